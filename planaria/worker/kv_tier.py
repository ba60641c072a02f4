"""KV blocks outside of the cache: a rank's connector to stores of them, the fastest first. In each one thread reads and
one writes; a step waits for neither, and no store for another.

What is read lies aside until its seal is checked, and goes into its block under a lock which is also held when the load
is dropped: so a disk that answers late writes into nobody's block. What is to be saved is copied before the step, by
the rank itself; the writer is as slow as it likes, and what it has no room for is refused. All stores are given what is
to be saved; what is to be brought back each brings as far as it has it, at the same time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planaria.protocol import KVLoad, KVNews, KVWork, StoreNews
from planaria.types import KVLayout, KVOffer
from planaria.worker.connector import Unconnected
from planaria.worker.kv_store import KEY, StoreError

logger = logging.getLogger("planaria.worker")

Blocks = Sequence[npt.NDArray[np.uint8]]  # of each cache: [blocks, bytes]

RATE = 512 << 20  # bytes that are written to a disk in a second, at most
STAGED = 128 << 20  # bytes that wait to be written
WAIT = 0.02  # seconds that a rank with nothing to compute waits for news
LOOK = 1.0  # seconds after which is looked for what others have written and removed
COMES = 0.5  # seconds that a block is waited for which another server is about to write
RETRY = 0.01
PAUSE = 10.0  # seconds in which nothing is written after the disk has refused
LAST = 2.0  # seconds for what is still to be written at the end


class Store(Protocol):
    """What keeps a rank's parts of blocks, each of `size` bytes, whole or not at all."""

    size: int

    def news(self) -> tuple[set[bytes], set[bytes]]:
        """Keys that have come and gone since the last look."""

    def keys(self) -> bytes:
        """Of what there is, one behind the other."""

    def read(self, key: bytes, into: memoryview) -> None:
        """Raises StoreError, unless it is all there as it was kept."""

    def write(self, key: bytes, payload: bytearray) -> list[bytes]:
        """Returns keys that had to go for it. Raises StoreError."""

    def remove(self, key: bytes) -> None: ...


