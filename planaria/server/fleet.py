"""The engines of a server: which processes there are, on which nodes, how many. Each is kept by an `EngineKeeper`.

Which of them has which sequence is the dispatcher's; of a server of several API processes each of those has one, and
the one here has none (`root.py` says what they are told).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from planaria import preload
from planaria.checkpoint.identity import weights_version
from planaria.checkpoint.shared import SharedWeights
from planaria.config.data_parallel import engine_config, sharers
from planaria.config.machine import accelerator_ids
from planaria.config.options import EngineConfig
from planaria.config.resolve import other_tensors, other_weights
from planaria.core.resize import deal_kinds
from planaria.errors import PlanariaError
from planaria.hosts.device_keeper import GivenKeepers, OwnedKeepers, keepers_of_all
from planaria.hosts.device_memory import Keepers
from planaria.hosts.local import LocalHost
from planaria.hosts.weights import WeightsMemory
from planaria.server.background import Background, in_thread
from planaria.server.dispatcher import Dispatcher
from planaria.server.engine import Engine
from planaria.server.engine_client import EngineProcess
from planaria.server.fleet_resize import Resizer
from planaria.server.keeper import EngineKeeper, Make, all_ready, experts_at
from planaria.server.loras import LoraRegistry
from planaria.server.placed import Plan
from planaria.server.wishes import update_weights
from planaria.wire import Dead, ExpertLoads, Phase, ProcessInfo, Slept, StartUpNews, WeightsUpdated

logger = logging.getLogger("planaria.server")

SHUTDOWN = "the server is shutting down"
LOOK = 2.0  # seconds between looks for a place
WHO_ELSE = 0.5  # seconds in which a signal to the whole process group reaches this process too


class Hosts(Protocol):
    """Places for engines on several nodes. Calls block. May be a Plan too."""

    def open(self, size: int) -> None:
        """Places for the first `size` engines. Raises ConfigError, CapacityError."""

    def grow(self, engines: Iterable[int]) -> None:
        """Places for those of these that have none, or for none of them. Raises as `open`."""

    def room(self, engine: int) -> bool:
        """Is there a place for one that has none?"""

    def release(self, engine: int) -> None:
        """It has ended, and doesn't come again."""

    def close(self) -> None: ...


class Mover(Protocol):
    """Who moves sequences: this process's dispatcher, or those of all API processes."""

    async def hand_over_all(self, engine: Engine) -> int:
        """See Dispatcher."""

    async def take_share(self, engine: Engine) -> int:
        """See Dispatcher."""

    async def emptied(self, indices: Iterable[int], timeout: float) -> None:
        """See Dispatcher."""

    async def leave(self, engine: Engine) -> None:
        """See Dispatcher."""


