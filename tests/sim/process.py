"""A simulated process of a rank: it comes to its link, answers commands in order with the hash model, waits for its
peers inside steps and in Regroup, and can be harmed. What it has loaded stays from one epoch to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planaria.config.options import ParallelConfig
from planaria.executor.boot import SPARE, RankBoot
from planaria.hosts.host import Place, Slot
from planaria.node import home
from planaria.protocol import (
    Allocate,
    Call,
    Command,
    Done,
    Exit,
    Facts,
    Failed,
    Hello,
    Join,
    LaneResult,
    Load,
    PlaceExperts,
    Probe,
    PutLora,
    Ready,
    Regroup,
    Reply,
    SendExperts,
    StepPlan,
    StepResult,
)
from planaria.topology import Layout
from tests.reference_worker import HashWorker, RowState, Work, mix, number_of
from tests.sim.context import Context
from tests.sim.experts import Experts
from tests.sim.scenario import VOCAB
from tests.sim.tier import GARBAGE, WAIT, SimTier

if TYPE_CHECKING:
    from tests.sim.launcher import Device
    from tests.sim.link import SimLink
    from tests.sim.simulation import Simulation

PULSE = 1.0
Part = tuple[
    int, int, int
]  # place in a stage and its number, tensor ranks, stages: lanes and context ranks hold the same
NOTICED = 0.05  # seconds after a process's end until its watcher knows


class Died(Exception):
    """In the midst of a computation."""


class Process:
    """`harm`: what was done to it, and when the engine could first have acted on it; None: it is well."""

    code = -9

    def __init__(self, sim: Simulation, pid: int, device: Device, slot: Slot) -> None:
        self.sim, self.world, self.pid, self.device, self.slot = sim, sim.world, pid, device, slot
        self.place = Place(-1, home(), f"node{device.node}", pid=pid)
        self.rank = SPARE
        self.alive, self.ended = True, ""  # ended: how, once the watcher knows
        self.for_good = False  # that it is stopped
        self.stopped = self.cut = self.hung = self.fail_next = self.oom_next = False
        self.slow, self.slow_steps = 1.0, 0
        self.harm: tuple[str, float] | None = None
        self.failures = 0  # in a row, without a token
        self.begun = 0.0  # when it became a rank, by the engine's own time
        self.layout = Layout()  # that it was last told of
        self.part: Part | None = None  # of the model, that it has loaded
        self.prepared: Layout | None = None  # as a spare: any rank's part
        self.moved = False  # to another rank, by its launcher
        self.link: SimLink | None = None
        self.epoch = -1
        self.attached = 0.0
        self.paused = 0.0  # seconds of its life in which it could not beat
        self.still_since = 0.0
        self.inbox: deque[tuple[int, Command]] = deque()
        self.busy = False
        self.worker: SimWorker | None = None
        self.tier: SimTier | None = None
        self.experts = Experts(self)
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._life = 0  # changes when what it was doing is over

    # -- time

    def later(self, delay: float, act: Callable[..., None], *values: Any) -> None:
        """Something this process does, unless it is dead by then or does something else; stopped ones do it later."""
        self.world.at(delay, self._do, self._life, act, values)

    def _do(self, life: int, act: Callable[..., None], values: tuple[Any, ...]) -> None:
        if not self.alive or life != self._life:
            return
        if self.stopped:
            self._held.append((act, values))
        else:
            act(*values)

    def pulse(self) -> tuple[int, int]:
        """As the link shows it."""
        until = self.still_since if not self.alive or self.stopped or self.cut else self.world.now
        return self.pid, int((until - self.attached - self.paused) / PULSE) + 1

    # -- life

    def boot(self, boot: RankBoot, link: SimLink | None) -> None:
        """Be this rank at this link; without one, be a spare."""
        self.world.at(0.005, self._boot, boot, link)

    def _boot(self, boot: RankBoot, link: SimLink | None) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._held.append((self._boot, (boot, link)))
            return
        self.leave()
        self.rank = boot.rank
        if link is None:
            self.later(self.sim.takes(1.0), self._prepare, boot.config.parallel.layout)
        elif self.hung:
            self.sim.faults.harmed(self, "hung")
        elif not self.cut:
            self.later(self.sim.takes(0.3 if self.epoch < 0 else 0.01), self._attach, link)

    def _prepare(self, layout: Layout) -> None:
        self.prepared = layout
        self.experts.read_ahead(layout)

    # -- as a Child

    @property
    def said(self) -> str:
        return "ready" if self.prepared is not None else ""

    @property
    def leaving(self) -> bool:
        return self.device.going

    def tell(self, boot: Any) -> None:
        """As a spare."""
        self.boot(boot, None)

    def kill(self) -> None:
        self.end("was killed by its launcher")

    def _attach(self, link: SimLink) -> None:
        if link.over:
            return
        self.link, self.epoch, self.attached, self.paused = link, link.epoch, self.world.now, 0.0
        link.attach(self.rank, self)

    def leave(self) -> None:
        """The epoch is over: what it waits for does not come."""
        self.sim.memory.scribble(self)
        self.worker = self.tier = None
        self._life += 1
        self._held = [item for item in self._held if item[0] == self._boot]
        self.link, self.busy = None, False
        self.inbox.clear()

    def end(self, how: str) -> None:
        if not self.alive:
            return
        if not (self.stopped or self.cut):
            self.still_since = self.world.now
        self.sim.memory.scribble(self)
        if "signal" in how:
            self.sim.memory.die(self)
        self.alive, self.stopped = False, False
        self.world.note("rank {} (pid {}) {}", self.rank, self.pid, how)
        self.world.at(self.sim.launcher.notice(), self._noticed, how)
        if self.link is not None:
            self.link.peer_died(self.rank, self)

    def _noticed(self, how: str) -> None:
        self.ended = how
        self.sim.launcher.ended(self)

    def stop(self) -> None:
        if not self.cut and not self.stopped:
            self.still_since = self.world.now
        self.stopped = True

    def go_on(self) -> None:
        if not self.alive or not self.stopped or self.for_good:
            return
        self.stopped = False
        if not self.cut:
            self.paused += self.world.now - max(self.still_since, self.attached)
        held, self._held = self._held, []
        for act, values in held:
            act(*values)

    # -- work

    def take(self, number: int, command: Command) -> None:
        self.inbox.append((number, command))
        self.serve()

    def serve(self) -> None:
        """Begin with the next command, if it is there and nothing else is being done."""
        if self.busy or not self.inbox or self.link is None or self.stopped:
            return
        number, command = self.inbox[0]
        exchanges = isinstance(command, SendExperts | PlaceExperts)
        if exchanges and self.experts.coming is not None and not self.experts.failure:
            return  # what is on its way comes first
        self.busy = True
        if isinstance(command, StepPlan | Regroup) or self._exchanges(command):
            self.link.gate.arrive(self.rank, number, command)
        else:
            self.go(number, command)

    def _exchanges(self, command: Command) -> bool:
        """Does it wait for others, to send or to receive experts?"""
        return isinstance(command, SendExperts) and not command.aside and self.experts.takes_part(command.moves)

    def received(self, command: SendExperts) -> None:
        """Experts came, beside steps."""
        if self.link is not None and self.link.gate.broken:
            self.experts.failure = self.link.gate.broken
        else:
            self.experts.receive(command)
        self.serve()

    def misses(self, why: str) -> None:
        """What it waits for beside its steps will not come."""
        self.experts.failure = why
        self.later(0.0, self.serve)

    def go(self, number: int, command: Command) -> None:
        """Nothing is missing: the command is carried out after the time that it takes."""
        seconds = self.sim.takes(self._cost(command))
        if isinstance(command, StepPlan):
            if self.hung:
                self.sim.faults.harmed(self, "hung")
                return
            seconds *= self.slow
            if self.slow_steps:
                self.slow_steps -= 1
                self.slow = self.slow if self.slow_steps else 1.0
        self.later(seconds, self._finish, number, command, seconds)

    def _cost(self, command: Command) -> float:
        match command:
            case StepPlan():
                if any(work.waits for work in command.kv):
                    return WAIT
                return 0.01 + 0.0005 * sum(row.count for lane in command.lanes for row in lane)
            case Load():
                return 1.0 if self._reads(command) and not self._is_prepared else 0.001
            case Regroup():
                return 0.05
            case SendExperts():
                return 0.005 + 0.01 * len(command.moves)
            case _:
                return 0.005

    def _reads(self, command: Load) -> bool:
        return self.rank in (command.ranks or (self.rank,)) and self.part != self._own

    @property
    def _own(self) -> Part:
        layout = self.layout
        at = layout.coords(self.rank)
        return at.pp * layout.tp + at.tp, layout.tp, layout.pp

    @property
    def context(self) -> Context | None:
        """None: it has all tokens."""
        return Context(self) if self._config.context(self.layout).size > 1 else None

    @property
    def _config(self) -> ParallelConfig:
        return self.sim.scenario.config.parallel

    @property
    def _is_prepared(self) -> bool:
        return self.prepared is not None and (self.prepared.tp, self.prepared.pp) == self._own[1:]

    def failed(self) -> None:
        self.failures += 1
        if self.link is not None and not self.link.over:  # else nobody will ever hear of it
            self.sim.faults.harmed(self, "failed")

    @property
    def is_hit(self) -> bool:
        """Is it one of those that a poisonous request kills?"""
        rank, (own, tp, pp) = self.sim.scenario.poison_rank, self._own
        return rank is None or own == min(rank, tp * pp - 1)

    def fail(self, number: int, failed: Failed) -> None:
        self._answer(number, failed)

    def _finish(self, number: int, command: Command, seconds: float) -> None:
        if self.link is None:
            return
        try:
            reply = self._handle(command, seconds)
        except Died:
            self.end("was killed by signal 9")
            return
        if isinstance(reply, Failed) and not isinstance(command, Call):
            self.link.gate.broke(self.rank, reply)
        self._answer(number, reply)
        if isinstance(command, Exit):
            self.end("ended with exit code 0")

    def _answer(self, number: int, reply: Reply) -> None:
        """Say it, and go on with the next command."""
        link = self.link
        if link is None or not self.inbox or self.inbox[0][0] != number:
            return
        _, command = self.inbox.popleft()
        self.busy = False
        link.reply(self.rank, number, reply)
        link.gate.answered(self.rank, number, command)
        self.serve()

    def _handle(self, command: Command, seconds: float) -> Reply:
        if self.fail_next and not isinstance(command, Exit):
            self.fail_next = False
            if not isinstance(command, Call):  # else only who asked is told
                self.failed()
            return Failed(self.rank, _PHASE.get(type(command), "step"), "RuntimeError: injected", "Traceback: injected")
        if self.oom_next and isinstance(command, StepPlan | Allocate):
            self.oom_next = False
            self.failed()
            return Failed(self.rank, _PHASE.get(type(command), "step"), "out of memory", "Traceback", "capacity")
        match command:
            case Join():
                self.moved = self.moved or command.layout.pcp != self.layout.pcp  # a rank may be of another stage then
                self.layout = command.layout
                has = self.part == self._own or self._is_prepared
                return Hello(self.rank, self.pid, "sim", "sim", "127.0.0.1", experts=self.experts.held() if has else (),
                             kv=self.sim.memory.numbers(self))  # fmt: skip
            case Regroup():
                self.experts.enter()
            case Load():
                at_once, most = len(command.ranks) or self.layout.size, self._config.max_parallel_loading_workers
                self.world.require(most is None or at_once <= most, "turns", f"{at_once} ranks may read, not {most}")
                if self._reads(command):
                    same = self.part is not None and self.part[1:] == self._own[1:] and not self.moved
                    self.world.require(not same, "weights", f"pid {self.pid} had {self.part} and reads {self._own}")
                    if not self._is_prepared:
                        self.experts.unload()
                    self.part, self.prepared, self.moved = self._own, None, False
                if self.rank in (command.ranks or (self.rank,)):
                    self.experts.load(command)
            case SendExperts() | PlaceExperts():
                return self._move_experts(command)
            case Probe():
                return Facts(self.rank, self.sim.block_bytes(self.layout), 1 << 30, 0)
            case Allocate():
                self.worker = self.sim.new_worker(self, command.num_blocks)
                damaged = self.sim.memory.allocate(self, command, self.worker)
                self.sim.counts["blocks found scribbled over"] += len(damaged)
                if command.recut is not None and self.rank == 0:
                    self.sim.counts["KV cut anew"] += 1
                    contexts = {
                        self.sim.scenario.config.parallel.context(each) for each in (self.layout, command.recut.layout)
                    }
                    self.sim.counts["KV cut anew by tokens"] += len(contexts) > 1
                facts: dict[str, Any] = {"damaged": damaged}
                if self.sim.disk is not None:
                    self.tier = SimTier(self, self.sim.disk)
                    facts["stored"] = self.tier.stored()
                return Ready(self.rank, facts=facts)
            case PutLora():
                assert self.worker is not None
                self.worker.put(command)
                self.sim.counts["adapters put"] += command.last
            case Call("expert_load"):
                return Done(self.rank, self.experts.load_counts())
            case Call():
                return Done(self.rank, 1)
            case Exit():
                return Done(self.rank)
            case StepPlan():
                return self._step(command, seconds)
        return Ready(self.rank)

    def _move_experts(self, command: SendExperts | PlaceExperts) -> Reply:
        assert self.link is not None
        if self.experts.failure:
            return Failed(self.rank, "experts", self.experts.failure, "", "peer")
        if isinstance(command, PlaceExperts):
            self.experts.arrange(command.version, command.maps)
        elif command.aside and self.experts.takes_part(command.moves):
            self.experts.coming = command
            self.link.gate.aside(self.rank, command)
        else:
            self.experts.receive(command)
        return Ready(self.rank)

    def _step(self, plan: StepPlan, seconds: float) -> Reply:
        assert self.worker is not None
        if self.experts.failure:
            return Failed(self.rank, "experts", self.experts.failure, "", "peer")
        self.experts.steps += 1
        self.world.require(plan.epoch == self.epoch, "epoch", f"a plan of {plan.epoch} in epoch {self.epoch}")
        own = self.layout.coords(self.rank).dp
        if plan.kv and self.tier is not None:
            self.tier.begin(plan.kv[own])
        try:
            lane = self.worker.step(plan.step, plan.lanes[own], plan.freed_rows[own], plan.turn)
        except (Died, Poisoned) as e:
            if isinstance(e, Died):
                self.sim.faults.harmed(self, "dead")
                raise
            self.failed()
            return Failed(self.rank, "step", "RuntimeError: poisoned", "Traceback: poisoned")
        except Exception as e:
            self.world.require(False, "plan", f"rank {self.rank} can't carry out step {plan.step}: {e}")
        self.worker.checked()
        self.sim.memory.finished(self, plan.step)
        assert self.link is not None
        self.link.agree(plan.step, own, lane)
        context = self.worker.context
        if self.rank not in self.layout.drawing or not (context is None or context.draws):
            lane = LaneResult([], [])  # only the first of the last stage has tokens
        news = self.tier.finished() if self.tier is not None else None
        return StepResult(plan.epoch, plan.step, (lane,), seconds, self.experts.prepared, news)


_PHASE: dict[type[Any], str] = {
    Join: "connect", Regroup: "groups", Load: "load", Probe: "probe", Allocate: "allocate", Call: "call",
    SendExperts: "experts", PlaceExperts: "experts", PutLora: "adapter",
}  # fmt: skip


class Poisoned(Exception):
    """By a request, without killing."""


class SimWorker(HashWorker):
    """The hash model, with memory that holds what was there before, and requests that no rank survives."""

    def __init__(self, process: Process, num_blocks: int) -> None:
        scenario = process.sim.scenario
        size = scenario.config.cache.block_size
        super().__init__(num_blocks, size, VOCAB)
        self.context = process.context
        here = size if self.context is None else size // self.context.own.size
        if scenario.garbage:
            self.cells = [[process.world.random.getrandbits(30)] * here for _ in range(num_blocks)]
        elif self.context is not None:
            self.cells = [[None] * here for _ in range(num_blocks)]
        self.told: dict[tuple[int, int], int] = {}  # of the step, where others have cells, too: by block and offset
        self.written: dict[int, list[tuple[int, int]]] = {}  # by step: cells
        self.sums: dict[int, int] = {}  # of blocks that were full
        self.pid = getattr(process, "pid", 0)
        self.poisons = scenario.poisons
        if scenario.poisons and process.is_hit:
            apply, poisons = self.books.apply, scenario.poisons

            def checked(*plan: Any) -> Any:
                work = apply(*plan)
                for item in work:
                    at = poisons.get(self.books.rows[item.row].fresh.seed)
                    if at is not None and item.start + item.size > at:
                        process.sim.counts["poisoned"] += 1
                        raise Poisoned if scenario.poison_raises else Died
                return work

            self.books.apply = checked  # type: ignore[method-assign,assignment]

    def _compute_all(self, every: list[Work]) -> None:
        if self.context is None:
            return super()._compute_all(every)
        self.told = {}
        places: list[tuple[list[int], int]] = []
        for work in every:
            state = self.books.rows[work.row]
            self._look(state, work.start)
            places += [(state.blocks, position) for position in range(work.start, work.start + work.size)]
        super()._compute_all(every)
        computed = [self.told[blocks[at // self.block_size], at % self.block_size] for blocks, at in places]
        cells = self.context.gathered(computed) + [GARBAGE] * len(places)
        for (blocks, at), cell in zip(places, cells, strict=False):
            self._store(blocks, at, cell)

    def _look(self, state: RowState, start: int) -> None:
        """At each cell of what a row has behind it."""
        h, number = 0, number_of(self.adapter(state))
        for position in range(start):
            h = mix(h, state.tokens[position], *number)
            if self._cell(state.blocks, position) != h:
                index, offset = divmod(start - 1, self.block_size)
                self.told[state.blocks[index], offset] = GARBAGE
                return

    def _cell(self, blocks: list[int], position: int) -> int | None:
        if self.context is None:
            return super()._cell(blocks, position)
        index, offset = divmod(position, self.block_size)
        found = self.told.get((blocks[index], offset))
        return self.context.cell(blocks[index], offset) if found is None else found

    def _store(self, blocks: list[int], position: int, cell: int) -> None:
        index, offset = divmod(position, self.block_size)
        block, at = blocks[index], offset
        self.sums.pop(block, None)  # it isn't full any more, or not yet
        if self.context is not None:
            self.told[block, offset] = cell
            at = self.context.own.local(offset) if self.context.own.here(offset) else -1
        if at >= 0:
            self.cells[block][at] = cell
            self.written.setdefault(self.books.step, []).append((block, at))

    def sum(self, block: int) -> int:
        return mix(*(cell or 0 for cell in self.cells[block]))

    def checked(self) -> None:
        """Blocks that a step has filled have their checksums; what was only guessed fills none."""
        for state in self.books.rows.values():
            for block in state.blocks[: state.cursor // self.block_size]:
                if block not in self.sums:
                    self.sums[block] = self.sum(block)

    def draft(self, state: RowState, position: int, most: int) -> list[int]:
        """No further than to what can't be computed: the tokens before it would be lost with the rank."""
        at = self.poisons.get(state.fresh.seed)
        return super().draft(state, position, most if at is None else max(0, min(most, at - position)))


def tokens_of(result: LaneResult) -> dict[int, list[int] | bytes]:
    """Or vectors."""
    drawn = zip(result.rows, result.tokens, strict=True)
    return {row: [token, *result.more.get(row, ())] for row, token in drawn} | result.pooled
