"""Several engines as one. Implements `planaria.wire.EngineClient`: who uses it need not know how many there are.

Each engine is a process of its own under its own supervisor. Here is which of them there are; which of them has which
sequence is the dispatcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from planaria.config.data_parallel import engine_config, sharers
from planaria.config.machine import accelerator_ids
from planaria.config.options import EngineConfig
from planaria.core.resize import Resize
from planaria.core.router import Router
from planaria.errors import PlanariaError
from planaria.server.dispatcher import Dispatcher
from planaria.server.engine_client import EngineHandle, EngineProcess
from planaria.server.fleet_resize import Resizer
from planaria.server.placed import Check, Plan
from planaria.server.supervisor import SupervisedEngine, added, all_ready, error_of
from planaria.wire import (
    Dead,
    EngineFacts,
    EngineResized,
    EngineState,
    EngineStats,
    ExpertLoads,
    FromEngine,
    Phase,
    ProcessInfo,
    Recovery,
    StartUpNews,
)

logger = logging.getLogger("planaria.server")

SHUTDOWN = "the server is shutting down"
LOOK = 2.0  # seconds between looks for a place
WHO_ELSE = 0.5  # seconds in which a signal to the whole process group reaches this process too


class Hosts(Protocol):
    """Places for engines on several nodes. Calls block. May be a Plan too."""

    def open(self, size: int) -> None:
        """Places for the first `size` engines. Raises ConfigError, CapacityError."""
        ...

    def grow(self, engines: Iterable[int]) -> None:
        """Places for those of these that have none, or for none of them. Raises as `open`."""
        ...

    def room(self, engine: int) -> bool:
        """Is there a place for one that has none?"""
        ...

    def release(self, engine: int) -> None:
        """It has ended, and doesn't come again."""
        ...

    def close(self) -> None: ...


class Mover(Protocol):
    """Who moves sequences: this process's dispatcher, or those of all API processes."""

    async def hand_over_all(self, engine: SupervisedEngine) -> int:
        """See Dispatcher."""
        ...

    async def take_share(self, engine: SupervisedEngine) -> int:
        """See Dispatcher."""
        ...

    async def emptied(self, indices: Iterable[int], timeout: float) -> None:
        """See Dispatcher."""
        ...


Make = Callable[[EngineConfig, Callable[[FromEngine], None]], EngineHandle]


