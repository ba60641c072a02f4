"""A whole small model in the kinds that a K-quantised file mixes: it stays packed, also in tensor ranks, and answers as
its unpacked weights do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from planaria.checkpoint import resolve_checkpoint
from planaria.checkpoint.spec import TensorInfo
from planaria.cli.model_report import report
from planaria.kernels.blocks import KINDS
from planaria.kernels.ops import Quantized
from planaria.kernels.quant import dequantise
from planaria.layers.build import build
from planaria.loader import WeightSource
from planaria.loader.composed import composed
from planaria.models import model_config
from planaria.models.shard import Shard
from tests.model.driver import Driver
from tests.model.gguf_files import write_gguf
from tests.model.tensors import CpuOps, random_blocks

HIDDEN, INNER, VOCAB, LAYERS = 256, 768, 160, 2
Q4_K_M = {"attn_q": "q4_k", "attn_k": "q4_k", "attn_v": "q6_k", "attn_output": "q5_0", "ffn_down": "q6_k"}
MIXES = {
    "q4_k_m": (Q4_K_M, "q4_k"), "q2_k": ({"attn_v": "q3_k", "ffn_down": "q3_k"}, "q2_k"),
    "iq4_xs": ({"attn_k": "iq4_nl", "attn_v": "q5_k"}, "iq4_xs"), "q5_1": ({"ffn_down": "q5_k"}, "q5_1"),
}  # fmt: skip


@pytest.fixture(params=MIXES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kinds, other = MIXES[request.param]
    tensors: dict[str, Any] = {"output_norm.weight": np.ones(HIDDEN, np.float32)}

    def add(name: str, rows: int, columns: int, kind: str) -> None:
        blocks = random_blocks(kind, rows, columns, seed=len(tensors))
        tensors[f"{name}.weight"] = blocks.data, GGMLQuantizationType[kind.upper()]

    add("token_embd", VOCAB, HIDDEN, "q6_k")
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", 128, HIDDEN), ("attn_v", 128, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):  # fmt: skip
            add(f"blk.{i}.{name}", rows, columns, kinds.get(name, other))
    sizes = {"embedding_length": HIDDEN, "feed_forward_length": INNER, "block_count": LAYERS}
    return write_gguf(tmp_path / "m.gguf", tensors=tensors, **sizes)


def model_of(path: Path, ops: CpuOps, quantization: str, shard: Shard | None = None) -> Any:
    checkpoint = resolve_checkpoint(str(path))
    config = model_config(checkpoint.config, checkpoint.generation_config)
    with WeightSource(checkpoint) as source:
        return build(config, source, ops, quantization=quantization, max_positions=64, shard=shard)


def test_a_file_stays_packed_and_answers_as_its_values(file: Path) -> None:
    tokens, found = [(7 * i * i + 3) % VOCAB for i in range(40)], []
    for dtype, quantization in (("float32", "none"), ("float32", "keep"), ("bfloat16", "keep")):
        ops = CpuOps(dtype, 2)
        model = model_of(file, ops, quantization)
        if quantization == "keep":
            assert model.weight_bytes < file.stat().st_size
            assert not any(form["unpacked"] for form in report(str(file))["weights"]), "planaria models says the same"
        found.append(Driver(model, ops, block_size=16).whole(0, tokens).log_softmax(-1))
        ops.close()
    for packed, limit in zip(found[1:], (5e-3, 1e-2), strict=True):
        divergence = torch.sum(found[0].exp() * (found[0] - packed), -1)
        assert float(divergence.median()) < limit  # random weights: a few positions are on a knife's edge


def test_a_tensor_rank_has_its_part_packed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns of the MLP's second matrix begin inside of a superblock."""
    ops, packed = CpuOps("float32", 1), []
    take = ops.pack
    monkeypatch.setattr(ops, "pack", lambda weight, bias=None: packed.append(weight) or take(weight, bias))
    shard = Shard(range(2, 4), range(1, 2), range(384, INNER), range(80, VOCAB), range(LAYERS))
    model_of(file, ops, "keep", shard)
    down = [w for w in packed if w.shape == (HIDDEN, INNER // 2)]
    assert len(down) == LAYERS and all(isinstance(w, Quantized) for w in packed)
    assert all(w.skip == 384 % KINDS[w.kind].elements for w in down)
    ops.close()


@pytest.mark.parametrize(("kind", "down"), [("q4_k", "q6_k"), ("iq4_nl", "q8_0"), ("mxfp4", "mxfp4")])
def test_experts_stay_packed(kind: str, down: str, tmp_path: Path) -> None:
    """As they lie in a file, all of a layer in one tensor; MXFP4 as 8-bit blocks that say the same."""
    draw, experts = np.random.default_rng(0), 4
    tensors: dict[str, Any] = {"output_norm.weight": np.ones(HIDDEN, np.float32)}

    def plain(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = (draw.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def packed(name: str, rows: int, columns: int, kind: str) -> None:
        if kind == "mxfp4":
            blocks = draw.integers(0, 256, (experts * rows, columns // 32, 17), np.uint8)
            blocks[..., 0] = 120  # 2^-7
        else:
            blocks = random_blocks(kind, experts * rows, columns, seed=len(tensors)).data
        tensors[f"{name}.weight"] = blocks.reshape(experts, rows, -1), GGMLQuantizationType[kind.upper()]

    plain("token_embd", VOCAB, HIDDEN)
    for norm in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    for norm in ("attn_q_norm", "attn_k_norm"):
        tensors[f"blk.0.{norm}.weight"] = np.ones(HIDDEN // 4, np.float32)
    for name, rows in (("attn_q", HIDDEN), ("attn_k", 128), ("attn_v", 128), ("attn_output", HIDDEN)):
        plain(f"blk.0.{name}", rows, HIDDEN)
    plain("blk.0.ffn_gate_inp", experts, HIDDEN)
    packed("blk.0.ffn_gate_exps", INNER, HIDDEN, kind)
    packed("blk.0.ffn_up_exps", INNER, HIDDEN, kind)
    packed("blk.0.ffn_down_exps", HIDDEN, INNER, down)
    file = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", {"qwen3moe.attention.layer_norm_rms_epsilon": 1e-5}, tensors,
        embedding_length=HIDDEN, block_count=1, feed_forward_length=INNER, expert_feed_forward_length=INNER,
        expert_count=experts, expert_used_count=2,
    )  # fmt: skip
    values = {
        name: dequantize(value[0], value[1]) if isinstance(value, tuple) else value for name, value in tensors.items()
    }
    same = write_gguf(
        tmp_path / "same.gguf", "qwen3moe", {"qwen3moe.attention.layer_norm_rms_epsilon": 1e-5}, values,
        embedding_length=HIDDEN, block_count=1, feed_forward_length=INNER, expert_feed_forward_length=INNER,
        expert_count=experts, expert_used_count=2,
    )  # fmt: skip
    tokens, found = [(7 * i * i + 3) % VOCAB for i in range(40)], []
    for path in (same, file):
        ops = CpuOps("float32", 2)
        model = model_of(path, ops, "keep")
        if path == file:
            assert model._expert_bytes() < 3 * experts * INNER * HIDDEN * 1.2
        found.append(Driver(model, ops, block_size=16).whole(0, tokens).log_softmax(-1))
        ops.close()
    divergence = torch.sum(found[0].exp() * (found[0] - found[1]), -1)
    limit = {"q4_k": 5e-3, "iq4_nl": 5e-4}.get(kind, 1e-5)  # rows in 8 bits, in 8 and more, or in 15
    assert float(divergence.median()) < limit


@pytest.mark.parametrize("rows", [range(384), range(50, 130), range(96, 192)])
def test_what_makes_keys_of_latents_is_turned(rows: range) -> None:
    heads, rank, key, value = 4, 32, 64, 32
    stored = {"k": random_blocks("q8_0", heads * rank, key), "v": random_blocks("q8_0", heads * value, rank, seed=1)}
    parts = tuple(TensorInfo(name, "q8_0", each.shape, 0, 0, each.data.nbytes) for name, each in stored.items())
    info = TensorInfo("kv", f"latent:{heads}", (heads * (key + value), rank), 0, 0, 0, parts=parts)
    made = composed(info, rows, range(rank), lambda part, some: stored[part.name].data[some.start : some.stop])
    keys, values = (dequantise(each).reshape(heads, -1, each.shape[1]) for each in stored.values())
    wanted = np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, rank)
    assert np.array_equal(made, wanted[rows.start : rows.stop])
