"""Context ranks, simulated: each has the cells of its own tokens, computes a share of a step's, and sees what the
others have. Who has which token, and whose share one is in, the shipping code decides.

A rank that begins with the history of a row looks at every cell of it, as attention does: one that is wrong, or
nobody's, spoils what comes after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.kernels.ops import Batch
from planaria.kernels.share import BatchShare
from planaria.worker.parts import context_of

if TYPE_CHECKING:
    from tests.sim.process import Process

MOST_TOKENS = 64
SAMPLES, FIRST = 2, 6  # of the counts of a share


class Context:
    """Of a rank in an epoch in which it shares tokens with others. `own`: which it has."""

    def __init__(self, process: Process) -> None:
        config, layout, rank = process.sim.scenario.config, process.layout, process.rank
        group = context_of(config, rank, layout)
        assert group is not None
        self.process, self.own = process, group.stripes
        others = {peer: context_of(config, peer, layout) for peer in layout.group(rank, "pcp", "tp")}
        self.members = {peer: it.stripes for peer, it in others.items() if it is not None and it.number == group.number}
        self.step = Batch(MOST_TOKENS, 1, 1, 1)
        self.shares = [BatchShare(self.step, number, layout.pcp) for number in range(layout.pcp)]
        self.share = self.shares[layout.coords(rank).pcp]
        self.given: list[list[int | None]] = []  # what it had when it came to the step
        self.seen: list[list[list[int | None]]] = []  # what each member had then

    def give(self) -> None:
        worker = self.process.worker
        self.given = [block.copy() for block in worker.cells] if worker is not None else []

    def see(self) -> None:
        assert self.process.link is not None
        workers = [self.process.link.ports[rank].worker for rank in self.members]
        self.seen = [worker.context.given for worker in workers if worker is not None and worker.context is not None]

    def cell(self, block: int, offset: int) -> int | None:
        """None: nobody has it."""
        for stripes, cells in zip(self.members.values(), self.seen, strict=True):
            if stripes.here(offset):
                found: int | None = cells[block][stripes.local(offset)]
                return found
        return None

    def gathered(self, computed: list[int]) -> list[int]:
        """What each has computed of a step's tokens, one share behind the other."""
        self.step.counts[:3] = len(computed), 1, 1
        return [cell for share in self.shares for cell in self._of(share, computed)]

    @staticmethod
    def _of(share: BatchShare, computed: list[int]) -> list[int]:
        count = share.deal()
        first = int(share.counts[FIRST])
        return computed[first : first + count]

    @property
    def draws(self) -> bool:
        """Is what is drawn from in this rank's share?"""
        self.share.deal()
        return bool(self.share.counts[SAMPLES])
