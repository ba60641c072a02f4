"""Mistakes with ranks that share the tokens of a step, or of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from planaria.kernels.share import BatchShare
from planaria.topology import Coords, Layout, kv_parts
from planaria.topology.kv_parts import KVPiece, KVRect
from planaria.topology.stripes import Context, Stripes
from tests.sim.context import Context as SimContext


@contextmanager
def compute_the_neighbours_share() -> Iterator[None]:
    """A chunk's part is computed by another rank than the one after whose part it is gathered."""

    def deal(self: BatchShare) -> int:
        bounds, at = self.bounds(), (self.rank + 1) % self.size
        return self.take(bounds[at], bounds[at + 1])

    with patch.object(BatchShare, "deal", deal):
        yield


@contextmanager
def gather_the_last_share_first() -> Iterator[None]:
    gathered = SimContext.gathered

    def backwards(self: SimContext, computed: list[int]) -> list[int]:
        with patch.object(self, "shares", self.shares[::-1]):
            return gathered(self, computed)

    with patch.object(SimContext, "gathered", backwards):
        yield


@contextmanager
def answer_with_the_last_share() -> Iterator[None]:
    """Tokens are awaited of the last prefill context rank, which doesn't draw."""

    def drawing(self: Layout) -> range:
        return range(self.rank(Coords(0, self.pp - 1, self.pcp - 1, 0)), self.size, self.size // self.dp)

    with patch.object(Layout, "drawing", property(drawing)):
        yield


@contextmanager
def forget_the_prefill_rank() -> Iterator[None]:
    """Ranks with other shares of a step have the same tokens of a sequence, and nobody has the rest."""

    def stripes(self: Context, dcp_rank: int) -> Stripes:
        return Stripes(self.size, dcp_rank, self.interleave)

    with patch.object(Context, "stripes", stripes):
        yield


@contextmanager
def leave_a_token_to_the_next_share() -> Iterator[None]:
    """The first share ends a token early, and the next begins where it is told to."""
    take = BatchShare.take

    def early(self: BatchShare, first: int, last: int) -> int:
        return take(self, first, max(first, last - (self.rank < self.size - 1)))

    with patch.object(BatchShare, "take", early):
        yield


@contextmanager
def take_the_first_tokens() -> Iterator[None]:
    """When KV is cut anew: those of the first context rank, whoever has the others."""
    pieces = kv_parts.pieces

    def first(wanted: KVRect, held: Sequence[KVRect]) -> list[KVPiece]:
        return [
            piece._replace(rank=next(rank for rank, part in enumerate(held) if part[:2] == held[piece.rank][:2]))
            for piece in pieces(wanted, held)
        ]

    with patch.object(kv_parts, "pieces", first):
        yield
