"""What everything simulated stands in: one virtual clock, one list of what will happen, one source of chance, and the
history of what did. Nothing here knows what is simulated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Violation(Exception):
    """A rule that must hold did not. `rule` is its name."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class World:
    """`now` is in seconds. `away` is how much of it the engine could not act in: it slept, or waited for a launch."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = self.away = self.slept = 0.0
        self.inside = False  # `pass_by`
        self.violation: Violation | None = None  # the first one, should anybody catch it
        self.history: list[tuple[float, str, tuple[Any, ...]]] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def awake(self) -> float:
        """Seconds that the engine could act in."""
        return self.now - self.away

    @property
    def pending(self) -> bool:
        """Will anything happen by itself?"""
        return bool(self._events)

    def note(self, what: str, *values: Any) -> None:
        self.history.append((self.now, what, values))

    def lines(self) -> list[str]:
        return [f"{when:10.3f}  {what.format(*values)}" for when, what, values in self.history]

    def at(self, delay: float, act: Callable[..., None], *values: Any) -> None:
        """`act(*values)` in so many seconds; what is due at the same time happens in the order it was asked for."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, act, values))

    def step(self, until: float) -> bool:
        """The next event that is due by then; False, and `now` is then, when there is none."""
        events = self._events
        if not events or events[0][0] > until:
            self.now = max(self.now, until)
            return False
        when, _, act, values = heapq.heappop(events)
        self.now = max(self.now, when)
        act(*values)
        return True

    def pass_by(self, seconds: float) -> None:
        """The engine can't act for so long; everything else goes on."""
        until = self.now + seconds
        self.inside = True
        while self.step(until):
            pass
        self.inside = False
        self.away += seconds

    def sleep(self, seconds: float) -> None:
        """The whole machine sleeps: the clock jumps, and nothing happened meanwhile."""
        self.now += seconds
        self.away += seconds
        self.slept += seconds
        self._events = [(when + seconds, count, act, values) for when, count, act, values in self._events]

    def require(self, holds: bool, rule: str, what: str) -> None:
        if not holds:
            self.note("VIOLATION {}: {}", rule, what)
            self.violation = self.violation or Violation(rule, what)
            raise self.violation
