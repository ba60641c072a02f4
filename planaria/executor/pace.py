"""How long a step may take, learned from how long steps took. Pure.

A step of n tokens is expected to cost n times the dearest token of late; it is overdue after MARGIN times that, never
before FLOOR seconds, always at the ceiling. Waiting is added up over looks as in `health`, so that an engine that was
itself stopped blames nobody.
"""

from __future__ import annotations

from planaria.executor.health import LONGEST_LOOK

FLOOR = 10.0  # seconds that any step may take
MARGIN = 20.0
DECAY = 0.999  # of what the dearest token cost, with every step


class Pace:
    """`ceiling`: seconds after which a step is overdue, whatever was learned."""

    def __init__(self, ceiling: float) -> None:
        self.ceiling = ceiling
        self.token = 0.0  # seconds
        self._step = -1  # that is being waited for
        self._waited = 0.0
        self._looked: float | None = None

    def took(self, tokens: int, seconds: float) -> None:
        """A step was answered. tokens: those its plan names, and one for the rows that go on by themselves."""
        self.token = max(self.token * DECAY, seconds / tokens)

    def allowed(self, tokens: int) -> float:
        """Seconds for a step of so many."""
        expected = MARGIN * self.token * tokens if self.token else self.ceiling
        return min(self.ceiling, max(FLOOR, expected))

    def look(self, step: int, tokens: int, now: float) -> float | None:
        """`step` is the oldest that is not answered, by a number that it alone has in all epochs. How long that has
        been so, if it is too long."""
        passed = 0.0 if self._looked is None else min(LONGEST_LOOK, now - self._looked)
        self._looked = now
        if step != self._step:
            self._step, self._waited = step, 0.0
            return None
        self._waited += passed
        return self._waited if self._waited > self.allowed(tokens) else None
