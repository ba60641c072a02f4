"""How many ranks there are along each axis, and which rank has which coordinates.

Rank order: tensor (`tp`) fastest, then prefill context (`pcp`), then pipeline stage (`pp`), then lane (`dp`). This is
the one place that knows it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import msgspec

AXES = ("dp", "pp", "pcp", "tp")  # slowest first


class Coords(NamedTuple):
    """Where a rank is along each axis; 0 is the first."""

    dp: int
    pp: int
    pcp: int
    tp: int


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Degrees, each at least 1 (else ValueError). `size` is their product: ranks are 0 .. size-1."""

    pp: int = 1
    dp: int = 1
    pcp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} is {getattr(self, axis)}: each degree is at least 1")

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.pcp * self.tp

    @property
    def expert_ranks(self) -> int:
        """Those that share a stage's experts."""
        return self.dp * self.pcp * self.tp

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Degrees in the order of AXES."""
        return self.dp, self.pp, self.pcp, self.tp

    def coords(self, rank: int) -> Coords:
        """Raises ValueError for a rank that isn't in the layout."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not among the {self.size} of {self}")
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        dp, pp = divmod(rest, self.pp)
        return Coords(dp, pp, pcp, tp)

    def rank(self, coords: Coords) -> int:
        """The inverse of `coords`."""
        return ((coords.dp * self.pp + coords.pp) * self.pcp + coords.pcp) * self.tp + coords.tp

    @property
    def drawing(self) -> range:
        """The rank of each lane that draws its tokens: the first tensor rank of the last stage."""
        return _drawing(self)

    def holds(self, coords: Coords) -> bool:
        """Is there a rank with these coordinates?"""
        return all(0 <= at < size for at, size in zip(coords, self.shape, strict=True))

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` along these axes only, itself among them, ascending.

        group(r, "tp") is its tensor group, group(r, "pp") its pipeline by stage, group(r, "dp", "pcp", "tp") those that
        share its stage's experts.
        """
        self._known(axes)
        at = self.coords(rank)
        members = [0]
        for axis, size, here in zip(AXES, self.shape, at, strict=True):
            steps = range(size) if axis in axes else (here,)
            members = [member * size + step for member in members for step in steps]
        return tuple(members)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along these axes, by first rank. Every rank is in exactly one."""
        self._known(axes)
        firsts = [0]
        for axis, size in zip(AXES, self.shape, strict=True):
            steps = range(1) if axis in axes else range(size)
            firsts = [first * size + step for first in firsts for step in steps]
        return tuple(self.group(first, *axes) for first in firsts)

    def __str__(self) -> str:
        """`tp=2 pp=2`: degrees larger than 1, or `tp=1`."""
        large = [f"{axis}={getattr(self, axis)}" for axis in reversed(AXES) if getattr(self, axis) > 1]
        return " ".join(large) or "tp=1"

    @staticmethod
    def _known(axes: tuple[str, ...]) -> None:
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"no axis {axis!r}; there are {', '.join(AXES)}")


@cache  # asked for with every step
def _drawing(layout: Layout) -> range:
    return range(layout.rank(Coords(0, layout.pp - 1, 0, 0)), layout.size, layout.size // layout.dp)
