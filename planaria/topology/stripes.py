"""Which tokens of a sequence a rank has keys and values of, where context ranks share them.

Rule: token i is on context rank (i // interleave) mod size. A rank has its tokens one behind the other, so its n-th is
where the n-th of a whole sequence would be; `position` and `local` go from one count to the other. Both take numbers
and arrays.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Stripes(NamedTuple):
    """Of context rank `rank` of `size`, which have `interleave` tokens in turn."""

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def held(self, length: int) -> int:
        """How many of the first `length` tokens are here."""
        cycles, rest = divmod(length, self.size * self.interleave)
        return cycles * self.interleave + max(0, min(rest - self.rank * self.interleave, self.interleave))

    def here(self, position: Any) -> Any:
        return position // self.interleave % self.size == self.rank

    def local(self, position: Any) -> Any:
        """The number of a token that is here among those that are."""
        return position // (self.size * self.interleave) * self.interleave + position % self.interleave

    def position(self, local: Any) -> Any:
        """The inverse of `local`."""
        turn = local // self.interleave * self.size + self.rank
        return turn * self.interleave + local % self.interleave

    def meets(self, other: Stripes) -> bool:
        """Is any token both here and there?"""
        cycle = math.gcd(self.size * self.interleave, other.size * other.interleave)
        mine, its = ({(each.rank * each.interleave + i) % cycle for i in range(each.interleave)}
                     for each in (self, other))  # fmt: skip
        return not mine.isdisjoint(its)


class Context(NamedTuple):
    """Which ranks share a sequence's tokens: `dcp` neighbouring tensor ranks of each of `pcp` that compute shares of a
    step. pcp_rank: which of these is meant."""

    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    pcp_rank: int = 0

    @property
    def size(self) -> int:
        return self.pcp * self.dcp

    def stripes(self, dcp_rank: int) -> Stripes:
        return Stripes(self.size, self.pcp_rank * self.dcp + dcp_rank, self.interleave)
