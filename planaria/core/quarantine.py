"""Which request may be what kills its worker. Pure; requests are named by id.

Being in a step that a fault ended only raises suspicion; a token that a request gets afterwards clears it. Requests
that were in two faults without a token between them are run alone, one at a time, until each got one. A request is
convicted when its worker died twice with it alone, or at once when it came with that history.
"""

from __future__ import annotations

from collections.abc import Iterable

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
