"""Several engines as one. Implements `planaria.wire.EngineClient`: who uses it need not know how many there are.

Each engine is a process of its own under its own supervisor. A sequence is one engine's at a time; when that engine
ends or its ranks begin anew, the sequence goes on in another at once, with the tokens it has: computing them again
takes less time than another process or epoch. It does so once without having got a token: the request may be what
kills engines, and then it stays where the supervisor can find that out.

An engine calls each stay of a sequence by another name, so nothing that one has still to say of a sequence that has
left it is ever taken for news.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from planaria.config.data_parallel import engine_config, sharers
from planaria.config.machine import accelerator_ids
from planaria.config.options import EngineConfig
from planaria.core.resize import Resize
from planaria.core.router import Router
from planaria.errors import PlanariaError
from planaria.server.engine_client import EngineHandle, EngineProcess
from planaria.server.fleet_resize import Resizer, hand_over_all, take_share
from planaria.server.open_sequence import Open
from planaria.server.placed import Check, Plan
from planaria.server.supervisor import SupervisedEngine, added, all_ready, error_of
from planaria.types import Delta, FinishReason
from planaria.wire import (
    Dead,
    EngineFacts,
    EngineState,
    EngineStats,
    ExpertLoads,
    FromEngine,
    Phase,
    ProcessInfo,
    Recovery,
    Reshaped,
    Sink,
    StartUpNews,
    Submit,
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
        self._ending: set[int] = set()  # of them, those whose process is told to end
        self.closing = False  # no engine is added any more
        self.resizer = Resizer(self)
        self._open: dict[str, Open] = {}
        self._taken = Counter[int]()  # sequences that came to an engine from another
        self._before = EngineStats()  # what the engines that have left have counted
        self.replacing: set[int] = set()  # engines whose process was told to end
        self._tasks: set[asyncio.Task[Any]] = set()
        self._left = asyncio.Event()  # an engine that leaves has a sequence less
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
            self._rescue_all()

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
        self._ending.add(index)
        if self.joined(index):
            self._rescue(engine, certainly=True)
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
        self._ending.discard(index)
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
            await self.hand_over_all(engine)
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
            for open in self.of(engine):
                open.lost = engine.had(open.name) and not engine.on_purpose
        if engine.state == "ready":
            self._tell_facts()
            if not was_up:
                self._in_background(take_share(self, engine))  # of what is open here
        self._rescue_all()
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

    # -- sequences

    def submit(self, message: Submit, sink: Sink) -> None:
        if self.dead is not None:
            sink(Delta(message.id, len(message.output), [], FinishReason.ERROR, error=self.dead.message))
            return
        engine = self._up(message) or self._least_busy()
        if engine is None:  # the others were given up while the last one leaves
            error = "no engine is left to go on with it: all were given up, but for those that are leaving; try again"
            sink(Delta(message.id, len(message.output), [], FinishReason.ERROR, error=error))
            return
        open = self._open[message.id] = Open(self, message, sink)
        self._send(open, engine, message)

    def _up(self, message: Submit) -> SupervisedEngine | None:
        """The best of those that can admit."""
        history = [*message.prompt, *message.output] if message.output else message.prompt
        index = self.router.choose(history, message.max_tokens - len(message.output))
        return self.members[int(index)] if index is not None else None

    def _least_busy(self) -> SupervisedEngine | None:
        """Nobody is up: who will have the least to do when it is. One that has not joined yet must, if all others were
        given up; one that is to leave, if there is no other at all: then it can't."""

        def cost(engine: SupervisedEngine) -> tuple[bool, bool, int]:
            return engine.index in self.leaving, not self.joined(engine.index), len(engine.journal)

        able = [engine for engine in self.members.values() if engine.dead is None and engine.index not in self._ending]
        found = min(able, key=cost, default=None)
        if found is not None and not self.joined(found.index):
            self.admit(found.index)
        return found

    def _send(self, open: Open, engine: SupervisedEngine, message: Submit) -> None:
        open.engine, open.lost = engine, False
        known = len(message.output)
        self.router.sent(open.id, engine.index, len(message.prompt) + known, message.max_tokens - known)
        engine.submit(message, open.take)

    def cancel(self, request_id: str) -> None:
        open = self._open.get(request_id)
        if open is not None:
            self.ended(open)
            open.engine.cancel(open.name)

    def ended(self, open: Open) -> None:
        self._open.pop(open.id, None)
        open.heard()
        self.router.ended(open.id)
        if open.engine.index in self.leaving:
            self._left.set()

    def has(self, open: Open) -> bool:
        """Is it still open?"""
        return self._open.get(open.id) is open

    def of(self, engine: SupervisedEngine) -> list[Open]:
        """An engine's open sequences, the oldest first."""
        return [self._open[id] for id in self.router.requests(engine.index)] if self.joined(engine.index) else []

    def best_for(self, open: Open) -> SupervisedEngine | None:
        """Another engine that can go on with it now."""
        entry = open.engine.journal.get(open.name)
        other = self._up(entry.resubmit()) if entry is not None else None
        return other if other is not open.engine else None

    def _rescue_all(self) -> None:
        """What waits for an engine that is not up may go on in one that is."""
        for engine in self.members.values():
            if engine.state != "ready":
                self._rescue(engine)

    def _rescue(self, engine: SupervisedEngine, *, certainly: bool = False) -> None:
        """An engine is not up: what it has goes on elsewhere, if it may and can. certainly: there is no way back."""
        certainly = certainly or engine.dead is not None
        for open in self.of(engine):
            if open.stuck and engine.state != "ready":
                continue
            other = self.best_for(open) or (self._least_busy() if certainly else None)
            if other is not None and other is not engine:
                self.move(open, other)

    def move(self, open: Open, engine: SupervisedEngine) -> None:
        """Have another engine go on with a sequence."""
        entry = open.engine.give(open.name)
        assert entry is not None
        if open.lost:  # one that only waited there can't be what was in the way
            open.tried = len(entry.tokens)
        open.moves += 1
        open.name = f"{open.id}~{open.moves}"
        self._taken[engine.index] += 1
        self._send(open, engine, msgspec.structs.replace(entry.resubmit(), id=open.name))
        self._left.set()

    async def hand_over_all(self, engine: SupervisedEngine) -> int:
        """As `fleet_resize.hand_over_all`."""
        return await hand_over_all(self, engine)

    async def take_share(self, engine: SupervisedEngine) -> int:
        """As `fleet_resize.take_share`."""
        return await take_share(self, engine)

    async def emptied(self, indices: Iterable[int], timeout: float) -> None:
        """Wait until engines that leave have no sequence any more, for so many seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while any(self.of(self.members[index]) for index in indices):
                    self._left.clear()
                    await self._left.wait()

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
        busy = [engine.last_progress for engine in self.members.values() if len(engine.journal)]
        return min(busy, default=time.monotonic())

    def engines(self) -> list[EngineState]:
        loads = self.router.loads()
        return [
            EngineState(
                index, engine.state, engine.engine.pid if engine.engine is not None else 0,
                engine.facts.layout if engine.facts is not None else "",
                engine.facts.ranks if engine.facts is not None else [], engine.stats, len(engine.journal),
                loads.get(index, 0), index in self.leaving, self._taken[index], self.check.found.get(index, []),
            )
            for index, engine in sorted(self.members.items())
        ]  # fmt: skip

    async def resize(self, id: str, size: int, drain_timeout: float) -> Resize:
        return await self.resizer.resize(id, size, drain_timeout)

    async def reshape(self, tp: int, pp: int) -> list[Reshaped]:
        return await self.resizer.reshape(tp, pp)

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
