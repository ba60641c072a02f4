"""The engines of a server as an API process has them: the root keeps them, and says where each listens and when it has
ended. Requests and tokens go between the two directly.

The rule kept here: the root decides which engines there are and whether there will be another; here is decided which
engine has which of this process's own sequences, and which of them may be what kills it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import zmq

from planaria.config.options import EngineConfig
from planaria.errors import PlanariaError
from planaria.executor.link.keys import introduce, keep_alive
from planaria.server.background import Background
from planaria.server.dispatcher import Dispatcher
from planaria.server.engine import Engine
from planaria.server.engine_client import LOOK, EngineConnection
from planaria.server.loras import LoraRegistry
from planaria.server.root_messages import ApiOrder, Kill, Listed, OrderDone, Replayed, State, ToRoot
from planaria.wire import EngineFacts, FromEngine


def client_name(server: int) -> str:
    """Under which an API process comes to engines."""
    return f"api-{server}"


class Attached:
    """server: this process's number; tell: sends the root a message. dispatcher: that there is, with engines that have
    no process any more."""

    def __init__(
        self, config: EngineConfig, server: int, tell: Callable[[ToRoot], None], dispatcher: Dispatcher | None = None
    ) -> None:
        self.config, self.server, self.tell = config, server, tell
        self.dispatcher = dispatcher or Dispatcher(config.cache.enable_prefix_caching, loras=LoraRegistry.of(config))
        self.dispatcher.on_changed = self._admit
        for engine in self.dispatcher.members.values():
            engine.server, engine.tell = server, tell
            engine.on_news = functools.partial(self._hear, engine)
        self.listed: dict[int, Listed] = {}
        self.connections: dict[int, tuple[EngineConnection, int]] = {}  # to engines' processes, by number
        self._lost: set[int] = set()  # engines whose process has ended, until there is another
        self._background = Background()
        self._background.start(self._watch())

    def follow(self, state: State) -> None:
        """What the root says there is."""
        self.listed = {listed.index: listed for listed in state.engines}
        if self.dispatcher.loras is not None:
            self.dispatcher.loras.named = {named.name: named for named in state.loras}
        members = self.dispatcher.members
        for index in [index for index in members if index not in self.listed]:
            self._forget(members[index])
        for index, listed in self.listed.items():
            engine = members.get(index) or self._add(index)
            self._look(engine, listed)
            if engine.leaving != listed.leaving:
                self.dispatcher.close_to_new_work([index], listed.leaving)
            if listed.dead is not None and engine.dead is None:
                engine.die(listed.dead)
            elif listed.dead is None and engine.dead is not None:
                engine.revive()
            engine.set_exclusive_use(listed.exclusive_use)
        self.dispatcher.hand_overs.set_kinds({index: listed.kind for index, listed in self.listed.items()})
        self._admit()

    def _add(self, index: int) -> Engine:
        engine = Engine(index, self.server, self.tell)
        engine.on_news = functools.partial(self._hear, engine)
        self.dispatcher.add(engine)
        return engine

    def _forget(self, engine: Engine) -> None:
        engine.ending = True
        self.dispatcher.close_to_new_work([engine.index])
        self.dispatcher.rescue(engine, certainly=True)
        self._disconnect(engine.index)
        self._lost.discard(engine.index)
        self.dispatcher.forget(engine)

    def _look(self, engine: Engine, listed: Listed) -> None:
        """Has its process ended, or is there another?"""
        index = engine.index
        _, number = self.connections.get(index, (None, 0))
        if number and (listed.process != number or listed.ended is not None):
            self._disconnect(index)
            as_told = listed.process == number and listed.as_told
            if not as_told:
                self._lost.add(index)
            engine.down(as_told)
            engine.on_change()
            engine.admit()  # with what is suspected now
        if index not in self.connections and listed.address and listed.ended is None:
            self._connect(engine, listed)

    def _connect(self, engine: Engine, listed: Listed) -> None:
        def prepare(socket: zmq.Socket[Any]) -> None:
            socket.setsockopt(zmq.ROUTING_ID, client_name(self.server).encode())
            if listed.keys is not None:
                introduce(socket, listed.keys.driver.public, listed.keys.ranks[0])
                keep_alive(socket, self.config.parallel.heartbeat_timeout)

        engine.connection = connection = EngineConnection(engine.hear)
        connection.pid = listed.pid
        self.connections[engine.index] = connection, listed.process
        connection.connect(listed.address, prepare)

    def _disconnect(self, index: int) -> None:
        if index in self.connections:
            self.connections.pop(index)[0].close()

    def _hear(self, engine: Engine, message: FromEngine) -> None:
        if isinstance(message, EngineFacts) and engine.index in self._lost:
            self._lost.discard(engine.index)
            tokens = sum(len(stream.history()) for stream in engine.sent())
            self.tell(Replayed(engine.index, len(engine.streams), tokens))

    def _admit(self) -> None:
        """Those that the root gives work to, as soon as they are up for this process too."""
        for index, engine in self.dispatcher.members.items():
            listed = self.listed.get(index)
            if listed is not None and listed.joined and engine.facts is not None and not self.dispatcher.joined(index):
                self.dispatcher.admit(engine)

    async def _watch(self) -> None:
        """A process that says nothing to this one, or what can't be, is no use to it."""
        while True:
            await asyncio.sleep(LOOK)
            for index, (connection, number) in self.connections.items():
                limit = self.dispatcher.members[index].most_silent(self.config.faults.step_timeout)
                if why := connection.trouble(limit):
                    self.tell(Kill(index, number, why))

    async def carry_out(self, order: ApiOrder) -> OrderDone:
        """All but "count"."""
        engine, moved, error = self.dispatcher.members.get(order.engine), 0, ""
        try:
            match order.what:
                case "empty" if engine is not None:
                    await self.dispatcher.emptied([order.engine], order.timeout)
                case "hand over" if engine is not None:
                    moved = await self.dispatcher.hand_over_all(engine)
                case "take share" if engine is not None:
                    async with asyncio.timeout(order.timeout):
                        await engine.ready()
                    moved = await self.dispatcher.take_share(engine)
        except (PlanariaError, TimeoutError) as e:
            error = str(e) or f"engine {order.engine} is not reached"
        return OrderDone(order.id, moved, error)

    def leave(self) -> None:
        """Have nothing to do with the root any more; what is open waits for other processes."""
        self._background.cancel()
        self.dispatcher.on_changed = lambda: None
        for index, engine in self.dispatcher.members.items():
            connected = index in self.connections
            self._disconnect(index)
            engine.server, engine.tell, engine.exclusive_use = 0, None, None
            if connected:
                engine.down(True)
                engine.on_change()

    def close(self) -> None:
        """Leave the engines to the root."""
        self._background.cancel()
        self.dispatcher.close()
        for index in list(self.connections):
            self._disconnect(index)
