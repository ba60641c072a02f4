"""Which request may be what kills its worker. Pure; requests are named by id.

Being in a step that a fault ended only raises suspicion; a token that a request gets afterwards clears it. Requests
that were in two faults without a token between them are run alone, one at a time, until each got one. A request is
convicted when its worker died twice with it alone, or at once when it came with that history.

Where several servers use an engine each keeps the account of its own suspects; `ExclusiveUses` are what makes "alone"
true: in one server's all others have let go of what they had in the engine. They come in the order they were asked for.
Servers are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

SUSPECT = 2  # faults in a row without a token after which a request is run alone
CONVICT = 2  # faults alone


class Quarantine:
    def __init__(self) -> None:
        self.faults: dict[str, int] = {}  # in a row, of requests that got no token since
        self.alone: dict[str, int] = {}  # of them, alone
        self.running: str | None = None  # who runs alone now

    def fault(self, present: Iterable[str]) -> str | None:
        """A fault ended a step that these requests were in. Returns the one that must be answered with an error."""
        for id in present:
            self.faults[id] = self.faults.get(id, 0) + 1
        suspect, self.running = self.running, None
        if suspect is None or suspect not in self.faults:
            return None
        self.alone[suspect] = self.alone.get(suspect, 0) + 1
        return suspect if self.alone[suspect] >= CONVICT else None

    def cleared(self, id: str) -> bool:
        """It got a token, or ended. True if it was running alone."""
        self.faults.pop(id, None)
        self.alone.pop(id, None)
        if self.running != id:
            return False
        self.running = None
        return True

    def suspects(self) -> bool:
        """Must anybody run alone?"""
        return any(count >= SUSPECT for count in self.faults.values())

    def next(self, order: Iterable[str]) -> str | None:
        """Who runs alone now: the one that does already, or the first suspect in this order; None: nobody has to."""
        if self.running is None and self.faults:
            self.running = next((id for id in order if self.faults.get(id, 0) >= SUSPECT), None)
        return self.running


class ExclusiveUse(msgspec.Struct, frozen=True):
    """serial: its number; server: whose it is; free: nobody else has anything in the engine."""

    serial: int
    server: int
    free: bool = False


class ExclusiveUses:
    """Which server may run a sequence alone in one engine, one after the other."""

    def __init__(self) -> None:
        self.now: ExclusiveUse | None = None
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
        """A server has nothing in the engine any more, and sends nothing until that use is over."""
        if self.now is not None and self.now.serial == serial:
            self._owing.discard(server)
            self._look()

    def left(self, server: int, servers: list[int]) -> None:
        """A server wants none, or has ended. servers: that there are."""
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
            self.now = ExclusiveUse(self._serial, server)
            self._look()

    def _look(self) -> None:
        if self.now is not None and not self._owing and not self.now.free:
            self.now = msgspec.structs.replace(self.now, free=True)
