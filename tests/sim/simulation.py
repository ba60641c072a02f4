"""One seed, one thread: the shipping engine loop, crew, gang, worker group, health, pace, core and quarantine, driven
by a virtual clock over simulated processes and links, with faults drawn at every step. `simulate` raises Violation.

Rules that must hold, by name
- once: each accepted request ends exactly once, and nothing of it comes afterwards
- index: its tokens are counted up without a gap or repetition
- tokens: they are those of the run without faults
- cancelled, errors: a request ends so only if it was asked for, or if there is a reason
- poison: a request that no rank survives ends with an error, and no other is convicted in its place
- verdict: who is given up was harmed
- epoch: what is of another epoch is not believed; plan: ranks can do what they are told; ranks agree: all compute the
  same
- detect: harm is noticed within its bound; ends: everything is over soon after the last fault
- gives up: the engine ends only after its limit, and then; weights: what a process loaded it keeps
- leaks: no block, row, process or link is left; crash: nothing raises what nobody catches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planaria.errors import PlanariaError
from planaria.executor.boot import Place
from planaria.executor.crew import System
from planaria.executor.loop import EngineLoop
from planaria.protocol import Reply
from planaria.types import Delta, FinishReason
from planaria.wire import Cancel, Dead, FromEngine, Output, Processes, Recovery, Report, Shutdown, Submit
from planaria.worker.reference import HashWorker
from tests.sim.launcher import SimLauncher
from tests.sim.link import SimLink
from tests.sim.process import Process, SimWorker
from tests.sim.scenario import ERRORS, MESSAGES, Asked, Scenario, draw
from tests.sim.world import Violation, World

LOOK = 1.0  # seconds between an idle engine's looks at its ranks
FENCED = 65.0  # seconds after which a rank that does not come to a new epoch is missed
PATIENCE = 500.0  # seconds within which everything ends after the last fault and the last message
OCCASIONS, TURNS = 60_000, 20_000
GHOSTS = 100

MakeWorker = Callable[[Process, int], HashWorker]


@dataclass
class Answer:
    """What a front end has of a request."""

    tokens: list[int]
    finish: FinishReason | None = None
    error: str | None = None


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
        config = scenario.config
        self.launcher = SimLauncher(self, config.parallel.world_size, config.faults.spare_workers)
        self.link: SimLink | None = None
        self.links: list[SimLink] = []
        self.loop = EngineLoop(config, self.launcher, self._link_for, self._hear, self.world.clock, SimSystem(self))
        self.loop.on_loss = self._rouse
        self.answers: dict[str, Answer] = {}
        self.cancelled: set[str] = set()
        self.reports = 0  # not answered
        self.counts: Counter[str] = Counter()
        self.armed: Counter[str] = Counter()
        self.harms: list[Process] = []
        self.ghosts: list[tuple[int, tuple[int, int, Reply]]] = []
        self.left = scenario.budget
        self.last_event = 0.0  # by the engine's own time
        self.fence_at = 0.0
        self.fruitless: list[tuple[float, bool]] = []  # recoveries since the last token; do they count for sure?
        self.lost_now: set[int] = set()  # since requests went on
        self.doomed = False  # there was a reason to give up at once
        self.disturbed = False  # slow or late, in this epoch: deadlines may be missed by ranks that are well
        self.dead: Dead | None = None
        self.woken = False
        self.began = False

    # -- what simulated parts ask

    def takes(self, seconds: float) -> float:
        return seconds * self.world.random.uniform(0.5, 1.5)

    def new_worker(self, process: Process, num_blocks: int) -> HashWorker:
        return self.make_worker(process, num_blocks)

    def _link_for(self, places: list[Place], epoch: int) -> SimLink:
        self.link = SimLink(self, places, epoch)
        self.links.append(self.link)
        return self.link

    def _rouse(self) -> None:
        self.woken = True

    def remember(self, link: SimLink, answer: tuple[int, int, Reply]) -> None:
        """It will be heard again in an epoch that is not its own, if one follows."""
        if len(self.ghosts) < GHOSTS:
            self.ghosts.append((link.epoch, answer))

    def haunt(self, link: SimLink, number: int) -> None:
        """Messages of epochs before: those that look like an answer to this command, and any."""
        for ghost in self.ghosts[:]:
            epoch, answer = ghost
            if epoch < link.epoch and (answer[1] == number or self.world.random.random() < 0.05):
                self.ghosts.remove(ghost)
                self.counts["ghosts"] += 1
                self.world.at(0.0001, link.hear, answer)

    # -- faults

    def occasion(self) -> None:
        """Something may go wrong now."""
        self.counts["occasions"] += 1
        self.world.require(self.counts["occasions"] < OCCASIONS, "ends", "the engine goes round and round")
        chance = self.world.random
        if self.left and self.scenario.kinds and chance.random() < self.scenario.chance:
            self.left -= 1
            kind = chance.choice(self.scenario.kinds)
            self.world.at(chance.choice([0.0, 0.0, chance.uniform(0, 0.1), chance.uniform(0, 3)]), self._inject, kind)

    def strikes(self, kind: str, rank: int | None) -> bool:
        """Does an armed fault hit here?"""
        if not self.armed or not self.armed[kind]:
            return False
        self.armed[kind] -= 1
        if kind in ("delay", "launch is slow"):
            self.disturbed = True
        if kind in ("no device", "launch fails"):
            self.doomed = self.doomed or kind == "no device"
        self._happened(kind, rank)
        return True

    def _happened(self, kind: str, rank: int | None) -> None:
        self.counts[kind] += 1
        self.last_event = self.world.awake()
        self.world.note("FAULT {} (rank {})", kind, rank)

    def _inject(self, kind: str) -> None:
        if self.world.inside:  # the engine is away: what needs it waits
            self.world.at(0.01, self._inject, kind)
            return
        chance = self.world.random
        if kind in MESSAGES or kind.startswith("launch") or kind == "no device":
            self.armed[kind] += 1
            return
        if kind == "engine away":
            seconds = chance.choice([chance.uniform(0.5, 20), chance.uniform(20, 200)])
            self._happened(kind, None)
            self.disturbed = True
            self.world.pass_by(seconds)
            return
        if kind == "all asleep":
            self._happened(kind, None)
            self.world.sleep(chance.uniform(1, 4000))
            return
        alive = [p for p in (self.launcher.spares if kind == "spare dies" else self.launcher.ranks.values()) if p.alive]
        if not alive:
            return
        process = chance.choice(alive)
        self._happened(kind, process.rank)
        match kind:
            case "kill" | "spare dies":
                self.kill(process, 0.0)
            case "kill several":
                for each in alive:
                    if each is process or chance.random() < 0.6:
                        self.kill(each, chance.choice([0.0, chance.uniform(0, 0.1)]))
            case "stop":
                self.harmed(process, "stopped")
                process.stop()
            case "short stop":
                if not process.stopped:
                    process.stop()
                    self.world.at(chance.uniform(0.1, 1.3), process.go_on)
            case "cut":
                if not process.cut:
                    process.cut, process.still_since = True, self.world.now
                    self.harmed(process, "cut")
            case "hang":
                process.hung = True
            case "slow":
                process.slow, process.slow_steps, self.disturbed = chance.uniform(10, 100), 1, True
            case "slow for long":
                process.slow, process.slow_steps, self.disturbed = 10.0, 30, True
            case "exception":
                process.fail_next = True
            case "out of memory":
                process.oom_next = True
            case _:
                raise AssertionError(kind)

    def kill(self, process: Process, delay: float) -> None:
        if delay:
            self.world.at(delay, self.kill, process, 0.0)
        elif process.alive:
            self.harmed(process, "dead")
            process.end("was killed by signal 9")

    def harmed(self, process: Process, how: str) -> None:
        """What the engine must notice, and may act on."""
        if process.harm is None or how == "dead":
            process.harm = how, self.world.awake()
            self.harms.append(process)
        self.last_event = self.world.awake()

    def fenced(self) -> None:
        """Another epoch begins: whoever must be noticed has to be noticed there."""
        self.fence_at = self.world.awake()
        if not self.began:
            self.fruitless.append((self.world.now, False))

    def watch(self) -> None:
        """Is every harm noticed in time?"""
        if not self.harms:
            return
        now, current = self.world.awake(), self.launcher.ranks
        self.harms = [p for p in self.harms if p.harm is not None and (p.rank < 0 or current.get(p.rank) is p)]
        for process in self.harms:
            assert process.harm is not None
            how, since = process.harm
            if process.rank < 0:
                continue
            if how in ("failed", "gap") and since <= self.fence_at:
                continue
            waited = now - max(since, self.fence_at, process.begun)
            if waited > self._bound(process, how):
                self.world.require(
                    False, "detect", f"rank {process.rank} is {how} for {waited:.2f} s and nobody noticed"
                )

    def _bound(self, process: Process, how: str) -> float:
        config = self.scenario.config
        attached = process.link is not None and process.link is self.link
        match how:
            case "dead":
                return 0.2 if attached else 0.7
            case "stopped":
                return 6.0
            case "cut":
                return config.parallel.heartbeat_timeout + 4.0 if attached else FENCED
            case "gap":
                return config.parallel.heartbeat_timeout + 4.0
            case "hung":
                return config.faults.step_timeout + 5.0 if attached else FENCED
            case _:
                return FENCED if process.hung else 5.0

    def replacing(self, ranks: Sequence[int]) -> None:
        """Who is given up was harmed, or failed twice; a deadline that was missed may be anyone's."""
        for rank in ranks:
            process = self.launcher.ranks[rank]
            self.world.require(
                self._harmed(process) or process.failures > 1 or self.excused, "verdict",
                f"rank {rank} (pid {process.pid}) is well and was given up",
            )  # fmt: skip

    def _harmed(self, process: Process) -> bool:
        return process.harm is not None or process.stopped  # a short stop is one, too, while it lasts

    @property
    def excused(self) -> bool:
        """Is there another reason than a rank's own?"""
        return self.disturbed or any(process.harm is not None for process in self.launcher.ranks.values())

    # -- the front end

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Output():
                for delta in message.deltas:
                    self._delta(delta)
            case Recovery() if not message.seconds:
                self.counts["losses"] += 1
                self._attempt(message)
                self.world.note("LOSS of ranks {} in {}: {}", message.ranks, message.phase, message.cause)
                self._judge(message)
            case Recovery():
                self._recovered(message)
            case Processes():
                self.reports -= 1
            case Dead():
                self.world.note("DEAD: {}", message.message)
                self.dead = message
                self._gave_up()
            case _:
                pass

    def _attempt(self, notice: Recovery) -> None:
        """A further attempt for sure, or maybe the rest of what killed others a moment ago?"""
        ended = any(word in notice.cause for word in ("process", "connection", "missing", "missed", "started"))
        sure = not self.lost_now or (ended and not self.lost_now.isdisjoint(notice.ranks))
        self.fruitless.append((self.world.now, sure))
        self.lost_now.update(notice.ranks if ended else (-1,))

    def _judge(self, notice: Recovery) -> None:
        limit = self.scenario.config.faults.recovery_limit
        self.world.require(self._recent(True) <= limit, "gives up", f"attempt {self._recent(True)} of {limit}")
        sure = "signal" in notice.cause or "stopped" in notice.cause or "no sign of life" in notice.cause
        well = [rank for rank in notice.ranks if not self._harmed(self.launcher.ranks[rank])]
        self.world.require(not well if sure else self.excused, "verdict", f"ranks {well} are well: {notice.cause}")

    def _recent(self, sure: bool = False) -> int:
        since = self.world.now - self.scenario.config.faults.recovery_window
        return sum(1 for when, counts in self.fruitless if when >= since and (counts or not sure))

    def _recovered(self, done: Recovery) -> None:
        self.world.note("RECOVERED: epoch {}, {} requests, {}", done.epoch, done.requests, done.seconds)
        ranks = self.launcher.ranks
        self.world.require(done.pids == [ranks[rank].pid for rank in sorted(ranks)], "epoch", f"pids {done.pids}")
        self.disturbed = False
        self.lost_now.clear()
        for process in ranks.values():
            if process.harm is not None and process.harm[0] in ("failed", "gap"):
                process.harm = None

    def _gave_up(self) -> None:
        limit = self.scenario.config.faults.recovery_limit
        self.world.require(
            self.doomed or self._recent() >= limit, "gives up", f"after {self._recent()} attempts of {limit}"
        )

    def _delta(self, delta: Delta) -> None:
        require, world = self.world.require, self.world
        answer = self.answers.get(delta.request_id)
        require(answer is not None, "once", f"{delta.request_id} was never asked for")
        assert answer is not None
        require(answer.finish is None, "once", f"{delta.request_id} goes on after its end")
        require(
            delta.index == len(answer.tokens), "index",
            f"{delta.request_id} has {len(answer.tokens)} tokens, the next is number {delta.index}",
        )  # fmt: skip
        answer.tokens += delta.tokens
        expected = self.scenario.asked[delta.request_id].tokens
        require(
            answer.tokens == expected[: len(answer.tokens)], "tokens", f"{delta.request_id}: {answer.tokens} {expected}"
        )
        if delta.tokens:
            self.fruitless.clear()
            for process in self.launcher.ranks.values():
                process.failures = 0
        if delta.finish is not None:
            answer.finish, answer.error = delta.finish, delta.error
            world.note("{} ends: {} {}", delta.request_id, delta.finish, delta.error or "")
            self._ended(self.scenario.asked[delta.request_id], answer)

    def _ended(self, asked: Asked, answer: Answer) -> None:
        require, id = self.world.require, asked.submit.id
        match answer.finish:
            case FinishReason.ABORT:
                require(id in self.cancelled or self.loop.stopping, "cancelled", f"{id} was not")
            case FinishReason.ERROR if "again and again" in (answer.error or ""):
                outside = self.counts["losses"] - self.counts["poisoned"]
                require(asked.poison is not None or outside >= 2, "poison", f"{id} is innocent")
                self.fruitless.clear()
                self.counts["convicted" if asked.poison is not None else "convicted though innocent"] += 1
            case FinishReason.ERROR:
                shrunk = self.counts["out of memory"] and "holds" in (answer.error or "")
                require(self.loop.core is None or shrunk or self._dying(), "errors", f"{id}: {answer.error}")
            case _:
                require(answer.tokens == asked.tokens, "tokens", f"{id} ends early")
                require(asked.poison is None, "poison", f"{id} can't have been computed")

    def _dying(self) -> bool:
        return self.doomed or self._recent() >= self.scenario.config.faults.recovery_limit

    def _say(self, message: Any) -> None:
        self.last_event = max(self.last_event, self.world.awake())
        match message:
            case Submit():
                self.world.note("submit {}: {} + {}", message.id, len(message.prompt), message.max_tokens)
                self.answers[message.id] = Answer(list(message.output))
            case Cancel():
                self.world.note("cancel {}", message.id)
                self.cancelled.add(message.id)
            case Report():
                self.reports += 1
            case Shutdown():
                self.world.note("shutdown")
        self.loop.handle(message)

    # -- the run

    def run(self) -> None:
        """As `planaria.engine_process` does."""
        loop = self.loop
        try:
            loop.start()
        except PlanariaError as e:
            self.world.note("did not start: {}", e)
            refused = any(self.counts[kind] for kind in ERRORS)  # the first time these are no faults
            self.doomed = self.doomed or refused
            self._gave_up()
        else:
            self.began = True
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
                if at == len(messages):
                    break
                self._idle(min(came + messages[at][0], world.now + LOOK))
            if not loop.turn():
                loop.check()
            waited = world.awake() - self.last_event
            world.require(waited < PATIENCE, "ends", f"{waited:.0f} s after the last fault requests are still open")
        if not loop.stopping:
            core = loop.core
            assert core is not None
            world.require(not core.has_requests() and self.reports == 0, "once", "something was never answered")
            self._check_core()

    def _idle(self, until: float) -> None:
        self.occasion()
        while not self.woken and self.world.step(until):
            self.watch()
        self.woken = False

    def _check(self) -> None:
        require = self.world.require
        for id, answer in self.answers.items():
            require(answer.finish is not None, "once", f"{id} never ended")
        left = [process.pid for process in self.launcher.all if process.alive]
        require(not left, "leaks", f"processes {left}")
        require(all(link.closed for link in self.links), "leaks", "a link is open")

    def _check_core(self) -> None:
        core = self.loop.core
        assert core is not None
        require = self.world.require
        for lane in core.lanes:
            lane.pool.check()
            free, rows = lane.pool.num_free, sorted(lane.free_rows)
            require(free == lane.num_blocks, "leaks", f"{lane.num_blocks - free} blocks")
            require(rows == list(range(lane.config.max_num_seqs)), "leaks", f"rows: {rows} are free")
            require(not (lane.entries or lane.waiting or lane.computing or lane.prefilling), "leaks", "entries")
        require(not core.quarantine.faults and not core.quarantine.alone, "leaks", "suspicions")


def simulate(seed: int, make_worker: MakeWorker = SimWorker, *, keyed: bool = True) -> Simulation:
    """Run a seed to its end. Raises Violation, with the history in its notes."""
    sim = Simulation(draw(seed, keyed=keyed), make_worker)
    try:
        sim.run()
    except Violation as e:
        e.add_note(history(sim))
        raise
    except Exception as e:
        broken = Violation("crash", f"{type(e).__name__}: {e}")
        broken.add_note(history(sim))
        raise broken from e
    return sim


def history(sim: Simulation) -> str:
    scenario = sim.scenario
    parallel, scheduler = scenario.config.parallel, scenario.config.scheduler
    poisons = {id: asked.poison for id, asked in scenario.asked.items() if asked.poison is not None}
    return "\n".join([
        f"seed {scenario.seed}: tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size} "
        f"depth={scheduler.depth} micro_steps={scheduler.micro_steps} rows={scheduler.max_num_seqs} "
        f"prefix caching={scenario.config.cache.enable_prefix_caching} {scenario.config.faults} poison={poisons}",
        *sim.world.lines(),
    ])  # fmt: skip
