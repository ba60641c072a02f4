"""How links fail, and what both ends of one look like. Each error names the ranks it is about.

A link is of one epoch and is never repaired: after any of these but PeerLags the owner fences it and makes another.
"""

from __future__ import annotations

from typing import Protocol

from planaria.errors import PlanariaError
from planaria.protocol import Command, Reply

DRIVER = -1  # the driver's place among ranks


class LinkError(PlanariaError):
    """Root. `ranks` are those at fault (DRIVER for the driver), as far as known; {} in the text stands for them."""

    def __init__(self, text: str, *ranks: int) -> None:
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        super().__init__(text.replace("{}", names))
        self.text, self.ranks = text, ranks


class ConnectionLost(LinkError):
    """A process ended without saying goodbye, or its connection broke."""


class PeerLags(LinkError):
    """A peer took nothing for the stated time. It may be stopped, stuck, or busy for longer than the deadline."""


class MessageLost(LinkError):
    """A sequence number is missing: what comes next can't be trusted."""


class Fenced(LinkError):
    """The epoch is over (`fence` was called)."""


class LinkClosed(LinkError):
    """The other end (or this one) was closed in order."""


class RankPort(Protocol):
    """A rank's end. `receive` belongs to one thread, `reply` to one thread; they may be two."""

    rank: int

    def receive(self, timeout: float | None) -> tuple[int, Command] | None:
        """The next command and its number, or None after `timeout` seconds (None: no limit)."""

    def reply(self, number: int, reply: Reply) -> None: ...

    def beat(self) -> None:
        """Say that this process lives; called about once a second from a thread of its own. Raises ConnectionLost where
        the driver is known to be out of reach."""

    def close(self) -> None: ...