class Fleet:
    """Start with `await start()`; `on_progress` hears how the first start goes. make: gives an engine; hosts: keeps the
    places for engines that are not processes of this node; shared_in, names: see EngineKeeper; weights: memory that
    there is for them; keepers: that have it, on devices. Called in one event loop."""

    def __init__(
        self, config: EngineConfig, on_progress: Callable[[StartUpNews], None] | None = None,
        make: Make = EngineProcess, hosts: Hosts | None = None, shared_in: str | None = None,
        names: str | None = None, weights: WeightsMemory | None = None, keepers: GivenKeepers | None = None,
    ) -> None:  # fmt: skip
        self.local: LocalHost | None = None  # of this node, where engines are processes of it
        if make is EngineProcess:
            self.local = LocalHost(devices=(), forks={preload.ENGINE: preload.of_an_engine(config)})
            make = functools.partial(EngineProcess, host=self.local)
        self.config, self.on_progress, self.make, self.hosts = config, on_progress, make, hosts
        self.shared_in, self.names = shared_in, names
        self.keepers: OwnedKeepers | GivenKeepers | None = keepers  # of this node's devices, for all engines here
        if weights is None and self.local is not None:
            self.keepers = keepers_of_all(config.device.platform, accelerator_ids())
        kept, on_host = Keepers(self.keepers.keeping) if self.keepers else None, config.device.platform.on_host
        self.weights = weights or (WeightsMemory.make(kept) if on_host or kept is not None else None)
        self.dispatcher = Dispatcher(config.cache.enable_prefix_caching, self, LoraRegistry.of(config))
        self.mover: Mover = self.dispatcher
        self.members: dict[int, EngineKeeper] = {}  # by number
        self.closing = False  # no engine is added any more
        self.resizer = Resizer(self)
        self.updating = asyncio.Lock()
        self.shared_weights: SharedWeights | None = None  # that are in force, if they are none of a folder
        self.began = weights_version(config.checkpoint.get("files", ()))  # which weights those of `config` are
        self.others: Callable[[], list[ProcessInfo]] = list  # processes that are no engine's
        self.replacing: set[int] = set()  # engines whose process was told to end
        self._background = Background()
        parallel = config.parallel
        self.kinds: dict[int, str] = {}  # of engines, by number, where there are two
        if parallel.splits_prefill:
            self.kinds = deal_kinds(parallel.replicas, parallel.prefill_engines, {})
        for index in parallel.replicas:
            self.add(index, len(parallel.replicas))

    def add(self, index: int, size: int) -> EngineKeeper:
        """Another engine, one of `size`, not yet started. It gets work once it is up and was admitted."""
        here = self.config.parallel.distributed_executor_backend in ("uni", "mp")  # else ranks are placed by others
        accelerators = accelerator_ids() if here and not self.config.device.platform.on_host else []
        config = engine_config(self.config, index, size, accelerators)
        keeper = EngineKeeper(config, self._news(index), self.make, self.shared_in, self.weights, self.names)
        keeper.on_recovery = lambda message: self.dispatcher.on_recovery(message)
        keeper.on_process = lambda: self.dispatcher.on_changed()
        keeper.on_leaving = functools.partial(self._told_to_leave, keeper)
        keeper.on_placed = functools.partial(self.dispatcher.check.placed, index)
        keeper.on_no_place = lambda: self._background.start(self._bring_back(keeper))
        self.members[index], keeper.engine.kind = keeper, self.kinds.get(index, "")
        self.dispatcher.add(keeper.engine)
        return keeper

    def set_kinds(self, kinds: Mapping[int, str]) -> None:
        """What engines are for from now on, also those that will be added."""
        self.kinds = dict(kinds)
        self.dispatcher.hand_overs.set_kinds(kinds)

    def _news(self, index: int) -> Callable[[StartUpNews], None] | None:
        """Start-up news, with ranks counted over all engines."""
        tell, first = self.on_progress, index * self.config.parallel.world_size
        if tell is None or not index:
            return tell

        def renumbered(news: StartUpNews) -> None:
            if isinstance(news, Phase):
                tell(msgspec.structs.replace(news, rank=first + news.rank))

        return renumbered

    async def remove(self, index: int) -> None:
        """End an engine and wait for it. What it still has goes on elsewhere."""
        keeper = self.members[index]
        self.dispatcher.close_to_new_work([index])
        await self.mover.leave(keeper.engine)
        await keeper.close()
        if self.hosts is not None:
            await asyncio.to_thread(self.hosts.release, index)
        del self.members[index]
        self.dispatcher.forget(keeper.engine)

    async def prepare(self) -> None:
        """Have all there that engines of this node can have before there is room for them."""
        await asyncio.gather(*(keeper.prepare() for keeper in self.members.values()))

    async def start(self) -> None:
        """Start all engines; the dispatcher's `ready` says when they can admit. Raises ConfigError, CapacityError where
        they are to be on other nodes and these have no room."""
        if self.hosts is not None:
            await asyncio.to_thread(self.hosts.open, len(self.members))
            if isinstance(self.hosts, Plan):
                self.dispatcher.check.plan = self.hosts
        keepers = list(self.members.values())
        await asyncio.gather(*(keeper.start() for keeper in keepers))
        self._background.start(self.admit(keepers))

    async def admit(self, keepers: list[EngineKeeper]) -> None:
        """All or nothing: the first that can't come up is the end of all."""
        try:
            await all_ready(keepers)
        except PlanariaError as e:
            cause = next((keeper.engine.dead for keeper in keepers if keeper.engine.dead is not None), None)
            self.dispatcher.die(cause or Dead("error", str(e)))
            return
        for keeper in keepers:
            if not self.dispatcher.joined(keeper.index):
                self.dispatcher.admit(keeper.engine)

    def _told_to_leave(self, keeper: EngineKeeper) -> None:
        """Somebody wants an engine's process to end. Another takes its place: the fleet's size is not the signal's
        matter."""
        if keeper.index not in self.replacing:
            self.replacing.add(keeper.index)
            task = self._background.start(self._replace(keeper))
            task.add_done_callback(lambda task: self.replacing.discard(keeper.index))

    async def _replace(self, keeper: EngineKeeper) -> None:
        await asyncio.sleep(WHO_ELSE)
        await self.resizer.idle()
        if self.closing or keeper.index not in self.members:
            return
        logger.info("engine %d was told to end: another takes its place", keeper.index)
        self.dispatcher.close_to_new_work([keeper.index])
        try:
            await self.mover.hand_over_all(keeper.engine)
        except PlanariaError as e:
            logger.info("%s: they wait for its successor", e)
        finally:
            keeper.restart()
            self.dispatcher.close_to_new_work([keeper.index], False)

    async def _bring_back(self, keeper: EngineKeeper) -> None:
        """It was given up because there was no place for it: when there is one it begins again."""
        hosts = self.hosts
        while hosts is not None and self.dispatcher.joined(keeper.index):
            await asyncio.sleep(LOOK)
            if self.closing or self.members.get(keeper.index) is not keeper:
                return
            with contextlib.suppress(PlanariaError, TimeoutError):
                if not self.resizer.busy and await asyncio.to_thread(hosts.room, keeper.index):
                    if self.members.get(keeper.index) is keeper and not self.closing:
                        logger.info("there is a place for engine %d again", keeper.index)
                        keeper.revive()
                    return

    def drain(self) -> None:
        """No new engines will come: the front end shuts down."""
        if not self.closing:
            self.closing = True
            self.resizer.cancel(SHUTDOWN)

    def share_out(self, size: int | None = None) -> None:
        """Deal each node's cores over its own of so many engines, or of those that there are now."""
        if self.config.device.auto_threads:
            for index, keeper in self.members.items():
                keeper.share(sharers(self.config.parallel, index, size or len(self.members)))

    async def report(self) -> list[ProcessInfo]:
        """Of each engine its processes; what can be said without the engine where it doesn't answer."""
        keepers = sorted((index, keeper) for index, keeper in self.members.items() if not keeper.lent)
        found = await asyncio.gather(*(keeper.report() for _, keeper in keepers))
        alone = list(self.members) == [0]
        return self.others() + [
            msgspec.structs.replace(
                row,
                engine=index,
                coordinates=row.coordinates if alone else {"dp": index, **row.coordinates},
                kind=self.kinds.get(index, "") if row.role == "engine" else "",
            )  # fmt: skip
            for (index, _), rows in zip(keepers, found, strict=True)
            for row in rows
        ]

    async def sleep(self, level: int | None) -> dict[int, Slept]:
        """All engines at once, by number. See wire.Sleep."""
        keepers = sorted((n, keeper) for n, keeper in self.members.items() if keeper.engine.dead is None)
        found = await asyncio.gather(*(keeper.wishes.sleep(level) for _, keeper in keepers))
        return {index: slept for (index, _), slept in zip(keepers, found, strict=True)}

    def begin_with(self, path: str, shared: SharedWeights | None, number: int) -> None:
        """Before an engine is started: these weights are in force, as if they had been the `number`-th to come. Raises
        ConfigError, ModelError."""
        self.shared_weights = shared
        checkpoint = other_weights(self.config, path) if shared is None else other_tensors(self.config, shared)
        self.config = msgspec.structs.replace(self.config, checkpoint=checkpoint, weights_number=number)
        for keeper in self.members.values():
            keeper.config = msgspec.structs.replace(keeper.config, checkpoint=checkpoint, weights_number=number)

    async def update_weights(self, path: str, handle: str = "", *, keep_kv: bool = False) -> dict[int, WeightsUpdated]:
        """One engine after the other, so that the others serve meanwhile; all of them, or none. See wire.UpdateWeights.
        Raises ConfigError, ModelError."""
        shared = SharedWeights.held(handle) if handle else None
        before, number = self.config, self.config.weights_number + 1
        asked = (other_weights, before, path) if shared is None else (other_tensors, before, shared)
        checkpoint = await asyncio.to_thread(*asked)
        try:
            return await self._updated(before, number, checkpoint, keep_kv)
        finally:
            if self.config.checkpoint is checkpoint:
                self.shared_weights = shared  # and those of before are let go of

    async def _updated(
        self, before: EngineConfig, number: int, checkpoint: dict[str, Any], keep_kv: bool
    ) -> dict[int, WeightsUpdated]:  # fmt: skip
        self.config = msgspec.structs.replace(before, checkpoint=checkpoint, weights_number=number)
        found: dict[int, WeightsUpdated] = {}
        for index, keeper in sorted(self.members.items()):
            if keeper.engine.dead is None:
                found[index] = await update_weights(keeper, number, checkpoint, keep_kv)
                if found[index].error:
                    self.config = msgspec.structs.replace(
                        self.config, checkpoint=before.checkpoint, weights_number=number + 1
                    )
                    for done in list(found)[:-1]:
                        await update_weights(self.members[done], number + 1, before.checkpoint)
                    break
        return found

    async def experts(self) -> dict[int, ExpertLoads]:
        """Experts' load and places, of each engine that records it and answers, by number."""
        keepers = sorted(self.members.items())
        found = await asyncio.gather(*(experts_at(keeper) for _, keeper in keepers))
        return {index: loads for (index, _), loads in zip(keepers, found, strict=True) if loads is not None}

    def leave_keepers(self) -> None:
        """Another process has them."""
        if self.keepers is not None:
            self.keepers.leave()

    async def close(self) -> None:
        """End all engines and wait for them. Idempotent."""
        self.drain()
        await self.resizer.abandon(SHUTDOWN)
        self._background.cancel()
        self.dispatcher.close()
        await asyncio.gather(*(keeper.close() for keeper in self.members.values()))
        if self.hosts is not None:
            await in_thread(self.hosts.close)
        if self.local is not None:
            await in_thread(self.local.close)
        if self.keepers is not None:
            await in_thread(self.keepers.close)
