"""Whose turn it is to run a sequence alone in an engine that several servers use. Pure; servers are numbers.

A server keeps the account of its own suspects (`quarantine.py`); here is what makes "alone" true: in one server's turn
all others have let go of what they had in the engine. Turns are given in the order they were asked for.
"""

from __future__ import annotations

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """serial: number of the turn; server: whose it is; free: nobody else has anything in the engine."""

    serial: int
    server: int
    free: bool = False


class Turns:
    """Of one engine."""

    def __init__(self) -> None:
        self.now: Turn | None = None
        self._serial = 0
        self._waiting: list[int] = []
        self._owing: set[int] = set()  # who has not let go yet

    def want(self, server: int, alone: bool, servers: list[int]) -> None:
        """A server has suspects, or none any more. servers: that there are."""
        if not alone:
            self.left(server, servers)
        elif server not in self._waiting and (self.now is None or self.now.server != server):
            self._waiting.append(server)
            if self.now is None:
                self._next(servers)

    def let_go(self, server: int, serial: int) -> None:
        """A server has nothing in the engine any more, and sends nothing until the turn is over."""
        if self.now is not None and self.now.serial == serial:
            self._owing.discard(server)
            self._look()

    def left(self, server: int, servers: list[int]) -> None:
        """A server wants no turn, or has ended. servers: that there are."""
        if server in self._waiting:
            self._waiting.remove(server)
        if self.now is None:
            return
        if self.now.server == server:
            self._next(servers)
        elif server not in servers:
            self._owing.discard(server)
            self._look()

    def _next(self, servers: list[int]) -> None:
        self.now = None
        if self._waiting:
            self._serial += 1
            server = self._waiting.pop(0)
            self._owing = {other for other in servers if other != server}
            self.now = Turn(self._serial, server)
            self._look()

    def _look(self) -> None:
        if self.now is not None and not self._owing and not self.now.free:
            self.now = msgspec.structs.replace(self.now, free=True)
