"""What a server and the process that takes its place say to each other.

The successor says Ask, and hears Offer or Declined; it says Take when it could start its engines at once, and hears
Given when there are none any more; it says State whenever its engines are others, Serving when it accepts connections,
and hears Yours: until then the first one can take all of it back. `PROTOCOL` is another as soon as one of these
messages, or what is in the memory files that go with an Offer, is no longer what it was.
"""

from __future__ import annotations

import msgspec

from planaria.node import Keeping
from planaria.server.root_messages import Kill, Serving, State, Stop

PROTOCOL = 3


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """release: of Planaria; tls: does it speak TLS on the port?"""

    protocol: int
    release: str
    tls: bool = False


class Take(msgspec.Struct, frozen=True, tag="take"):
    """All is ready that needs no engine."""


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Somebody wants the end of a response that still runs in the first server."""

    id: str
    why: str


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """It serves on."""

    why: str


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """With descriptors: of the socket that listens, of the weights' memory if `weights`, of the memory of KV of each of
    these engines, of the tensors that are in force if they are in memory, and of the pipes that `keepers` of devices'
    memory live by. began: which weights the server was started
    with; number, path: of those that are in force now (number 0: the same)."""

    release: str
    weights: bool
    engines: list[int]
    began: str = ""
    number: int = 0
    path: str = ""
    keepers: list[Keeping] = []


class Given(msgspec.Struct, frozen=True, tag="given"):
    """Its engines have ended, it accepts nothing, and the journal is free. running: responses that go on in it."""

    running: list[str]


class Yours(msgspec.Struct, frozen=True, tag="yours"):
    """It takes nothing back any more while the other lives."""


class IdleConnection(msgspec.Struct, frozen=True, tag="idle"):
    """With its descriptor: a client that waits to ask for something else."""


class KeptResponse(msgspec.Struct, frozen=True, tag="kept"):
    """With the descriptor of a memory file: the records of a response, which has ended or runs in the background."""

    id: str


class GoneResponse(msgspec.Struct, frozen=True, tag="gone"):
    """One that is kept no longer."""

    id: str


ToFirst = Ask | Take | State | Serving | Stop | Withdraw
ToSuccessor = Declined | Offer | Given | Yours | Kill | IdleConnection | KeptResponse | GoneResponse
