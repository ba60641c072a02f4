"""Ways to exchange tokens that need nothing but messages: any group has them.

Rule: two ranks that have messages for each other take turns in the order of their numbers, so that no two wait for
each other to receive, also where a message is gone only when it was received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from planaria.mesh.comm import Array, Comm


class Lanes:
    """Which rows are whose. `width` tensor ranks of each lane follow one another in the group; rows of all lanes lie
    one lane after the other. dealt: each tensor rank has a part of its lane's rows."""

    def __init__(self, group: Comm, width: int, *, dealt: bool = False) -> None:
        self.group, self.width, self.dealt = group, width, dealt and width > 1
        self.lanes = group.size // width
        self.lane = group.rank // width
        self.starts = [0] * (self.lanes + 1)

    def count(self, counts: Sequence[int]) -> int:
        """Tokens of each lane in this step; the sum."""
        self.starts = [0, *accumulate(counts)]
        return self.starts[-1]

    def rows(self, lane: int) -> range:
        return range(self.starts[lane], self.starts[lane + 1])

    def part(self, rank: int) -> range:
        """Rows that a rank answers for: its lane's, or its part of them."""
        lane, place = divmod(rank, self.width)
        rows = self.rows(lane)
        if not self.dealt:
            return rows
        first, last = (len(rows) * at // self.width for at in (place, place + 1))
        return range(rows.start + first, rows.start + last)

    def within(self, rank: int) -> range:
        """`part` of a rank of this lane, counted from the lane's first row."""
        part = self.part(rank)
        return range(part.start - self.own.start, part.stop - self.own.start)

    @property
    def own(self) -> range:
        return self.rows(self.lane)


class ByMessages:
    """What ways that know the lanes' rows have in common. limits: see `make`."""

    def __init__(self, group: Comm, width: int, limits: tuple[int, int] = (0, 0), *, dealt: bool = False) -> None:
        self.group, self.at = group, Lanes(group, width, dealt=dealt)
        self.lanes = self.at.lanes

    def begin(self, num_tokens: int) -> int:
        return self.count(self.tell(num_tokens))

    def tell(self, number: int) -> list[int]:
        return tell(self.group, number)[:: self.at.width]

    def count(self, counts: Sequence[int]) -> int:
        return self.at.count(counts)


class Naive(ByMessages):
    """All ranks are told the tokens of each lane, by its first tensor rank or a part by each of them; what they made of
    them is added up everywhere."""

    def dispatch(self, parts: Sequence[Array], into: Sequence[Array]) -> None:
        at = self.at
        tellers = range(0, self.group.size, 1 if at.dealt else at.width)
        for part, whole in zip(parts, into, strict=True):
            cut(whole, at.own)[...] = part
            for rank in tellers:
                if rows := at.part(rank):
                    self.group.broadcast(cut(whole, rows), rank)

    def combine(self, y: Array, out: Array) -> None:
        if len(y):
            self.group.all_reduce(y)
            out[...] = cut(y, self.at.own)


class AllGather(ByMessages):
    """Every rank gets the other lanes' tokens, and gives each lane its part of that lane's sum."""

    def dispatch(self, parts: Sequence[Array], into: Sequence[Array]) -> None:
        at, rank = self.at, self.group.rank
        for part, whole in zip(parts, into, strict=True):
            cut(whole, at.own)[...] = part

            def give(other: int, whole: Array = whole) -> None:
                if self._tells(rank, other):
                    self._send(cut(whole, at.part(rank)), other)

            def take(other: int, whole: Array = whole) -> None:
                if self._tells(other, rank):
                    self._receive(cut(whole, at.part(other)), other)

            in_turns(self.group, give, take)

    def _tells(self, rank: int, other: int) -> bool:
        """Does this rank bring its part of its lane to that one? Where tensor ranks have all rows, to its like only."""
        width = self.at.width
        return rank // width != other // width and (self.at.dealt or rank % width == other % width)

    def combine(self, y: Array, out: Array) -> None:
        at, group = self.at, self.group
        mine = at.part(group.rank)
        parts = room(y, (group.size, len(mine), y.shape[1]))
        parts[group.rank] = cut(y, mine)
        in_turns(
            group, lambda other: self._send(cut(y, at.part(other)), other),
            lambda other: self._receive(parts[other], other),
        )  # fmt: skip
        add_up(list(parts), cut(out, at.within(group.rank)))
        if at.dealt:
            share(group, at.width, lambda rank: cut(out, at.within(rank)))

    def _send(self, rows: Array, to: int) -> None:
        if len(rows):
            self.group.send(rows, to)

    def _receive(self, rows: Array, source: int) -> None:
        if len(rows):
            self.group.receive(rows, source)


def tell(group: Comm, value: int) -> list[int]:
    """A number of each rank, known to all."""
    values = np.zeros(group.size, np.int64)
    values[group.rank] = value
    own = values[group.rank : group.rank + 1].copy()
    in_turns(
        group, lambda other: group.send(own, other),
        lambda other: group.receive(values[other : other + 1], other),
    )  # fmt: skip
    numbers: list[int] = values.tolist()
    return numbers


def in_turns(group: Comm, give: Callable[[int], None], take: Callable[[int], None]) -> None:
    """With every other rank of the group: give, and take what it gives."""
    for other in range(group.size):
        if group.rank < other:
            give(other)
            take(other)
        elif group.rank > other:
            take(other)
            give(other)


def share(group: Comm, width: int, rows: Callable[[int], Array]) -> None:
    """Each tensor rank of a lane has its rows of something: all of the lane get all."""
    lane = group.rank // width

    def give(other: int) -> None:
        if other // width == lane and len(rows(group.rank)):
            group.send(rows(group.rank), other)

    def take(other: int) -> None:
        if other // width == lane and len(rows(other)):
            group.receive(rows(other), other)

    in_turns(group, give, take)


def add_up(parts: Sequence[Array], out: Array) -> None:
    """The sum of the parts in their order."""
    out[...] = parts[0]
    for part in parts[1:]:
        out += part


def cut(x: Array, rows: range) -> Array:
    return x[rows.start : rows.stop]


def room(like: Array, shape: tuple[int, ...]) -> Array:
    """For numbers of the same kind, where those are."""
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)
