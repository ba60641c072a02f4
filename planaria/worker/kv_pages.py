"""KV in memory of the node is put into huge pages where a step is about to write. So to map it, to look through it and
to end with it takes a process as long with many tokens as with few; and a step takes next to no small pages.
"""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planaria.hosts.mapping import HUGE, collapse, for_good

logger = logging.getLogger("planaria.worker")

AHEAD = HUGE // 2  # bytes of each cache behind what a step writes
FIRST = HUGE // 16  # of a cache that are in use before it is worth a page: a few short requests take next to no memory
BREATH = 0.001  # seconds before another try
TRIES = 5


class HugeBlocks:
    """caches: [blocks, bytes] of each, at multiples of HUGE. Of memory that nobody has written yet a page takes a tenth
    of the time that as many small ones take. Nothing is done of a cache's last part, which is less than a page: KV
    takes what is configured."""

    def __init__(self, caches: Sequence[npt.NDArray[np.uint8]]) -> None:
        self.caches = [cache.reshape(-1) for cache in caches]
        self._sizes = [cache.shape[1] for cache in caches]
        self._ends = [len(cache) // HUGE * HUGE for cache in self.caches]
        self._done = [0] * len(caches)  # bytes of each
        self._next = FIRST // max(self._sizes, default=FIRST)  # block that wants more

    def reach(self, last: int) -> None:
        """A step is about to write blocks up to this one."""
        if last < self._next:
            return
        self._next = sys.maxsize
        for number, (cache, size) in enumerate(zip(self.caches, self._sizes, strict=True)):
            start, wanted = self._done[number], (last + 1) * size + AHEAD
            end = min(self._ends[number], -(-wanted // HUGE) * HUGE)
            if start < end and not _put(cache, start, end):
                return
            self._done[number] = max(start, end)
        each = zip(self._done, self._ends, self._sizes, strict=True)
        self._next = min(((done - AHEAD) // size for done, end, size in each if done < end), default=sys.maxsize)


def _put(cache: npt.NDArray[np.uint8], start: int, end: int) -> bool:
    """All pages between these. False: with others it will not be better."""
    cache[start:end:HUGE].max()  # now there is something in each, and it stays what it is
    for again in range(TRIES, 0, -1):
        try:
            collapse(cache.ctypes.data + start, end - start)
            break
        except OSError as e:
            if e.errno != errno.EAGAIN or again == 1:  # else somebody has just been at it
                logger.info("KV stays in small pages, at least in part: %s", e.strerror)
                return not for_good(e)
            time.sleep(BREATH)
    return True
