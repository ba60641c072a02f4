"""DeepSeek's latent attention and experts against Transformers, on random small checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from planaria.errors import ConfigError, ModelError
from planaria.kernels.cpu.build import host_isa
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.cpu.target import ISAS
from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.models import model_config
from planaria.types import Request
from tests.model import test_parallel as parallel
from tests.model.checkpoints import DictSource, config_of, load_reference, write_checkpoint
from tests.model.driver import Driver
from tests.model.random_source import RandomSource
from tests.model.ranks import Ranks
from tests.model.test_models import TOLERANCE, distance, expected, one_torch_thread, rope  # noqa: F401

SIZES: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 64,
}  # fmt: skip
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=0.9)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {"routed_scaling_factor": 1.7, "norm_topk_prob": True}),
    "v2-groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    ),
    "v2-query-latent-yarn-biases": (
        "deepseek_v2",
        {"q_lora_rank": 48, "attention_bias": True, "v_head_dim": 32, "first_k_dense_replace": 3, **YARN},
    ),
    "v3": ("deepseek_v3", {"n_group": 4, "topk_group": 2, "q_lora_rank": 48}),
    "v3-no-pairs": (
        "deepseek_v3",
        {"n_group": 2, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False, **YARN},
    ),
}  # fmt: skip
LENGTHS = (1, 5, 18, 41)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a case, its texts, and Transformers' logits of them, made once."""
    made: dict[str, tuple[Path, list[list[int]], list[Tensor]]] = {}

    def get(name: str) -> tuple[Path, list[list[int]], list[Tensor]]:
        if name not in made:
            family, overrides = CASES[name]
            folder = write_checkpoint(tmp_path_factory.mktemp(name), family, **{**SIZES, **overrides})
            reference = load_reference(folder)
            draw = torch.Generator().manual_seed(1)
            texts = [torch.randint(0, 131, (n,), generator=draw).tolist() for n in LENGTHS]
            made[name] = folder, texts, [expected(reference, text) for text in texts]
        return made[name]

    return get


def make_model(folder: Path, ops: Any, quantization: str = "keep") -> Any:
    return build(model_config(config_of(folder)), DictSource.open(folder), ops, quantization=quantization)


def feeds(texts: list[list[int]]) -> Iterator[dict[int, list[int]]]:
    """The texts in chunks of different sizes, so that whole prompts, chunks and single tokens share a step."""
    left, step = dict(enumerate(texts)), 0
    while left:
        feed = {i: tokens[: (1, 7, 3)[(i + step) % 3]] for i, tokens in reversed(left.items())}
        yield feed
        left = {i: tokens[len(feed[i]) :] for i, tokens in left.items() if len(tokens) > len(feed[i])}
        step += 1


def in_chunks(driver: Driver, texts: list[list[int]]) -> list[Tensor]:
    parts: dict[int, list[Tensor]] = {i: [] for i in range(len(texts))}
    for feed in feeds(texts):
        for i, logits in driver.step(feed).items():
            parts[i].append(logits)
    return [torch.cat(part) for part in parts.values()]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, checkpoint: Any, make_ops: Any) -> None:
    folder, texts, wanted = checkpoint(name)
    assert min(float(w.std()) for w in wanted) > 0.5  # else a wrong model could pass
    ops = make_ops()
    model = make_model(folder, ops)
    whole = Driver(model, ops, block_size=16, seed=1).step(dict(enumerate(texts)))
    chunks = in_chunks(Driver(model, ops, block_size=16, seed=2), texts)
    for i, want in enumerate(wanted):
        assert distance(whole[i], want) < TOLERANCE
        assert distance(chunks[i], want) < TOLERANCE


@pytest.mark.parametrize("name", ["v2-groups", parallel.long("v3")])
def test_greedy_tokens_equal_those_of_transformers(name: str, checkpoint: Any, make_ops: Any) -> None:
    """Of twenty prompts, ten in a batch."""
    folder, _, _ = checkpoint(name)
    reference, ops = load_reference(folder), make_ops()
    model, draw = make_model(folder, ops), torch.Generator().manual_seed(5)
    for seed in range(2):
        texts = [torch.randint(0, 131, (n,), generator=draw).tolist() for n in range(1 + seed, 60, 6)]
        driver, feed = Driver(model, ops, block_size=16, seed=seed), dict(enumerate(texts))
        got: dict[int, list[int]] = {i: [] for i in feed}
        for _ in range(12):
            for i, logits in driver.step(feed).items():
                got[i].append(int(logits[-1].argmax()))
            feed = {i: tokens[-1:] for i, tokens in got.items()}
        for i, text in enumerate(texts):
            # its choice after the text and each of our tokens: the same as its own greedy continuation
            assert got[i] == expected(reference, text + got[i][:-1])[len(text) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_batch(checkpoint: Any, dtype: str) -> None:
    """To the last bit: alone in chunks, or with others. And what a cache held before does not matter."""
    folder, texts, _ = checkpoint("v2-groups")
    ops = CpuOps(dtype, 2)
    model = make_model(folder, ops)
    together = Driver(model, ops, block_size=16, seed=1).step(dict(enumerate(texts)))
    used = Driver(model, ops, block_size=16, seed=2)
    for layer in model.layers:
        memory = layer.attention.kv.memory
        memory.array(0, np.uint8, (memory.size,))[:] = 255  # not a number, in either dtype
    for i, text in enumerate(texts):
        assert torch.equal(used.whole(i, text, chunk=7), together[i])
    ops.close()


SPARE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 6, "vocab_size": 200, "max_position_embeddings": 512, "q_lora_rank": 40, "kv_lora_rank": 80,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48, "first_k_dense_replace": 2,
}  # fmt: skip


