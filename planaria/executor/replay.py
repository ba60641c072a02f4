"""How long it takes after a fault until everybody goes on. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planaria.wire import Recovery


class Replay:
    """Begins when a recovery is `done`, at `now` (seconds). `ids`: of the sequences that had tokens."""

    def __init__(self, done: Recovery, ids: Iterable[str], now: float) -> None:
        self.done, self.began, self.first = done, now, 0.0
        self._waiting = set(ids)
        self._all = len(self._waiting)

    def heard(self, id: str, now: float) -> Recovery | None:
        """A sequence got a token, or has ended; the recovery with its replay, when nobody waits any more."""
        if id not in self._waiting:
            return None
        if len(self._waiting) == self._all:
            self.first = now - self.began
        self._waiting.remove(id)
        if self._waiting:
            return None
        replay = {"first token": self.first, "replay": now - self.began}
        return msgspec.structs.replace(self.done, seconds=self.done.seconds | replay)


def is_replayed(message: Recovery) -> bool:
    """Is it the last that is said of a fault?"""
    return "replay" in message.seconds


def told_replay(message: Recovery) -> str:
    """A line for the log."""
    first, all = message.seconds["first token"], message.seconds["replay"]
    return f"replay: the first sequence has its next token {first:.2f} s after that, the last {all:.2f} s"
