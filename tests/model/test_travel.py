"""Experts that travel between ranks: what arrives is what was sent, to the bit, on both back ends; steps after it give
the same tokens."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.cpu.shared import SharedComm
from planaria.kernels.ops import Ops
from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.layers.moe import MoE
from planaria.mesh.comm import CollectiveAborted, Comm
from planaria.mesh.segment import create_segment
from planaria.models import model_config
from planaria.models.deal import deal
from planaria.topology.experts import ExpertMap, Move
from planaria.worker.experts import FORM, Experts
from tests.model.checkpoints import DictSource, config_of, write_checkpoint
from tests.model.test_mesh import SOON

QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
BACKENDS = [
    ("cpu", "float32", "none"), ("cpu", "bfloat16", "none"), ("cpu", "bfloat16", "q8_0"), ("cpu", "float32", "q4_1"),
    ("torch", "float32", "none"), ("torch", "bfloat16", "none"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("experts"), "qwen2_moe", **QWEN)


def ops_of(kind: str, dtype: str) -> Ops:
    return CpuOps(dtype, 1) if kind == "cpu" else TorchOps("cpu", dtype)


def read(folder: Path, ops: Ops, quantization: str, experts: tuple[int, ...]) -> Any:
    """A model with these experts in each layer, nowhere placed."""
    config = model_config(config_of(folder))
    (shard,) = deal(config, 1, 1, None, ExpertMap.linear(6, 1))
    shard = dataclasses.replace(shard, reads=(experts,) * len(config.moe_layers))
    return build(config, DictSource.open(folder), ops, quantization=quantization, shard=shard)


def bits(ops: Ops, block: MoE, expert: int) -> list[bytes]:
    return [ops.memory(weight).tobytes() for weight in block.held[expert]]


class Pair:
    """Two ranks of one process, in a group of shared memory; `do` runs a part of each in a thread of its own."""

    def __init__(self, folder: Path, kind: str, dtype: str, quantization: str) -> None:
        entry = CpuOps("float32", 1)
        fd = create_segment()
        self.pool = ThreadPoolExecutor(2)
        self.groups: list[Comm] = list(
            self.pool.map(lambda rank: SharedComm(fd, rank, (0, 1), entry._entry, crowded=True, ring=4), range(2))
        )
        self.ranks = []
        for group, experts in zip(self.groups, ((0, 1, 2), (3, 4, 5)), strict=True):
            ops = ops_of(kind, dtype)
            found = Experts(ops, read(folder, ops, quantization, experts))
            found.enter(group)
            found.arrange(0, [(layer, (0, 1, 2, 3, 4, 5)) for layer in found.blocks])
            self.ranks.append(found)

    def do(self, part: Any) -> list[Any]:
        return list(self.pool.map(part, self.ranks))


@pytest.mark.parametrize(("kind", "dtype", "quantization"), BACKENDS)
def test_what_arrives_is_what_was_sent(folder: Path, kind: str, dtype: str, quantization: str) -> None:
    pair = Pair(folder, kind, dtype, quantization)
    whole_ops = ops_of(kind, dtype)
    whole = {block.number: block for block in read(folder, whole_ops, quantization, tuple(range(6))).blocks}

    def arrange(version: int, new: list[tuple[int, tuple[int, ...]]]) -> None:
        pair.do(lambda rank: rank.arrange(version, new))
        for own, rank in enumerate(pair.ranks):
            assert rank.bytes_aside == 0
            for layer, slots in new:
                block = rank.blocks[layer]
                assert sorted(block.held) == sorted(slots[3 * own : 3 * own + 3])
                for expert in block.held:
                    assert bits(rank.ops, block, expert) == bits(whole_ops, whole[layer], expert)

    before = [dict(rank.held()) for rank in pair.ranks]
    tables = [{layer: block.slots.table.copy() for layer, block in rank.blocks.items()} for rank in pair.ranks]
    moves = (Move(0, 4, 0, 1, 0), Move(0, 0, 4, 0, 1), Move(1, 5, 2, 1, 0), Move(0, 1, 1, 0, 0), Move(1, 2, 5, 0, 1))
    pair.do(lambda rank: rank.prepare(1, moves, aside=True))
    pair.do(lambda rank: rank.prepare(1, (), aside=False))  # until it is there
    for rank, table in zip(pair.ranks, tables, strict=True):  # in memory, and nothing in use has changed
        assert rank.prepared == 1 and rank.bytes_aside
        assert all((block.slots.table == table[layer]).all() for layer, block in rank.blocks.items())
    assert dict(pair.ranks[0].held())[0] == (0, 1, 2, 4)
    arrange(1, [(0, (4, 1, 2, 3, 0, 5)), (1, (0, 1, 5, 3, 4, 2))])
    back = tuple(Move(m.layer, m.expert, 0, m.target, m.source or 0) for m in moves if m.source != m.target)
    pair.do(lambda rank: rank.prepare(2, back, aside=False))
    arrange(2, [(layer, (0, 1, 2, 3, 4, 5)) for layer in (0, 1)])
    assert [dict(rank.held()) for rank in pair.ranks] == before


def test_what_was_not_prepared_is_not_placed(folder: Path) -> None:
    pair = Pair(folder, "torch", "float32", "none")
    rank = pair.ranks[0]
    with pytest.raises(ValueError, match="version 1 of the experts was not prepared"):
        rank.arrange(1, [])
    with pytest.raises(ValueError, match="layer 0: expert 3 was not prepared"):
        rank.arrange(0, [(0, (3, 1, 2, 0, 4, 5))])


def test_an_exchange_that_fails_beside_steps_is_told_at_the_next_chance(folder: Path) -> None:
    """The other rank never comes; what waits for it ends with the epoch, and what is in use is as before."""
    pair = Pair(folder, "cpu", "float32", "none")
    rank = pair.ranks[0]
    rank.prepare(1, (Move(0, 4, 0, 1, 0),), aside=True)
    waiting = [thread for thread in threading.enumerate() if thread.name == "planaria-experts"]
    rank.check()
    pair.groups[1].abort("its epoch is over")
    for thread in waiting:
        thread.join(60)
    with pytest.raises(CollectiveAborted):
        rank.check()
    rank.leave()
    assert rank.prepared == 0 and dict(rank.held())[0] == (0, 1, 2)


def test_an_exchange_that_fails_on_one_rank_is_told_to_those_that_wait_for_it(folder: Path) -> None:
    """Without a step, which would tell of it, they would wait until their deadline."""
    pair = Pair(folder, "cpu", "float32", "none")
    waits, fails = pair.ranks
    taken: list[Any] = []
    blank, release = waits.ops.blank, waits.ops.release
    waits.ops.blank = lambda form: (taken.append(blank(form)), taken[-1])[1]  # type: ignore[method-assign]
    waits.ops.release = lambda weight: (taken.remove(weight), release(weight))[1]  # type: ignore[method-assign]

    def fail(expert: Any, to: int) -> None:
        forms = np.zeros((2, FORM), np.int64)
        for row, weight in zip(forms, expert, strict=True):
            form = fails.ops.form(weight)
            row[: len(form) + 1] = len(form), *form
        fails.group.send(forms, to)
        raise MemoryError("no room for the rest")

    fails._send = fail  # type: ignore[method-assign]
    pair.do(lambda rank: rank.prepare(1, (Move(0, 4, 0, 1, 0),), aside=True))
    for thread in [thread for thread in threading.enumerate() if thread.name == "planaria-experts"]:
        thread.join(SOON)
        assert not thread.is_alive()
    with pytest.raises(MemoryError):
        fails.check()
    with pytest.raises(CollectiveAborted, match="rank 1 gave up"):
        waits.check()
    assert not taken and not waits.bytes_aside, "memory for what did not come is free again"


def test_what_comes_twice_lies_there_once(folder: Path) -> None:
    pair = Pair(folder, "cpu", "float32", "none")
    released: list[Any] = []
    rank = pair.ranks[0]
    release = rank.ops.release
    rank.ops.release = lambda weight: (released.append(weight), release(weight))[1]  # type: ignore[method-assign]
    pair.do(lambda rank: rank.prepare(1, (Move(0, 4, 0, 1, 0),), aside=False))
    once = rank.bytes_aside
    pair.do(lambda rank: rank.prepare(2, (Move(0, 4, 0, 1, 0), Move(0, 4, 1, 1, 0)), aside=False))
    assert rank.bytes_aside == once and len(released) == 4
    pair.do(lambda rank: rank.arrange(2, [(0, (4, 1, 2, 3, 0, 5))]) if rank is pair.ranks[0] else None)
    (block,) = [block for number, block in rank.blocks.items() if number == 0]
    ops = ops_of("cpu", "float32")
    whole = {block.number: block for block in read(folder, ops, "none", tuple(range(6))).blocks}
    assert bits(rank.ops, block, 4) == bits(ops, whole[0], 4)
