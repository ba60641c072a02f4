"""What each rank is doing while an engine comes up, told as it happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from planaria.wire import FromEngine, Phase

logger = logging.getLogger("planaria.engine")

FIRST_LINE = 10.0  # seconds in a phase after which the log says what is awaited
PARTS = {
    "launch": "replace", "connect": "replace", "groups": "regroup", "load": "load", "experts": "load",
    "probe KV": "load", "warm-up": "load",
}  # fmt: skip


def parts_of(phases: dict[str, float]) -> dict[str, float]:
    """Of a recovery, from the seconds of its phases: replace (until all processes are there), regroup, load."""
    parts = dict.fromkeys(PARTS.values(), 0.0)
    for phase, part in PARTS.items():
        parts[part] += phases.get(phase, 0.0)
    return parts


class StartUp:
    """`enter` begins a phase on all ranks, `done` ends it on one. `seconds` is by phase, of the slowest rank."""

    def __init__(
        self, world_size: int, emit: Callable[[FromEngine], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.world_size, self.emit, self.clock = world_size, emit, clock
        self.name = ""
        self.seconds: dict[str, float] = {}
        self._began, self._next_line = 0.0, FIRST_LINE

    def enter(self, name: str) -> None:
        now = self.clock()
        if self.name:
            self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self._began
        self.name, self._began, self._next_line = name, now, FIRST_LINE
        for rank in range(self.world_size):
            self.emit(Phase(rank, name))

    def waiting(self, ranks: Sequence[int]) -> None:
        """Called now and then: a line in the log after 10 s in a phase, then each time twice as long has passed."""
        elapsed = self.clock() - self._began
        if elapsed >= self._next_line:
            self._next_line *= 2
            names = ", ".join(map(str, ranks))
            logger.info("waiting for %s for %.0f s: ranks %s", self.name, elapsed, names)

    def done(self, rank: int) -> None:
        self.emit(Phase(rank, self.name, self.clock() - self._began))
