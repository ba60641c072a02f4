"""The reference operations on CUDA against the same code on the CPU: whole models, paged and chunked batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.models import model_config
from tests.model.driver import Driver
from tests.model.random_source import RandomSource

pytestmark = pytest.mark.gpu

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
}


EXPERTS = {
    **{name: value for name, value in QWEN3.items() if "window" not in name},
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}  # fmt: skip


def logits(
    device: str, dtype: str, kind: str | None = None, config: dict[str, Any] = QWEN3
) -> dict[int, Tensor]:  # fmt: skip
    """Of three texts: whole, then a step with a chunk and two single tokens."""
    ops = TorchOps(device, dtype)
    model = build(model_config(config), RandomSource(kind), ops, quantization="keep")
    driver = Driver(model, ops, block_size=16)
    draw = random.Random(0)
    texts = {i: [draw.randrange(1000) for _ in range(n)] for i, n in enumerate((1, 40, 130))}
    parts = [
        driver.step(texts),
        driver.step({2: [5], 0: [6], 1: [draw.randrange(1000) for _ in range(33)]}),
        driver.step({0: [7], 1: [8], 2: [9]}),
    ]
    ops.close()
    return {i: torch.cat([part[i] for part in parts]).log_softmax(-1) for i in texts}


@pytest.mark.parametrize("kind", [None, "q8_0", "q4_1"])
def test_float32_equals_the_cpu(cuda: str, kind: str | None) -> None:
    here, there = logits("cpu", "float32", kind), logits(cuda, "float32", kind)
    for i in here:
        assert float((here[i] - there[i]).abs().max()) < 1e-4


def test_experts_in_float32_equal_those_of_the_cpu(cuda: str) -> None:
    """By Triton's kernels, where it is installed."""
    here, there = logits("cpu", "float32", config=EXPERTS), logits(cuda, "float32", config=EXPERTS)
    for i in here:
        assert float((here[i] - there[i]).abs().max()) < 1e-4


def test_bfloat16_is_near_float32(cuda: str) -> None:
    exact, found = logits("cpu", "float32"), logits(cuda, "bfloat16")
    for i in exact:
        assert float((exact[i] - found[i]).abs().mean()) < 0.05


def test_a_step_without_samples_and_the_device_of_the_result(cuda: str) -> None:
    ops = TorchOps(cuda, "bfloat16")
    model = build(model_config(QWEN3), RandomSource(), ops, quantization="keep")
    driver = Driver(model, ops, block_size=16)
    assert driver.step({0: [1, 2, 3]}, wanted=[])[-1].shape == (0, 1000)
    driver.step({0: [4]})
    result = driver.run()
    assert (result.device.type, result.dtype, tuple(result.shape)) == ("cuda", torch.float32, (1, 1000))


def test_memory_is_that_of_the_weights_and_the_cache(cuda: str) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    ops = TorchOps(cuda, "bfloat16")
    model = build(model_config(QWEN3), RandomSource(), ops, quantization="keep", max_positions=64)
    model.make_kv(100, 16)
    used = torch.cuda.memory_allocated() - before
    expected = model.weight_bytes + 100 * model.kv_block_bytes(16)
    assert expected <= used < expected * 1.05 + 2**20
