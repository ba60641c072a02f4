"""Mistakes with KV that one engine lends another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from planaria.core.kv_cache import BlockPool
from planaria.core.sequence import SequenceState
from planaria.core.transfer import Fetch, Lender
from planaria.hosts.kv_keys import SET, BlockKeys
from planaria.types import KVLease
from planaria.worker.kv_shared import OtherKV


@contextmanager
def count_answers() -> Iterator[None]:
    """As many answers as there are ranks, whoever gives them."""

    def confirm(self: Fetch, rank: int, count: int, seconds: float, failed: str = "") -> bool:
        self.missing &= self.missing - 1
        self.usable = min(self.usable, count)
        return not self.missing

    with patch.object(Fetch, "confirm", confirm):
        yield


@contextmanager
def never_release() -> Iterator[None]:
    keeps = patch.object(Lender, "release", lambda self, number, id: None)
    with keeps, patch.object(Lender, "look", lambda *now: False):
        yield


@contextmanager
def release_twice() -> Iterator[None]:
    """What is over is released once more."""

    def release(self: Lender, number: int, id: int) -> None:
        if number == self.number and id in self.leases:
            self.lane.pool.release(self.leases[id][0])

    with patch.object(Lender, "release", release), patch.object(Lender, "look", lambda *now: False):
        yield


@contextmanager
def hold_nothing() -> Iterator[None]:
    """A lease without references, whose end gives some back."""
    lend = Lender.lend

    def blind(self: Lender, entry: SequenceState) -> KVLease | None:
        with patch.object(BlockPool, "share", lambda *blocks: None):
            return lend(self, entry)

    with patch.object(Lender, "lend", blind):
        yield


@contextmanager
def believe_what_was_lent() -> Iterator[None]:
    """Look at no key, neither before nor after; and lend for no time, so that memory goes to others meanwhile."""

    def marks(self: BlockKeys, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        return [SET] * len(blocks)

    with (
        patch.object(BlockKeys, "marks", marks), patch.object(OtherKV, "there", True), hold_for_no_time(),
    ):  # fmt: skip
        yield


@contextmanager
def hold_for_no_time() -> Iterator[None]:
    """By itself it is no mistake: nobody relies on a lease."""
    lend = Lender.lend

    def brief(self: Lender, entry: Any) -> KVLease | None:
        lease = lend(self, entry)
        if lease is not None:
            self.release(lease.number, lease.id)
        return lease

    with patch.object(Lender, "lend", brief):
        yield


@contextmanager
def take_the_rest_for_granted() -> Iterator[None]:
    """A transfer that ended early counts as whole."""
    confirm = Fetch.confirm

    def whole(self: Fetch, rank: int, count: int, seconds: float, failed: str = "") -> bool:
        return confirm(self, rank, len(self.blocks), seconds)

    with patch.object(Fetch, "confirm", whole), hold_for_no_time():
        yield


@contextmanager
def take_one_rank_for_all() -> Iterator[None]:
    """Blocks count when the first rank has its part of them: the others' are not confirmed."""
    confirm = Fetch.confirm

    def first(self: Fetch, rank: int, count: int, seconds: float, failed: str = "") -> bool:
        self.missing = 1 << rank
        return confirm(self, rank, count, seconds, failed)

    with patch.object(Fetch, "confirm", first):
        yield


@contextmanager
def forget_the_epoch() -> Iterator[None]:
    """A lease of a KV that has ended counts: its number is not looked at, and nor are its keys."""

    def marks(self: BlockKeys, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        return [SET] * len(blocks)

    with patch.object(OtherKV, "there", True), patch.object(BlockKeys, "marks", marks):
        yield
