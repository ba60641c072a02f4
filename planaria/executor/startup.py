"""What each rank is doing while an engine comes up, told as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable

from planaria.wire import FromEngine, Phase


class StartUp:
    """`enter` begins a phase on all ranks, `done` ends it on one. `seconds` is by phase, of the slowest rank."""

    def __init__(self, world_size: int, emit: Callable[[FromEngine], None]) -> None:
        self.world_size, self.emit = world_size, emit
        self.name = ""
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def enter(self, name: str) -> None:
        now = time.perf_counter()
        if self.name:
            self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self._began
        self.name, self._began = name, now
        for rank in range(self.world_size):
            self.emit(Phase(rank, name))

    def done(self, rank: int) -> None:
        self.emit(Phase(rank, self.name, time.perf_counter() - self._began))
