"""Loading: what is checked, fused, kept packed, quantised, cut, reported and let go."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from planaria.errors import ModelError
from planaria.kernels.numbers import to_bfloat16
from planaria.kernels.ops import Quantized, Rows, Stacked
from planaria.kernels.quant import dequantise, quantise
from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.models import model_config
from planaria.models.config import ModelConfig
from planaria.models.shard import Shard
from tests.model.checkpoints import DictSource
from tests.model.driver import Driver

Array = npt.NDArray[Any]

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.1."


def config(**fields: Any) -> ModelConfig:
    return model_config({**CONFIG, **fields})


def tensors() -> dict[str, Array | Quantized]:
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (50, 64), "lm_head": (50, 64)}
    for i in range(2):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes |= {f"{attention}{name}": (size, 64) for name, size in (("q_proj", 64), ("o_proj", 64))}
        shapes |= {f"{attention}{name}": (32, 64) for name in ("k_proj", "v_proj")}
        shapes |= {f"{mlp}gate_proj": (128, 64), f"{mlp}up_proj": (128, 64), f"{mlp}down_proj": (64, 128)}
    made: dict[str, Array | Quantized] = {}
    for name, shape in shapes.items():
        made[f"{name}.weight"] = draw.normal(size=shape).astype(np.float32) / 8
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            made[f"{name}.bias"] = draw.normal(size=shape[0]).astype(np.float32)
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{i}.{norm}.weight"] = draw.random(64, np.float32) + 0.5
    made["model.norm.weight"] = draw.random(64, np.float32) + 0.5
    return made


def packed(kind: str = "q8_0", *, but: Iterable[str] = ()) -> dict[str, Array | Quantized]:
    """The tensors with every matrix packed, except those whose name holds one of `but`."""
    return {
        name: quantise(t, kind) if isinstance(t, np.ndarray) and t.ndim == 2 and not any(b in name for b in but) else t
        for name, t in tensors().items()
    }


class Recorder(TorchOps):
    """TorchOps that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Rows | Quantized, Array | None]] = []

    def pack(self, weight: Rows | Quantized, bias: Array | None = None) -> Any:
        self.given.append((weight, bias))
        return super().pack(weight, bias)

    def kinds(self) -> list[str]:
        """In order: embedding; per layer qkv, o, gate_up, down; head."""
        return [w.kind if isinstance(w, Quantized) else "plain" for w, _ in self.given]


def load(values: dict[str, Array | Quantized], quantization: str, **options: Any) -> Recorder:
    ops = Recorder()
    build(config(), DictSource(values), ops, quantization=quantization, **options)
    return ops


def test_projections_that_are_read_together_are_one_weight() -> None:
    values = tensors()
    ops = load(values, "keep")
    qkv, bias = ops.given[1]
    names = [f"model.layers.0.self_attn.{p}_proj." for p in "qkv"]
    assert isinstance(qkv, Stacked) and isinstance(bias, np.ndarray)
    assert np.array_equal(qkv.whole(), np.concatenate([values[f"{n}weight"] for n in names]))  # type: ignore[misc]
    assert np.array_equal(bias, np.concatenate([values[f"{n}bias"] for n in names]))  # type: ignore[misc]
    assert ops.given[2][1] is None  # Qwen2 has no bias there
    assert [tuple(w.shape) for w, _ in ops.given] == [
        (50, 64), *[(128, 64), (64, 64), (256, 64), (64, 128)] * 2, (50, 64),
    ]  # fmt: skip


