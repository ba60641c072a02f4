"""KV on its way between engines of a fleet, simulated: when ranks copy, what becomes of the owner meanwhile, what is
said late or twice. Whether a block is what was lent is decided by the shipping code, on the index that the owner's core
has written in real memory of the node.

An engine here has two ranks for this, each with every other cell of a block: what one has copied lacks the other's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from planaria.core import transfer
from planaria.protocol import KVLoad, KVNews, StepPlan
from planaria.types import KVLease
from planaria.worker import kv_shared
from planaria.worker.kv_shared import Lost, OtherKV

if TYPE_CHECKING:
    from tests.sim.deployment import Deployment
    from tests.sim.memory import EngineMemory
    from tests.sim.remote import Remote

RANKS = 2
CACHES = [np.zeros((1, 16), np.uint8)]  # cells are kept elsewhere
LOOK = 1.0


class SimCopying:
    """One rank's, of a load: some cells of it in one step, the rest in another, and what it says then."""

    def __init__(self, remote: Remote, load: KVLoad, rank: int) -> None:
        self.remote, self.load, self.rank, self.count, self.failed = remote, load, rank, 0, ""
        self.other: OtherKV | None = None
        self.marks: list[int] = []

    def go_on(self) -> bool:
        """Has it ended?"""
        lease = self.load.lease
        assert isinstance(lease, KVLease)
        try:
            owner = self.remote.sim.transfers.memory_at(lease.memory)
            if self.other is None:
                self.other = OtherKV(lease, 0, CACHES, str(self.remote.layout))
                self.marks = self.other.keys.marks(lease.blocks, self.load.keys)
                self._copy(owner, first=True)
                return False
            self._copy(owner, first=False)
            same = self.other.keys.marks(lease.blocks, self.load.keys)
            if not self.other.there:
                raise Lost("gone")
            self.count = kv_shared.unchanged(self.marks, same)
            self.failed = "" if self.count == len(self.load.keys) else "evicted"
        except Lost as e:
            self.failed = str(e)
        return True

    def _copy(self, owner: EngineMemory, *, first: bool) -> None:
        worker, lease = self.remote.worker, self.load.lease
        assert isinstance(lease, KVLease)
        if owner.worker is None:
            raise Lost("gone")
        half = worker.block_size // 2
        for theirs, own in list(zip(lease.blocks, self.load.blocks, strict=True))[: len(self.marks)]:
            for at in range(self.rank, worker.block_size, RANKS):
                if (at < half) is first:
                    worker.cells[own][at] = owner.worker.cells[theirs][at]


class SimTransfers:
    """Of a fleet. `chance` is its own: fleets of one kind are as they were."""

    def __init__(self, sim: Deployment) -> None:
        self.sim, self.chance = sim, random.Random(f"transfers of {sim.scenario.seed}")
        self.slow = self.chance.choice([0.0, 0.3, 0.9])
        self.numbers = 0

    def number(self) -> int:
        """Of another KV."""
        self.numbers += 1
        return self.numbers

    def memory_at(self, place: tuple[int, int, int]) -> EngineMemory:
        """Raises Lost."""
        for memory in self.sim.memories.values():
            if msgspec.structs.astuple(memory.kept.origin) == place:
                return memory
        raise Lost("gone")

    def connect(self, remote: Remote) -> None:
        """Its ranks have begun, or begun anew."""
        remote.copies, remote.said = [], []
        if remote.memory is not None and self.sim.scenario.config.parallel.splits_prefill:
            assert remote.core is not None
            remote.core.connect({rank: {} for rank in range(RANKS)}, 1)
            origin = msgspec.structs.astuple(remote.memory.kept.origin)
            transfer.lend_from(remote.core.lanes, remote.memory.number, origin)

    def look(self, remote: Remote) -> None:
        """As an engine that waits for messages does."""
        if remote.core is not None and any(each.leases for each in transfer.lenders(remote.core.lanes)):
            if transfer.expire(remote.core.lanes, self.sim.world.now):
                remote.output([], stepped=True)
            remote.later(LOOK, self.look, remote)

    def copy(self, remote: Remote, plan: StepPlan) -> list[tuple[int, KVNews]]:
        """What ranks do for a step of this plan, and say with it."""
        for work in plan.kv:
            remote.copies = [copy for copy in remote.copies if copy.load.number not in work.dropped]
            remote.copies += [SimCopying(remote, load, rank) for load in work.loads for rank in range(RANKS)]
        said = [each for each in remote.said if self.chance.random() < 0.5]
        remote.said = [each for each in remote.said if each not in said]
        for copy in list(remote.copies):
            if self.chance.random() < self.slow or not copy.go_on():
                continue
            remote.copies.remove(copy)
            failed = {copy.load.number: copy.failed} if copy.failed else {}
            news = copy.rank, KVNews(loaded=((copy.load.number, copy.count, 0.01),), failed=failed)
            said.append(news)
            self.sim.counts["blocks from another engine"] += copy.count
            self.sim.counts[f"transfers ended: {copy.failed or 'whole'}"] += 1
            if self.chance.random() < 0.2:
                remote.said.append(news)  # and once more, later
        return said
