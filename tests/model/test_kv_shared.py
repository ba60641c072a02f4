"""A rank that copies blocks of another engine out of memory of the node: what comes, and every reason why not."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from planaria.core.kv_index import BufferIndex, begin
from planaria.hosts.kv_keys import BlockKeys, Shape
from planaria.hosts.memory import KVMemory
from planaria.protocol import KVLoad, KVNews, KVWork
from planaria.types import KVLease
from planaria.worker import kv_shared
from planaria.worker.kv_shared import SharedKV
from planaria.worker.kv_sums import BlockSums

BYTES = (96, 160)  # of a block, in each of two caches
KEYS = [bytes([i]) * 16 for i in range(8)]
DIGEST, NUMBER = "0123456789abcdef", 77


class Owner:
    """An engine's memory with 8 blocks, of which block i has key i."""

    def __init__(self, memory: KVMemory, num_blocks: int = 8) -> None:
        self.memory, shape = memory, Shape(1, num_blocks, 16, 4, 8)
        part = memory.part(0, NUMBER, num_blocks * sum(BYTES), len(BYTES))
        self.blocks = [
            np.frombuffer(part.take(num_blocks * size), np.uint8).reshape(num_blocks, size) for size in BYTES
        ]
        for cache in self.blocks:
            cache[:] = np.arange(num_blocks)[:, None] + np.arange(cache.shape[1]) % 7
        memory.made(0, NUMBER)
        self.index: BufferIndex
        (self.index,) = begin(memory.index(shape.size), shape, DIGEST.encode() + b"weights", NUMBER)
        for block, key in enumerate(KEYS):
            self.index.remember(block, key)
        self.sums = BlockSums(self.blocks, np.frombuffer(memory.sums(0, NUMBER, num_blocks), np.int64), 4, 16)
        self.sums.note(range(num_blocks))


@pytest.fixture
def owner() -> Iterator[Owner]:
    memory = KVMemory.make()
    assert memory is not None
    yield Owner(memory)
    memory.close()


@pytest.fixture(params=[True, False], ids=["checked", "not checked"])
def rank(request: pytest.FixtureRequest) -> SharedKV:
    """With 5 blocks of its own."""
    blocks = [np.zeros((5, size), np.uint8) for size in BYTES]
    sums = BlockSums(blocks, np.zeros(5, np.int64), 4, 16) if request.param else None
    return SharedKV(0, blocks, DIGEST, sums)


def load(owner: Owner, number: int = NUMBER) -> KVLoad:
    """Of blocks 6, 2 and 4 into 0, 3 and 1."""
    place = msgspec.structs.astuple(owner.memory.origin)
    lease = KVLease(1, number, (6, 2, 4), place)
    return KVLoad(9, (KEYS[6], KEYS[2], KEYS[4]), (0, 3, 1), lease)


def fetch(rank: SharedKV, asked: KVLoad, *, idle: bool = True) -> KVNews:
    rank.begin(KVWork(loads=(asked,)))
    for _ in range(10):
        rank.copy(idle=idle)
        if (news := rank.finished()) is not None:
            assert rank.finished() is None
            return news
    raise AssertionError("no news")


@pytest.mark.parametrize("idle", [True, False])
def test_blocks_come_whole(owner: Owner, rank: SharedKV, monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    monkeypatch.setattr(kv_shared, "BUSY_BYTES", 300)  # one in a step
    news = fetch(rank, load(owner), idle=idle)
    assert [(number, count) for number, count, _ in news.loaded] == [(9, 3)] and not news.failed
    for mine, its in zip(rank.blocks, owner.blocks, strict=True):
        assert (mine[[0, 3, 1]] == its[[6, 2, 4]]).all() and not mine[[2, 4]].any()
    if rank.sums is not None:
        assert not rank.sums.wrong([0, 3, 1])


def test_what_is_dropped_is_not_written(owner: Owner, rank: SharedKV) -> None:
    rank.begin(KVWork(loads=(load(owner),)))
    rank.begin(KVWork(dropped=(9,)))
    rank.copy(idle=True)
    assert rank.finished() is None and not any(cache.any() for cache in rank.blocks)


def ends(rank: SharedKV, asked: KVLoad, count: int, why: str) -> None:
    news = fetch(rank, asked)
    assert [entry[:2] for entry in news.loaded] == [(9, count)] and news.failed == {9: why}


def test_a_block_of_another_key_ends_it(owner: Owner, rank: SharedKV) -> None:
    owner.index.forget(2)
    owner.index.remember(2, b"another request!")
    ends(rank, load(owner), 1, "evicted")


def test_a_block_that_is_given_away_meanwhile_does_not_count(
    owner: Owner, rank: SharedKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, looks = BlockKeys.marks, 0

    def then(self: BlockKeys, *args: list[int]) -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 2:  # after the copy: it had another key, and has the same again
            owner.index.forget(2)
            owner.index.remember(2, KEYS[2])
        return marks(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockKeys, "marks", then)
    ends(rank, load(owner), 1, "evicted")


def test_kv_of_another_number_is_gone(owner: Owner, rank: SharedKV) -> None:
    ends(rank, load(owner, NUMBER + 1), 0, "gone")


def test_an_owner_that_begins_anew_meanwhile_has_nothing(owner: Owner, rank: SharedKV) -> None:
    fetch(rank, load(owner))  # it is mapped
    owner.memory.clear()
    ends(rank, load(owner), 0, "gone")


def test_memory_that_has_ended_is_gone(rank: SharedKV) -> None:
    memory = KVMemory.make()
    assert memory is not None
    asked = load(Owner(memory))
    memory.close()
    ends(rank, asked, 0, "gone")


def test_another_layout_is_refused(owner: Owner, rank: SharedKV) -> None:
    rank.digest = "another layout.."
    ends(rank, load(owner), 0, "layout")


@pytest.mark.parametrize("rank", [True], indirect=True)
def test_flipped_bytes_are_found(owner: Owner, rank: SharedKV) -> None:
    owner.blocks[1][4, 100] ^= 8
    ends(rank, load(owner), 2, "damaged")