class StoreThreads:
    """One store of a rank. blocks: of the caches of this epoch; loaded: hears which blocks came; news: of all the
    rank's stores, notified when there is some; rate: bytes that are written in a second, at most. clock: seconds."""

    def __init__(
        self, name: str, store: Store, blocks: Blocks, loaded: Callable[[list[int]], None] | None = None, *,
        news: threading.Condition | None = None, rate: float = RATE, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name, self.store, self.blocks, self.rate, self.clock = name, store, blocks, rate, clock
        self.loaded = loaded or (lambda blocks: None)
        self._news = self._lock = news or threading.Condition()  # of all below, and of every write into a block
        self._open: set[int] = set()  # loads that are not dropped
        self._known: set[bytes] = set()  # keys that the core has been told of, or will be
        self._loaded: list[tuple[int, int, float]] = []
        self._stored: list[bytes] = []
        self._refused: list[bytes] = []
        self._gone: list[bytes] = []
        self._errors: Counter[str] = Counter()
        self._counts = 0, 0  # blocks saved and loaded
        self._why = ""
        self._said = 0, ""  # blocks there, and why
        self._staged = 0
        self._paused = 0.0  # until then nothing is written
        self._loads: queue.SimpleQueue[KVLoad | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[bytes, bytearray] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"planaria-kv-{does}", daemon=True)
            for does, work in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def stored(self) -> bytes:
        keys = self.store.keys()
        with self._lock:
            self._known = split(keys)
            self._said = len(self._known), ""
        return keys

    def has(self, key: bytes) -> bool:
        """Was it there, when last looked?"""
        return key in self._known

    def begin(self, work: KVWork) -> None:
        with self._lock:
            self._open.difference_update(work.dropped)
            self._open.update(load.number for load in work.loads)
        for load in work.loads:
            self._loads.put(load)
        for key, block in work.saves:
            self._take(key, block)

    def _take(self, key: bytes, block: int) -> None:
        size = self.store.size
        with self._lock:
            if self._staged + size > STAGED and self._staged:
                self._refused.append(key)
                self._errors["busy"] += 1
                return
            self._staged += size
        payload = copy_out(self.blocks, block, size)
        self._saves.put((key, payload))

    def finished(self) -> KVNews | None:
        """With `news`."""
        with self._news:
            if self._why and self.clock() >= self._paused:
                self._why = ""
            if not self._has_news:
                return None
            there, loaded = len(self._known), tuple(self._loaded)
            saves, loads = self._counts
            figures = StoreNews(there, saves, loads, dict(self._errors), self._why)
            stored = [key for key in self._stored if key in self._known]  # else it had to go again
            refused = [*self._refused, *(key for key in self._stored if key not in self._known)]
            gone = [key for key in self._gone if key not in self._known]
            for said in (self._loaded, self._stored, self._refused, self._gone, self._errors):
                said.clear()
            self._counts, self._said = (0, 0), (there, self._why)
            return KVNews(loaded, tuple(stored), tuple(refused), tuple(gone), {self.name: figures})

    @property
    def _has_news(self) -> bool:
        said = self._loaded or self._stored or self._refused or self._gone or self._errors
        return bool(said) or self._said != (len(self._known), self._why)

    def close(self, *, last: bool) -> None:
        with self._lock:
            self._open.clear()
        self._loads.put(None)
        self._saves.put(None)
        if last:
            self._threads[1].join(LAST)

    # -- reading

    def _read(self) -> None:
        aside, looked = bytearray(self.store.size), self.clock()
        while True:
            if self.clock() - looked >= LOOK:
                self.look()
                looked = self.clock()
            try:
                load = self._loads.get(timeout=LOOK)
            except queue.Empty:
                continue
            if load is None:
                return
            began, count = self.clock(), 0
            until = began + COMES if load.lease is not None else began
            for key, block in zip(load.keys, load.blocks, strict=True):
                if not self._bring(load.number, key, block, aside, until):
                    break
                count += 1
            with self._news:
                if load.number in self._open:
                    self._open.discard(load.number)
                    self._loaded.append((load.number, count, self.clock() - began))
                    self._counts = self._counts[0], self._counts[1] + count
                    self._news.notify()

    def look(self) -> None:
        """What other processes have written and removed."""
        came, went = self.store.news()
        with self._lock:
            self._stored += sorted(came - self._known)
            self._gone += sorted(went & self._known)
            self._known = self._known - went | came if came or went else self._known

    def _bring(self, number: int, key: bytes, block: int, aside: bytearray, until: float) -> bool:
        """Is it there, and whole? until: it may still come."""
        while number in self._open:
            try:
                self.store.read(key, memoryview(aside))
                break
            except Exception as e:  # whatever it is: its tokens are computed
                error = e if isinstance(e, StoreError) else StoreError("read", repr(e))
                if error.kind != "gone" or self.clock() >= until:
                    self._failed(error, key)
                    return False
                time.sleep(RETRY)
        with self._lock:
            if number not in self._open:
                return False
            copy_in(self.blocks, block, aside)
            self.loaded([block])
        return True

    def _failed(self, error: StoreError, key: bytes) -> None:
        if error.kind == "damaged":
            self.store.remove(key)
        with self._lock:
            self._errors[error.kind] += 1
            self._gone.append(key)
            self._known.discard(key)
        logger.log(
            logging.DEBUG if error.kind == "gone" else logging.WARNING, "KV block %s is computed: %s", key.hex(), error
        )

    # -- writing

    def _write(self) -> None:
        free = self.clock()  # when the next may be written
        while (item := self._saves.get()) is not None:
            key, payload = item
            now = self.clock()
            if now < self._paused:
                self._saved(key, payload, kept=False)
                continue
            if now < free:
                time.sleep(free - now)
            free = max(now, free) + len(payload) / self.rate
            try:
                gone = self.store.write(key, payload)
                self._saved(key, payload, kept=True)
                with self._lock:
                    self._gone += gone
                    self._known.difference_update(gone)
            except Exception as e:  # whatever it is: it isn't kept
                self._refuse(e if isinstance(e, StoreError) else StoreError("write", repr(e)))
                self._saved(key, payload, kept=False)

    def _saved(self, key: bytes, payload: bytearray, *, kept: bool) -> None:
        with self._news:
            self._staged -= len(payload)
            (self._stored if kept else self._refused).append(key)
            if kept:
                self._known.add(key)
                self._counts = self._counts[0] + 1, self._counts[1]
                self._why = ""
            self._news.notify()

    def _refuse(self, error: StoreError) -> None:
        with self._lock:
            self._errors[error.kind] += 1
            first, self._why = not self._why, f"nothing can be written: {error}"
            self._paused = self.clock() + PAUSE
        if first:
            logger.warning("KV blocks are not kept in the store %s for now: %s", self.name, error)


class KVStores:
    """A rank's stores, the fastest first, with one condition; layout: of its engine. See planaria.worker.connector."""

    def __init__(
        self, stores: Sequence[StoreThreads | Unconnected], news: threading.Condition, layout: KVLayout | None = None
    ) -> None:
        self.stores, self._news, self.layout = stores, news, layout
        self._parts: dict[int, _Parts] = {}  # of loads

    def stored(self) -> dict[str, bytes]:
        return {store.name: store.stored() for store in self.stores}

    def begin(self, work: KVWork) -> None:
        for number in work.dropped:
            self._parts.pop(number, None)
        loads: list[list[KVLoad]] = [[] for _ in self.stores]
        for load in work.loads:
            if not own_load(load, self.layout):
                continue
            parts = self._parts[load.number] = _Parts(len(load.keys))
            for i, key in enumerate(load.keys):
                at = next((at for at, store in enumerate(self.stores) if store.has(key)), -1)
                parts.of.setdefault(at % len(self.stores), []).append(i)
            for at, places in parts.of.items():
                keys, blocks = zip(*((load.keys[i], load.blocks[i]) for i in places), strict=True)
                loads[at].append(KVLoad(load.number, keys, blocks, load.lease))
        for store, part in zip(self.stores, loads, strict=True):
            store.begin(KVWork(work.dropped, tuple(part), work.saves))

    def finished(self, *, waits: bool) -> KVNews | None:
        with self._news:
            said = [store.finished() for store in self.stores]
            if waits and not any(said):
                self._news.wait(WAIT)
                said = [store.finished() for store in self.stores]
            if not any(said):
                return None
            loaded = [
                ended
                for at, news in enumerate(said)
                if news
                for part in news.loaded
                if (ended := self._ended(at, part))
            ]
            found = [news for news in said if news]
            gone = {key for news in found for key in news.gone if not any(store.has(key) for store in self.stores)}
            return KVNews(
                tuple(loaded), tuple(key for news in found for key in news.stored),
                tuple(key for news in found for key in news.refused), tuple(sorted(gone)),
                {name: figures for news in found for name, figures in news.stores.items()},
            )  # fmt: skip

    def _ended(self, at: int, part: tuple[int, int, float]) -> tuple[int, int, float] | None:
        """A store's part of a load. Of the whole load, when it was the last."""
        number, count, seconds = part
        parts = self._parts.get(number)
        if parts is None:  # dropped
            return None
        places = parts.of.pop(at)
        if count < len(places):
            parts.usable = min(parts.usable, places[count])
        parts.seconds = max(parts.seconds, seconds)
        if parts.of:
            return None
        del self._parts[number]
        return number, parts.usable, parts.seconds

    def close(self, *, last: bool) -> None:
        for store in self.stores:
            store.close(last=last)


class _Parts:
    """Of a load: by store the places in it of what that one brings; usable: blocks from the first on that are there."""

    def __init__(self, usable: int) -> None:
        self.of: dict[int, list[int]] = {}
        self.usable, self.seconds = usable, 0.0


def split(keys: bytes) -> set[bytes]:
    return {keys[at : at + KEY] for at in range(0, len(keys), KEY)}


def own_load(load: KVLoad, layout: KVLayout | None) -> bool:
    """Does it come from stores of this rank, be it that another server of the same layout has put it there?"""
    lease = load.lease
    return lease is None or (isinstance(lease, KVOffer) and not lease.host and lease.layout in (None, layout))


def copy_out(blocks: Blocks, block: int, size: int) -> bytearray:
    """A block of all caches, `size` bytes together."""
    payload = bytearray(size)
    copied, at = np.frombuffer(payload, np.uint8), 0
    for part in blocks:
        end = at + part.shape[1]
        copied[at:end] = part[block]
        at = end
    return payload


def copy_in(blocks: Blocks, block: int, payload: bytearray | memoryview) -> None:
    copied, at = np.frombuffer(payload, np.uint8), 0
    for part in blocks:
        end = at + part.shape[1]
        part[block] = copied[at:end]
        at = end
