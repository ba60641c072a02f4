"""A fleet as an API process has it: the root runs the engines, and says where each of them listens and when it has
ended. Requests and tokens go between the two directly.

The rule kept here: the root decides which engines there are and whether there will be another; here is decided which
engine has which of this process's own sequences, and which of them may be what kills it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from planaria.config.options import EngineConfig
from planaria.errors import PlanariaError
from planaria.executor.link.gatekeeper import introduce, keep_alive
from planaria.executor.reformations import Reformations
from planaria.server.engine_client import Ended, EngineHandle
from planaria.server.fleet import Fleet
from planaria.server.root_messages import Kill, Listed, Order, OrderDone, Replayed, State, ToRoot
from planaria.server.supervisor import SupervisedEngine, error_of
from planaria.wire import Dead, EngineFacts, FromEngine, Recovery

logger = logging.getLogger("planaria.server")

Tell = Callable[[ToRoot], None]


def client_name(server: int) -> str:
    """Under which an API process comes to engines."""
    return f"api-{server}"


class AttachedEngine(EngineHandle):
    """One process of an engine. after: number of the one before."""

    local = False  # whether it was stopped is the root's to see

    def __init__(
        self, config: EngineConfig, hear: Callable[[FromEngine], None], server: int, tell: Tell, after: int
    ) -> None:
        super().__init__(config, hear)
        self.index = config.parallel.data_parallel_index
        self.server, self.tell, self.after = server, tell, after
        self.listed: Listed | None = None  # as it was when it was found
        loop = asyncio.get_running_loop()
        self._found: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[str] = loop.create_future()
        self.as_told = False

    def look(self, listed: Listed | None) -> None:
        """What the root says of this engine now; None: there is none any more."""
        if self.listed is None:
            if listed is not None and listed.process > self.after and listed.address and listed.ended is None:
                self.listed, self.pid = listed, listed.pid
                self._found.set_result(None)
        elif not self._over.done() and (listed is None or listed.process != self.listed.process or listed.ended):
            ended = listed.ended if listed is not None and listed.process == self.listed.process else None
            self.as_told = ended is not None and listed is not None and listed.as_told
            self._over.set_result(ended.how if ended is not None else "ended")
            if ended is not None and ended.said is not None and not self._said.done():
                self._said.set_result(ended.said)

    async def start(self) -> None:
        """Wait for it, and connect."""
        await self._found
        if self.listed is not None:
            name, keys = client_name(self.server).encode(), self.listed.keys

            def prepare(socket: zmq.Socket[Any]) -> None:
                socket.setsockopt(zmq.ROUTING_ID, name)
                if keys is not None:
                    introduce(socket, keys.driver.public, keys.ranks[0])
                    keep_alive(socket, self.config.parallel.heartbeat_timeout)

            await self._connect(self.listed.address, prepare)

    async def _wait(self) -> tuple[str, bool]:
        return await self._over, False

    def kill(self) -> None:
        """Ask for it."""
        if self.listed is not None and not self._over.done():
            why = self._broken.result() if self._broken.done() else f"said nothing for {self.silent:.0f} s"
            self.tell(Kill(self.index, self.listed.process, why))

    def leave(self) -> None:
        """It goes on without this process."""
        for waiting, value in ((self._over, "was left"), (self._found, None)):
            if not waiting.done():
                waiting.set_result(value)  # type: ignore[arg-type]


class AttachedSupervisor(SupervisedEngine):
    """An engine, whatever becomes of its processes, as one of several servers that use it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.limit = Reformations(sys.maxsize, self.config.faults.recovery_window)  # the root's to keep
        self.log = logger.debug  # the root says it

    async def close(self) -> None:
        """Leave the engine to the root."""
        self._closing = True
        if isinstance(self.engine, AttachedEngine):
            self.engine.leave()
        if self._task is not None:
            await self._task

    def give_up(self, dead: Dead) -> None:
        """There will be no other process."""
        self._die(dead)

    def revive(self) -> None:
        """There will be one after all, which is waited for as ever."""
        if self._task is None or self._task.done():
            super().revive()
        else:
            self.dead = None
            self._ready.clear()
            self.on_change()

    def _goes_on(self, engine: Any, ended: Ended) -> bool:
        self.queue.restarting = engine.as_told
        goes_on = super()._goes_on(engine, ended)
        self.queue.admit()
        return goes_on

