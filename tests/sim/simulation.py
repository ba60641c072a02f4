"""One seed, one thread: the shipping engine loop, gang, bring-up, reply ledger, health, pace, core and quarantine,
driven by a virtual clock over simulated nodes, processes and links, with faults drawn at every step.

Rules that must hold, by name
- once: each accepted request ends exactly once, and nothing of it comes afterwards; all else that was asked is answered
- index: its tokens are counted up without a gap or repetition
- tokens: they are those of the run without faults
- cancelled, errors: a request ends so only if it was asked for, or if there is a reason
- poison: a request that no rank survives ends with an error, and no other is convicted in its place
- verdict: who is given up was harmed
- epoch: what is of another epoch is not believed; plan: ranks can do what they are told; ranks agree: all compute the
  same
- layout: what is told is what there is; it is smaller than what was asked for only while devices are missing, and
  another one only if somebody asked; what can't be had changes nothing
- deadlock: nobody waits for what can't come
- same maps, held, prepared, weights, bytes: of experts, see experts.py
- only committed, same bytes: of KV on disk, see tier.py
- detect: harm is noticed within its bound; ends: everything is over soon after the last fault
- gives up: the engine ends only after its limit, and then; weights: what a process loaded it keeps;
  turns: no more ranks read them at a time than may
- leaks: no block, row, process or link is left; crash: nothing raises what nobody catches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from planaria.core.engine import CLAIM, EngineCore
from planaria.errors import PlanariaError
from planaria.executor.loop import EngineLoop
from planaria.executor.recovery import is_replayed
from planaria.executor.watch import System
from planaria.hosts.host import Place
from planaria.topology import Layout
from planaria.topology.experts import Maps
from planaria.wire import (
    Cancel,
    Dead,
    EngineResized,
    FromEngine,
    LoadLora,
    Output,
    Processes,
    Recovery,
    Report,
    ResizeEngine,
    Shutdown,
    Submit,
    UnloadLora,
)
from tests.sim.client import Client
from tests.sim.faults import Faults
from tests.sim.lanes import Lanes, Pause
from tests.sim.launcher import SimLauncher
from tests.sim.link import SimLink
from tests.sim.memory import SimMemory
from tests.sim.process import Process, SimWorker
from tests.sim.rules import Rules, Wish
from tests.sim.scenario import BLOCK_BYTES, ERRORS, Scenario
from tests.sim.tier import SimDisk
from tests.sim.travel import Travel
from tests.sim.world import World

LOOK = 1.0  # seconds between an idle engine's looks at its ranks
PATIENCE = 500.0  # seconds within which everything ends after the last fault and the last message
SETTLED = 200.0  # seconds after which there are as many ranks as there can be
TURNS = 20_000

MakeWorker = Callable[[Process, int], SimWorker]


class SimSystem(System):
    def __init__(self, sim: Simulation) -> None:
        self.sim = sim

    def problems(self, num_ranks: int) -> list[str]:
        return []

    def is_stopped(self, pid: int) -> bool:
        return any(process.pid == pid and process.stopped for process in self.sim.launcher.all)


class Simulation:
    def __init__(self, scenario: Scenario, make_worker: MakeWorker = SimWorker) -> None:
        self.scenario, self.make_worker = scenario, make_worker
        self.world = World(scenario.seed * 2)
        self.counts: Counter[str] = Counter()
        self.rules, self.faults, self.lanes = Rules(self), Faults(self), Lanes(self)
        self.client, self.travel = Client(self.world, scenario.asked), Travel(self)
        self.disk = SimDisk(self) if scenario.config.cache.kv_tier is not None else None
        config = scenario.config
        self.counts["several lanes"] += config.parallel.lanes > 1
        self.counts["context ranks"] += config.parallel.decode_context_parallel_size > 1
        self.counts["prefill context ranks"] += config.parallel.prefill_context_parallel_size > 1
        self.launcher = SimLauncher(self, scenario.nodes, config.parallel.layout, config.faults.spare_workers)
        self.link: SimLink | None = None
        self.links: list[SimLink] = []
        self.loop = EngineLoop(config, self.launcher, self._link_for, self._hear, self.world.clock, SimSystem(self))
        self.loop.on_loss = self._rouse
        self.memory = self.loop.gang.kv.memory = SimMemory(scenario.seed, self.launcher.nodes)
        self.reports = 0  # not answered
        self.dead: Dead | None = None
        self.woken = self.began = False
        self.wishes: dict[str, Wish] = {}  # for another layout, that aren't answered

    # -- what simulated parts ask

    def takes(self, seconds: float) -> float:
        return seconds * self.world.random.uniform(0.5, 1.5)

    def new_worker(self, process: Process, num_blocks: int) -> SimWorker:
        return self.make_worker(process, num_blocks)

    def block_bytes(self, layout: Layout) -> int:
        """Of a KV block on each rank: more, where fewer ranks of a lane share it."""
        asked = self.scenario.config.parallel.layout
        ranks, wanted = (each.tp * each.pp * each.pcp for each in (layout, asked))
        more = wanted / ranks if self.scenario.tight else 1
        return max(BLOCK_BYTES, int(BLOCK_BYTES * more))

    def fits(self, layout: Layout) -> bool:
        """Is there KV memory for one request of full length?"""
        config = self.scenario.config
        assert config.cache.memory is not None
        blocks = config.cache.memory // self.block_bytes(layout)
        return blocks * config.cache.block_size >= config.scheduler.max_model_len

    def maps_in_force(self) -> Maps:
        """As the engine thinks; empty: they aren't dealt whole."""
        return tuple(placed.slots for placed in self.loop.gang.maps)

    def _link_for(self, places: list[Place], epoch: int) -> SimLink:
        self.link = SimLink(self, places, epoch)
        self.links.append(self.link)
        return self.link

    def _rouse(self) -> None:
        self.woken = True

    # -- the front end

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Output():
                for delta in message.deltas:
                    self.rules.heard(delta, self.client.hear(delta))
            case Recovery() if not message.seconds:
                self.counts["losses"] += 1
                self.travel.lost()
                self.rules.lost(message)
            case Recovery() if is_replayed(message):
                pass
            case Recovery():
                self.counts["KV kept"] += self.loop.gang.kv.kept
                self.rules.recovered(message)
            case Processes():
                self.reports -= 1
            case EngineResized():
                self.world.require(message.id in self.wishes, "once", f"{message.id} is answered again")
                self.rules.resized(self.wishes.pop(message.id), message)
            case Dead():
                self.world.note("DEAD: {}", message.message)
                self.dead = message
                self.rules.gave_up(message)
            case _:
                pass

    def _say(self, message: Any) -> None:
        self.rules.last_event = max(self.rules.last_event, self.world.awake())
        match message:
            case Submit():
                self.client.submit(message)
            case Cancel():
                self.client.cancel(message.id)
            case Report():
                self.reports += 1
            case LoadLora() | UnloadLora():
                name = type(message).__name__
                self.world.note("{} {}", name, message.digest)
                self.counts[name] += isinstance(message, UnloadLora) or message.part == 0
            case Shutdown():
                self.world.note("shutdown")
            case ResizeEngine():
                self._resize_engine(message)
                return
            case Pause():
                self.lanes.pause(message)
                return
        self.loop.handle(message)

    def _resize_engine(self, wish: ResizeEngine) -> None:
        self.world.note("asked for tp={} pp={} dp={}", wish.tp, wish.pp, wish.dp)
        self.wishes[wish.id] = Wish(
            wish, self.loop.gang.layout, self.loop.gang.epoch, self.rules.losses, len(self.rules.shortages),
            self.counts["experts read"], bool(self.wishes),
        )  # fmt: skip
        self.loop.handle(wish)

    # -- the run

    def run(self) -> None:
        """As `planaria.engine_process` does."""
        loop = self.loop
        try:
            loop.start()
        except PlanariaError as e:
            self.world.note("did not start: {}", e)
            refused = any(self.counts[kind] for kind in ERRORS)  # the first time these are no faults
            self.rules.doomed = self.rules.doomed or refused
            self.rules.gave_up(Dead("error", str(e)))
        else:
            self.began = True
            if self.disk is not None and loop.core is not None:
                self.disk.began(loop.core)
            self._serve()
            loop.close()
        self._check()

    def _serve(self) -> None:
        loop, world, messages = self.loop, self.world, self.scenario.messages
        came, at = world.now, 0
        while not loop.stopping:
            self.counts["turns"] += 1
            world.require(self.counts["turns"] < TURNS, "ends", "the engine turns and gets nowhere")
            while at < len(messages) and came + messages[at][0] <= world.now and not loop.stopping:
                at += 1
                self._say(messages[at - 1][1])
            if loop.stopping:
                break
            if not loop.busy():
                if at == len(messages) and loop.layout_change.arrival is None:
                    break
                look = world.now + LOOK
                self._idle(min(came + messages[at][0], look) if at < len(messages) else look)
            self._turn()
            waited = world.awake() - self.rules.last_event
            world.require(waited < PATIENCE, "ends", f"{waited:.0f} s after the last fault requests are still open")
        if not loop.stopping:
            self._settle()
        if not loop.stopping:
            core = loop.core
            assert core is not None
            world.require(not core.has_requests() and self.reports == 0, "once", "something was never answered")
            self._check_core()
            self.counts["loads given up"] += core.tier.given_up

    def _turn(self) -> None:
        if not self.loop.step():
            self.lanes.go_on()
            self.loop.check()

    def _idle(self, until: float) -> None:
        self.faults.occasion()
        while not self.woken and self.world.step(until):
            self.rules.watch()
        self.woken = False

    def _settle(self) -> None:
        """Nothing goes wrong any more: soon there are as many ranks as there are devices for."""
        gang, world = self.loop.gang, self.world
        self.faults.over()
        until = world.awake() + SETTLED
        while not self.loop.stopping and gang.layout != gang.asked and gang.layout != self.launcher.best(gang.asked):
            self._idle(world.now + LOOK)
            self._turn()
            world.require(world.awake() < until, "layout", f"{gang.layout} in place of {gang.asked} for no reason")

    def _check(self) -> None:
        require = self.world.require
        self.client.check()
        require(not self.wishes, "once", f"{', '.join(self.wishes)} were never answered")
        self.travel.check()
        left = [process.pid for process in self.launcher.all if process.alive]
        require(not left, "leaks", f"processes {left}")
        require(all(link.closed for link in self.links), "leaks", "a link is open")

    def _check_core(self) -> None:
        core = self.loop.core
        assert core is not None
        check_empty(core, self.world)


