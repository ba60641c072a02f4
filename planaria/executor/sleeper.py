"""An engine that sleeps: nothing is computed, and memory is given back, until it is woken. What is open waits, and new
requests do too; a rank that ends meanwhile is replaced, and sleeps again.

Waking is an epoch that begins: ranks take from their node's memory, or read, what they let go of, and KV is computed
again from the tokens of what is open.
"""

from __future__ import annotations

from collections.abc import Callable

from planaria.errors import WorkersLost
from planaria.executor.gang import START_TIMEOUT, Gang
from planaria.protocol import FreeMemory
from planaria.wire import FromEngine, Sleep, Slept

LEVELS = (0, 1, 2)


class Sleeper:
    """level: see Sleep. settle: what is on its way ends; wake: another epoch begins, or why none does."""

    def __init__(
        self, gang: Gang, emit: Callable[[FromEngine], None], clock: Callable[[], float], settle: Callable[[], None],
        wake: Callable[[], str],
    ) -> None:  # fmt: skip
        self.gang, self.emit, self.clock, self.settle, self.wake = gang, emit, clock, settle, wake
        self.level: int | None = None

    def ask(self, asked: Sleep, why_not: str) -> None:
        """Do it, and answer. why_not: it can't be done. Raises WorkersLost, when that is answered."""
        began, error = self.clock(), why_not
        lost: WorkersLost | None = None
        if not error and asked.level is not None and asked.level not in LEVELS:
            error = f"there is no level {asked.level}; levels are 0 to {max(LEVELS)}"
        if not error and None not in (self.level, asked.level) and asked.level < self.level:  # type: ignore[operator]
            error = f"it sleeps at level {self.level}; wake it first"
        if not error:
            try:
                error = self._change(asked.level)
            except WorkersLost as e:
                error, lost = f"{e}; ask again", e
        self.emit(Slept(asked.id, self.level, error, self.clock() - began))
        if lost is not None:
            raise lost

    def _change(self, level: int | None) -> str:
        before, self.level = self.level, None
        if level is None:
            return self.wake() if before else ""
        self.settle()
        self._free(level, before or 0)
        self.level = level
        return ""

    def again(self) -> None:
        """Another epoch has begun meanwhile: let go of what its ranks have. Raises WorkersLost."""
        if self.level is not None:
            self._free(self.level, 0)

    def _free(self, level: int, before: int) -> None:
        if level > before:
            self.gang.ask(FreeMemory(level == 2), START_TIMEOUT)
            self.gang.kv.clear(self.gang.layout)
