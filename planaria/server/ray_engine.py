"""An engine of a fleet as an actor on a Ray cluster (D1): the same front end's end as for a process of this machine,
over an encrypted connection. Calls to Ray block, so they are made from threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.env import environment
from planaria.errors import CapacityError, PlanariaError
from planaria.executor.link.keys import Keys
from planaria.logs import current_level
from planaria.node import home
from planaria.server.engine_client import LOOK
from planaria.server.far_engine import FarEngine, listed
from planaria.wire import FromEngine, Leaving, Report

if TYPE_CHECKING:
    from planaria.executor.ray.fleet import RayHosts
    from planaria.executor.ray.lane_hosts import LaneHosts

logger = logging.getLogger("planaria.server")

ENTRY = "planaria.engine_process:RemoteEngine"
DRIFT = 5.0  # seconds between looks for another place
COME_UP = 120.0  # seconds for an actor to come up and listen
LET_GO = 10.0  # seconds after which one that was killed counts as gone: what it says reaches nobody
SETTINGS = ("PLANARIA_RAY_FRACTION", "PLANARIA_RAY_WAIT")  # of the engine's own ranks


class RayEngine(FarEngine):
    """In the group that `hosts` has for it."""

    def __init__(self, hosts: RayHosts | LaneHosts, config: EngineConfig, hear: Callable[[FromEngine], None]) -> None:
        super().__init__(config, hear)
        self.hosts, self.index = hosts, config.parallel.data_parallel_index
        self._actor: Any = None
        self._where: Any = None
        self._killed, self._closed = threading.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[str, bool]] = self._loop.create_future()
        self._drifting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises CapacityError, PlanariaError."""
        await self._connect_far(*await asyncio.to_thread(self._begin))

    def _begin(self) -> tuple[str, Keys]:
        """In a thread. Where a node goes away meanwhile, it begins again in another place."""
        from planaria.executor.ray import environment as env
        from planaria.executor.ray.actor import Whereabouts

        hosts, offer = self.hosts, env.offered(environment())
        try:
            found = None
            while found is None:
                hosts.renew(self.index, self._killed)
                variables = self._missing_at_start(env.read_at_start(offer))
                if variables is not None:
                    self._actor = self._make_actor(variables)
                    found = self._answer(self._actor.where.remote(hosts.resource, sorted(offer)))
            at = self._where = msgspec.msgpack.decode(found, type=Whereabouts)
            self.pid, self.local = at.pid, at.home == home()
            hosts.came_up(self.index, at.ray_node)
            changes = env.merge(at.own, offer, {})
            values = {change.name: change.new for change in changes}
            values |= {name: value for name, value in environment().items() if name in SETTINGS}
            values |= hosts.settings_of(self.index, self.config.parallel.world_size)  # its layout may be another by now
            keys = Keys.generate(1)
            heartbeat = self.config.parallel.heartbeat_timeout
            own = msgspec.msgpack.encode(listed(keys))
            address = self._answer(self._actor.listen.remote(ENTRY, values, at.address, own, heartbeat))
            if address is None:
                raise CapacityError(f"the node of engine {self.index} went away while it came up")
            self._run()
        except PlanariaError:
            self._end_actor()
            raise
        except Exception as e:  # Ray raises what it likes here
            self._end_actor()
            lines = [line for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
            raise PlanariaError(f"engine {self.index} can't be started on Ray: {lines[-1].strip()}") from e
        logger.info("engine %d is on %s (%s), process %d", self.index, at.node, at.address, at.pid)
        if not self.local:
            shown = "; ".join(change.line for change in changes) or "as it is there"
            logger.info("environment of engine %d on %s: %s", self.index, at.node, shown)
        return str(address), keys

    def _missing_at_start(self, offer: dict[str, str]) -> dict[str, str] | None:
        """Those of `offer`, variables that a process reads when it starts, that the engine's node has not set itself;
        None: the node is gone."""
        if not offer:
            return {}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from planaria.executor.ray.actor import report

        hosts = self.hosts
        where = NodeAffinitySchedulingStrategy(hosts.seat(self.index).node, soft=False)
        ask = hosts.connected.ray.remote(num_cpus=0, max_retries=0)(report).options(scheduling_strategy=where)
        own = self._answer(ask.remote(sorted(offer)))
        return None if own is None else {name: value for name, value in offer.items() if name not in own}

    def _make_actor(self, variables: dict[str, str]) -> Any:
        """variables: that must be there before its process starts; the user's go over them."""
        from planaria.executor.ray.actor import remote_class

        hosts = self.hosts
        given = hosts.connected.inherited(self.config.parallel.ray_runtime_env)
        given["env_vars"] = variables | given.get("env_vars", {})
        options = {**hosts.seat_options(self.index), "runtime_env": given}
        return remote_class(hosts.connected.ray).options(**options).remote(engine=True)

    def _answer(self, asked: Any) -> Any:
        """What the actor answers; None when its node is gone. Raises CapacityError after COME_UP seconds."""
        ray, deadline = self.hosts.connected.ray, time.monotonic() + COME_UP
        while time.monotonic() < deadline:
            if self._killed.is_set():
                raise PlanariaError("it was told to end")
            done, _ = ray.wait([asked], timeout=LOOK)
            if self.hosts.stranded(self.index):
                self._end_actor()
                return None
            if done:
                return ray.get(asked)
        raise CapacityError(f"engine {self.index} did not come up on Ray within {COME_UP:g} s")

    def _run(self) -> None:
        hosts = self.hosts
        parallel = msgspec.structs.replace(
            self.config.parallel, distributed_executor_backend="ray", **hosts.fields_of(self.index)
        )
        device = msgspec.structs.replace(self.config.device, sharers=hosts.share(self.index))
        config = msgspec.structs.replace(self.config, parallel=parallel, device=device)
        run = self._actor.serve.remote(msgspec.msgpack.encode(config), current_level())
        threading.Thread(
            target=self._watch, args=(hosts.connected.ray, run), name="planaria-watch-engine", daemon=True
        ).start()

    def _watch(self, ray: Any, run: Any) -> None:
        """In a thread. No wait is long: Ray may go away."""
        from planaria.executor.ray.watch import NODE_DIED, how_it_ended

        how = ""
        while not how and not self._closed.is_set():
            try:
                if not ray.is_initialized():  # a call would start another one
                    raise ConnectionError("disconnected")
                ended, _ = ray.wait([run], timeout=LOOK)
                how = how_it_ended(ray, run) if ended else ""
            except Exception as e:
                how = f"can't be watched: Ray is gone ({type(e).__name__})"
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            if NODE_DIED in how and not self._killed.is_set():
                self._loop.call_soon_threadsafe(self._lose_node)
            else:
                self._loop.call_soon_threadsafe(self._has_ended, how, how == "returned 1")

    def _lose_node(self) -> None:
        self._drifting = self._drifting or asyncio.create_task(self._drift())

    async def _drift(self) -> None:
        """Ray has given up its node and hears of it no more. As long as its connection holds it lives and serves; when
        there is another place it leaves for that."""
        logger.warning("Ray has given up the node of engine %d, which lives on", self.index)
        while True:
            self.send(Report())  # a sign of life
            with contextlib.suppress(PlanariaError, TimeoutError):
                if await asyncio.to_thread(self.hosts.room, self.index):
                    break
            await asyncio.sleep(DRIFT)
        self.hear(Leaving())

    def _has_ended(self, how: str, spoke: bool) -> None:
        if not self._ended.done():
            self._ended.set_result((how, spoke))

    def broke(self) -> None:
        if self.ends_with_connection:
            self._has_ended("has left", False)
        super().broke()

    async def _wait(self) -> tuple[str, bool]:
        return await self._ended

    def end(self, *, followed: bool = False) -> None:
        self.ends_with_connection = self._drifting is not None  # else Ray says when it has
        super().end(followed=followed)

    def kill(self) -> None:
        """Also a stopped one, on whatever node."""
        if self._killed.is_set():
            return
        self._killed.set()
        if self._actor is None:  # it begins, and sees it
            return
        threading.Thread(target=self._end_actor, name="planaria-end-engine", daemon=True).start()
        self._loop.call_later(LET_GO, self._has_ended, "was given up", False)

    def _end_actor(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from planaria.executor.ray.actor import end_processes
        from planaria.executor.ray.cluster import bounded

        at, connection = self._where, self.hosts.connection
        if at is not None and at.home == home():
            with contextlib.suppress(ProcessLookupError):
                os.kill(at.pid, signal.SIGKILL)
        if connection is None or not connection.alive:
            return
        ray = connection.ray
        if at is not None and at.home != home():
            where = NodeAffinitySchedulingStrategy(at.ray_node, soft=False)
            end = ray.remote(num_cpus=0, max_retries=0)(end_processes).options(scheduling_strategy=where)
            bounded("kill an engine's process", lambda: ray.wait([end.remote([(at.pid, at.born)])], timeout=1.0))
        bounded("kill an actor", functools.partial(ray.kill, self._actor))

    def _close(self) -> None:
        if self._drifting is not None:
            self._drifting.cancel()
        super()._close()
        self._closed.set()
        if not self._killed.is_set():
            self._killed.set()
            threading.Thread(target=self._end_actor, name="planaria-end-engine", daemon=True).start()
