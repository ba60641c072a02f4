"""Mistakes with KV blocks on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from planaria.core.connector import LaneConnector
from planaria.core.kv_cache import KeyScope
from planaria.core.step import StepBuilder
from planaria.core.transfer import Fetch
from planaria.protocol import KVWork
from planaria.topology import Layout
from planaria.worker import kv, kv_store

ROOT, IDENTITY = KeyScope.root, kv.identity_of


@contextmanager
def read_no_checksum() -> Iterator[None]:
    with patch.object(kv_store, "is_whole", lambda *args: True):
        yield


@contextmanager
def leave_the_version_out() -> Iterator[None]:
    """Of keys, and of where files are."""

    def root(self: KeyScope, salt: str = "", adapter: str = "") -> bytes:
        return ROOT(KeyScope("", self.dtype), salt, adapter)

    def identity(config: Any, layout: Layout, rank: int, kernels: str, weights: str) -> bytes:
        return IDENTITY(config, layout, rank, kernels, "")

    with patch.object(KeyScope, "root", root), patch.object(kv, "identity_of", identity):
        yield


@contextmanager
def leave_the_part_out() -> Iterator[None]:
    """All ranks have the same files."""

    def identity(config: Any, layout: Layout, rank: int, kernels: str, weights: str) -> bytes:
        return IDENTITY(config, Layout(), 0, kernels, weights)

    with patch.object(kv, "identity_of", identity):
        yield


def _identity_without(**fields: int) -> Any:
    """Of all but these options of context ranks."""

    def identity(config: Any, layout: Layout, rank: int, kernels: str, weights: str) -> bytes:
        parallel = msgspec.structs.replace(config.parallel, **fields)
        return IDENTITY(msgspec.structs.replace(config, parallel=parallel), layout, rank, kernels, weights)

    return patch.object(kv, "identity_of", identity)


@contextmanager
def leave_the_degree_out() -> Iterator[None]:
    """Ranks have what others left that shared tokens among more or fewer."""
    with _identity_without(decode_context_parallel_size=1):
        yield


@contextmanager
def forget_the_interleave() -> Iterator[None]:
    """Ranks have what others left that had other tokens in turn."""
    with _identity_without(cp_kv_cache_interleave_size=1):
        yield


@contextmanager
def believe_the_first_rank() -> Iterator[None]:
    """A block is there when one rank has it."""
    confirm = Fetch.confirm

    def first(self: Fetch, rank: int, *said: Any) -> bool:
        self.missing = 1 << rank
        return confirm(self, rank, *said)

    with patch.object(Fetch, "confirm", first):
        yield


@contextmanager
def save_before_the_commit() -> Iterator[None]:
    """A block has its key when its row enters."""
    enter = StepBuilder._enter

    def early(self: StepBuilder, entry: Any, *args: Any) -> None:
        enter(self, entry, *args)
        full = len(entry.request.prompt + entry.request.output) // self.lane.block_size
        for key, block in zip(entry.keys[:full], entry.blocks, strict=False):
            self.lane.pool.remember(block, key)
        if self.lane.connector is not None:
            self.lane.connector.want(entry.keys[:full], entry.blocks)

    with patch.object(StepBuilder, "_enter", early):
        yield


@contextmanager
def save_what_is_there_now() -> Iterator[None]:
    """A block that was to be saved is, whatever it holds by then."""
    work = LaneConnector.work

    def blind(self: LaneConnector, tokens: int, *, computes: bool) -> KVWork | None:
        held = dict(self.lane.pool.key_of)
        self.lane.pool.key_of.update((block, key) for key, block in self.queue.items())
        try:
            return work(self, tokens, computes=computes)
        finally:
            self.lane.pool.key_of = held

    with patch.object(LaneConnector, "work", blind):
        yield


@contextmanager
def tell_nobody_what_is_dropped() -> Iterator[None]:
    drop = LaneConnector.drop

    def silent(self: LaneConnector, fetch: Fetch, *why: str) -> None:
        drop(self, fetch, *why)
        self.dropped.clear()

    with patch.object(LaneConnector, "drop", silent):
        yield
