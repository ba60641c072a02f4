"""A wait that says what it waits for: the first line at once, the next after ten seconds, then ever less often."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST = 10.0


class Patience:
    """`say` gets lines. `limit`: seconds in all. The clock starts now."""

    def __init__(self, say: Callable[[str], None], limit: float) -> None:
        self.say, self.limit = say, limit
        self.began = time.monotonic()
        self._next = 0.0

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
        """Say it, if it is time to."""
        if self.waited >= self._next:
            self.say(f"{what} ({self.waited:.0f} s of {self.limit:.0f} s)")
            self._next = max(FIRST, 2 * self._next)
