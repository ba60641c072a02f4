"""KV blocks of other engines of this node: copied by the rank that needs them, straight from the memory which outlives
those engines (planaria.hosts.memory), into its own.

Nobody waits for the owner, and it need not be alive. Whether a block is still what was lent, its index says: a copy
counts only if the block had the same key, put there the same time, before and after. So one that was stopped in the
midst of a copy, for however long, never takes another request's KV for its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from planaria.hosts import kv_keys
from planaria.hosts.memory import KVMemory
from planaria.node import ProcessGone, Shared
from planaria.protocol import KVLoad, KVNews, KVWork
from planaria.types import KVLease
from planaria.worker.kv_sums import Blocks, BlockSums

BUSY_BYTES, IDLE_BYTES = 4 << 20, 64 << 20  # that are copied in a step which computes, or doesn't
OPEN = 16  # memories of others that are kept mapped


class Lost(Exception):
    """Why a block doesn't come, in a word."""


class OtherKV:
    """Another engine's, as this rank's part of it. Raises Lost where it is of another kind than `digest`."""

    def __init__(self, lease: KVLease, rank: int, blocks: Blocks, digest: str) -> None:
        self.number, self.rank = lease.number, rank
        try:
            self.memory = KVMemory.of(Shared(*lease.memory))
        except ProcessGone:
            raise Lost("gone") from None
        try:
            head = self.memory.index(kv_keys.FIRST)
            self.numbers = head[:8].cast("q")
            shape = kv_keys.shape_of(head, digest.encode())
            if not self.there:
                raise Lost("gone")
            if shape is None:
                raise Lost("layout")
            self.keys = shape.keys_of(self.memory.index(shape.size), 0)
            sizes = [shape.num_blocks * cache.shape[1] for cache in blocks]
            part = self.memory.part(rank, lease.number, sum(sizes), len(sizes))
            self.blocks = [np.frombuffer(part.take(size), np.uint8).reshape(shape.num_blocks, -1) for size in sizes]
            self.sums = np.frombuffer(self.memory.sums(rank, lease.number, shape.num_blocks), np.int64)
        finally:
            self.memory.close()  # what is mapped stays

    @property
    def there(self) -> bool:
        """Is it still the same KV?"""
        return bool(self.numbers[0] == self.number and self.number in self.memory.numbers(self.rank))


class Copying:
    """A load that was begun; `done` of its blocks are there."""

    def __init__(self, load: KVLoad) -> None:
        self.load, self.done, self.began = load, 0, time.perf_counter()


class SharedKV:
    """Of one rank in one epoch. blocks: of this rank's caches; digest: of the configuration and the layout, which
    others' must be equal to; sums: of its blocks, where they have checksums."""

    def __init__(self, rank: int, blocks: Blocks, digest: str, sums: BlockSums | None) -> None:
        self.rank, self.blocks, self.digest, self.sums = rank, blocks, digest, sums
        self.block_bytes = max(1, sum(cache.shape[1] for cache in blocks))
        self._others: dict[tuple[tuple[int, int, int], int], OtherKV] = {}
        self._open: deque[Copying] = deque()
        self._loaded: list[tuple[int, int, float]] = []
        self._failed: dict[int, str] = {}

    def begin(self, work: KVWork) -> None:
        """Heed what is dropped, and take in what is to come."""
        self._open = deque(copying for copying in self._open if copying.load.number not in work.dropped)
        self._open.extend(Copying(load) for load in work.loads if isinstance(load.lease, KVLease))

    def copy(self, *, idle: bool) -> None:
        """Some of what is open, before the step computes; idle: it won't."""
        room = max(1, (IDLE_BYTES if idle else BUSY_BYTES) // self.block_bytes)
        while self._open and room > 0:
            copying = self._open[0]
            failed = ""
            try:
                room -= self._some(copying, room)
            except Lost as e:
                failed = str(e)
            load = copying.load
            if failed or copying.done == len(load.blocks):
                self._open.popleft()
                self._loaded.append((load.number, copying.done, time.perf_counter() - copying.began))
                self._failed |= {load.number: failed} if failed else {}

    def _some(self, copying: Copying, room: int) -> int:
        """Copy up to so many of its blocks; returns how many. Raises Lost; `done` are good all the same."""
        load, lease = copying.load, copying.load.lease
        assert isinstance(lease, KVLease)
        other = self._other(lease)
        part = slice(copying.done, copying.done + room)
        keys, theirs, own = load.keys[part], lease.blocks[part], load.blocks[part]
        marks = other.keys.marks(theirs, keys)
        source, into = np.array(theirs[: len(marks)]), np.array(own[: len(marks)])
        for mine, its in zip(self.blocks, other.blocks, strict=True) if marks else ():
            mine[into] = its[source]
        same = other.keys.marks(theirs, keys)
        if not other.there:
            raise Lost("gone")
        good = unchanged(marks, same)
        if self.sums is not None:
            damaged = self.sums.copied(into[:good].tolist(), other.sums[source[:good]])
            copying.done += damaged
            if damaged < good:
                raise Lost("damaged")
        else:
            copying.done += good
        if good < len(keys):
            raise Lost("evicted")
        return good

    def _other(self, lease: KVLease) -> OtherKV:
        place = lease.memory, lease.number
        found = self._others.get(place)
        if found is None:
            found = self._others[place] = OtherKV(lease, self.rank, self.blocks, self.digest)
            while len(self._others) > OPEN:
                del self._others[next(iter(self._others))]
        return found

    def finished(self) -> KVNews | None:
        """What has come since the last time."""
        if not self._loaded:
            return None
        news = KVNews(tuple(self._loaded), failed=self._failed)
        self._loaded, self._failed = [], {}
        return news

    def close(self) -> None:
        """Write into no block any more."""
        self._open.clear()
        self._others.clear()


def unchanged(before: Sequence[int], after: Sequence[int]) -> int:
    """How many blocks, from the first on, had the same mark both times."""
    both = zip(before, after, strict=False)
    return next((i for i, (one, two) in enumerate(both) if one != two), min(len(before), len(after)))
