"""What a host is: nodes with slots, in which processes are started, told things, watched and ended.

A host is a back end's one file: this machine's processes (`local`), those of other nodes by an agent on each, Ray's
actors. Nothing here waits, but `await_starts` and `await_ends`, each with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from planaria.topology import Cluster

Slot = tuple[str, int]  # a node's name, and the number of a place there: an accelerator's where the node has some
NOWHERE = -1  # in place of that number: it takes no place


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a process came up, as its host saw it. rank: that it has, -1: none. home: see `planaria.node`; address: by
    which other nodes reach it; cores: that its node gives to all ranks together; devices: ids of the accelerators that
    are its own; host: the launcher's own name of the node, where that is another; bundle: its index in the engine's
    placement group."""

    rank: int
    home: str
    node: str
    address: str = "127.0.0.1"
    pid: int = 0
    cores: int = 1
    devices: tuple[int, ...] = ()
    host: str = ""
    bundle: int = -1


class Program(msgspec.Struct, frozen=True, array_like=True):
    """What runs in a process: a module, as `child` says. visible: accelerators that it sees; empty: all."""

    module: str
    args: tuple[str, ...] = ()
    visible: tuple[int, ...] = ()


class Child(Protocol):
    """A process. `place`: where it is, its pid 0 until it is started; `ended`: how it did, empty until then; `code`:
    then, what it returned, or less than 0 for a signal; `said`: the first line that it said to who keeps it, empty
    until then; `leaving`: its node is going, and it works on until then."""

    slot: Slot
    place: Place
    ended: str
    code: int
    said: str

    @property
    def leaving(self) -> bool: ...

    @property
    def stopped(self) -> bool:
        """Does the kernel hold it still?"""

    def tell(self, message: bytes) -> None:
        """Hand it something, without waiting for it; one that doesn't take it in time is killed."""

    def kill(self) -> None:
        """For certain, a stopped one too; `ended` follows. Idempotent."""


News = Callable[[Any], None]  # gets a child that has said something or has ended, in any thread


class Host(Protocol):
    def slots(self) -> Cluster:
        """Nodes that are here and take processes, and their slots."""

    def need(self, processes: int, spares: int) -> None:
        """So many are wanted at a time, and spares on each node: where no accelerators count the slots, there are
        enough from now on."""

    def spawn(self, slot: Slot, entry: Program, boot: bytes | None, news: News, *, rank: int = -1) -> Child:
        """Start a process; `boot` is the first that it is told; rank: its number at first, for people, -1: none.
        Raises OSError: not now."""

    def await_starts(self, children: Iterable[Child], timeout: float) -> None:
        """Wait until each is started, or has ended; those that are not in time end."""

    def await_ends(self, children: Iterable[Child], timeout: float) -> list[Child]:
        """Those that have not ended by then."""

    def absent(self) -> list[str]:
        """A line for each node that should be here, and why it isn't."""

    def close(self) -> None:
        """No process is left that was ended; what is kept besides ends. Idempotent."""


def how_it_ended(code: int) -> str:
    """A process's return code in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
