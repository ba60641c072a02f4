"""One seed, one thread: a fleet of engines behind one server. The shipping fleet with its router, resizer, keepers,
journals and quarantines, fault log and health, and the shipping engine processes' ends in the server, on an event loop
with a virtual clock; the processes behind them run the shipping core over the hash model.

Rules beside those of `simulation.py` that are meant for any engine
- route: new work, and work that goes on elsewhere, is given to an engine that is in the fleet, and ready if any is
- size: a change of the fleet's size does what it says, or nothing
- follows: an engine whose process's end is known gets another one, or is given up, before long
- health: /health tells the truth about every engine and about all of them, and counts every fault once
- errors: a request ends with an error only when no engine is left; verdict: a process that is killed was harmed, or is
  not wanted any more; leaks: no sequence, load, block, process or task is left
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from planaria.core.resize import COMMITTED, Refused
from planaria.core.router import EngineId
from planaria.core.transfer import LEASE
from planaria.executor.recovery import layout_name
from planaria.hosts.memory import KVMemory
from planaria.server import engine_client, keeper, prefill
from planaria.server.config import ServerConfig
from planaria.server.engine import Engine
from planaria.server.fleet import Fleet
from planaria.server.keeper import EngineKeeper
from planaria.server.service import Service
from planaria.server.stream import Piece, Stream
from planaria.topology import Layout
from planaria.types import Delta, FinishReason
from planaria.wire import Cancel, FromEngine, Submit
from tests.sim.client import Client
from tests.sim.fleet_rules import SURE, FleetRules
from tests.sim.fleet_scenario import FleetScenario, Shape, Size
from tests.sim.memory import EngineMemory
from tests.sim.process import SimWorker
from tests.sim.remote import Remote, SimEngineProcess
from tests.sim.scenario import MOST
from tests.sim.simulation import MakeWorker, check_empty
from tests.sim.transfers import SimTransfers
from tests.sim.virtual import on_clock
from tests.sim.world import World

LOOK = 1.0
PATIENCE = 600.0  # seconds within which everything ends after the last fault and the last message
SETTLED = 300.0  # seconds after which all engines are well that can be
CLOSED = 60.0  # seconds within which all processes have ended
FIRST_PID = 60_000_000
ARMED = ("said twice", "said too late", "said for nothing", "delay", "load dies", "load is slow", "start fails")


class Deployment:
    def __init__(self, scenario: FleetScenario, make_worker: MakeWorker = SimWorker) -> None:
        self.scenario, self.make_worker = scenario, make_worker
        self.world = World(scenario.seed * 2)
        self.counts: Counter[str] = Counter()
        self.client = Client(self.world, scenario.asked)
        self.rules = FleetRules(self)
        self.left, self.armed = 0, Counter[str]()
        self.remotes: dict[int, Remote] = {}  # the latest of each engine
        self.all: list[Remote] = []
        self.owners: dict[int, EngineKeeper] = {}
        self.opens: dict[str, Stream] = {}
        self.layouts: dict[EngineKeeper, Layout] = {}  # that were agreed on
        self.gone: set[int] = set()  # nodes
        self.closing = self.over = False  # over: nothing goes wrong any more
        self.fleet: Fleet
        self.service: Service
        self.memories: dict[int, EngineMemory] = {}
        self.transfers = SimTransfers(self)
        self._left_to_say = 0
        self._asked: set[asyncio.Task[None]] = set()

    # -- what simulated parts ask

    def takes(self, seconds: float) -> float:
        return seconds * self.world.random.uniform(0.5, 1.5)

    def new_pid(self) -> int:
        return FIRST_PID + len(self.all)

    def memory_of(self, kept: KVMemory) -> EngineMemory:
        """Of the keeper that has it."""
        memory = self.memories.setdefault(id(kept), EngineMemory(kept))
        memory.new_number = self.transfers.number
        return memory

    def _make(self, config: Any, hear: Callable[[FromEngine], None]) -> SimEngineProcess:
        return SimEngineProcess(self, config, hear)

    def started(self, remote: Remote) -> None:
        engine, index = self.fleet.members[remote.index], remote.index
        before = self.remotes[index] if self.owners.get(index) is engine else None
        self.all.append(remote)
        self.remotes[index], self.owners[index] = remote, engine
        self.rules.started(remote, before)
        agreed = self.layouts.get(engine, remote.layout)
        same = remote.layout == agreed or self.fleet.resizer._resizing_engines  # then it may be the next one already
        self.world.require(same, "layout", f"engine {index} starts with {remote.layout}: {agreed}")

    def can_start(self, index: int) -> bool:
        if self.strikes("start fails", None):
            if self.owners.get(index) is self.fleet.members[index]:  # which had one before
                self.rules.lost += 1
                self.rules.tried(index)
            return False
        return True

    def delay_of_start(self, remote: Remote) -> float:
        if remote.index % self.scenario.nodes in self.gone or self.strikes("load dies", remote):
            self.world.at(self.world.random.uniform(0.3, 1.0), self._kill, remote, -9)
        return self.world.random.uniform(5.0, 60.0) if self.strikes("load is slow", remote) else 0.0

    def harmed(self, remote: Remote, how: str) -> None:
        if remote.harm is None or how in ("dead", "given up"):
            remote.harm = how, self.world.awake()
        self.rules.stirred()

    # -- faults

    def occasion(self) -> None:
        """Something may go wrong now."""
        chance = self.world.random
        if self.left and self.scenario.kinds and chance.random() < self.scenario.chance:
            self.left -= 1
            delay = chance.choice([0.0, chance.uniform(0, 0.1), chance.uniform(0, 3)])
            self.world.at(delay, self._inject, chance.choice(self.scenario.kinds))

    def strikes(self, kind: str, remote: Remote | None) -> bool:
        """Does an armed fault hit here?"""
        if not self.armed or not self.armed[kind]:
            return False
        self.armed[kind] -= 1
        self._happened(kind, remote)
        return True

    def _happened(self, kind: str, remote: Remote | None) -> None:
        self.counts[kind] += 1
        self.rules.stirred()
        self.world.note("FAULT {} (engine {})", kind, remote.index if remote is not None else None)

    def _inject(self, kind: str) -> None:
        chance, world = self.world.random, self.world
        if self.over:
            return
        if world.inside:
            world.at(0.01, self._inject, kind)
        elif kind in ARMED:
            self.armed[kind] += 1
        elif kind == "server away":
            self._happened(kind, None)
            world.pass_by(chance.choice([chance.uniform(0.5, 20), chance.uniform(20, 200)]))
        elif kind == "all asleep":
            self._happened(kind, None)
            world.sleep(chance.uniform(1, 4000))
        elif kind == "node leaves":
            self._happened(kind, None)
            node = chance.randrange(self.scenario.nodes)
            self.gone.add(node)
            world.at(chance.choice([0.1, chance.uniform(0.2, 6.0)]), self.gone.discard, node)
            for remote in list(self.remotes.values()):
                if remote.index % self.scenario.nodes == node:
                    self._kill(remote, -9)
        elif alive := [remote for remote in self.remotes.values() if remote.returncode is None]:
            remote = chance.choice(alive)
            self._happened(kind, remote)
            self._harm(kind, remote)

    def _harm(self, kind: str, remote: Remote) -> None:
        chance = self.world.random
        match kind:
            case "kill":
                self._kill(remote, -9)
            case "exit":
                self._kill(remote, chance.choice([0, 1]))
            case "crash":
                remote.crash()
            case "gives up":
                remote.give_up()
            case "stop":
                self.harmed(remote, "stopped")
                remote.stopped = remote.for_good = True
            case "short stop":
                if not remote.stopped:
                    remote.stopped = True
                    self.world.at(chance.uniform(0.1, 1.3), remote.go_on)
            case "hang" if remote.up and not remote.regrouping:  # else it may take an hour
                remote.hung = True
                self.harmed(remote, "hung")
            case "hang":
                pass
            case "slow":
                remote.slow = chance.uniform(10, 100)
            case "ranks lost":
                remote.lose_ranks("its process was killed by signal 9")
            case "told to end":
                remote.leave()
            case _:
                raise AssertionError(kind)

    def _kill(self, remote: Remote, code: int) -> None:
        if remote.returncode is None:
            self.harmed(remote, "dead")
            remote.end(code)

    # -- the front end

    def _say(self, message: Submit | Cancel | Size | Shape) -> None:
        self.rules.stirred()
        self._left_to_say -= 1
        match message:
            case Submit():
                self.client.submit(message)
                if not self.service.open:
                    self.service.busy_since = self.world.now
                self.service.open[message.id] = None  # type: ignore[index]
                self.fleet.dispatcher.submit(Stream(message, self._hear))
                if (open := self.fleet.dispatcher.open.get(message.id)) is not None:
                    self.opens[message.id] = open
                    self.rules.routed(message.id, open.engine)
            case Cancel():
                self.client.cancel(message.id)
                self.client.answers[message.id].finish = FinishReason.ABORT
                self._close(message.id)
                self.fleet.dispatcher.cancel(message.id)
            case Size() | Shape():
                ask = self._resize(message) if isinstance(message, Size) else self._resize_engines(message)
                task = asyncio.get_running_loop().create_task(ask)
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)

    def _hear(self, stream: Stream, piece: Piece) -> None:
        index = len(stream.tokens) - len(piece.tokens)
        delta = Delta(stream.id, index, piece.tokens, piece.finish, error=piece.error)
        answer = self.client.hear(delta)
        if answer.finish is not None:
            self._close(delta.request_id)
        self.rules.heard(delta, answer)

    def _close(self, id: str) -> None:
        self.service.open.pop(id, None)  # type: ignore[call-overload]

    async def _resize(self, size: Size) -> None:
        before = sorted(self.fleet.members)
        self.world.note("asked for {} engines", size.engines)
        try:
            prefill = size.prefill if self.fleet.kinds else None
            resize = await self.fleet.resizer.resize(size.id, size.engines, size.drain_timeout, prefill)
        except Refused as e:
            self.world.note("{} is refused: {}", size.id, e)
            return
        now = sorted(self.fleet.members)
        self.world.note("{} is {}: {} {}", size.id, resize.state, now, resize.reason)
        done = resize.state == COMMITTED
        self.counts["resizes" if done else "resizes undone"] += 1
        wanted = list(range(size.engines)) if done else before
        members = self.fleet.members
        gone = [index for index in before if index not in members or members[index].engine.dead is not None]
        excused = not done and bool(gone)  # then those that were being started had to help out, or are all that is left
        self.world.require(now == wanted or excused, "size", f"{size}: {resize.state}, {now}")
        self.rules.stirred()

    async def _resize_engines(self, shape: Shape) -> None:
        self.world.note("asked for {}", shape)
        engines = list(self.fleet.members.values())
        try:
            answers = await self.fleet.resizer.resize_engines(shape.tp, shape.pp)
        except Refused as e:
            self.world.note("{} is refused: {}", shape, e)
            return
        self.world.note("{} is answered: {}", shape, [answer.error or answer.layout for answer in answers])
        for engine, answer in zip(engines, answers, strict=False):
            if not answer.error:
                self.layouts[engine] = Layout(tp=shape.tp, pp=shape.pp)
                self.counts["layouts of engines"] += 1
                wrong = shape.tp > MOST or answer.layout != layout_name(self.layouts[engine])
                self.world.require(not wrong, "layout", f"engine {engine.index}: {answer}")
        self.rules.stirred()

    # -- the run

    def run(self) -> None:
        with (
            on_clock(self.world) as loop,
            patch.object(prefill, "FIRST", 4),
            patch.object(prefill, "LEAST", 2),
            patch.object(prefill, "MOST", 6),
            patch.object(engine_client, "process_state", self._state_of),
            patch.object(keeper, "process_state", self._state_of),
        ):
            loop.run_until_complete(self._run())
            self.world.require(not asyncio.all_tasks(loop), "leaks", f"tasks {asyncio.all_tasks(loop)}")

    def _state_of(self, pid: int) -> str:
        return "T" if self.all[pid - FIRST_PID].stopped else "S"

    async def _run(self) -> None:
        self.fleet = fleet = Fleet(self.scenario.config, make=self._make)
        fleet.weights = None  # nobody here has any; and threads, which let go of them, have a time of their own
        for member in fleet.members.values():
            member.weights = None
        fleet.resizer.available = lambda: 1 << 50
        move = fleet.dispatcher.move

        def moved(open: Stream, engine: Engine) -> None:
            self.rules.routed(open.id, engine)
            self.counts["moved"] += 1
            self.world.note("{} goes on in engine {}", open.id, engine.index)
            move(open, engine)

        choose = fleet.dispatcher.router.choose

        def chosen(tokens: Sequence[int], max_tokens: int, salt: str = "", kind: str = "") -> EngineId | None:
            found = choose(tokens, max_tokens, salt, kind)
            if found is not None:
                self.rules.chosen(found)
            return found

        fleet.dispatcher.move, fleet.dispatcher.router.choose = moved, chosen  # type: ignore[assignment, method-assign]
        remove = fleet.remove

        async def removed(index: int) -> None:
            if index in fleet.members:
                self.rules.leaves(fleet.members[index])
            await remove(index)

        fleet.remove = removed  # type: ignore[method-assign]
        self.service = Service(fleet.dispatcher, None, ServerConfig())
        await fleet.start()
        await fleet.dispatcher.ready()
        self.left = self.scenario.budget
        await self._serve()
        self.closing = True
        await asyncio.wait_for(fleet.close(), CLOSED)
        if self._asked:
            await asyncio.wait(self._asked)
        await asyncio.sleep(LOOK)
        self._check()

    async def _serve(self) -> None:
        world = self.world
        self._left_to_say = len(self.scenario.messages)
        for when, message in self.scenario.messages:
            world.at(when, self._say, message)
        while self._left_to_say or self.client.open or self._asked:
            await self._look()
            waited = world.awake() - self.rules.last_event
            world.require(waited < PATIENCE, "ends", f"{waited:.0f} s after the last fault requests are still open")
        self.over, self.left, self.armed = True, 0, Counter()
        until = world.awake() + SETTLED
        while not self.rules.settled():
            await self._look()
            world.require(world.awake() < until, "ends", "engines don't come back")
        await asyncio.sleep(2 * SURE)
        if scenario_splits := self.scenario.config.parallel.splits_prefill:
            await asyncio.sleep(LEASE + 2 * LOOK)
        self.counts["fleets of two kinds"] += scenario_splits
        self.rules.check_health()
        self.rules.check_counts()
        self._check_empty()

    async def _look(self) -> None:
        self.occasion()
        await asyncio.sleep(LOOK)
        self.rules.watch()
        self.rules.watch_waiting()
        self.rules.check_health()
        self.rules.gave_up()

    def _check_empty(self) -> None:
        require, fleet = self.world.require, self.fleet
        require(not fleet.dispatcher.open, "leaks", f"sequences {list(fleet.dispatcher.open)}")
        tell = [i for i, engine in fleet.members.items() if engine.engine.dead is None and self.remotes[i].harm is None]
        loads = {i: load for i, load in fleet.dispatcher.router.loads().items() if load and i in tell}
        stale = self.counts["said twice"] + self.counts["said too late"]  # what an engine said of itself
        require(not loads or bool(stale), "leaks", f"loads {loads} of nothing")
        for index, engine in fleet.members.items():
            held = list(engine.engine.streams)
            require(not held, "leaks", f"engine {index} has {held} in its journal")
            require(not engine.engine.quarantine.faults, "leaks", f"suspicions {engine.engine.quarantine.faults}")
            core = self.remotes[index].core
            if index in tell and core is not None:
                require(not core.has_requests(), "leaks", f"engine {index} computes for nobody")
                check_empty(core, self.world)

    def _check(self) -> None:
        self.client.check()
        left = [remote.pid for remote in self.all if remote.returncode is None]
        self.world.require(not left, "leaks", f"processes {left}")
        ports = [remote.pid for remote in self.all if not remote.socket.closed]
        self.world.require(not ports, "leaks", f"sockets of {ports}")


def lines(sim: Deployment) -> list[str]:
    scenario, config = sim.scenario, sim.scenario.config
    poisons = {id: asked.poison for id, asked in scenario.asked.items() if asked.poison is not None}
    return [
        f"seed {scenario.seed}: {config.parallel.data_parallel_size} engines on {scenario.nodes} nodes "
        f"depth={config.scheduler.depth} rows={config.scheduler.max_num_seqs} "
        f"prefix caching={config.cache.enable_prefix_caching} {config.faults} poison={poisons}",
        *sim.world.lines(),
    ]  # fmt: skip
