"""From one epoch to the next: why, and what is tried, loss after loss, until the next one has begun. Pure.

A loss keeps the layout, or takes what fits; a wish has another one. If that can't be had, the present one is what is
tried next; a wish that meets a fault becomes that fault's recovery.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from planaria.errors import PlanariaError, WorkersLost
from planaria.protocol import Failed
from planaria.topology import Layout

HOPELESS = 2  # processes for one rank, one after the other, that did not come up


@dataclass(frozen=True)
class Wish:
    """Another layout, on purpose: nobody is suspected, nothing counts as fruitless. cause: a line for people; phase:
    what the ranks were about."""

    layout: Layout
    cause: str
    phase: str

    def __str__(self) -> str:
        return self.cause


class Transition:
    """`first`: why the epoch ends; `cause`: what is being dealt with; `layout`: what to begin with, None: the present
    one or what fits."""

    def __init__(self, cause: WorkersLost | Wish, present: Layout) -> None:
        self.first = self.cause = cause
        self.present = present
        self.layout = cause.layout if isinstance(cause, Wish) else None
        self._replaced: Counter[int] = Counter()

    @property
    def loss(self) -> WorkersLost | None:
        """What is being dealt with, if it is one."""
        return self.cause if isinstance(self.cause, WorkersLost) else None

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks whose processes must be replaced."""
        return self.loss.ranks if self.loss is not None and self.loss.dead else ()

    @property
    def failed(self) -> Failed:
        """What is being dealt with, as a rank's answer."""
        cause = self.cause
        if isinstance(cause, Wish):
            return Failed(0, cause.phase, cause.cause, "", "layout")
        return Failed(cause.ranks[0] if cause.ranks else 0, cause.phase, cause.cause, cause.traceback, cause.kind)

    @property
    def changing(self) -> bool:
        """Is it another layout, on purpose, that is tried now?"""
        return self.layout not in (None, self.present)

    @property
    def counts(self) -> bool:
        """Does this attempt count as one more? What killed a rank may have killed others, which is seen a moment later:
        that is the same one. A wish is nobody's fault."""
        same = self.cause is not self.first and self.dead and not any(map(self._replaced.get, self.dead))
        return self.loss is not None and not same

    def hopeless(self) -> list[int]:
        """Lost ranks for which one process after the other did not come up."""
        return [rank for rank in self.dead if self._replaced[rank] >= HOPELESS]

    def replacing(self) -> None:
        """Other processes are about to be started for what is lost."""
        self._replaced.update(self.dead)

    def came_to_nothing(self, error: PlanariaError) -> bool:
        """The attempt did. Is there something else to try?"""
        if isinstance(error, WorkersLost):
            self.cause, self.layout = error, self.present if self.layout is not None else None
            if isinstance(self.first, Wish):
                self.first = error
            return True
        if not self.changing:
            return False
        self.cause = Wish(self.present, f"{self.layout} can't be had: {error}", "layout")
        self.layout = self.present
        return True
