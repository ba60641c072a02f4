"""The fleet as the root of several API processes has it: it runs the engines and has no sequences itself.

What is done with sequences (moving them, waiting for their end) is done by the API processes, each with its own, and
counted together here. They know an engine's processes by number, and none is told twice.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.core.turns import Turns
from planaria.errors import PlanariaError
from planaria.server.api_processes import ApiProcess, ApiProcesses
from planaria.server.attached import client_name
from planaria.server.engine_client import Ended, EngineHandle, EngineProcess
from planaria.server.fleet import Fleet, Hosts, Make
from planaria.server.root_messages import Kill, LetGo, Listed, Replayed, State, ToRoot, Wants
from planaria.server.supervisor import SupervisedEngine
from planaria.wire import EngineState, FromEngine, Gone, ProcessInfo, Recovery, StartUpNews

REACHED = 10.0  # seconds an API process gets to connect to an engine that has come up


class RootSupervisor(SupervisedEngine):
    """An engine's processes, for others. `number`: of the one of now; `ended`: how it did."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = 0
        self.ended: Ended | None = None
        self.as_told = False
        self.turns = Turns()
        self.on_end: Callable[[], None] = lambda: None

    def _goes_on(self, engine: EngineHandle, ended: Ended) -> bool:
        self.ended, self.as_told = ended, self.queue.restarting or self._closing
        self.on_end()
        return super()._goes_on(engine, ended)

    def _count(self) -> int:
        return self.stats.running + self.stats.waiting

    def _busy(self) -> bool:
        return self._count() > 0

    def _cost(self, done: Recovery) -> str:
        return ""  # the API processes know it, and /health shows it

    def _progressed(self) -> bool:
        """A sequence that is run alone is found out, or cleared: either gets somewhere."""
        alone = self.turns.now is not None and self.turns.now.free
        return alone or self.stats.generation_tokens > self._before.generation_tokens


class ApiMover:
    """Moves the sequences of all API processes: each moves its own."""

    def __init__(self, apis: ApiProcesses) -> None:
        self.apis = apis

    async def hand_over_all(self, engine: SupervisedEngine) -> int:
        """Raises PlanariaError when nobody can take over."""
        done = await self.apis.order("hand over", engine.index)
        error = next((done.error for done in done if done.error), "")
        if error:
            raise PlanariaError(error)
        return sum(part.moved for part in done)

    async def take_share(self, engine: SupervisedEngine) -> int:
        return sum(part.moved for part in await self.apis.order("take share", engine.index, REACHED))

    async def emptied(self, indices: Iterable[int], timeout: float) -> None:
        await asyncio.gather(*(self.apis.order("empty", index, timeout) for index in indices))


class RootFleet(Fleet):
    """apis: the API processes; folder: where engines' sockets have their names."""

    supervise = RootSupervisor

    def __init__(
        self, config: EngineConfig, on_progress: Callable[[StartUpNews], None] | None, apis: ApiProcesses, folder: str,
        make: Make = EngineProcess, hosts: Hosts | None = None,
    ) -> None:  # fmt: skip
        self.apis, self.folder, self._inner_make = apis, folder, make
        self._numbers = itertools.count(1)
        self._going: set[int] = set()  # engines that end: nobody is to use them
        self.on_replayed: Callable[[Replayed], None] = lambda message: None
        apis.lost = self._lost
        super().__init__(config, on_progress, self._make, hosts)
        self.mover = ApiMover(apis)

    # -- what the API processes are told

    def _make(self, config: EngineConfig, hear: Callable[[FromEngine], None]) -> EngineHandle:
        engine = self._inner_make(config, hear)
        engine.shared_in = self.folder
        engine.on_address = functools.partial(self._listening, config.parallel.data_parallel_index)
        return engine

    def _listening(self, index: int) -> None:
        supervisor = self.members[index]
        assert isinstance(supervisor, RootSupervisor)
        supervisor.number, supervisor.ended = next(self._numbers), None
        self.publish()

    def publish(self) -> None:
        """Say what there is."""
        listed = []
        for index, engine in sorted(self.members.items()):
            assert isinstance(engine, RootSupervisor)
            if index in self._going:
                continue
            entry = Listed(
                index=index, process=engine.number, ended=engine.ended, as_told=engine.as_told, dead=engine.dead,
                joined=self.joined(index), leaving=index in self.leaving, turn=engine.turns.now,
            )  # fmt: skip
            if (now := engine.engine) is not None:
                entry = msgspec.structs.replace(entry, pid=now.pid, address=now.address, keys=now.keys)
            listed.append(entry)
        self.apis.publish(State(listed))

    def add(self, index: int, size: int) -> SupervisedEngine:
        engine = super().add(index, size)
        assert isinstance(engine, RootSupervisor)
        engine.on_end = self.publish
        self._going.discard(index)
        self.publish()
        return engine

    def admit(self, index: int) -> None:
        super().admit(index)
        self.publish()

    def close_to_new_work(self, indices: Iterable[int]) -> None:
        super().close_to_new_work(indices)
        self.publish()

    def open_to_new_work(self, indices: Iterable[int]) -> None:
        super().open_to_new_work(indices)
        self.publish()

    def _changed(self, engine: SupervisedEngine) -> None:
        super()._changed(engine)
        self.publish()

    async def remove(self, index: int) -> None:
        self._going.add(index)
        self.publish()
        await self.apis.order("settle")
        await super().remove(index)

    # -- what they say

    def hear(self, api: ApiProcess, message: ToRoot) -> None:
        """All that is about engines."""
        match message:
            case Kill():
                engine = self.members.get(message.engine)
                now = engine.engine if isinstance(engine, RootSupervisor) and engine.number == message.process else None
                if now is not None:
                    now.give_up(message.why)
            case Wants():
                self._turns(message.engine, lambda turns: turns.want(api.number, message.alone, list(self.apis.all)))
            case LetGo():
                self._turns(message.engine, lambda turns: turns.let_go(api.number, message.serial))
            case Replayed():
                self.on_replayed(message)

    def _turns(self, index: int, change: Callable[[Turns], None]) -> None:
        engine = self.members.get(index)
        if isinstance(engine, RootSupervisor):
            change(engine.turns)
            self.publish()

    def _lost(self, api: ApiProcess) -> None:
        """What it has asked of engines nobody waits for any more."""
        for engine in self.members.values():
            assert isinstance(engine, RootSupervisor)
            if engine.engine is not None and engine.engine.address and engine.ended is None:
                engine.engine.send(Gone(client_name(api.number)))
            engine.turns.left(api.number, list(self.apis.all))
        self.publish()

    # -- for people

    @property
    def last_progress(self) -> float:
        return self.apis.totals.moved or time.monotonic()

    def engines(self) -> list[EngineState]:
        counted, found = self.apis.totals, []
        for engine in super().engines():
            opened, load = counted.open.get(engine.index, (0, 0))
            taken = counted.taken.get(engine.index, 0)
            found.append(msgspec.structs.replace(engine, open=opened, load=load, taken=taken))
        return found

    async def report(self) -> list[ProcessInfo]:
        return [*self.apis.report(), *await super().report()]