class Fleet:
    """Start with `await start()`; `on_progress` hears how the first start goes. make: gives an engine; hosts: keeps the
    places for engines that are not processes of this node."""

    supervise: type[SupervisedEngine] = SupervisedEngine

    def __init__(
        self, config: EngineConfig, on_progress: Callable[[StartUpNews], None] | None = None,
        make: Make = EngineProcess, hosts: Hosts | None = None,
    ) -> None:  # fmt: skip
        self.config, self.on_progress, self.make, self.hosts = config, on_progress, make, hosts
        self.facts: EngineFacts | None = None
        self.dead: Dead | None = None
        self.on_recovery: Callable[[Recovery], None] = lambda message: None
        self.on_settled: Callable[[int], None] = lambda index: None
        self.router = Router()
        self.check = Check()
        self.members: dict[int, SupervisedEngine] = {}  # by number
        self.leaving: set[int] = set()  # those that get no new work
        self.ending: set[int] = set()  # of them, those whose process is told to end
        self.closing = False  # no engine is added any more
        self.resizer = Resizer(self)
        self.dispatcher = Dispatcher(self)
        self.submit, self.cancel = self.dispatcher.submit, self.dispatcher.cancel
        self.mover: Mover = self.dispatcher
        self._before = EngineStats()  # what the engines that have left have counted
        self.replacing: set[int] = set()  # engines whose process was told to end
        self._tasks: set[asyncio.Task[Any]] = set()
        for index in self.first():
            self.add(index, len(config.parallel.replicas))

    def first(self) -> Iterable[int]:
        """The engines to begin with."""
        return self.config.parallel.replicas

    # -- engines

    def add(self, index: int, size: int) -> SupervisedEngine:
        """Another engine, one of `size`, not yet started. It gets work once it is up and `admit` was called."""
        here = self.config.parallel.distributed_executor_backend in ("uni", "mp")  # else ranks are placed by others
        accelerators = accelerator_ids() if here and self.config.device.device == "cuda" else []
        config = engine_config(self.config, index, size, accelerators)
        engine = self.supervise(config, self._news(index), self.make)
        engine.on_recovery = lambda message: self.on_recovery(message)
        engine.on_change = functools.partial(self._changed, engine)
        engine.on_leaving = functools.partial(self._told_to_leave, engine)
        engine.on_placed = functools.partial(self.check.placed, index)
        engine.on_step = lambda: self.router.snapshot(index, engine.stats)
        self.members[index] = engine
        return engine

    def _news(self, index: int) -> Callable[[StartUpNews], None] | None:
        """Start-up news, with ranks counted over all engines."""
        tell, first = self.on_progress, index * self.config.parallel.world_size
        if tell is None or not index:
            return tell

        def renumbered(news: StartUpNews) -> None:
            if isinstance(news, Phase):
                tell(msgspec.structs.replace(news, rank=first + news.rank))

        return renumbered

    def admit(self, index: int) -> None:
        """From now on this engine gets work."""
        engine = self.members[index]
        capacity = engine.facts.num_blocks * engine.facts.block_size if engine.facts is not None else None
        self.router.join(index, capacity)
        self.router.set_up(index, engine.state == "ready")
        self._tell_facts()
        if engine.state == "ready":
            self.dispatcher.rescue_all()

    def joined(self, index: int) -> bool:
        """Has this engine been given to the router?"""
        return index in self.router

    def close_to_new_work(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.leaving.add(index)
            if self.joined(index):
                self.router.drain(index)

    def open_to_new_work(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.leaving.discard(index)
            if self.joined(index):
                self.router.drain(index, False)

    async def remove(self, index: int) -> None:
        """End an engine and wait for it. What it still has goes on elsewhere."""
        engine = self.members[index]
        self.close_to_new_work([index])
        self.ending.add(index)
        if self.joined(index):
            self.dispatcher.rescue(engine, certainly=True)
        await engine.close()
        if self.hosts is not None:
            await asyncio.to_thread(self.hosts.release, index)
        if self.joined(index):
            self.router.leave(index)
        self._before = _sum([self._before, engine.stats])
        self.on_settled(index)
        del self.members[index]
        self.check.forget(index)
        self._end_with_the_last()
        self.leaving.discard(index)
        self.ending.discard(index)
        self._tell_facts()

    async def start(self) -> None:
        """Start all engines; `ready` says when they can admit. Raises ConfigError, CapacityError where they are to be
        on other nodes and these have no room."""
        if self.hosts is not None:
            await asyncio.to_thread(self.hosts.open, len(self.members))
            if isinstance(self.hosts, Plan):
                self.check.plan = self.hosts
        await asyncio.gather(*(engine.start() for engine in self.members.values()))

    async def ready(self) -> EngineFacts:
        engines = list(self.members.values())
        try:
            await all_ready(engines)
        except PlanariaError as e:
            # All or nothing: the first that can't come up is the end of all.
            cause = next((engine.dead for engine in engines if engine.dead is not None), None)
            self.dead = self.dead or cause or Dead("error", str(e))
            raise error_of(self.dead) from None
        for engine in engines:
            if not self.joined(engine.index):
                self.admit(engine.index)
        assert self.facts is not None
        return self.facts

    def _told_to_leave(self, engine: SupervisedEngine) -> None:
        """Somebody wants an engine's process to end. Another takes its place: the fleet's size is not the signal's
        matter."""
        if engine.index not in self.replacing:
            self.replacing.add(engine.index)
            self._in_background(self._replace(engine), lambda task: self.replacing.discard(engine.index))

    def _in_background(
        self, work: Coroutine[Any, Any, Any], then: Callable[[asyncio.Task[Any]], None] = lambda task: None
    ) -> None:
        """Until it is done, or `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(then)

    async def _replace(self, engine: SupervisedEngine) -> None:
        await asyncio.sleep(WHO_ELSE)
        await self.resizer.idle()
        if self.closing or engine.index not in self.members:
            return
        logger.info("engine %d was told to end: another takes its place", engine.index)
        self.close_to_new_work([engine.index])
        try:
            await self.mover.hand_over_all(engine)
        except PlanariaError as e:
            logger.info("%s: they wait for its successor", e)
        finally:
            engine.restart()
            self.open_to_new_work([engine.index])

    def _tell_facts(self) -> None:
        for index, engine in self.members.items():
            if engine.facts is not None:
                self.check.look(index, engine.facts)
        known = [engine.facts for _, engine in sorted(self.members.items()) if engine.facts is not None]
        if not known:
            return
        first, few = known[0], len(known) == 1
        self.facts = msgspec.structs.replace(
            first, num_blocks=min(facts.num_blocks for facts in known),
            layout=first.layout if few else f"dp={len(known)} {first.layout}",
            ranks=[pid for facts in known for pid in facts.ranks],
            places=[place for facts in known for place in facts.places],
        )  # fmt: skip

    def _changed(self, engine: SupervisedEngine) -> None:
        """An engine's state is another: what waits for one that is not up may go on in one that is."""
        if not self.joined(engine.index):
            return  # it has not joined yet, or has left
        if engine.state in ("ready", "ended"):
            self.on_settled(engine.index)
        was_up = self.router.is_up(engine.index)
        self.router.set_up(engine.index, engine.state == "ready")
        if was_up and engine.state != "ready":
            for stream in self.dispatcher.of(engine):
                stream.lost = engine.queue.had(stream) and not engine.on_purpose
        if engine.state == "ready":
            self._tell_facts()
            if not was_up:
                self._in_background(self.dispatcher.take_share(engine))  # of what is open here
        self.dispatcher.rescue_all()
        self._end_with_the_last()
        if engine.lacks_place and self.hosts is not None:
            self._in_background(self._bring_back(engine, self.hosts))

    async def _bring_back(self, engine: SupervisedEngine, hosts: Hosts) -> None:
        """It was given up because there was no place for it: when there is one it begins again."""
        while True:
            await asyncio.sleep(LOOK)
            if self.closing or self.members.get(engine.index) is not engine:
                return
            with contextlib.suppress(PlanariaError, TimeoutError):
                if not self.resizer.busy and await asyncio.to_thread(hosts.room, engine.index):
                    break
        if self.members.get(engine.index) is engine and not self.closing:
            logger.info("there is a place for engine %d again", engine.index)
            engine.revive()

    def _end_with_the_last(self) -> None:
        """Without an engine there is nobody who could go on."""
        causes = [engine.dead for engine in self.members.values()]
        if causes and all(cause is not None for cause in causes):
            self.dead = self.dead or causes[-1]

    # -- for people

    @property
    def stats(self) -> EngineStats:
        engines = list(self.members.values())
        total = _sum([self._before, *(engine.stats for engine in engines)])
        usage = sum(engine.stats.kv_usage for engine in engines) / max(1, len(engines))
        return msgspec.structs.replace(total, kv_usage=usage)

    @property
    def last_progress(self) -> float:
        """Of the engine that has not moved for the longest."""
        busy = [engine.last_progress for engine in self.members.values() if len(engine.queue)]
        return min(busy, default=time.monotonic())

    def engines(self) -> list[EngineState]:
        loads = self.router.loads()
        return [
            EngineState(
                index, engine.state, engine.engine.pid if engine.engine is not None else 0,
                engine.facts.layout if engine.facts is not None else "",
                engine.facts.ranks if engine.facts is not None else [], engine.stats, len(engine.queue),
                loads.get(index, 0), index in self.leaving, self.dispatcher.taken[index],
                self.check.found.get(index, []),
            )
            for index, engine in sorted(self.members.items())
        ]  # fmt: skip

    async def resize(self, id: str, size: int, drain_timeout: float) -> Resize:
        return await self.resizer.resize(id, size, drain_timeout)

    async def resize_engines(self, tp: int, pp: int) -> list[EngineResized]:
        return await self.resizer.resize_engines(tp, pp)

    def resizes(self) -> list[Resize]:
        return list(self.resizer.resizes)

    def drain(self) -> None:
        if not self.closing:
            self.closing = True
            self.resizer.cancel(SHUTDOWN)

    def share_out(self, size: int | None = None) -> None:
        """Deal each node's cores over its own of so many engines, or of those that there are now."""
        if self.config.device.auto_threads:
            for index, engine in self.members.items():
                engine.share(sharers(self.config.parallel, index, size or len(self.members)))

    async def report(self) -> list[ProcessInfo]:
        engines = sorted(self.members.items())
        found = await asyncio.gather(*(engine.report() for _, engine in engines))
        if list(self.members) == [0]:
            return found[0]
        return [
            msgspec.structs.replace(row, coordinates={"dp": index, **row.coordinates})
            for (index, _), rows in zip(engines, found, strict=True)
            for row in rows
        ]

    async def experts(self) -> dict[int, ExpertLoads]:
        members = sorted(self.members.items())
        found = await asyncio.gather(*(engine.experts() for _, engine in members))
        return {index: loads for (index, _), loads in zip(members, found, strict=True) if loads is not None}

    async def close(self) -> None:
        """End all engines and wait for them. Idempotent."""
        self.drain()
        await self.resizer.abandon(SHUTDOWN)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(engine.close() for engine in self.members.values()))
        if self.hosts is not None:
            await asyncio.to_thread(self.hosts.close)


def _sum(parts: Iterable[EngineStats]) -> EngineStats:
    """Added up; of epochs the highest; kv_usage of the last."""
    total = EngineStats()
    for stats in parts:
        total = msgspec.structs.replace(
            added(total, stats), running=total.running + stats.running, waiting=total.waiting + stats.waiting,
            epoch=max(total.epoch, stats.epoch),
        )  # fmt: skip
    return total
