"""KV blocks in a store that LMCache knows (github.com/LMCache/LMCache, the package `lmcache`): its server, Redis, S3
and what else its remote connectors reach, by the URL that says which.

A block is one object of bytes: the head that planaria.worker.kv_store puts before a file, and its payload. Whoever can
write into the store can do no more harm than make blocks be computed: what has no seal that fits its key is not used.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as Late
from typing import Any

from planaria.worker.kv_store import HEAD, KEY, StoreError, head_of, is_whole

logger = logging.getLogger("planaria.worker")

PATIENCE = 5.0  # seconds that one block is waited for
PAUSE = 10.0  # seconds in which the store isn't asked, after it was silent
DAMAGED = 4096  # blocks that are known to be
LISTED = 10.0  # seconds between looks at what others have written, where it can be listed


class LMCacheStore:
    """url: LMCache's remote_url; identity: of what is in this rank's part; size: of its payload. Raises ImportError."""

    def __init__(
        self, url: str, identity: bytes, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import load_engine_config_with_overrides
        from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector import CreateConnector

        self.url, self.identity, self.size, self.clock = url, identity, size, clock
        self.whole = HEAD.size + size
        self._torch, self._key, self._create = torch, CacheEngineKey, CreateConnector
        self._object, self._about = TensorMemoryObj, MemoryObjMetadata
        self.name = f"planaria-{identity.hex()}"
        # what LMCache's connectors ask of the memory that objects are read into: this store is it
        self.config: Any = load_engine_config_with_overrides(overrides={"remote_url": url, "chunk_size": 1})
        self.metadata = LMCacheMetadata(
            self.name, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=torch.uint8,
            kv_shape=(1, 1, 1, 1, self.whole), chunk_size=1,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="planaria-kv-lmcache", daemon=True).start()
        self._remote: Any = None
        self._paused, self._why = 0.0, ""
        self._listed = -LISTED
        self._there: set[bytes] = set()
        self._damaged: set[bytes] = set()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    # -- as LMCache's connectors want it

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any = None, *more: Any, **other: Any) -> Any:
        """One object's memory. None for what is no block of this rank's, however large it says that it is."""
        shapes = shapes if isinstance(shapes, list) else [shapes]
        dtypes = dtypes if isinstance(dtypes, list) else [dtypes]
        if sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)) != self.whole:
            return None
        raw = self._torch.empty(self.whole, dtype=self._torch.uint8)
        about = self._about(shapes[0], dtypes[0], 0, self.whole, 1, 0, fmt, shapes=shapes, dtypes=dtypes)
        return self._object(raw, about, None)

    def get_full_chunk_size_bytes(self) -> int:
        return self.whole

    # -- planaria.worker.kv_tier.Store

    def news(self) -> tuple[set[bytes], set[bytes]]:
        """Keys that have come and gone since the last look, where the store can say which it has."""
        if self.clock() - self._listed < LISTED:
            return set(), set()
        self._listed = self.clock()
        try:
            found = self._do("read", lambda remote: remote.list())
        except StoreError:
            return set(), set()
        if found is None:  # it can't
            return set(), set()
        there = {key for key in map(self._key_of, found) if key is not None}
        came, went, self._there = there - self._there, self._there - there, there
        return came, went

    def keys(self) -> bytes:
        self._listed, self._there = -LISTED, set()
        return b"".join(sorted(self.news()[0]))

    def read(self, key: bytes, into: memoryview) -> None:
        """The payload of a block, into `size` bytes. Raises StoreError."""
        found = self._do("read", lambda remote: remote.get(self._named(key)))
        if found is None:
            raise StoreError("gone", "is not kept any more")
        payload = memoryview(found.byte_array).cast("B")
        if len(payload) == self.whole:
            into[:] = payload[HEAD.size :]
        if len(payload) != self.whole or not is_whole(bytes(payload[: HEAD.size]), self.identity, key, into):
            raise StoreError("damaged", "not what its checksum says")

    def write(self, key: bytes, payload: bytearray) -> list[bytes]:
        """Keep a block, unless it is there. Raises StoreError."""
        name = self._named(key)
        if key not in self._damaged and self._do("write", lambda remote: remote.exists(name)):
            return []
        made = self.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), self._remote_format())
        view = memoryview(made.byte_array).cast("B")
        view[: HEAD.size] = head_of(self.identity, key, payload)
        view[HEAD.size :] = payload
        self._do("write", lambda remote: remote.put(name, made))
        self._damaged.discard(key)
        return []

    def remove(self, key: bytes) -> None:
        """What is no block any more. Not all stores can: it is written over when it is to be kept again."""
        if len(self._damaged) < DAMAGED:
            self._damaged.add(key)

    # -- the rest

    def _named(self, key: bytes) -> Any:
        return self._key(self.name, 1, 0, int.from_bytes(key, "big"), self._torch.uint8)

    def _key_of(self, name: str) -> bytes | None:
        parts = name.split("@")
        try:
            return int(parts[3], 16).to_bytes(KEY, "big") if parts[0] == self.name else None
        except (IndexError, ValueError, OverflowError):
            return None

    def _remote_format(self) -> Any:
        return getattr(self._remote.getWrappedConnector(), "meta_fmt", None)

    def _do(self, what: str, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """In LMCache's words, with a deadline. Raises StoreError."""
        if self.clock() < self._paused:
            raise StoreError(what, self._why)
        waits = asyncio.run_coroutine_threadsafe(self._ask(ask), self._loop)
        try:
            return waits.result(PATIENCE)
        except Late:
            waits.cancel()
            self._why = f"LMCache's store says nothing for {PATIENCE:g} s"
        except Exception as e:  # of whichever client it is
            self._why = f"LMCache: {type(e).__name__}: {str(e)[:200]}"
        self._paused, self._remote = self.clock() + PAUSE, None
        raise StoreError(what, self._why)

    async def _ask(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        if self._remote is None:
            self._remote = self._create(self.url, self._loop, self, self.config, self.metadata)
        return await ask(self._remote)
