"""KV in memory of the node is put into huge pages where steps come to write, a little before they do. So to map it, to
look through it and to end with it takes a process as long with many tokens as with few; and a step takes no pages.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planaria.hosts.mapping import HUGE, collapse, for_good

logger = logging.getLogger("planaria.worker")

BREATH = 0.001  # seconds after each page, so that one keeps no step waiting for long
TRIES = 5


class HugeBlocks:
    """caches: [blocks, bytes] of each, at multiples of HUGE. A thread does it, beside steps. Of a cache that has less
    than half a page nothing is done, for most of it would be empty; nor of its last part, which is less than a page:
    KV takes what is configured."""

    def __init__(self, caches: Sequence[npt.NDArray[np.uint8]]) -> None:
        self.caches = [cache.reshape(-1) for cache in caches]
        self._sizes = [cache.shape[1] for cache in caches]
        self._done = [0] * len(caches)  # bytes of each
        self._next = HUGE // 2 // max(self._sizes, default=HUGE)  # block that wants more
        self._most = 0  # that has been written
        self._more, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def written(self, most: int) -> None:
        """A step has written blocks up to this one."""
        if most < self._next or self._closed:
            return
        self._most = max(most, self._most)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="planaria-kv-pages", daemon=True)
            self._thread.start()
        self._more.set()

    def _run(self) -> None:
        while self._more.wait() and not self._closed:
            self._more.clear()
            for number, (cache, size) in enumerate(zip(self.caches, self._sizes, strict=True)):
                end = min(len(cache) // HUGE * HUGE, (self._most + 1) * size + HUGE // 2)
                while self._done[number] < end:
                    if self._closed or not _put(cache, self._done[number]):
                        return
                    self._done[number] += HUGE
            there = zip(self._done, self._sizes, strict=True)
            self._next = min((done - HUGE // 2) // size for done, size in there)

    def close(self) -> None:
        """Their memory is about to be given back."""
        self._closed = True
        self._more.set()
        if self._thread is not None:
            self._thread.join()


def _put(cache: npt.NDArray[np.uint8], at: int) -> bool:
    """One page. False: with another it will not be better."""
    int(cache[at])  # now there is something, and it stays what it is
    for again in range(TRIES, 0, -1):
        try:
            collapse(cache.ctypes.data + at, HUGE)
            break
        except OSError as e:
            if e.errno != errno.EAGAIN or again == 1:  # else somebody has just been at it
                logger.info("KV stays in small pages, at least in part: %s", e.strerror)
                return not for_good(e)
            time.sleep(BREATH)
    time.sleep(BREATH)
    return True
