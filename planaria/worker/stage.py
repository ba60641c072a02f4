"""A rank's place in a step: hidden states from the stage before and to the one after, drawn tokens to whom embeds them.

Rule: sending waits for nobody, receiving waits until what it needs is there, and both happen in the order of the
steps on every rank. So a stage that has its plans runs ahead of the next one by as many steps as the plans allow:
steps take turns, and a row's token is asked for when the row's turn comes again, not before.

Tokens go from the rank that draws them to the ranks of the first stage: along the pipeline to the first of them, from
there to the others. Every rank knows from the plan which rows draw in a step, so tokens go alone. Where
rows draft, how many tokens one drew and what it drafts goes with them, and to all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planaria.mesh.comm import Array
from planaria.mesh.mesh import Mesh

if TYPE_CHECKING:
    from planaria.kernels.ops import Batch

Tokens = npt.NDArray[np.int32]
Hear = Callable[[int, list[int], Tokens], None]  # turn, rows, what is told of them


class Stage:
    """`forward` runs this stage's layers on what `batch` holds. hidden_size: columns of what passes between stages.
    width: numbers that are told of a row that drew; 1: its token."""

    def __init__(
        self, batch: Batch, forward: Callable[[], Array], mesh: Mesh | None = None, hidden_size: int = 0,
        width: int = 1,
    ) -> None:  # fmt: skip
        self.batch, self.forward = batch, forward
        self.mesh = mesh or Mesh()
        self.hidden_size, self.width = hidden_size, width
        self.samples = self.mesh.samples
        self._waits = (self.mesh.reads_tokens or width > 1) and not self.samples
        self._open: deque[tuple[int, list[int]]] = deque()  # steps whose tokens have not come: (turn, rows)

    def take_tokens(self, turn: int, hear: Hear) -> None:
        """Have `hear` take what rows of this turn go on with, [rows, width]."""
        while any(own == turn for own, _ in self._open):
            of, rows = self._open.popleft()
            hear(of, rows, self._receive_tokens(len(rows)))

    def drain(self, hear: Hear) -> None:
        """Take in what is still on its way, before another stage uses the same mesh."""
        while self._open:
            self.take_tokens(self._open[-1][0], hear)

    def run(self, last: Callable[[], Array] | None = None) -> Array | None:
        """One forward pass, of this rank's share of the step. Logits on the ranks of the last stage (whole on the one
        that draws), None on others. last: what the last stage does instead."""
        pp, num_tokens = self.mesh.pp, self.batch.deal()
        if pp.rank > 0:
            self._receive_hidden(num_tokens)
        if pp.rank == pp.size - 1:
            return (last or self.forward)()
        self._send_hidden(self.forward())
        return None

    def drew(self, turn: int, rows: list[int], told: Tokens | list[list[int]] | None) -> None:
        """The rows that draw in a step of this turn, in order; where this rank drew them, what is told of them."""
        if told is None:
            if self._waits:
                self._open.append((turn, rows))
            return
        cp, pp = self.mesh.cp, self.mesh.pp
        if cp.size == pp.size == 1:
            return
        told = np.asarray(told, np.int32)
        for stage in range(pp.size - 1 if self.width > 1 else min(1, pp.size - 1)):
            pp.send(told, stage)
        if cp.size > 1 and (pp.size == 1 or self.width > 1):
            cp.broadcast(told)

    def _receive_tokens(self, count: int) -> Tokens:
        cp, pp = self.mesh.cp, self.mesh.pp
        told = np.empty((count, self.width), np.int32)
        if pp.rank < pp.size - 1 and cp.rank == 0:
            pp.receive(told, pp.size - 1)
        if cp.size > 1:
            cp.broadcast(told)
        return told

    def _send_hidden(self, hidden: Array) -> None:
        self.mesh.pp.send(np.ascontiguousarray(hidden), self.mesh.pp.rank + 1)

    def _receive_hidden(self, num_tokens: int) -> None:
        pp = self.mesh.pp
        hidden = self.batch.make_hidden(self.hidden_size)[:num_tokens]
        if hidden.shape[1] == self.hidden_size:
            pp.receive(hidden, pp.rank - 1)
            return
        unpadded = np.empty((num_tokens, self.hidden_size), np.float32)
        pp.receive(unpadded, pp.rank - 1)
        hidden[:, : self.hidden_size] = unpadded
