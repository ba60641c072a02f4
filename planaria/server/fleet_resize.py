"""A fleet's change of size, carried out (`planaria.core.resize` keeps the books).

Up: the new engines come up beside the others, and get work when all of them can admit, also some of what runs; if one
can't, all of them end and nothing has changed. Down: the last engines get no new work, what they have may finish for a
while, the rest goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from planaria.config.machine import accelerator_ids
from planaria.core.resize import COMMITTED, Refused, Resize, Resizes, Room, deal_kinds, room_in_memory
from planaria.errors import PlanariaError
from planaria.node import available_memory
from planaria.server.keeper import all_ready
from planaria.topology import LaneGroup, Layout
from planaria.wire import EngineResized

if TYPE_CHECKING:
    from planaria.server.fleet import Fleet

logger = logging.getLogger("planaria.server")

DRAIN_TIMEOUT = 120.0  # seconds that running requests get before they are moved
OVERHEAD = 200 << 20  # bytes of a rank beside weights and KV: an interpreter, with its part of the engine


@runtime_checkable
class LanePlaces(Protocol):
    """Places for the lanes of one engine, by number. Calls block."""

    def lend(self, lanes: int) -> tuple[LaneGroup, ...]:
        """Those of so many, made where there are none. Raises ConfigError, CapacityError."""

    def take_back(self, lanes: int) -> None:
        """So many are in use from now on."""


class Resizer:
    """One for each fleet. `available`: free memory of this node in bytes, for tests."""

    def __init__(self, fleet: Fleet, available: Callable[[], int] = available_memory) -> None:
        self.fleet, self.available = fleet, available
        parallel = fleet.config.parallel
        self.resizes = Resizes(parallel.replicas[0], "lane" if parallel.shares_experts else "engine")
        self._task: asyncio.Task[None] | None = None
        self._cancelled = self._resizing_engines = False

    async def resize(
        self, id: str, size: int, drain_timeout: float = DRAIN_TIMEOUT, prefill: int | None = None
    ) -> Resize:
        """Have `size` engines, `prefill` of them for prompts, where there are two kinds; returns when it is committed
        or rolled back. Raises Refused."""
        fleet = self.fleet
        parallel = fleet.config.parallel
        for given, option in (
            (parallel.data_parallel_external_lb, "--data-parallel-rank"),
            (parallel.data_parallel_hybrid_lb, "--data-parallel-start-rank"),
        ):
            if given:
                raise Refused(f"an outside balancer knows this server's engines ({option}): start or stop servers")
        if fleet.closing:
            raise Refused("the server is shutting down", busy=True)
        if fleet.dispatcher.dead is not None:
            raise Refused(f"the last engine has ended: {fleet.dispatcher.dead.message}")
        if self._resizing_engines:
            raise Refused("the engines' layout is being changed; ask again after it", busy=True)
        if fleet.replacing:
            raise Refused(f"engine {min(fleet.replacing)} was told to end and is being replaced; ask again", busy=True)
        if parallel.shares_experts:
            return await self._resize_lanes(id, size)
        kinds = self._kinds(size, prefill)
        alive = [index for index, keeper in fleet.members.items() if keeper.engine.dead is None]
        resize, new = self.resizes.ask(id, size, list(fleet.members), alive, self._room(len(alive)))
        if new:
            self._task = asyncio.create_task(self._run(resize, drain_timeout, kinds))
        elif resize.state == COMMITTED and self.resizes.current is None:
            fleet.set_kinds(kinds)
        task = self._task
        if task is not None and self.resizes.current is resize:
            await asyncio.shield(task)
        return resize

    def _kinds(self, size: int, prefill: int | None) -> dict[int, str]:
        """By number. Raises Refused."""
        fleet = self.fleet
        if not fleet.kinds and prefill is None:
            return {}
        if not fleet.kinds:
            raise Refused("this server's engines are of one kind (see --prefill-engines): give their number alone")
        if prefill is None:
            raise Refused("this server's engines are of two kinds: say how many of each (--prefill, --decode)")
        if prefill >= size:
            raise Refused(f"{prefill} of {size} engines for prompts leave none to go on with them: ask for more")
        return deal_kinds(range(self.resizes.first, self.resizes.first + size), prefill, fleet.kinds)

    async def _resize_lanes(self, id: str, size: int) -> Resize:
        """Data-parallel ranks that share experts are lanes of one engine: it begins another epoch with more or fewer,
        and what is open goes on in them. Raises Refused."""
        lanes = range(self.fleet.config.parallel.lanes)
        resize, new = self.resizes.ask(id, size, lanes, lanes)
        if new:
            self._task = asyncio.create_task(self._run_lanes(resize))
        task = self._task
        if task is not None and self.resizes.current is resize:
            await asyncio.shield(task)
        return resize

    async def _run_lanes(self, resize: Resize) -> None:
        fleet, parallel = self.fleet, self.fleet.config.parallel
        (keeper,) = fleet.members.values()
        places, groups = fleet.hosts if isinstance(fleet.hosts, LanePlaces) else None, tuple[LaneGroup, ...]()
        try:
            layout = Layout(parallel.pipeline_parallel_size, resize.after, tp=parallel.tensor_parallel_size)
            if places is not None:
                self.resizes.enter("places", time.monotonic())
                groups = await asyncio.to_thread(places.lend, resize.after)
            self.resizes.enter("re-form", time.monotonic())
            done = await keeper.resize(layout.tp, layout.pp, layout.dp, groups)
            failure = done.error
        except asyncio.CancelledError as e:
            failure = str(e) or "it was cancelled"
        except (PlanariaError, TimeoutError) as e:
            failure = str(e)
        except Exception as e:  # whatever Ray raises; what is under way must end, or nothing is ever changed again
            logger.exception("resize %s failed", resize.id)
            failure = f"{type(e).__name__}: {e}"
        if places is not None:
            await asyncio.to_thread(places.take_back, resize.before if failure else resize.after)
        if failure:
            self.resizes.roll_back(failure, time.monotonic())
            logger.warning("resize %s rolled back: %s", resize.id, failure)
            return
        fleet.config = fleet.config.with_layout(layout)
        self.resizes.commit(time.monotonic())
        logger.info("resize %s committed: %d lanes after %.2f s", resize.id, resize.after, done.seconds)

    async def resize_engines(self, tp: int, pp: int) -> list[EngineResized]:
        """One engine after the other, so that the others serve meanwhile. Raises Refused."""
        fleet = self.fleet
        if fleet.closing:
            raise Refused("the server is shutting down", busy=True)
        if self.resizes.current is not None or self._resizing_engines:
            raise Refused("another change of the fleet is under way; ask again after it", busy=True)
        self._resizing_engines = True
        found: list[EngineResized] = []
        try:
            for keeper in list(fleet.members.values()):
                found.append(await keeper.resize(tp, pp))
                if found[-1].error:
                    break
            else:
                layout = Layout(pp, fleet.config.parallel.lanes, tp=tp)
                fleet.config = fleet.config.with_layout(layout)  # of engines that are added
        finally:
            self._resizing_engines = False
        return found

    @property
    def busy(self) -> bool:
        """Is a change under way?"""
        return self.resizes.current is not None or self._resizing_engines

    async def idle(self) -> None:
        """Wait until no change is under way."""
        while self.resizes.current is not None and self._task is not None:
            await asyncio.wait({self._task})

    def cancel(self, why: str) -> None:
        """Roll back what is under way."""
        if self._task is not None and not self._task.done() and not self._cancelled:
            self._cancelled = True  # once: rolling back is not to be cancelled
            self._task.cancel(why)

    async def abandon(self, why: str) -> None:
        """Roll back what is under way, and wait until that is done."""
        self.cancel(why)
        if self._task is not None:
            await asyncio.wait({self._task})

    def _room(self, running: int) -> Room | None:
        """For how many engines the user gave groups, or this node has devices, or memory; None where ranks are placed
        elsewhere."""
        config, facts = self.fleet.config, self.fleet.dispatcher.facts
        ranks, groups = config.parallel.world_size, config.parallel.placement_groups
        if groups:
            return Room(len(groups), "--placement-group names a group for each")
        if config.parallel.distributed_executor_backend not in ("uni", "mp") or self.fleet.hosts is not None:
            return None
        if not config.device.platform.on_host:
            devices = len(accelerator_ids())
            return Room(devices // ranks, f"each needs {ranks} accelerators, and there are {devices}")
        if facts is None:
            return None
        needed = facts.weight_bytes - facts.shared_bytes + ranks * ((config.cache.memory or 0) + OVERHEAD)
        return room_in_memory(self.available(), needed, running)

    async def _run(self, resize: Resize, drain_timeout: float, kinds: dict[int, str]) -> None:
        """kinds: of the engines there are to be, where there are two."""
        fleet, books = self.fleet, self.resizes
        before = fleet.kinds
        fleet.kinds = {**kinds, **before}  # of those that come
        logger.info("resize %s: from %d to %d engines", resize.id, resize.before, resize.after)
        failure = ""
        try:
            if resize.start:
                await self._grow(resize)
            fleet.set_kinds(kinds)
            if resize.stop:
                await self._drain(resize, drain_timeout)
                await self._hand_over_all(resize)
                books.enter("stop", time.monotonic())
                await asyncio.gather(*(fleet.remove(index) for index in resize.stop))
                fleet.share_out()
        except asyncio.CancelledError as e:
            failure = str(e) or "it was cancelled"
        except PlanariaError as e:
            failure = str(e)
        except Exception as e:
            logger.exception("resize %s failed", resize.id)
            failure = f"{type(e).__name__}: {e}"
        if failure:
            books.enter("roll back", time.monotonic())
            await self._undo(resize)
            fleet.set_kinds(before)
            books.roll_back(failure, time.monotonic())
            logger.warning("resize %s rolled back: %s", resize.id, failure)
            return
        books.commit(time.monotonic())
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in resize.phases.items())
        logger.info("resize %s committed: %d engines; seconds: %s", resize.id, resize.after, parts)

    async def _grow(self, resize: Resize) -> None:
        fleet = self.fleet
        self.resizes.enter("start", time.monotonic())
        if fleet.hosts is not None:
            await asyncio.to_thread(fleet.hosts.grow, resize.start)
        for index in resize.start:
            if index in fleet.members:  # it was given up
                await fleet.remove(index)
        fleet.share_out(resize.after)  # first: those that run would else wait for those that load
        keepers = [fleet.add(index, resize.after) for index in resize.start]
        await asyncio.gather(*(keeper.start() for keeper in keepers))
        await all_ready(keepers)
        for keeper in keepers:
            if not fleet.dispatcher.joined(keeper.index):  # it had to, meanwhile
                fleet.dispatcher.admit(keeper.engine)
        self.resizes.enter("balance", time.monotonic())
        for keeper in keepers:
            resize.moved += await fleet.mover.take_share(keeper.engine)

    async def _drain(self, resize: Resize, timeout: float) -> None:
        """No new work for those that leave; what they have may finish."""
        fleet = self.fleet
        self.resizes.enter("drain", time.monotonic())
        fleet.dispatcher.close_to_new_work(resize.stop)
        await fleet.mover.emptied(resize.stop, timeout)

    async def _hand_over_all(self, resize: Resize) -> None:
        """Raises PlanariaError when nobody can take over."""
        self.resizes.enter("migrate", time.monotonic())
        for index in resize.stop:
            resize.moved += await self.fleet.mover.hand_over_all(self.fleet.members[index].engine)

    async def _undo(self, resize: Resize) -> None:
        fleet = self.fleet
        joined = fleet.dispatcher.joined
        fleet.dispatcher.close_to_new_work([index for index in resize.stop if index in fleet.members], False)
        await asyncio.gather(
            *(fleet.remove(index) for index in resize.start if index in fleet.members and not joined(index))
        )
        fleet.share_out()