def spare_logits(ops: Any) -> list[Tensor]:
    model = build(model_config(SPARE), RandomSource(), ops, quantization="keep")
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 200, (n,), generator=draw).tolist() for n in (1, 40, 430)]
    driver = Driver(model, ops, block_size=32)
    first = driver.step(dict(enumerate(texts)))
    second = driver.step({1: [5], 2: [7, 8, 9]})
    ops.close()
    return [logits.log_softmax(-1) for logits in (*first.values(), *second.values())]


@pytest.fixture(scope="module")
def spare_reference() -> list[Tensor]:
    return spare_logits(TorchOps("cpu", "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS[ISAS.index(host_isa()) :])
def test_every_level_of_instructions(isa: str, dtype: str, spare_reference: list[Tensor]) -> None:
    """Sizes that fill no whole tile, a text longer than a tile of keys, blocks of two chunks."""
    for found, wanted in zip(spare_logits(CpuOps(dtype, 2, isa=isa)), spare_reference, strict=True):
        error = (found - wanted).abs()
        assert float(error.max()) < TOLERANCE if dtype == "float32" else float(error.mean()) < 0.05


def test_packed_weights(checkpoint: Any) -> None:
    """Packed at load: what makes keys and values stays plain, the rest is packed; both back ends agree."""
    folder, texts, wanted = checkpoint("v2-query-latent-yarn-biases")
    found = []
    for ops in (TorchOps(), CpuOps("float32", 2)):
        model = make_model(folder, ops, "q8_0")
        found.append(Driver(model, ops, block_size=16).step(dict(enumerate(texts))))
        ops.close()
    for i, want in enumerate(wanted):
        assert distance(found[1][i], found[0][i]) < 5e-3  # rows are rounded to 15 bits before packed weights
        assert float((found[0][i].log_softmax(-1) - want.log_softmax(-1)).abs().mean()) < 0.1


def test_the_cache_holds_one_latent_a_token(checkpoint: Any, make_ops: Any) -> None:
    folder, _, _ = checkpoint("v2")
    ops, seen = make_ops(), []
    config = model_config(config_of(folder))
    model = build(config, DictSource.open(folder), ops, quantization="keep", progress=lambda *done: seen.append(done))
    assert model.kv_block_bytes(16) == 3 * 16 * (32 + 16) * 4  # layers, tokens, latent and rotated key, float32
    assert seen[-1] == (config.num_parameters,) * 2


@pytest.mark.parametrize(
    "tp, pp, whole", [(2, 2, True), parallel.long(2, 1, False), parallel.long(3, 1, False), parallel.long(1, 2, False)]
)
def test_ranks_with_parts(checkpoint: Any, tp: int, pp: int, whole: bool) -> None:
    """Heads dealt, latents on every tensor rank; experts whole on one of them or cut."""
    name = "v2-query-latent-yarn-biases" if tp == 3 else "v2-groups"
    config = parallel.config_for(str(checkpoint(name)[0]))
    plenty = parallel.alone(config, parallel.requests(config.model.vocab_size))
    given = msgspec.structs.replace(config.parallel, enable_expert_parallel=whole)
    with Ranks(msgspec.structs.replace(config, parallel=given), tp, pp) as ranks:
        parallel.start(ranks)
        wanted = parallel.requests(config.model.vocab_size)
        parallel.assert_same(parallel.together(ranks, config, wanted, 2), plenty)


def test_few_blocks_and_a_shared_prompt(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven blocks of 16 tokens, where the requests together want 18: they wait or are computed again. One has the
    prompt of another."""
    config = parallel.config_for(str(checkpoint("v2-groups")[0]))

    def wanted() -> list[Request]:
        first = parallel.requests(config.model.vocab_size)
        twin = first[1]
        return [*first, Request("twin", twin.prompt, twin.params, twin.seed, max_tokens=twin.max_tokens)]

    plenty = parallel.alone(config, wanted())
    assert plenty["twin"][0] == plenty["r1"][0]
    monkeypatch.setattr(parallel, "BLOCKS", 7)
    parallel.assert_same(parallel.alone(config, wanted()), plenty)


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"q_lora_rank": "big"}, "q_lora_rank"), ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"), ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"topk_method": "best", "architectures": ["DeepseekV2ForCausalLM"]}, "topk_method"),
        ({"first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 0}, "n_shared_experts"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError, match=field):
        model_config({**SPARE, **fields})


def test_the_published_models_have_the_sizes_they_are_known_by() -> None:
    lite: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
    }  # fmt: skip
    v3 = {
        **lite, "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
        "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    }  # fmt: skip
    assert round(model_config(lite).num_parameters / 1e9, 1) == 15.7
    assert round(model_config(v3).num_parameters / 1e9) == 671


def test_sizes_the_cpu_kernels_do_not_take() -> None:
    ops = CpuOps("float32", 1)
    with pytest.raises(ConfigError, match="multiples of 16"):
        build(model_config({**SPARE, "kv_lora_rank": 40}), RandomSource(), ops, quantization="keep").make_kv(4, 16)
    ops.close()
