"""Which ranks have been silent for too long. Pure: looks in, verdicts out.

A rank's pulse is a count that it raises about once a second from a thread of its own, also during a long step. Silence
is added up over the looks, each counting for at most `LONGEST_LOOK`, so that an engine which was itself stopped for a
while doesn't take that for its ranks' silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

LONGEST_LOOK = 1.0  # seconds that pass between two looks at most, as far as silence is concerned
STOPPED = 2.0  # seconds of silence after which a process that the kernel calls stopped is lost


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
