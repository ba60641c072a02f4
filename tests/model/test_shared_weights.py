"""Weights that one rank has packed and another maps: the same bytes, nothing read, and never those of another part."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from planaria.config.options import EngineConfig, EngineOptions
from planaria.config.resolve import resolve
from planaria.hosts import weights
from planaria.hosts.weights import WeightsMemory
from planaria.kernels.cpu.ops import CpuOps
from planaria.loader import WeightSource
from planaria.node import Memories, home
from planaria.topology import Layout
from planaria.worker.parts import read_part
from planaria.worker.weights import RankWeights
from tests.model.checkpoints import write_checkpoint
from tests.model.driver import Driver
from tests.model.ranks import boot_of

EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "moe_intermediate_size": 32, "num_key_value_heads": 4, "q_lora_rank": None,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2": ({"tie_word_embeddings": True}, "q8_0"), "qwen2_moe": (EXPERTS, "none"), "deepseek_v2": (LATENT, "none"),
}  # fmt: skip
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
ALL = 0, Layout()


@pytest.fixture(scope="module")
def config_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineConfig]:
    made: dict[str, Path] = {}

    def config(family: str, **options: Any) -> EngineConfig:
        shape, quantization = FAMILIES[family]
        if family not in made:
            made[family] = write_checkpoint(tmp_path_factory.mktemp(family), family, **shape)
        few = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "threads": 1, "quantization": quantization}
        return resolve(EngineOptions(model=str(made[family]), **few, **options))

    return config


@pytest.fixture
def memory() -> WeightsMemory:
    made = WeightsMemory.make()
    assert made is not None
    return made


def rank_of(config: EngineConfig, memory: WeightsMemory | None) -> RankWeights:
    shared = Memories(home(), weights=memory.origin) if memory is not None else Memories()
    return RankWeights(msgspec.structs.replace(boot_of(config), memories=shared))


def read(config: EngineConfig, memory: WeightsMemory | None, reads: Any = None, part: Any = ALL) -> tuple[Any, CpuOps]:
    ops = CpuOps("float32", 1)
    return read_part(config, ops, part, reads, lambda part, fraction: None, rank_of(config, memory)), ops


def logits(model: Any, ops: CpuOps) -> Any:
    try:
        return Driver(model, ops, block_size=16).step({0: TEXT})[0].numpy().copy()
    finally:
        ops.close()


def shared(model: Any) -> bool:
    return not model.norm.weight.values.flags.writeable


@pytest.fixture
def no_source(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def read_nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("the checkpoint was read")

    return lambda: monkeypatch.setattr(WeightSource, "get", read_nothing)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_another_has_packed_is_the_same(
    config_for: Any, memory: WeightsMemory, no_source: Any, family: str
) -> None:
    config = config_for(family)
    own, wrote = read(config, None), read(config, memory)
    no_source()
    mapped = read(config, memory)
    assert [shared(model) for model, _ in (own, wrote, mapped)] == [False, True, True]
    assert len({model.weight_bytes for model, _ in (own, wrote, mapped)}) == 1
    wanted = logits(*own)
    assert wanted.std() > 0.5
    for found in (wrote, mapped):
        assert np.array_equal(logits(*found), wanted)


def test_each_part_and_each_way_of_packing_is_its_own(config_for: Any, memory: WeightsMemory) -> None:
    config = config_for("qwen2")
    other = msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, quantization="none"))
    halves = [read(config, memory, part=(rank, Layout(tp=2)))[0] for rank in range(2)]
    assert all(map(shared, halves))
    assert not np.array_equal(*(half.layers[0].attention.qkv.data for half in halves))
    for each in (config, other):
        assert np.array_equal(logits(*read(each, memory)), logits(*read(each, None)))


def test_weights_of_something_else_are_refused(
    config_for: Any, memory: WeightsMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RankWeights, "_digest", lambda self, what, ops: bytes(15) + b"1")
    read(config_for("qwen2_moe"), memory)
    with caplog.at_level(logging.WARNING):
        model, ops = read(config_for("qwen2"), memory)
    assert not shared(model) and "was asked for" in caplog.text
    assert np.array_equal(logits(model, ops), logits(*read(config_for("qwen2"), None)))


def test_a_checkpoint_that_was_written_again_is_another(config_for: Any, memory: WeightsMemory) -> None:
    config = config_for("qwen2")
    read(config, memory)
    (path,) = map(Path, config.checkpoint["files"])
    before = rank_of(config, memory)._digest("", CpuOps("float32", 1))
    path.write_bytes(path.read_bytes())
    assert rank_of(config, memory)._digest("", CpuOps("float32", 1)) != before


def test_a_mistake_while_it_is_written_leaves_it_to_the_next(
    config_for: Any, memory: WeightsMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("qwen2")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(WeightSource, "get", fails)
        with pytest.raises(RuntimeError, match="a mistake"):
            read(config, memory)
    model, ops = read(config, memory)
    assert shared(model)
    ops.close()


def test_experts_that_travel_are_a_rank_s_own(config_for: Any, memory: WeightsMemory) -> None:
    config = config_for("qwen2_moe", enable_expert_parallel=True, tensor_parallel_size=2)
    reads = ((0, 1, 5),) * 2
    for _ in range(2):
        model, ops = read(config, memory, reads, (0, Layout(tp=2)))
        block = model.blocks[0]
        assert shared(model) and not block.router.data.flags.writeable and sorted(block.held) == [0, 1, 5]
        assert all(weight.data.flags.writeable for pair in block.held.values() for weight in pair)
        ops.release(block.held[5][0])  # as when it goes to another rank: its memory is zeroed
        ops.close()


def test_slices_of_experts_are_a_rank_s_own(
    tmp_path: Path, memory: WeightsMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is there once for all lanes; each reads its slices, of every expert, and reads them once."""
    folder = write_checkpoint(tmp_path / "model", "qwen2_moe", **{**EXPERTS, "moe_intermediate_size": 64})
    config = resolve(
        EngineOptions(
            model=str(folder), device="cpu", dtype="float32", max_model_len=64, threads=1, quantization="none",
            data_parallel_size=2,
        )
    )  # fmt: skip
    get, names = WeightSource.get, list[str]()

    def counted(self: WeightSource, name: str, **how: Any) -> Any:
        names.append(name)
        return get(self, name, **how)

    monkeypatch.setattr(WeightSource, "get", counted)
    sizes = list[int]()
    for rank in range(2):
        names.clear()
        model, ops = read(config, memory, None, (rank, Layout(dp=2)))
        assert shared(model) and all(sorted(block.held) == list(range(8)) for block in model.blocks)
        assert len(names) == len(set(names))
        assert sum(".experts." in name for name in names) == 2 * 8 * 3
        assert any(".experts." not in name for name in names) == (rank == 0)
        pairs = [pair for block in model.blocks for pair in block.held.values()]
        assert all(weight.data.flags.writeable for pair in pairs for weight in pair)
        sizes.append(sum(ops.memory(weight).nbytes for pair in pairs for weight in pair))
        ops.close()
    assert sizes == [2 * 8 * 3 * 64 * 64 * 4 // 2] * 2


@pytest.mark.row("P10")
def test_ranks_of_any_engine_read_in_turn(
    config_for: Any, memory: WeightsMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines and spares of a node have this memory alone in common."""

    def free() -> bool:
        descriptor = memory._file.another()
        return weights._lock(descriptor.number, fcntl.F_WRLCK, weights.LOCKS + weights.SLOTS)

    def made(most: int | None) -> Any:
        config = config_for("qwen2", max_parallel_loading_workers=most)
        return rank_of(config, memory).make(ALL, "", build=None, ops=None, heard=pytest.fail)  # type: ignore[arg-type]

    monkeypatch.setattr(RankWeights, "_made", lambda self, *asked: free())
    assert (made(1), made(None)) == (False, True)
    assert free()
