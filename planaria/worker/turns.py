"""Micro-batches of a step take turns at computing, in threads of their own; while one exchanges, the next one computes.

Rule: a turn is all that lies between two exchanges, and turns go around: the first micro-batch's first, the second's
first, ..., the first's second, and so on. So on every rank of a lane, which has the same number of them, computing is
in the same order, and what tensor ranks add up meets. An earlier micro-batch has stored its keys and values of a layer
before a later one attends over them, so a sequence may be cut between the two.

Who waits for a turn waits for others that compute or exchange; an error in any of them ends all waits (`fail`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from planaria.mesh.all2all import All2All
from planaria.mesh.comm import Array

if TYPE_CHECKING:
    from planaria.worker.streams import Streams


class TurnsOver(Exception):
    """Another micro-batch has failed: what is left of this one is of no use."""


class Rotation:
    """Of `count` micro-batches. streams: of the device they compute on."""

    def __init__(self, count: int, streams: Streams | None = None) -> None:
        self.count, self.streams = count, streams
        self.error: BaseException | None = None  # the first that ended a micro-batch
        self._changed = threading.Condition()
        self._next = 0

    def begin(self) -> None:
        """Another step. Nobody is in a turn."""
        self._next, self.error = 0, None
        if self.streams is not None:
            self.streams.handed_on()

    def take(self, place: int) -> None:
        """Wait for the turn of the micro-batch at this place. Raises TurnsOver."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == place or self.error is not None)
            if self.error is not None:
                raise TurnsOver
        if self.streams is not None:
            self.streams.taken()

    def hand_on(self, place: int) -> None:
        """The turn is over."""
        if self.streams is not None:
            self.streams.handed_on()
        with self._changed:
            self._next = (place + 1) % self.count
            self._changed.notify_all()

    def fail(self, error: BaseException) -> bool:
        """End the waits of all; is this the first error?"""
        with self._changed:
            first = self.error is None
            if first:
                self.error = error
            self._changed.notify_all()
        return first


class InTurns:
    """A micro-batch's way to exchange tokens: outside of its turn. counts: tokens of each lane's part in this step."""

    def __init__(self, exchange: All2All, turns: Rotation, place: int) -> None:
        self.exchange, self.turns, self.place = exchange, turns, place
        self.lanes = exchange.lanes
        self.counts: Sequence[int] = ()

    def begin(self, num_tokens: int) -> int:
        """The lanes have told each other already."""
        return self.count(self.counts)

    def tell(self, number: int) -> list[int]:
        return self.exchange.tell(number)

    def count(self, counts: Sequence[int]) -> int:
        return self.exchange.count(counts)

    def dispatch(self, parts: Sequence[Array], into: Sequence[Array]) -> None:
        with self._outside():
            self.exchange.dispatch(parts, into)

    def combine(self, y: Array, out: Array) -> None:
        with self._outside():
            self.exchange.combine(y, out)

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        self.turns.hand_on(self.place)
        yield
        self.turns.take(self.place)
