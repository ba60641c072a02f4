"""Blocks that a server of another layout has put into a store: read as its ranks have written them, and cut.

A store has what each rank has of a block under a name that says which part of which blocks that is (see
worker.kv.identity_of_part), so this rank opens the stores of those that have something of its own. What comes of it is
told as for blocks of other servers (worker.kv_peers).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from planaria.protocol import KVLoad, KVNews, KVWork
from planaria.types import KVLayout, KVOffer
from planaria.worker.kv_coming import PartLoads
from planaria.worker.kv_recut import PartSource
from planaria.worker.kv_store import StoreError
from planaria.worker.kv_tier import COMES, RETRY, WAIT, Store, own_load

logger = logging.getLogger("planaria.worker")

OPEN = 16  # stores of others that are kept


class StoreLoads:
    """Of one rank in one epoch. layout: its engine's; make: a store of parts with this identity, of so many bytes."""

    def __init__(
        self, loads: PartLoads, layout: KVLayout, make: Callable[[bytes, int], Store],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.loads, self.layout, self.make, self.clock = loads, layout, make, clock
        self._stores: OrderedDict[tuple[bytes, int], Store] = OrderedDict()
        self._queue: queue.SimpleQueue[KVLoad | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="planaria-kv-cut", daemon=True).start()

    def begin(self, work: KVWork) -> None:
        self.loads.drop(work.dropped)
        for load in work.loads:
            if isinstance(load.lease, KVOffer) and not load.lease.host and not own_load(load, self.layout):
                self.loads.expect(load, 1)
                self._queue.put(load)

    def finished(self, *, waits: bool) -> KVNews | None:
        with self.loads.news:
            if waits and not self.loads.have_ended:
                self.loads.news.wait(WAIT)
            ended, failed = self.loads.take()
            return KVNews(ended, failed=failed) if ended else None

    def close(self) -> None:
        self.loads.close()
        self._queue.put(None)

    # -- its thread

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            assert isinstance(load.lease, KVOffer)
            began, count, why = self.clock(), 0, "error"
            sources: Sequence[PartSource] = ()
            try:  # here, and not between steps: nobody has signed for what is said of the layout
                sources = self.loads.sources(load.lease) if self.loads.recut is not None else ()
                self.loads.known(load, max(1, len(sources)))
                count, why = self._read(load, sources, began + COMES)
            except Exception:  # whatever it is: the rest is computed
                logger.exception("KV blocks of another layout")
            for source in sources or (self.loads.same,):
                self.loads.ended(source, load, count, why, self.clock() - began)

    def _read(self, load: KVLoad, sources: Sequence[PartSource], until: float) -> tuple[int, str]:
        """Of the load's keys, how many from the first on have come of all, and why no more. until: they may still be
        written."""
        if not sources:
            return 0, "layout"
        opened = [(source, self._store(source), bytearray(source.size)) for source in sources]
        for index, key in enumerate(load.keys):
            for source, store, aside in opened:
                if why := self._part(load, source, store, key, aside, until):
                    return index, why
                if not self.loads.bring(source, load, index, memoryview(aside)):
                    return index, "dropped"
        return len(load.keys), ""

    def _part(
        self, load: KVLoad, source: PartSource, store: Store, key: bytes, aside: bytearray, until: float
    ) -> str:  # fmt: skip
        """Read it. Why it can't be, in a word; empty: it is there."""
        while self.loads.bring(source, load, -1, memoryview(b"")):
            try:
                store.read(key, memoryview(aside))
                return ""
            except StoreError as e:
                if e.kind == "damaged":
                    store.remove(key)
                if e.kind != "gone" or self.clock() >= until:
                    logger.debug("KV block %s is computed: %s", key.hex(), e)
                    return e.kind
            time.sleep(RETRY)
        return "dropped"

    def _store(self, source: PartSource) -> Store:
        place = source.identity, source.size
        store = self._stores.pop(place, None) or self.make(*place)
        while len(self._stores) >= OPEN:
            self._stores.popitem(last=False)
        self._stores[place] = store
        return store
