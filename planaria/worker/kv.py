"""A rank's KV: in memory that outlives it where its boot names some, else in its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from planaria.executor.boot import RankBoot
from planaria.hosts.memory import KVMemory
from planaria.node import ProcessGone

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops

CACHES = 2  # of a layer, at most: keys and values

logger = logging.getLogger("planaria.worker")


class RankKV:
    """`made`: (rank, number of the KV) that the model's caches are of."""

    def __init__(self, boot: RankBoot) -> None:
        self.memory: KVMemory | None = None
        self.made: tuple[int, int] | None = None
        self.enter(boot)

    def enter(self, boot: RankBoot) -> None:
        """For another epoch."""
        self.rank = boot.rank
        if self.memory is not None and self.memory.origin == boot.memory:
            return
        if self.memory is not None:
            self.memory.close()
        self.memory, self.made = None, None
        if boot.memory is not None and boot.config.device.device == "cpu":
            try:
                self.memory = KVMemory.of(boot.memory)
                self.memory.compute()
            except ProcessGone as e:
                logger.warning("KV will not outlive rank %d: %s", boot.rank, e)

    @property
    def number(self) -> int:
        """Of the KV in this rank's part."""
        return self.memory.holds(self.rank) if self.memory is not None else 0

    def forget(self, model: Any) -> None:
        """It counts for nothing, and its memory is given back."""
        self.made = None
        if model is not None:
            model.drop_kv()
        if self.memory is not None:
            self.memory.clear_part(self.rank)

    def unmap(self) -> None:
        """There is no model any more that computes in it."""
        self.made = None

    def make(self, model: Any, ops: Ops, num_blocks: int, block_size: int, number: int) -> None:
        """Have caches of this KV, with all that is in its part. Raises CapacityError."""
        if number and self.made == (self.rank, number):
            return
        if self.memory is not None:
            size = num_blocks * model.kv_block_bytes(block_size)
            ops.kv_part = self.memory.part(self.rank, size, CACHES * len(model.layers))
        model.make_kv(num_blocks, block_size)
        ops.kv_part = None
        self.made = self.rank, number
        if self.memory is not None:
            self.memory.made(self.rank, number)
