"""Blocks on their way from one engine to another: who holds them meanwhile (`Lender`, of the engine that has them), and
when they count where they go (`Fetch`, of the one that wants them). Pure; bytes are moved by ranks.

Rules it keeps
- What is lent has a reference of its lease's until whoever it is for has gone on, or has ended, or the deadline has
  come, or running rows need the memory. Nobody has to be asked, so nothing is held for one that died, stopped or lies.
- A lease is of one KV: its number says of which engine's process and since which epoch. What is said of another is not
  heard.
- So a lease is no promise: a block may be another's while it is copied. Ranks look at its key in the owner's index
  before and after, and a copy counts only if it was the same one both times (planaria.worker.kv_shared).
- A block counts as there only when every rank of the lane has confirmed it: a set of ranks, so that one which says it
  twice, or late, stands for no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from planaria.core.kv_cache import BlockKey, BlockPool, chain
from planaria.core.sequence import SequenceState
from planaria.core.stats import TransferStats
from planaria.protocol import KVLoad
from planaria.types import KVLease, KVOffer

if TYPE_CHECKING:
    from planaria.core.scheduler import Lane

LEASE = 30.0  # seconds that blocks are held for who comes for them


class Fetch:
    """Blocks of a request on their way. hits: of memory, before them; missing: ranks that haven't answered (bits);
    usable: blocks from the first on that all who have answered have; lease: of the engine they come from, with those
    blocks of its own, or as they are offered, None: they come from a store; asked: keys of what is offered, where they
    aren't `keys`."""

    __slots__ = (
        "asked", "began", "blocks", "entry", "failed", "hits", "keys", "lease", "missing", "number", "seconds", "until",
        "usable",
    )  # fmt: skip

    def __init__(
        self, number: int, entry: SequenceState, hits: list[int], keys: list[BlockKey], blocks: list[int], ranks: int,
        lease: KVLease | KVOffer | None = None, asked: list[BlockKey] | None = None,
    ) -> None:  # fmt: skip
        self.number, self.entry, self.hits, self.keys, self.blocks = number, entry, hits, keys, blocks
        self.asked = keys if asked is None else asked
        self.missing, self.usable, self.seconds, self.lease = ranks, len(blocks), 0.0, lease
        self.failed = ""  # why not all are usable
        self.began = self.until = 0.0

    def confirm(self, rank: int, count: int, seconds: float, failed: str = "") -> bool:
        """A rank has so many, from the first on. Have all said so? Who has said it before is not heard again."""
        if self.missing >> rank & 1:
            self.missing &= ~(1 << rank)
            self.usable, self.seconds = min(self.usable, count), max(self.seconds, seconds)
            self.failed = self.failed or failed
        return not self.missing

    @property
    def load(self) -> KVLoad:
        wait = (self.until - self.began) / 2  # an answer that comes later would be heard by nobody
        return KVLoad(self.number, tuple(self.asked), tuple(self.blocks), self.lease, len(self.hits), wait)


