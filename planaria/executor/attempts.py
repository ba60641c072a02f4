"""What is tried when an epoch has ended, loss after loss, until the next one has begun. Pure.

The layout that is wanted may be another than the present one: a change on purpose. If that can't be had, the present
one is what is tried next; a change that meets a fault becomes that fault's recovery.
"""

from __future__ import annotations

from collections import Counter

from planaria.errors import PlanariaError, WorkersLost
from planaria.topology import Layout

HOPELESS = 2  # processes for one rank, one after the other, that did not come up


class Attempts:
    """`loss`: what is being dealt with; `first`: what it began with; `layout`: what to begin with, None: the present
    one or what fits."""

    def __init__(self, loss: WorkersLost, present: Layout, wanted: Layout | None) -> None:
        self.loss = self.first = loss
        self.present, self.layout = present, wanted
        self._replaced: Counter[int] = Counter()

    @property
    def changing(self) -> bool:
        """Is it another layout, on purpose, that is tried now?"""
        return self.layout not in (None, self.present)

    @property
    def counts(self) -> bool:
        """Does this attempt count as one more? What killed a rank may have killed others, which is seen a moment later:
        that is the same one. A change on purpose is nobody's fault."""
        loss = self.loss
        same = loss is not self.first and loss.dead and loss.ranks and not any(map(self._replaced.get, loss.ranks))
        return loss.kind != "layout" and not same

    def hopeless(self) -> list[int]:
        """Lost ranks for which one process after the other did not come up."""
        return [rank for rank in self.loss.ranks if self.loss.dead and self._replaced[rank] >= HOPELESS]

    def replacing(self) -> None:
        """Other processes are about to be started for what is lost."""
        self._replaced.update(self.loss.ranks if self.loss.dead else ())

    def failed(self, error: PlanariaError) -> bool:
        """The attempt came to nothing. Is there something else to try?"""
        wanted = self.layout
        if isinstance(error, WorkersLost):
            self.loss, self.layout = error, self.present if wanted is not None else None
            if self.first.kind == "layout":
                self.first = error
            return True
        if not self.changing:
            return False
        cause = f"{wanted} can't be had: {error}"
        self.loss = WorkersLost(self.loss.epoch, (), cause, "layout", dead=False, kind="layout")
        self.layout = self.present
        return True
