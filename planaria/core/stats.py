"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import msgspec


class ExpertStats(msgspec.Struct, frozen=True, array_like=True):
    """Of balancing experts' load. Counters count from the engine's start."""

    balancedness: float = 1.0  # of the last steps, see planaria.core.eplb.policy
    rearrangements: int = 0
    bytes_moved: int = 0  # between ranks
    rearranged_at: float = 0.0  # when the last one had ended, in seconds since 1970; 0: none has


class StoreStats(msgspec.Struct, frozen=True, array_like=True):
    """Of one store of KV blocks (memory, disk). Counters count from the engine's start."""

    stored: int = 0  # blocks of which each rank has its part
    saved: int = 0  # blocks written, by all ranks
    saved_bytes: int = 0
    loaded_bytes: int = 0
    errors: dict[str, int] = {}  # by kind
    why: str = ""  # nothing is written now; empty: all is well


class TransferStats(msgspec.Struct, frozen=True, array_like=True):
    """Of KV blocks between engines of a server. Counters count from the engine's start."""

    transfers: int = 0  # that were begun here
    blocks: int = 0  # that came, and count
    received_bytes: int = 0  # by all ranks
    seconds: float = 0.0  # until all ranks had theirs
    failed: dict[str, int] = {}  # transfers of which not all came, by reason
    lent: int = 0  # histories
    held: int = 0  # blocks that are lent now
    expired: int = 0  # leases that nobody released
    taken_back: int = 0  # because running requests needed the memory

    def added(self, other: TransferStats) -> TransferStats:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        reasons = {**self.failed, **other.failed}
        failed = {why: self.failed.get(why, 0) + other.failed.get(why, 0) for why in reasons}
        return TransferStats(**sums, failed=failed, held=other.held)


_SUMMED = ("transfers", "blocks", "received_bytes", "seconds", "lent", "expired", "taken_back")


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """Of KV blocks that are kept outside of the cache. Counters count from the engine's start."""

    queries: int = 0  # tokens of prompts that were not in the cache, looked up
    hits: int = 0  # of them brought back
    given_up: int = 0  # loads that took too long, so that their tokens were computed
    missing: int = 0  # loads of which not all came: ranks lacked them, or had them damaged
    stores: dict[str, StoreStats] = {}  # by name


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """Of tokens that workers guessed and steps checked. accepted: how many were right, by their place behind a row's
    last token. Counters count from the engine's start."""

    checks: int = 0  # of a row's drafts in a step
    drafted: int = 0
    accepted: tuple[int, ...] = ()

    def checked(self, drafted: Mapping[int, int], more: Mapping[int, Sequence[int]]) -> DraftStats:
        """And those of a step, by row. more: the tokens that rows drew after their first."""
        accepted = [0] * max(drafted.values())
        for row in drafted:
            for place in range(len(more.get(row, ()))):
                accepted[place] += 1
        return self.added(DraftStats(len(drafted), sum(drafted.values()), tuple(accepted)))

    def added(self, other: DraftStats) -> DraftStats:
        both = zip_longest(self.accepted, other.accepted, fillvalue=0)
        return DraftStats(
            self.checks + other.checks, self.drafted + other.drafted, tuple(one + two for one, two in both)
        )


class EngineStats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """A snapshot, sent with every step's deltas. Counters count from the engine's start."""

    step: int = 0
    epoch: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    kv_tokens: int = 0  # that KV has room for
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    preemptions: int = 0
    prompt_tokens: int = 0  # computed: not those that were found, nor again after a token had come
    generation_tokens: int = 0
    replayed_tokens: int = 0  # computed again after a loss
    experts: ExpertStats | None = None  # None: they are not balanced
    tier: TierStats | None = None  # None: there is none
    drafts: DraftStats | None = None  # None: no row drafts
    transfers: TransferStats | None = None  # None: the server has engines of one kind
    token_seconds: float = 0.0  # that one of a prompt took in the last steps; 0: nobody asks, or none has been measured
