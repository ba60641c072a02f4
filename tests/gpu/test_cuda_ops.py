"""The operations on CUDA against the definition on the CPU: whole models, paged and chunked batches, recorded steps."""

from __future__ import annotations

import random
import warnings
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import Streams
from planaria.kernels.gpu.draw import Drawer
from planaria.kernels.gpu.graphs import OFTEN
from planaria.kernels.gpu.ops import GpuOps
from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.models import model_config
from planaria.protocol import Fresh
from planaria.types import SamplingParams
from planaria.worker.sampler import Sampler
from planaria.worker.torch_sampler import TorchSampler
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


def make(device: str, dtype: str) -> TorchOps:
    """With recorded steps on a device."""
    return TorchOps(device, dtype) if device == "cpu" else GpuOps.recording(device, dtype, graphs=True)


def logits(
    device: str, dtype: str, kind: str | None = None, config: dict[str, Any] = QWEN3
) -> dict[int, Tensor]:  # fmt: skip
    """Of three texts: whole, then a step with a chunk and two single tokens."""
    ops = make(device, dtype)
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
    ops = make(cuda, "bfloat16")
    model = build(model_config(QWEN3), RandomSource(), ops, quantization="keep")
    driver = Driver(model, ops, block_size=16)
    assert driver.step({0: [1, 2, 3]}, wanted=[])[-1].shape == (0, 1000)
    driver.step({0: [4]})
    result = driver.run()
    assert (result.device.type, result.dtype, tuple(result.shape)) == ("cuda", torch.float32, (1, 1000))


def test_memory_is_that_of_the_weights_and_the_cache(cuda: str) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    ops = make(cuda, "bfloat16")
    model = build(model_config(QWEN3), RandomSource(), ops, quantization="keep", max_positions=64)
    model.make_kv(100, 16)
    used = torch.cuda.memory_allocated() - before
    expected = model.weight_bytes + 100 * model.kv_block_bytes(16)
    assert expected <= used < expected * 1.05 + 2**20


def test_attention_is_by_kernels(cuda: str) -> None:
    ops = GpuOps(cuda, "bfloat16")
    driver = Driver(build(model_config(QWEN3), RandomSource(), ops, quantization="keep"), ops, block_size=16)
    driver.step({0: [1, 2, 3]})
    assert {way.name for way in ops.ways.values()} <= {"torch varlen", "Triton"}
    print([(way.name, way.refused) for way in ops.ways.values()])


def test_recorded_steps_give_the_same(cuda: str) -> None:
    """Steps of a token each until they are played, with a row that comes and goes."""
    drivers = []
    for recorded in (False, True):
        ops = GpuOps.recording(cuda, "float32", graphs=recorded)
        model = build(model_config(QWEN3), RandomSource(), ops, quantization="keep")
        drivers.append((ops, Driver(model, ops, block_size=16)))
    feeds = [{i: [i + 1] * 20 for i in range(3)}, *[{i: [i + n] for i in range(3 - n % 2)} for n in range(6 * OFTEN)]]
    for number, feed in enumerate(feeds):
        found = []
        for ops, driver in drivers:
            driver.batch.prefill = number == 0
            found.append(driver.step(feed))
            for made in getattr(ops, "graphs", ()):
                if made._thread is not None:
                    made._thread.join()
        for i in feed:
            assert float((found[0][i] - found[1][i]).abs().max()) < 1e-5
    assert len(drivers[1][0].graphs[0].ready) == 2


@pytest.mark.parametrize("config", [QWEN3, EXPERTS], ids=["dense", "experts"])
def test_a_step_waits_for_its_device_once(cuda: str, config: dict[str, Any]) -> None:
    """By torch's own count; before steps are recorded, and after."""
    own, ops = model_config(config), GpuOps.recording(cuda, "bfloat16", graphs=True)
    ops.drawer_of(5, own.vocab_size)
    model = build(own, RandomSource(), ops, quantization="keep")
    model.make_kv(5 * 512 // 16, 16)
    streams, found = Streams(ops, model.forward, 5, own.vocab_size, 512), list[list[str]]()
    for _ in range(20):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            streams.step()
            torch.cuda.set_sync_debug_mode("default")
        found.append([str(each.message) for each in said if "synchroniz" in str(each.message)])
        if (thread := ops.graphs[0]._thread) is not None:
            thread.join()
    assert ops.graphs[0].ready and {len(each) for each in found[2:]} <= {0, 1}, found
    ops.close()


def test_tokens_are_those_of_the_cpu(cuda: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (100, 50_000):
        logits = torch.randn(6, size, generator=generator) * 3
        params = [
            SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
            for t, k, p, m in (
                (0, 0, 1, 0),
                (1, 0, 1, 0),
                (0.7, 5, 1, 0),
                (1.3, 0, 0.9, 0),
                (1, 50, 0.5, 0),
                (1, 0, 1, 0.05),
            )
        ]
        drawer = Drawer(8, size, torch.device(cuda))
        samplers = [TorchSampler(8, size, drawer=drawer), Sampler(8, size, plain=True)]
        for sampler in samplers:
            for row, each in enumerate(params):
                sampler.enter(row, Fresh(array("q", [1]), 1, each, row))
        for _ in range(50):
            found = samplers[0].sample(logits.to(cuda), [*range(6)])
            assert found == samplers[1].sample(logits.numpy().copy(), [*range(6)])
