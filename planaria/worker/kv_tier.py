"""KV blocks on disk: a rank's connector to a folder. One thread reads, one writes; a step waits for neither.

What is read lies aside until its seal is checked, and goes into its block under a lock which is also held when the load
is dropped: so a disk that answers late writes into nobody's block. What is to be saved is copied before the step, by
the rank itself; the writer is as slow as it likes, and what it has no room for is refused.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from planaria.protocol import KVLoad, KVNews, KVWork
from planaria.worker.kv_store import KEY, BlockStore, StoreError

logger = logging.getLogger("planaria.worker")

Blocks = Sequence[npt.NDArray[np.uint8]]  # of each cache: [blocks, bytes]

RATE = 512 << 20  # bytes that are written in a second, at most
STAGED = 128 << 20  # bytes that wait to be written
WAIT = 0.02  # seconds that a rank with nothing to compute waits for news
LOOK = 30.0  # seconds after which is looked for what others have written and removed
PAUSE = 10.0  # seconds in which nothing is written after the disk has refused
LAST = 2.0  # seconds for what is still to be written at the end


class DiskTier:
    """blocks: of the caches of this epoch; store: of this rank's part; loaded: hears which blocks came. clock:
    seconds."""

    def __init__(
        self, store: BlockStore, blocks: Blocks, loaded: Callable[[list[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.store, self.blocks, self.clock = store, blocks, clock
        self.loaded = loaded or (lambda blocks: None)
        self._lock = threading.Lock()  # of all below, and of every write into a block
        self._news = threading.Condition(self._lock)
        self._open: set[int] = set()  # loads that are not dropped
        self._known: set[bytes] = set()  # keys that the core has been told of, or will be
        self._loaded: list[tuple[int, int, float]] = []
        self._stored: list[bytes] = []
        self._refused: list[bytes] = []
        self._gone: list[bytes] = []
        self._errors: Counter[str] = Counter()
        self._why = self._said = ""
        self._staged = 0
        self._paused = 0.0  # until then nothing is written
        self._loads: queue.SimpleQueue[KVLoad | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[bytes, bytearray] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"planaria-kv-{name}", daemon=True)
            for name, work in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def stored(self) -> bytes:
        keys = self.store.keys()
        with self._lock:
            self._known = split(keys)
        return keys

    def begin(self, work: KVWork) -> None:
        loads = [load for load in work.loads if load.lease is None]
        with self._lock:
            self._open.difference_update(work.dropped)
            self._open.update(load.number for load in loads)
        for load in loads:
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
        payload = bytearray(size)
        copied, at = np.frombuffer(payload, np.uint8), 0
        for part in self.blocks:
            end = at + part.shape[1]
            copied[at:end] = part[block]
            at = end
        self._saves.put((key, payload))

    def finished(self, *, waits: bool) -> KVNews | None:
        with self._news:
            if waits and not self._has_news:
                self._news.wait(WAIT)
            if self._why and self.clock() >= self._paused:
                self._why = ""
            if not self._has_news:
                return None
            news = KVNews(
                tuple(self._loaded), tuple(self._stored), tuple(self._refused), tuple(self._gone), dict(self._errors),
                self._why,
            )  # fmt: skip
            for said in (self._loaded, self._stored, self._refused, self._gone, self._errors):
                said.clear()
            self._said = self._why
            return news

    @property
    def _has_news(self) -> bool:
        said = self._loaded or self._stored or self._refused or self._gone or self._errors
        return bool(said) or self._why != self._said

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
            for key, block in zip(load.keys, load.blocks, strict=True):
                if load.number not in self._open or not self._bring(load.number, key, block, aside):
                    break
                count += 1
            with self._news:
                if load.number in self._open:
                    self._open.discard(load.number)
                    self._loaded.append((load.number, count, self.clock() - began))
                    self._news.notify()

    def look(self) -> None:
        """What other processes have written and removed."""
        if not self.store.changed():
            return
        there = split(self.store.keys(gently=True))
        with self._lock:
            self._stored += sorted(there - self._known)
            self._gone += sorted(self._known - there)
            self._known = there

    def _bring(self, number: int, key: bytes, block: int, aside: bytearray) -> bool:
        """Is it there, and whole?"""
        try:
            self.store.read(key, memoryview(aside))
        except Exception as e:  # whatever it is: its tokens are computed
            self._failed(e if isinstance(e, StoreError) else StoreError("read", repr(e)), key)
            return False
        bytes_, at = np.frombuffer(aside, np.uint8), 0
        with self._lock:
            if number not in self._open:
                return False
            for part in self.blocks:
                end = at + part.shape[1]
                part[block] = bytes_[at:end]
                at = end
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
            free = max(now, free) + len(payload) / RATE
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
                self._why = ""
            self._news.notify()

    def _refuse(self, error: StoreError) -> None:
        with self._lock:
            self._errors[error.kind] += 1
            first, self._why = not self._why, f"nothing can be written: {error}"
            self._paused = self.clock() + PAUSE
        if first:
            logger.warning("KV blocks are not kept in %s for now: %s", self.store.folder, error)


def split(keys: bytes) -> set[bytes]:
    return {keys[at : at + KEY] for at in range(0, len(keys), KEY)}
