"""What a launcher is that can't put one rank in another's place: a loss is the engine's end."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.errors import CapacityError
from planaria.executor.boot import Place, RankBoot


class Fixed:
    """A base for such launchers."""

    replaces = False

    def replace(self, ranks: Sequence[int]) -> list[Place]:
        raise CapacityError(f"ranks {list(ranks)} can't be replaced by this executor back end")

    def stand_by(self, boot: RankBoot) -> None:
        """There are no spares."""

    def spare_pids(self) -> list[int]:
        return []

    def settle(self, ranks: Sequence[int]) -> None:
        """Whoever tells of an end says how, too."""