class AttachedFleet(Fleet):
    """server: this process's number; tell: sends the root a message."""

    supervise = AttachedSupervisor

    def __init__(self, config: EngineConfig, server: int, tell: Tell) -> None:
        self.server, self.tell = server, tell
        self.listed: dict[int, Listed] = {}
        self._admitted = asyncio.Event()
        self._removals: dict[int, asyncio.Task[None]] = {}  # engines that are being left
        super().__init__(config, None, self._attach)

    def first(self) -> Iterable[int]:
        return ()

    def _attach(self, config: EngineConfig, hear: Callable[[FromEngine], None]) -> AttachedEngine:
        index = config.parallel.data_parallel_index
        before = self.members[index].engine
        after = before.listed.process if isinstance(before, AttachedEngine) and before.listed is not None else 0
        engine = AttachedEngine(config, hear, self.server, self.tell, after)
        engine.look(self.listed.get(index))
        return engine

    def add(self, index: int, size: int) -> SupervisedEngine:
        engine = super().add(index, size)
        engine.queue.server, engine.queue.tell = self.server, self.tell
        engine.on_leaving = lambda: None  # the root hears it too
        engine.on_placed = lambda message: None  # and this
        engine.on_recovery = self._recovered
        return engine

    def _recovered(self, message: Recovery) -> None:
        if not message.ranks and message.seconds and "replay" not in message.seconds:
            self.tell(Replayed(message.engine, message.requests, message.tokens))

    def follow(self, state: State) -> None:
        """What the root says there is."""
        self.listed = {listed.index: listed for listed in state.engines}
        for index in [index for index in self.members if index not in self.listed and index not in self._removals]:
            task = self._removals[index] = asyncio.create_task(self.remove(index))
            task.add_done_callback(lambda task, index=index: self._removals.pop(index))  # type: ignore[misc]
        for index, listed in self.listed.items():
            engine = self.members.get(index)
            if engine is None:
                engine = self.add(index, len(self.listed))
                self._in_background(engine.start())
            elif isinstance(engine.engine, AttachedEngine):
                engine.engine.look(listed)
            assert isinstance(engine, AttachedSupervisor)
            if listed.leaving and index not in self.leaving:
                self.close_to_new_work([index])
            elif index in self.leaving and not listed.leaving:
                self.open_to_new_work([index])
            if listed.dead is not None and engine.dead is None:
                engine.give_up(listed.dead)
            elif listed.dead is None and engine.dead is not None:
                engine.revive()
            engine.queue.take_turn(listed.turn)
        self._admit_known()

    def _admit_known(self) -> None:
        for index, engine in self.members.items():
            listed = self.listed.get(index)
            if listed is not None and listed.joined and not self.joined(index) and engine.facts is not None:
                self.admit(index)
                self._admitted.set()

    def _changed(self, engine: SupervisedEngine) -> None:
        self._admit_known()
        super()._changed(engine)
        if self.dead is not None:
            self._admitted.set()

    async def ready(self) -> EngineFacts:
        """Wait until an engine that the root gives work to can be given some."""
        await self._admitted.wait()
        if self.dead is not None:
            raise error_of(self.dead)
        assert self.facts is not None
        return self.facts

    async def carry_out(self, order: Order) -> OrderDone:
        """All but "count"."""
        engine = self.members.get(order.engine)
        moved, error = 0, ""
        try:
            match order.what:
                case "settle":
                    await asyncio.gather(*self._removals.values())
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
