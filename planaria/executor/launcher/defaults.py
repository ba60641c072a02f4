"""What a launcher does where its way of starting ranks asks for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planaria.errors import CapacityError
from planaria.executor.boot import RankBoot
from planaria.hosts.host import Child, Place
from planaria.topology import Layout


class Defaults:
    """A base: ranks can't be replaced, there are no spares, whoever tells of an end says how, too, and nothing is to be
    ended."""

    replaces = False
    followed = False
    leaving: Sequence[int] = ()

    def __init__(self) -> None:
        self.on_exit: Callable[[], None] = lambda: None

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        raise CapacityError(f"ranks {list(ranks)} can't be replaced by this executor back end")

    def give_up(self, ranks: Sequence[int]) -> None: ...

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        return None

    def room_for(self, layout: Layout) -> bool:
        return False

    def stand_by(self, boot: RankBoot) -> None: ...

    def spare_pids(self) -> list[int]:
        return []

    def beside(self, boots: Sequence[RankBoot]) -> Sequence[Child]:
        return ()

    def tell_spares(self, boot: RankBoot) -> None: ...

    def settle(self, ranks: Sequence[int]) -> None: ...

    def lost(self) -> dict[int, str]:
        """Nobody that the link doesn't tell of."""
        return {}

    def closing(self) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...