def check_empty(core: EngineCore, world: World) -> None:
    """Rule "leaks": nothing is left of any request."""
    require = world.require
    for now in (world.now, world.now + CLAIM):  # what nobody has claimed by then goes
        require(core.plan(now) is None, "leaks", "work for nobody")
    for lane in core.lanes:
        lane.pool.check()
        free, rows = lane.pool.num_free, sorted(lane.free_rows)
        require(free == lane.num_blocks, "leaks", f"{lane.num_blocks - free} blocks")
        require(rows == list(range(lane.config.max_num_seqs)), "leaks", f"rows: {rows} are free")
        require(not (lane.entries or lane.waiting or lane.computing or lane.prefilling), "leaks", "entries")
    require(not core.loras.users.total(), "leaks", "users of adapters")
    require(not core.quarantine.faults and not core.quarantine.alone, "leaks", "suspicions")


def lines(sim: Simulation) -> list[str]:
    scenario = sim.scenario
    parallel, scheduler = scenario.config.parallel, scenario.config.scheduler
    poisons = {id: asked.poison for id, asked in scenario.asked.items() if asked.poison is not None}
    return [
        f"seed {scenario.seed}: {parallel.layout} on nodes of "
        f"{scenario.nodes} depth={scheduler.depth} micro_steps={scheduler.micro_steps} rows={scheduler.max_num_seqs} "
        f"prefix caching={scenario.config.cache.enable_prefix_caching} {scenario.config.faults} poison={poisons}",
        *sim.world.lines(),
    ]  # fmt: skip
