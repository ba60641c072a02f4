"""How often an engine may begin anew without getting anywhere. Pure."""

from __future__ import annotations

from collections import deque


class Reformations:
    """Allows `limit` of them within `window` seconds with no token committed since the one before."""

    def __init__(self, limit: int, window: float) -> None:
        self.limit, self.window = limit, window
        self._fruitless: deque[float] = deque()

    def allowed(self, now: float, progressed: bool) -> bool:
        """May there be another? `progressed`: a token was committed since the last one."""
        if progressed:
            self._fruitless.clear()
        self._fruitless.append(now)
        while now - self._fruitless[0] > self.window:
            self._fruitless.popleft()
        return len(self._fruitless) <= self.limit
