"""Which ranks have been silent for too long, and which step is overdue. Pure: looks in, verdicts out.

A rank's pulse is a count that it raises about once a second from a thread of its own, also during a long step. Silence
is added up over the looks, each counting for at most `LONGEST_LOOK`, so that an engine which was itself stopped for a
while doesn't take that for its ranks' silence.

A step of n tokens is expected to cost n times the dearest token of late; it is overdue after MARGIN times that, never
before FLOOR seconds, always at the ceiling. Waiting is added up over the looks in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

LONGEST_LOOK = 1.0  # seconds that pass between two looks at most, as far as silence is concerned
STOPPED = 2.0  # seconds of silence after which a process that the kernel calls stopped is lost
FLOOR = 10.0  # seconds that any step may take
MARGIN = 20.0
DECAY = 0.999  # of what the dearest token cost, with every step


class Health:
    """`timeout`: seconds of silence after which a rank is lost."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._last: dict[int, tuple[int, int]] = {}
        self._silent: dict[int, float] = {}
        self._looked: float | None = None

    def silent(self, ranks: Iterable[int]) -> float:
        """For how many seconds the most silent of them has been so."""
        return max((self._silent.get(rank, 0.0) for rank in ranks), default=0.0)

    def look(
        self, pulses: Sequence[tuple[int, int]], now: float, is_stopped: Callable[[int], bool],
        pids: Sequence[int] = (),
    ) -> dict[int, str]:  # fmt: skip
        """`pulses[rank]`: pid and count, (0, 0) where nothing is known. `is_stopped(pid)` asks the kernel. `pids`: of
        processes whose pulse may not have begun, 0 where not known; they may take their time, but not be stopped.
        Returns what is wrong with each rank that must be given up."""
        passed = 0.0 if self._looked is None else min(LONGEST_LOOK, now - self._looked)
        self._looked = now
        lost: dict[int, str] = {}
        for rank, (pid, count) in enumerate(pulses):
            begun = pid != 0
            if not begun and pids:
                pid, count = pids[rank], -1
            if not pid or self._last.get(rank) != (pid, count):
                self._last[rank], self._silent[rank] = (pid, count), 0.0
                continue
            silent = self._silent[rank] = self._silent[rank] + passed
            if begun and silent >= self.timeout:
                lost[rank] = f"gave no sign of life for {silent:.1f} s"
            elif silent >= STOPPED and is_stopped(pid):
                lost[rank] = f"is stopped (no sign of life for {silent:.1f} s)"
        return lost


class Pace:
    """How long a step may take, learned from how long steps took. `ceiling`: seconds after which it is overdue,
    whatever was learned."""

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
