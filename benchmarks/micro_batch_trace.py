"""What micro-batches do and when, for tests and benchmarks: they wrap what a step calls, which keeps no account."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

COMPUTE = "compute"


class Span(NamedTuple):
    """What a micro-batch of a step did; seconds of the node's monotonic clock. An exchange includes its waits."""

    place: int
    what: str  # compute, dispatch or combine
    begin: float
    end: float


class Timed:
    """An All2All of one micro-batch, whose exchanges are noted."""

    def __init__(self, exchange: Any, place: int, spans: list[Span]) -> None:
        self.exchange, self.place, self.spans = exchange, place, spans

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exchange, name)

    def dispatch(self, *tensors: Any) -> None:
        self._timed("dispatch", *tensors)

    def combine(self, *tensors: Any) -> None:
        self._timed("combine", *tensors)

    def _timed(self, what: str, *tensors: Any) -> None:
        since = time.monotonic()
        getattr(self.exchange, what)(*tensors)
        self.spans.append(Span(self.place, what, since, time.monotonic()))


def traced(micro_batches: Any) -> list[Span]:
    """Of a worker's MicroBatches, from now on; may be cleared between two steps."""
    spans: list[Span] = []
    for turns in (micro_batches.once, micro_batches.turns):
        _watch(turns, spans)
    for part in (micro_batches.whole, *micro_batches.parts):
        part.exchange.exchange = Timed(part.exchange.exchange, part.place, spans)
    return spans


def _watch(turns: Any, spans: list[Span]) -> None:
    take, hand_on, since = turns.take, turns.hand_on, [0.0]

    def taken(place: int) -> None:
        take(place)
        since[0] = time.monotonic()

    def handed_on(place: int) -> None:
        spans.append(Span(place, COMPUTE, since[0], time.monotonic()))
        hand_on(place)

    turns.take, turns.hand_on = taken, handed_on
