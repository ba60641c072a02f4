"""An engine of a fleet as an actor on a Ray cluster (D1). Calls to Ray block, so they are made from threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from planaria.config.options import EngineConfig
from planaria.env import environment
from planaria.errors import CapacityError, PlanariaError
from planaria.executor.link.keys import Keys
from planaria.logs import current_level
from planaria.node import Memories, home
from planaria.server.far_engine import FarEngine, listed
from planaria.wire import FromEngine, Leaving, Report

if TYPE_CHECKING:
    from planaria.executor.ray.child import RayChild
    from planaria.executor.ray.fleet import RayHosts
    from planaria.executor.ray.lane_hosts import LaneHosts

logger = logging.getLogger("planaria.server")

ENTRY = "planaria.engine_process:RemoteEngine"
DRIFT = 5.0  # seconds between looks for another place
COME_UP = 120.0  # seconds for an actor to come up, and again to listen
SETTINGS = ("PLANARIA_RAY_FRACTION", "PLANARIA_RAY_WAIT")  # of the engine's own ranks


class RayEngine(FarEngine):
    """In the group that `hosts` has for it."""

    shares_memory = True  # where it comes up on this machine

    def __init__(self, hosts: RayHosts | LaneHosts, config: EngineConfig, hear: Callable[[FromEngine], None]) -> None:
        super().__init__(config, hear)
        self.hosts = hosts
        self._drifting: asyncio.Task[None] | None = None
        self._stop = threading.Event()  # to wait for a place

    async def start(self) -> None:
        """Raises CapacityError, PlanariaError."""
        child = await asyncio.to_thread(self._begin)
        self.pid, self.local = child.place.pid, child.place.home == home()
        keys = Keys.generate(1)
        told = self._config(), listed(keys), child.place.address, current_level(), self._memories(child)
        child.tell(msgspec.msgpack.encode(told))
        try:
            async with asyncio.timeout(COME_UP):
                while not child.said:
                    if child.ended or self._killed:
                        how = child.ended or "was told to end"
                        raise PlanariaError(f"engine {self.index} can't be started on Ray: {how}")
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            raise CapacityError(f"engine {self.index} did not come up on Ray within {COME_UP:g} s") from None
        finally:
            if not child.said:
                child.kill()
        at = child.place
        logger.info("engine %d is on %s (%s), process %d", self.index, at.node, at.address, at.pid)
        await self._connect_far(child.said, keys)
        self._look()

    def _begin(self) -> RayChild:
        """In a thread. Where a node goes away meanwhile, it begins again in another place. Raises CapacityError,
        PlanariaError."""
        hosts, own = self.hosts, environment()
        while True:
            hosts.renew(self.index, self._stop)
            variables = {name: own[name] for name in SETTINGS if name in own}
            # its layout may be another by now
            variables |= hosts.settings_of(self.index, self.config.parallel.world_size)
            child = self.child = hosts.spawn(self.index, ENTRY, variables, COME_UP, self._news)
            if self._stop.is_set():
                child.kill()
            hosts.actors.await_starts([child])
            if self._stop.is_set():
                raise PlanariaError("it was told to end")
            if not child.ended:
                hosts.came_up(self.index, child.place.host)
                return child
            if not hosts.stranded(self.index):
                raise CapacityError(f"engine {self.index}: {child.ended}")

    def _memories(self, child: RayChild) -> Memories:
        """Of its machine: the server's own, or the reaper's there."""
        if not self.local:
            return self.hosts.memories(child)
        return Memories.of(self.memory, self.weights)

    def _config(self) -> EngineConfig:
        """As its process has it."""
        parallel = msgspec.structs.replace(
            self.config.parallel, distributed_executor_backend="ray", **self.hosts.fields_of(self.index)
        )
        device = msgspec.structs.replace(self.config.device, sharers=self.hosts.share(self.index))
        return msgspec.structs.replace(self.config, parallel=parallel, device=device)

    def _look(self) -> None:
        if self.child is None or not self.child.place.pid:  # `_begin` sees to it
            return
        super()._look()
        if self.child.leaving and not self._killed:
            self._drifting = self._drifting or asyncio.create_task(self._drift())

    async def _drift(self) -> None:
        """Ray has given up its node and hears of it no more. As long as its connection holds it lives and serves; when
        there is another place it leaves for that."""
        while True:
            self.send(Report())  # a sign of life
            with contextlib.suppress(PlanariaError, TimeoutError):
                if await asyncio.to_thread(self.hosts.room, self.index):
                    break
            await asyncio.sleep(DRIFT)
        self.hear(Leaving())

    def end(self, *, followed: bool = False) -> None:
        self.ends_with_connection = self._drifting is not None  # else Ray says when it has
        super().end(followed=followed)

    def kill(self) -> None:
        self._stop.set()
        super().kill()

    def _close(self) -> None:
        if self._drifting is not None:
            self._drifting.cancel()
        super()._close()
        self._stop.set()
        if self.child is not None:
            self.child.kill()
