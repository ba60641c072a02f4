"""Checksums of full blocks beside them in the node's memory: who goes on with what another process has written knows
whether that process scribbled over it while it died.

A block's is made in the step that fills it, before the rank answers, so before its commit. What has none that fits is
computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from planaria.protocol import LanePlan

if TYPE_CHECKING:
    from planaria.worker.runner import Runner

Blocks = Sequence[npt.NDArray[np.uint8]]  # of each cache: [blocks, bytes]


class BlockSums:
    """table: of each block, 0: it has none. rows: that a step may have."""

    def __init__(self, blocks: Blocks, table: npt.NDArray[np.int64], rows: int, block_size: int) -> None:
        self.blocks, self.table, self.block_size = blocks, table, block_size
        self._done = np.zeros(rows, np.int32)  # blocks of each row that have one, from the first on

    def note(self, blocks: Iterable[int]) -> None:
        """These hold what they are to hold."""
        for block in blocks:
            self.table[block] = self._sum(block)

    def copied(self, blocks: Sequence[int], sums: npt.NDArray[np.int64]) -> int:
        """These came from another engine, where each has such a sum. How many of them, from the first on, hold what
        they held there?"""
        for done, (block, sum) in enumerate(zip(blocks, sums.tolist(), strict=True)):
            if self._sum(block) != sum:
                return done
            self.table[block] = sum
        return len(blocks)

    def filled(self, plan: LanePlan, runner: Runner) -> None:
        """A step with this plan was computed. Rows that enter begin with blocks that have theirs."""
        for change in plan:
            if change.fresh is not None:
                self._done[change.row] = change.start // self.block_size
        full = runner.cursor // self.block_size
        for row in np.flatnonzero(full > self._done).tolist():
            self.note(runner.batch.block_table[row, self._done[row] : full[row]].tolist())
            self._done[row] = full[row]

    def wrong(self, blocks: Iterable[int]) -> list[int]:
        """Those that don't hold what they are to hold."""
        return [block for block in blocks if self.table[block] != self._sum(block)]

    def _sum(self, block: int) -> int:
        """XXH3 (github.com/Cyan4973/xxHash), 63 of its bits, never 0."""
        found = xxhash.xxh3_64()
        for cache in self.blocks:
            found.update(cache[block])
        return (found.intdigest() >> 1) | 1
