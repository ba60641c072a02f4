"""What a back end is made of: a launcher, which starts ranks, and a link for each epoch, which carries messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from planaria.errors import CapacityError
from planaria.executor.boot import RankBoot
from planaria.executor.link.address import Address
from planaria.executor.reply_ledger import RankReply
from planaria.hosts.host import Child, Place
from planaria.protocol import Command
from planaria.topology import LaneGroup, Layout


class Launcher:
    """Where ranks come from. One that can't `replace` a rank has `replaces` False: a loss is then the engine's end.
    What is no launcher's own says that ranks can't be replaced, that there are no spares, and that nothing is to be
    ended."""

    name: str
    replaces = False
    followed = False  # set before the end: another engine's process will ask for ranks on the same nodes

    def __init__(self) -> None:
        self.on_exit: Callable[[], None] = lambda: None  # called from any thread when a rank's process ends unasked

    @property
    def leaving(self) -> Sequence[int]:
        """Ranks that work, in places that are going: they move when `prepare` has others."""
        return ()

    def start(self) -> list[Place]:
        """Make all ranks' processes, without weight, and say where each is."""
        raise NotImplementedError

    def run(self, boots: Sequence[RankBoot]) -> None:
        """Give every rank what it begins with, or goes on with in another epoch. It comes to its link by itself."""
        raise NotImplementedError

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """End these ranks for certain, then see that `layout` has all of its ranks; where they are now. Those that live
        keep their numbers where these have the same part of the model in `layout`, else take places that have it, or
        those of others, or end. Raises OSError: not now; Infeasible: too few places, but enough for its `nearest`;
        CapacityError."""
        raise CapacityError(f"ranks {list(ranks)} can't be replaced by this executor back end")

    def give_up(self, ranks: Sequence[int]) -> None:
        """What was started for these ended again and again: their devices count as gone until they prove well."""

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        """Get ready what `layout` has more than is there; the largest layout up to it that has its places by now."""
        return None

    def room_for(self, layout: Layout) -> bool:
        """Would `prepare` come to it, in the time that processes take to start? False where that can't be told, and for
        a while after one that was to get ready ended on the way."""
        return False

    def stand_by(self, boot: RankBoot) -> None:
        """See that as many spares as were asked for are there and getting ready."""

    def spare_pids(self) -> list[int]:
        """Of this node."""
        return []

    def beside(self, boots: Sequence[RankBoot]) -> Sequence[Child]:
        """Start a process on each node that has ranks, which packs their weights there (RankBoot.beside; a boot for
        each rank) and says READY or why it can't; `on_exit` is called then, too. Empty, where that can't be. Raises
        OSError."""
        return ()

    def tell_spares(self, boot: RankBoot) -> None:
        """Those that there are get ready once more, as this says."""

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended though nobody asked, or whose node is gone, and how. Nobody, where the link
        tells."""
        return {}

    def settle(self, ranks: Sequence[int]) -> None:
        """These have ended: wait a moment until it is known how."""

    def closing(self) -> None:
        """From now on an end is no loss."""

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Idempotent."""

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""


@runtime_checkable
class Borrower(Protocol):
    """A launcher whose lanes have a placement group each, which somebody else makes and removes."""

    def lend(self, groups: Sequence[LaneGroup]) -> Sequence[LaneGroup]:
        """These are the engine's from now on; those that were before. Raises ConfigError, CapacityError."""


class Link(Protocol):
    name: str

    def send(self, number: int, command: Command) -> None: ...

    def receive(self, timeout: float | None) -> RankReply | None: ...

    def address_of(self, rank: int) -> Address: ...

    def pulses(self) -> list[tuple[int, int]]: ...

    def wake(self) -> None: ...

    def fence(self) -> None: ...

    def close(self) -> None: ...
