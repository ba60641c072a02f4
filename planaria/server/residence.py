"""Whether the engines of a fleet are there at all: loaded, or unloaded with or without what they leave in the node's
memory. Sequences that come meanwhile wait for engines, as they do for one that has died.

Unloading is an engine's end without a successor; loading is the successor's start. What outlives an engine's death, KV
and packed weights, outlives this as well, until it is dropped.
"""

from __future__ import annotations

import asyncio
import os

from planaria.server.engine import error_of
from planaria.server.fleet import Fleet
from planaria.server.keeper import EngineKeeper


class Residence:
    """Of one fleet. Calls come one after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def load(self) -> None:
        """Start all engines; returns when they can admit. Raises UserError, CapacityError or EngineDead, with none of
        them there."""
        keepers, dispatcher = list(self.fleet.members.values()), self.fleet.dispatcher
        dispatcher.dead = None
        found = await asyncio.gather(*map(_start, keepers), return_exceptions=True)
        failed = next((failure for failure in found if failure is not None), None)
        if failed is None:
            await self.fleet.admit(keepers)
            failed = error_of(dispatcher.dead) if dispatcher.dead is not None else None
        if failed is not None:
            await self.unload()
            raise failed

    async def unload(self) -> None:
        """End all engines, and wait for it. They come back awake."""
        there = [k for k in self.fleet.members.values() if k.task is not None and not k.lent and k.engine.dead is None]
        await asyncio.gather(*(keeper.lend(kill=False) for keeper in there))
        for keeper in there:
            keeper.wishes.level = None

    @property
    def busy(self) -> bool:
        """Is something under way that needs its engines?"""
        waited = any(keeper.wishes.waits for keeper in self.fleet.members.values())
        return waited or self.fleet.resizer.busy or self.fleet.updating.locked()

    @property
    def num_bytes(self) -> int:
        """Memory of the node that its KV and packed weights have, and tensors that it was given."""
        weights, memories = self.fleet.weights, [keeper.memory for keeper in self.fleet.members.values()]
        packed = os.fstat(weights.fileno()).st_blocks * 512 if weights is not None else 0
        given = self.fleet.shared_weights.num_bytes if self.fleet.shared_weights is not None else 0
        return packed + given + sum(memory.num_bytes for memory in memories if memory is not None)

    async def drop(self, *, weights: bool) -> None:
        """Give back what unloaded engines left: KV, and (weights) packed weights, too. Tensors that it was given stay,
        since nothing else has them."""
        for keeper in self.fleet.members.values():
            if keeper.memory is not None:
                keeper.memory.close()
                keeper.memory = None
            if weights and self.fleet.weights is not None:
                await asyncio.to_thread(self.fleet.weights.forget, keeper.index)


async def _start(keeper: EngineKeeper) -> None:
    """The first process, one after it was unloaded, or after it was given up."""
    if keeper.task is None:
        try:
            await keeper.start()
        except BaseException:
            keeper.handle = None  # another, the next time
            raise
    elif keeper.lent:
        keeper.engine.revive()
        keeper.take_back()
    elif keeper.engine.dead is not None:
        assert keeper.handle is not None
        keeper.handle.kill()
        await asyncio.wait({keeper.task})
        keeper.revive()
