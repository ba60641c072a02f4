"""Loads of KV blocks of which ranks of another engine have a part each: what has come of them, until all parts have.

Bytes go into a block under a lock which is also held when its load is dropped, so what comes late is written nowhere.
A block counts when all that it needs of all sources has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from planaria.protocol import KVLoad
from planaria.types import KVOffer
from planaria.worker.kv_recut import PartSource, Recut
from planaria.worker.kv_tier import Blocks


class Coming:
    """A load of so many blocks from so many sources, until all have ended. count: blocks, from the first on, of which
    all that is needed has come; why: not all are."""

    def __init__(self, sources: int, count: int) -> None:
        self.sources = self.missing = sources
        self.parts = [0] * count
        self.count, self.why, self.seconds = count, "", 0.0

    def came(self, index: int) -> bool:
        """All of a block that one of them has. Is it whole?"""
        self.parts[index] += 1
        return self.parts[index] == self.sources

    def ended(self, count: int, why: str, seconds: float) -> bool:
        """One of them. Have all?"""
        self.missing -= 1
        self.count, self.why, self.seconds = min(self.count, count), self.why or why, max(self.seconds, seconds)
        return self.missing <= 0


class PartLoads:
    """Of one rank in one epoch. same: a source of this layout; blocks: of its caches; recut: blocks of other layouts,
    None: they are not taken; loaded: hears which blocks came; news: of all below, notified when a load has ended."""

    def __init__(
        self, same: PartSource, blocks: Blocks, recut: Recut | None, loaded: Callable[[list[int]], None] | None,
        news: threading.Condition,
    ) -> None:  # fmt: skip
        self.same, self.blocks, self.recut = same, blocks, recut
        self.loaded = loaded or (lambda blocks: None)
        self.news = news
        self.num_loaded = 0  # blocks
        self._open: dict[int, Coming] = {}  # by the load's number
        self._ended: list[tuple[int, int, float]] = []
        self._failed: dict[int, str] = {}

    def drop(self, numbers: Iterable[int]) -> None:
        with self.news:
            for number in numbers:
                self._open.pop(number, None)

    def sources(self, offer: KVOffer) -> Sequence[PartSource]:
        """Who has this rank's part of what is offered; none, where that has a layout which is not taken."""
        if self.recut is None or offer.layout is None:
            return [self.same]
        try:
            return self.recut.sources(offer.layout)
        except ValueError:
            return []

    def expect(self, load: KVLoad, sources: int = 1) -> None:
        """Parts of a load from so many."""
        with self.news:
            self._open[load.number] = Coming(sources, len(load.blocks))

    def known(self, load: KVLoad, sources: int) -> None:
        """They are so many, if nobody has dropped it."""
        with self.news:
            if (coming := self._open.get(load.number)) is not None:
                coming.sources = coming.missing = sources

    def bring(self, source: PartSource, load: KVLoad, index: int, payload: memoryview) -> bool:
        """What has come under `load.keys[index]`, -1: nothing, it is only asked. False: the load was dropped."""
        with self.news:
            coming = self._open.get(load.number)
            if coming is None:
                return False
            if index >= 0:
                source.put(self.blocks, load, index, payload)
                for at in range(source.whole(load, index), source.whole(load, index + 1)):
                    if coming.came(at):
                        self.loaded([load.blocks[at]])
                        self.num_loaded += 1
            return True

    def ended(self, source: PartSource, load: KVLoad, count: int, why: str, seconds: float) -> str:
        """A source has sent what is under the first `count` keys, and no more; why not all. Returns why the load has
        failed, if it has ended so."""
        with self.news:
            coming = self._open.get(load.number)
            if coming is None or not coming.ended(source.whole(load, count), why, seconds):
                return ""
            del self._open[load.number]
            self._ended.append((load.number, coming.count, coming.seconds))
            if coming.why:
                self._failed[load.number] = coming.why
            self.news.notify()
            return coming.why

    @property
    def have_ended(self) -> bool:
        return bool(self._ended)

    def take(self) -> tuple[tuple[tuple[int, int, float], ...], dict[int, str]]:
        """Loads that have ended since the last time (see KVNews), and why some failed."""
        ended, failed = tuple(self._ended), self._failed
        self._ended, self._failed = [], {}
        return ended, failed

    def close(self) -> None:
        """Write into no block any more."""
        with self.news:
            self._open.clear()
