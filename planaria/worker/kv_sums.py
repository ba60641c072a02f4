"""Checksums of full blocks beside them in the node's memory: who goes on with what another process has written knows
whether that process scribbled over it while it died.

A block's is made in the step that fills it, before the rank answers, so before its commit. What has none that fits is
computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planaria.config.machine import usable_cores
from planaria.kernels import block_sums
from planaria.protocol import LanePlan

if TYPE_CHECKING:
    from planaria.worker.runner import Runner

Blocks = Sequence[npt.NDArray[np.uint8]]  # of each cache: [blocks, bytes], one after the other
SHARE = 32  # blocks that are worth a thread


class BlockSums:
    """blocks: of 64 bytes or more. table: of each block, 0: it has none. rows: that a step may have."""

    def __init__(self, blocks: Blocks, table: npt.NDArray[np.int64], rows: int, block_size: int) -> None:
        self.blocks, self.table, self.block_size = blocks, table, block_size
        self._caches = np.array([cache.ctypes.data for cache in blocks], np.int64)
        self._sizes = np.array([cache.shape[1] for cache in blocks], np.int64)
        self._call = block_sums.load()
        self._done = np.zeros(rows, np.int32)  # blocks of each row that have one, from the first on

    def note(self, blocks: Iterable[int]) -> None:
        """These hold what they are to hold."""
        numbers = np.fromiter(blocks, np.int64)
        self.table[numbers] = self._sums(numbers)

    def copied(self, blocks: Sequence[int], sums: npt.NDArray[np.int64]) -> int:
        """These came from another engine, where each has such a sum. How many of them, from the first on, hold what
        they held there?"""
        numbers = np.array(blocks, np.int64)
        other = np.flatnonzero(self._sums(numbers) != sums)
        good = int(other[0]) if len(other) else len(blocks)
        self.table[numbers[:good]] = sums[:good]
        return good

    def filled(self, plan: LanePlan, runner: Runner) -> None:
        """A step with this plan was computed. Rows that enter begin with blocks that have theirs."""
        for change in plan:
            if change.fresh is not None:
                self._done[change.row] = change.start // self.block_size
        full = runner.cursor // self.block_size
        more = np.flatnonzero(full > self._done).tolist()
        if more:
            self.note(np.concatenate([runner.batch.block_table[row, self._done[row] : full[row]] for row in more]))
            self._done[more] = full[more]

    def wrong(self, blocks: Iterable[int]) -> list[int]:
        """Those that don't hold what they are to hold. By all cores, since nobody computes meanwhile."""
        numbers = np.fromiter(blocks, np.int64)
        parts = np.array_split(numbers, max(1, min(usable_cores(), len(numbers) // SHARE)))
        with ThreadPoolExecutor(len(parts)) as pool:
            found = np.concatenate(list(pool.map(self._sums, parts)))
        return [int(block) for block in numbers[found != self.table[numbers]]]

    def _sums(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of each of these, 63 bits, never 0. Raises IndexError for a number that no block has."""
        count, out = len(blocks), np.empty(len(blocks), np.int64)
        if count and not 0 <= blocks.min() <= blocks.max() < min(map(len, self.blocks)):
            raise IndexError(f"no block {blocks.max()}")
        work = np.empty(8 * count, np.int64)
        self._call(
            self._caches.ctypes.data, self._sizes.ctypes.data, len(self._caches), blocks.ctypes.data, count,
            work.ctypes.data, out.ctypes.data,
        )  # fmt: skip
        return out