def lent_part(
    lane: Lane, entry: SequenceState, lease: KVLease | KVOffer, first: int, usable: int
) -> tuple[int, KVLease | KVOffer, list[BlockKey] | None] | None:
    """Of a history's blocks `first` to `usable`: how many of them there are, the lease with the blocks of its own that
    hold them, and the keys of those, where they have another number of tokens. None: there are none."""
    size = its = lane.block_size
    if isinstance(lease, KVOffer) and lease.layout is not None:
        its = lease.layout.block_size
    count = min(usable, min(len(lease.blocks), entry.request.num_tokens // its) * its // size) - first
    if count <= 0:
        return None
    part = slice(first * size // its, -(-(first + count) * size // its))
    found = msgspec.structs.replace(lease, blocks=lease.blocks[part])
    if its == size:
        return count, found, None
    request = entry.request
    root = lane.scope.root(request.salt, request.adapter)
    return count, found, chain(request.span(0, part.stop * its), its, [], root)[part]


class Lender:
    """Of a lane with the KV `number`, in this memory of the node."""

    def __init__(self, lane: Lane, number: int, memory: tuple[int, int, int]) -> None:
        self.lane, self.number, self.memory = lane, number, memory
        self.leases: dict[int, tuple[list[int], float]] = {}  # blocks and deadline, the oldest first
        self.ids = self.expired = self.taken_back = 0

    def lend(self, entry: SequenceState) -> KVLease | None:
        """Hold the full blocks of a history whose request leaves. None: there are none."""
        blocks = self.lane.pool.hits(entry.keys[: entry.remembered])
        if not blocks:
            return None
        self.lane.pool.share(blocks)
        self.ids += 1
        self.leases[self.ids] = blocks, self.lane.now + LEASE
        return KVLease(self.ids, self.number, tuple(blocks), self.memory)

    def release(self, number: int, id: int) -> None:
        """Whoever it was for needs it no more. Of another KV, or over already: nothing."""
        if number == self.number and id in self.leases:
            self.lane.pool.release(self.leases.pop(id)[0])

    def look(self, now: float) -> bool:
        """End those whose time is over. Were there any?"""
        over = [id for id, (_, until) in self.leases.items() if until <= now]
        for id in over:
            self.release(self.number, id)
        self.expired += len(over)
        return bool(over)

    def make_room(self, *, alone: bool = False) -> bool:
        """Running rows need blocks: the oldest lease ends, and who comes for it computes. alone: one that enters does,
        so only if no row runs whose end makes room. False: there is none."""
        lane = self.lane
        runs = lane.deferred or lane.prefilling or any(turn.num_rows for turn in lane.turns)
        if not self.leases or (alone and runs):
            return False
        self.taken_back += 1
        self.release(self.number, next(iter(self.leases)))
        return True

    @property
    def held(self) -> int:
        """Blocks."""
        return sum(len(blocks) for blocks, _ in self.leases.values())


class Offers:
    """Blocks of histories that other servers will fetch. Ranks take copies, before the step in whose plan that stands
    computes, and hold those: here nothing is held, and what has fallen out of memory by then isn't offered."""

    def __init__(self) -> None:
        self.queue: deque[tuple[str, BlockKey]] = deque()
        self.at: tuple[str, ...] = ()  # where ranks are, in a server whose engines have no memory in common

    def lend(self, entry: SequenceState) -> KVOffer | None:
        """The full blocks of a history whose request leaves for another engine. None: there are none."""
        if not self.at or not entry.remembered:
            return None
        host, _, port = self.at[0].rpartition(":")
        return KVOffer(entry.request.id, tuple(range(entry.remembered)), host, int(port), at=self.at)

    def add(self, entry: SequenceState) -> None:
        """What of its history is there, and not yet offered."""
        keys = entry.keys[entry.offered : entry.remembered]
        self.queue.extend((entry.request.id, key) for key in keys)
        entry.offered = max(entry.offered, entry.remembered)

    def take(self, pool: BlockPool, most: int) -> tuple[tuple[str, BlockKey, int], ...]:
        """The next ones."""
        found: list[tuple[str, BlockKey, int]] = []
        while self.queue and len(found) < most:
            lease, key = self.queue.popleft()
            if (block := pool.block_of.get(key)) is not None:
                found.append((lease, key, block))
        return tuple(found)


def lend_from(lanes: Iterable[Lane], number: int, memory: tuple[int, int, int]) -> None:
    """Other engines can read this one's KV, which is in `memory`. What was lent of the same KV stays so."""
    for lane in lanes:
        if lane.lender is None or lane.lender.number != number:
            lane.lender = Lender(lane, number, memory)


def offer_from(lanes: Iterable[Lane], at: Sequence[str]) -> None:
    """Engines on other nodes fetch what this one's ranks, which are there, have copied for them."""
    for lane in lanes:
        if lane.connector is not None:
            lane.connector.offers.at = tuple(at)


def leave_with(lane: Lane, entry: SequenceState) -> KVLease | KVOffer | None:
    """What a request that goes on elsewhere takes along."""
    if lane.lender is not None:
        return lane.lender.lend(entry)
    return lane.connector.offers.lend(entry) if lane.connector is not None else None


def lenders(lanes: Iterable[Lane]) -> list[Lender]:
    return [lane.lender for lane in lanes if lane.lender is not None]


def release(lanes: Iterable[Lane], number: int, id: int) -> None:
    """A lease is over."""
    for lender in lenders(lanes):
        lender.release(number, id)


def expire(lanes: Iterable[Lane], now: float) -> bool:
    """End leases whose time is over. Were there any?"""
    over = False
    for lane in lanes:
        if lane.lender is not None:
            over |= lane.lender.look(now)
    return over


def lent(lanes: Iterable[Lane]) -> TransferStats:
    counts = ((each.ids, each.held, each.expired, each.taken_back) for each in lenders(lanes))
    ids, held, expired, taken_back = (sum(column) for column in zip((0, 0, 0, 0), *counts, strict=True))
    return TransferStats(lent=ids, held=held, expired=expired, taken_back=taken_back)
