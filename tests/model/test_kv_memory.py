"""What an engine has of KV after a fault: what was committed, or else as much memory as before, for what its ranks hold
themselves is not gone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planaria.hosts.mapping import HUGE, collapse
from planaria.hosts.memory import RANKS, KVMemory
from planaria.layers.decoder import Model
from planaria.protocol import Row, StepPlan
from planaria.topology import Layout
from planaria.wire import ResizeEngine
from planaria.worker.kv import RankKV
from planaria.worker.kv_pages import FIRST, HugeBlocks
from planaria.worker.kv_sums import BlockSums
from planaria.worker.runner import Runner
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, ask_for, texts

MIB = 1 << 20
ONE: dict[str, Any] = {
    "distributed_executor_backend": "uni", "threads": 1, "max_num_seqs": 64, "max_num_batched_tokens": 64,
}  # fmt: skip


class Node:
    """Of `free` bytes beside weights. What is left is told as a kernel or an accelerator would: KV memory that somebody
    still holds is taken. `shortages`: how often something else has it all."""

    def __init__(self, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.shortages = free, 0
        self.held: list[tuple[Any, int]] = []  # layers' caches and their bytes
        monkeypatch.setattr("planaria.worker.worker.available_bytes", lambda config: self.left())
        make_kv = Model.make_kv

        def noted(model: Model, num_blocks: int, block_size: int) -> None:
            make_kv(model, num_blocks, block_size)
            size = num_blocks * model.kv_block_bytes(block_size) // len(model.layers)
            self.held += [(weakref.ref(layer.attention.kv.memory), size) for layer in model.layers]

        monkeypatch.setattr(Model, "make_kv", noted)

    def left(self) -> int:
        if self.shortages and any(cache() is None for cache, _ in self.held):
            self.shortages -= 1
            return 0
        return self.free - sum(size for cache, size in self.held if cache() is not None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("kv"), "llama", num_hidden_layers=4))


def one_mistake(engine: Engine) -> tuple[int, int]:
    """KV blocks before and after a step that failed."""
    blocks, begin = engine.loop.gang.num_blocks, Runner.begin
    mistakes = [RuntimeError("a passing mistake")]

    def flawed(runner: Runner, *args: Any, **more: Any) -> Any:
        if runner.step_number > 3 and mistakes:
            raise mistakes.pop()
        return begin(runner, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "begin", flawed)
        (tokens,) = engine.run(texts(100, [(9, 12)]))
    assert len(tokens) == 12 and not mistakes and engine.loop.gang.epoch > 0
    return blocks, engine.loop.gang.num_blocks


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankKV, "numbers", ())


def test_what_was_committed_is_not_computed_again(model: str) -> None:
    with Engine(model, kv_cache_memory="2MiB", **ONE) as engine:
        before, after = one_mistake(engine)
        assert engine.loop.gang.epoch == 1 and engine.loop.gang.kv.kept
        assert engine.loop.core is not None and engine.loop.core.replayed_tokens == 0
    assert after == before


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "not checked"])
def test_what_a_dying_rank_has_scribbled_over_is_computed_again(model: str, checked: bool) -> None:
    options: dict[str, Any] = {**ONE, "distributed_executor_backend": "mp", "kv_checksums": checked}
    asked = texts(100, [(70, 20), (40, 20)])
    with Engine(model, kv_cache_memory="2MiB", **options) as engine:
        expected = engine.run(asked)

    def scribble_and_die() -> None:
        core, memory = engine.loop.core, engine.loop.gang.kv.memory
        assert core is not None and isinstance(memory, KVMemory)
        entry = core.lanes[0].entries["r0"]
        block = engine.loop.gang.kv.block_bytes // 4  # of one of four layers
        at = entry.blocks[1] * block
        cache = memory.part(
            0, engine.loop.gang.kv.there.number, engine.loop.gang.kv_bytes[engine.loop.gang.layout], 8
        ).take(1 << 19)
        for i in range(at, at + block, 2):
            cache[i] ^= 0x40
        engine.kill(0, signal.SIGKILL)

    with Engine(model, kv_cache_memory="2MiB", **options) as engine:
        found = engine.run(asked, at=8, harm=scribble_and_die)
        assert engine.loop.gang.kv.kept and len(engine.recoveries) == 1
        damaged = {lane: len(blocks) for lane, blocks in engine.loop.gang.kv.damaged.items()}
        again = engine.loop.core.replayed_tokens if engine.loop.core is not None else -1
    assert (found == expected) is checked and found[1] == expected[1]
    assert (damaged, again >= 70 - 16) == (({0: 1}, True) if checked else ({}, False))


def test_what_another_process_has_written_is_looked_at_while_the_rank_gets_ready(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    looks, ready = threading.Event(), threading.Event()
    make, wrong, init = RankKV.make, BlockSums.wrong, Runner.__init__

    def of_another(kv: RankKV, *args: Any) -> None:
        kv.made = None
        make(kv, *args)

    def look(sums: BlockSums, blocks: Any) -> list[int]:
        looks.set()
        assert ready.wait(60)
        return wrong(sums, blocks)

    def get_ready(runner: Runner, *args: Any, **more: Any) -> None:
        assert looks.wait(60)
        init(runner, *args, **more)
        ready.set()

    with Engine(model, kv_cache_memory="2MiB", **ONE) as engine:
        monkeypatch.setattr(RankKV, "make", of_another)
        monkeypatch.setattr(BlockSums, "wrong", look)
        monkeypatch.setattr(Runner, "__init__", get_ready)
        one_mistake(engine)
        assert ready.is_set() and engine.loop.core is not None and engine.loop.core.replayed_tokens == 0


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(("free", "asked"), [(3 * MIB, None), (3 * MIB, "2MiB")], ids=["auto", "given"])
def test_it_is_what_it_was(model: str, monkeypatch: pytest.MonkeyPatch, free: int, asked: str | None) -> None:
    Node(free, monkeypatch)
    with Engine(model, kv_cache_memory=asked, **ONE) as engine:
        before, after = one_mistake(engine)
        assert engine.loop.gang.epoch == 1
    assert after == before


@pytest.mark.usefixtures("nothing_kept")
def test_an_accelerator_that_gives_all_it_has_can_give_it_again(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Node(3 * MIB, monkeypatch)
    monkeypatch.setattr("planaria.executor.bring_up.KV_SHARE", 1.0)
    with Engine(model, kv_cache_memory=None, **ONE) as engine:
        before, after = one_mistake(engine)
        assert engine.loop.gang.epoch == 1
    assert after == before


@pytest.mark.usefixtures("nothing_kept")
def test_no_memory_for_a_moment_is_not_the_end(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(3 * MIB, monkeypatch)
    with Engine(model, kv_cache_memory="2MiB", **ONE) as engine:
        node.shortages = 2
        before, after = one_mistake(engine)
        assert engine.loop.dead is None and engine.loop.gang.epoch == 3
    assert after == before and not node.shortages


LAYOUTS = [(1, 1), (1, 2), (2, 2), (2, 1)]  # tensor ranks, stages


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_kv_is_cut_anew_for_each_layout(model: str, kernels: str) -> None:
    """What was committed is copied, and the same tokens follow."""
    asked = texts(100, [(90, 40), (40, 40), (33, 40)])
    with Engine(model, tensor_parallel_size=2, kernels=kernels) as engine:
        expected = engine.run(asked)
        core, kv = engine.loop.core, engine.loop.gang.kv
        assert core is not None
        for tp, pp in LAYOUTS:
            wish = ResizeEngine("", tp, pp)
            assert engine.run(asked, 60, functools.partial(ask_for, engine.loop, wish)) == expected
            assert engine.resized[-1].error == "" and engine.loop.gang.layout == Layout(tp=tp, pp=pp)
            assert kv.kept and kv.moved is not None and len(kv.moved[0]) > 3 * 40 // 16
        assert core.replayed_tokens == 0


def test_a_rank_that_scribbles_costs_what_it_scribbled_on_when_kv_is_cut_anew(model: str) -> None:
    asked = texts(100, [(70, 20), (40, 20)])
    with Engine(model, tensor_parallel_size=2) as engine:
        expected, loop = engine.run(asked), engine.loop
        core, memory = loop.core, loop.gang.kv.memory

        def scribble() -> None:
            assert core is not None and isinstance(memory, KVMemory)
            block, size = core.lanes[0].entries["r0"].blocks[1], loop.gang.kv.block_bytes // 4
            cache = memory.part(1, loop.gang.kv.there.number, loop.gang.kv_bytes[loop.gang.layout], 8)
            cache.take(loop.gang.num_blocks * size)[block * size] ^= 0x40
            ask_for(loop, ResizeEngine("", 1, 1))

        assert engine.run(asked, 8, scribble) == expected
        assert core is not None and 70 - 16 <= core.replayed_tokens <= 70 + 20
        assert [len(blocks) for blocks in loop.gang.kv.damaged.values()] == [1]


def test_more_ranks_than_it_has_parts_for_have_none() -> None:
    assert KVMemory.make(RANKS) is not None
    assert KVMemory.make(RANKS + 1) is None


def held(inode: int) -> int:
    """How often this process has a file, open and mapped."""
    found = [int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()]
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.append(os.fstat(int(fd)).st_ino)
    return found.count(inode)


def test_what_nobody_goes_on_with_is_the_systems_again() -> None:
    """Also while somebody knows of it: an engine that left is known until its circle of objects is collected."""
    memory = KVMemory.make()
    assert memory is not None and held(memory.origin.inode) == 3  # its descriptor, the mapping and that one's own
    memory.end()
    assert held(memory.origin.inode) == 0


def test_what_is_forgotten_leaves_no_descriptor() -> None:
    """As of an `LLM` over processes that its user lets go of."""
    memory = KVMemory.make()
    assert memory is not None
    inode = memory.origin.inode
    del memory
    assert held(inode) == 0


def test_what_steps_come_to_write_is_in_huge_pages_and_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little ahead of them, once there is a little; of a cache's last part nothing is done."""
    memory = KVMemory.make()
    assert memory is not None
    size, count, put = 8 << 10, 3 * HUGE // (8 << 10) + 9, list[tuple[int, int]]()
    part = memory.part(0, 1, 2 * size * count, 2)
    caches = [np.frombuffer(part.take(size * count), np.uint8).reshape(count, size) for _ in range(2)]
    first = [int(cache.ctypes.data) for cache in caches]
    assert not any(at % HUGE for at in first)
    refused: list[OSError] = []

    def noted(address: int, length: int) -> None:
        try:
            collapse(address, length)
        except OSError as e:
            if e.errno == errno.EAGAIN:
                raise
            refused.append(e)
        put.append((address, length))

    monkeypatch.setattr("planaria.worker.kv_pages.collapse", noted)
    pages = HugeBlocks(caches)
    few = FIRST // size
    pages.reach(few - 1)
    assert not put
    numbers = np.random.default_rng(0).integers(0, 256, (2, count, size), np.uint8)
    for at in range(count):
        pages.reach(at)
        reached = min(3 * HUGE, -(-((at + 1) * size + HUGE // 2) // HUGE) * HUGE) if at >= few else 0
        assert [sum(length for start, length in put if at <= start < at + 4 * HUGE) for at in first] == [reached] * 2
        for cache, there in zip(caches, numbers, strict=True):
            cache[at] = there[at]
    assert sorted(put) == [(at + page * HUGE, HUGE) for at in first for page in range(3)]
    assert all((cache == there).all() for cache, there in zip(caches, numbers, strict=True))
    if refused:
        pytest.skip(f"this system has no huge pages for memory files: {refused[0]}")
    with open("/proc/self/smaps") as file:
        found = [lines.split() for lines in file if lines.startswith(("ShmemPmdMapped", "FilePmdMapped"))]
    assert sum(int(words[1]) for words in found) >= 6 * HUGE >> 10
    assert 6 * HUGE <= memory.num_bytes <= 6 * HUGE + 2 * 10 * size, "no more than there is to be"
    memory.end()


def test_a_rank_tells_which_blocks_its_steps_are_about_to_write() -> None:
    """And forgets it before their memory goes."""
    kv: Any = object.__new__(RankKV)
    kv.sums = kv.shared = kv.peers = kv.connector = kv.memory = None
    told: list[Any] = []
    kv.pages = SimpleNamespace(reach=told.append)
    rows = [Row(0, 0, 20, (3, 7), True), Row(1, 4, 1, (), True), Row(2, 0, 5, (5,), True)]
    for lane in (tuple(rows), tuple(rows[1:2])):
        kv.begin(StepPlan(0, 1, ((), lane), ((), ())), 1)
    assert told == [7]
    kv.forget(None)
    assert kv.pages is None
