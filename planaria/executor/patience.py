"""A wait that says what it waits for: at once or after ten seconds, then ever less often."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST = 10.0


class Patience:
    """`say` gets lines. `limit`: seconds in all; first: before the first line. The clock starts now."""

    def __init__(self, say: Callable[[str], None], limit: float, first: float = 0.0) -> None:
        self.say, self.limit = say, limit
        self.began = time.monotonic()
        self._next = first

    @property
    def waited(self) -> float:
        return time.monotonic() - self.began

    @property
    def over(self) -> bool:
        return self.waited >= self.limit

    def pause(self) -> float:
        """Seconds until the next line, or the end."""
        return max(0.0, min(self._next, self.limit) - self.waited)

    def tell(self, what: str) -> None:
        """Say it, if it is time to: one line, however many times have gone by since the last."""
        if (waited := self.waited) >= self._next and not (self._next and self.over):
            self.say(f"{what} ({waited:.0f} s of {self.limit:.0f} s)")
            while self._next <= waited:
                self._next = max(FIRST, 2 * self._next)