def test_keep_leaves_packed_weights_packed() -> None:
    values = packed("q4_1")
    ops = load(values, "keep")
    assert ops.kinds() == ["q4_1"] * 10
    qkv = ops.given[1][0]
    assert isinstance(qkv, Quantized)
    parts = [values[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert np.array_equal(dequantise(qkv), np.concatenate([dequantise(p) for p in parts if isinstance(p, Quantized)]))


def test_weights_packed_differently_are_parts_of_a_product() -> None:
    values = packed("q8_0", but=["layers.0.self_attn.v_proj"])
    values["model.layers.1.mlp.up_proj.weight"] = quantise(np.random.default_rng(1).normal(size=(128, 64)), "q4_1")
    ops = load(values, "keep")
    qkv, gate_up = ["q8_0", "plain"], ["q8_0", "q4_1"]
    assert ops.kinds() == ["q8_0", *qkv, "q8_0", "q8_0", "q8_0", "q8_0", "q8_0", *gate_up, "q8_0", "q8_0"]
    found, up = ops.given[9][0], values["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(found, Quantized) and isinstance(up, Quantized)
    assert np.array_equal(found.data, up.data)


def test_none_unpacks_everything() -> None:
    assert load(packed("q4_1"), "none").kinds() == ["plain"] * 10


def test_packing_at_load_keeps_the_tables_at_eight_bits() -> None:
    assert load(tensors(), "q8_0").kinds() == ["q8_0"] * 10
    assert load(tensors(), "q4_1").kinds() == ["q8_0", *["q4_1"] * 8, "q8_0"]
    half = {n: to_bfloat16(t) if isinstance(t, np.ndarray) else t for n, t in tensors().items()}
    assert load(half, "q4_1").kinds() == ["q8_0", *["q4_1"] * 8, "q8_0"]


def test_packing_at_load_does_not_repack_what_the_file_has_as_small() -> None:
    assert load(packed("q4_1"), "q4_1").kinds() == ["q4_1"] * 10
    assert load(packed("q8_0"), "q4_1").kinds() == ["q8_0", *["q4_1"] * 8, "q8_0"]
    assert load(packed("q4_1"), "q8_0").kinds() == ["q8_0"] * 10


def test_a_width_that_no_block_fits_stays_plain() -> None:
    values = tensors()
    for i in range(2):
        mlp = f"model.layers.{i}.mlp."
        values |= {f"{mlp}{p}_proj.weight": np.ones((120, 64), np.float32) for p in ("gate", "up")}
        values[f"{mlp}down_proj.weight"] = np.ones((64, 120), np.float32)
    ops = Recorder()
    build(config(intermediate_size=120), DictSource(values), ops, quantization="q8_0")
    assert ops.kinds() == ["q8_0", *["q8_0", "q8_0", "q8_0", "plain"] * 2, "q8_0"]


@pytest.mark.parametrize("quantization", ["keep", "none"])
def test_packed_weights_compute_as_their_values(quantization: str) -> None:
    values = packed("q8_0")
    plain = {n: dequantise(t) if isinstance(t, Quantized) else t for n, t in values.items()}
    found = []
    for source in (values, plain):
        ops = TorchOps()
        model = build(config(), DictSource(source), ops, quantization=quantization)
        found.append(Driver(model, ops).whole(0, [3, 1, 4, 1, 5]))
    torch.testing.assert_close(*found)


def test_a_tied_head_is_the_embedding_itself() -> None:
    values = tensors()
    del values["lm_head.weight"]
    ops = Recorder()
    model = build(config(tie_word_embeddings=True), DictSource(values), ops, quantization="q8_0")
    assert model.head is model.embedding and len(ops.given) == 9


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", f"{LAYER}self_attn.k_proj.bias", f"{LAYER}mlp.up_proj.weight"]
)
@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_damage_is_one_line_before_anything_is_read(name: str, damage: str) -> None:
    values = tensors()
    if damage == "missing":
        del values[name]
    else:
        values[name] = np.zeros((7, 3), np.float32)
    source, ops = DictSource(values), Recorder()
    read: list[str] = []
    source.get = lambda n, **_: read.append(n)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ModelError, match=name) as refusal:
        build(config(), source, ops, quantization="keep")
    message = str(refusal.value)
    assert "\n" not in message and (damage == "missing" or "7" in message)
    assert read == [] and ops.given == []


def test_tensors_of_no_use_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    values = tensors()
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    with caplog.at_level(logging.WARNING):
        load(values, "keep")
    assert caplog.records == []
    values["visual.patch_embed.weight"] = np.zeros(8, np.float32)
    with caplog.at_level(logging.WARNING):
        load(values, "keep")
    assert [r.getMessage().count("visual.patch_embed.weight") for r in caplog.records] == [1]


def test_progress_ends_with_every_weight() -> None:
    seen: list[tuple[int, int]] = []
    load(tensors(), "keep", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (config().num_parameters,) * 2


def test_the_size_in_memory_is_known() -> None:
    weights, norms, biases = 2 * 50 * 64 + 2 * (128 * 64 + 64 * 64 + 3 * 128 * 64), 5 * 64, 256
    model = build(config(), DictSource(tensors()), Recorder(), quantization="keep")
    assert model.weight_bytes == 4 * (weights + norms + biases)
    model = build(config(), DictSource(packed("q8_0")), Recorder(), quantization="keep")
    assert model.weight_bytes == weights // 32 * 34 + 4 * (norms + biases)


def test_the_source_is_not_kept() -> None:
    source = DictSource(tensors())
    model = build(config(), source, TorchOps(), quantization="keep")
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert gone() is None and model.layers


@pytest.mark.parametrize("pack", [False, True])
def test_shards_hold_their_heads_and_columns(pack: bool) -> None:
    values = packed("q8_0") if pack else tensors()
    whole = load(values, "keep")
    shards = [
        Shard(range(2), range(1), range(32), range(20), range(2)),
        Shard(range(2, 4), range(1, 2), range(32, 128), range(20, 50), range(2)),
    ]
    found = []
    for shard in shards:
        ops = Recorder()
        model = build(config(), DictSource(values), ops, quantization="keep", shard=shard)
        assert (model.layers[0].attention.num_heads, model.layers[0].attention.num_kv_heads) == (2, 1)
        found.append(ops.given)

    def plain(weight: Rows | Quantized) -> Array:
        if isinstance(weight, Stacked):
            return weight.whole()
        return dequantise(weight) if isinstance(weight, Quantized) else weight

    full = [plain(w) for w, _ in whole.given]
    first, second = ([plain(w) for w, _ in given] for given in found)
    q = slice(0, 32), slice(32, 64)
    for part, head in ((first, 0), (second, 1)):
        k, v = (slice(at + 16 * head, at + 16 * head + 16) for at in (64, 96))
        assert np.array_equal(part[1], np.concatenate([full[1][q[head]], full[1][k], full[1][v]]))
        assert np.array_equal(part[2], full[2][:, q[head]])
    assert np.array_equal(second[3], np.concatenate([full[3][32:128], full[3][160:256]]))
    assert np.array_equal(np.concatenate([first[4], second[4]], 1), full[4])
    assert np.array_equal(np.concatenate([first[0], second[0]]), full[0])
    bias = whole.given[1][1]
    assert bias is not None and found[1][1][1] is not None
    assert np.array_equal(found[1][1][1], np.concatenate([bias[32:64], bias[80:96], bias[112:128]]))
