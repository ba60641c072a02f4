"""The driver: the only place where a core, a gang and a link meet time. One thread calls it.

`start` brings the gang up, `handle` takes a front end's message, `turn` does one round: plan what can be planned,
carry it out, commit, and hand what came of it to `emit`. Every open request is answered, also when the engine dies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from planaria.config.options import EngineConfig
from planaria.core.engine import EngineCore
from planaria.errors import (
    CallFailed,
    CapacityError,
    EngineDead,
    ModelError,
    PlanariaError,
    RanksDiffer,
    UserError,
    WorkersLost,
)
from planaria.executor.boot import Place, RankBoot, boots_for
from planaria.executor.census import census, here
from planaria.executor.gang import PHASES, Gang
from planaria.executor.health import Health
from planaria.executor.link.address import Address
from planaria.executor.link.codec import encode_command
from planaria.executor.link.faults import LinkError
from planaria.executor.pending import Pending
from planaria.executor.preflight import Needs, check_node, look
from planaria.executor.startup import StartUp
from planaria.executor.worker_group import Ticket, WorkerGroup
from planaria.node import node_name, process_state
from planaria.protocol import Call, Command, Exit, Failed, Hello, Reply, StepResult
from planaria.topology import Layout
from planaria.types import Delta, FinishReason, Request
from planaria.wire import Cancel, Dead, EngineFacts, FromEngine, Output, Processes, Report, Shutdown, Submit, ToEngine

logger = logging.getLogger("planaria.engine")

Emit = Callable[[FromEngine], None]

LOOK = 0.5  # seconds between looks at the ranks' health while waiting
START_TIMEOUT = 1800.0  # seconds for one command of the start; loading from a slow disk is the longest
EXIT_TIMEOUT = 5.0
SHARED = 64 << 20  # bytes of memory file that a node must be able to make
LAST_WORDS = 1.0  # seconds a rank gets to say why another rank could not go on


class Launcher(Protocol):
    name: str
    on_exit: Callable[[], None]  # called from any thread when a rank's process ends unasked

    def start(self) -> list[Place]:
        """Make all ranks' processes, without weight, and say where each is."""
        ...

    def run(self, boots: Sequence[RankBoot]) -> None:
        """Give every rank what it begins with. It then comes to its link by itself."""
        ...

    def lost(self) -> dict[int, str]: ...

    def closing(self) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


class Link(Protocol):
    name: str

    def send(self, number: int, command: Command) -> None: ...

    def receive(self, timeout: float | None) -> tuple[int, int, Reply] | None: ...

    def address_of(self, rank: int) -> Address: ...

    def pulses(self) -> list[tuple[int, int]]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def failure(failed: Failed) -> PlanariaError:
    """The exception a front end should see for a rank's failure."""
    if failed.kind == "model":
        return ModelError(failed.message)
    if failed.kind == "capacity":
        return CapacityError(failed.message)
    if failed.kind == "user":
        return UserError(failed.message)
    if failed.kind == "config":
        return RanksDiffer(failed.message)
    return EngineDead(f"rank {failed.rank} failed in {failed.phase}: {failed.message}")


class EngineLoop:
    """`link_for(places)` makes the link to what the launcher started. `on_loss`, where set, is called from another
    thread when a rank's process ends: whoever sleeps outside `turn` then calls `check`."""

    def __init__(
        self, config: EngineConfig, launcher: Launcher, link_for: Callable[[list[Place]], Link], emit: Emit
    ) -> None:
        self.config, self.launcher, self.link_for, self.emit = config, launcher, link_for, emit
        parallel = config.parallel
        # the rank whose step results have tokens: tensor rank 0 of the last stage
        self.answering = parallel.tensor_parallel_size * (parallel.pipeline_parallel_size - 1)
        self.on_loss: Callable[[], None] = lambda: None
        launcher.on_exit = self._on_exit
        self.group = WorkerGroup(parallel.world_size)
        self.health = Health(parallel.heartbeat_timeout)
        self.places: list[Place] = []
        self.members: tuple[Hello, ...] = ()
        self.link: Link | None = None
        self.core: EngineCore | None = None
        self.epoch = 0
        self.broken = False  # a rank is lost: the link can't be trusted to answer
        self.stopping = False
        self.dead: Dead | None = None
        self._reports: list[Pending] = []  # ranks' answers that a Report waits for

    # -- starting and ending

    def start(self) -> EngineFacts:
        """Launch, meet, load, allocate. Raises ModelError, CapacityError, RanksDiffer or EngineDead."""
        began = time.perf_counter()
        config = self.config
        phases = StartUp(self.group.world_size, self.emit)
        phases.enter("launch")
        gang = None
        try:
            if problems := check_node(look(node_name(), needs := Needs(self.group.world_size, SHARED)), needs):
                raise CapacityError(problems[0])
            self.places = self.launcher.start()
            self.link = self.link_for(self.places)
            link = self.link
            self.launcher.run(boots_for(config, self.places, link))
            gang = Gang(
                config.cache, config.scheduler, config.parallel, cpu=config.device.device == "cpu", epoch=self.epoch,
                apart=len({place.home for place in self.places}) > 1,
            )  # fmt: skip
            command: Command | None = gang.start()
            while command is not None:
                phases.enter(PHASES[type(command)])
                command = gang.on_done(self._ask(command, START_TIMEOUT, phases).in_order())
            failed = gang.failure
        except WorkersLost as e:
            failed = self._failed_by(e, phases.name)
        except BaseException:
            self.broken = True
            self.close()
            raise
        if failed is not None or gang is None:
            assert failed is not None
            error = failure(failed)
            if failed.kind in ("error", "peer") and failed.traceback:
                logger.error("%s\n%s", error, failed.traceback)
            self.broken = self.broken or self.group.world_size > 1
            self.close()
            raise error
        phases.enter("ready")
        self.members = gang.members
        self.core = EngineCore(config.scheduler, config.cache, gang.num_blocks)
        gang.seconds["engine"] = time.perf_counter() - began
        model = config.model
        return EngineFacts(
            model=config.served_model_name,
            max_model_len=config.scheduler.max_model_len,
            vocab_size=model.vocab_size,
            num_parameters=model.num_parameters,
            dtype=config.device.dtype,
            quantization=config.device.quantization,
            device=config.device.device,
            threads=config.device.threads,
            num_blocks=gang.num_blocks,
            block_size=config.cache.block_size,
            weight_bytes=gang.weight_bytes,
            executor=self.launcher.name,
            link=link.name,
            layout=f"tp={config.parallel.tensor_parallel_size} pp={config.parallel.pipeline_parallel_size}",
            ranks=[member.pid for member in gang.members],
            seconds=gang.seconds | phases.seconds,
        )

    def _ask(self, command: Command, timeout: float, phases: StartUp | None = None) -> Ticket:
        """Send a command with nothing else in flight and wait for all ranks. Raises WorkersLost."""
        assert self.link is not None
        ticket = self.group.submit(command, time.monotonic())
        self.link.send(ticket.number, command)
        deadline = time.monotonic() + timeout
        while True:
            answer = self._poll(min(deadline, time.monotonic() + LOOK))
            if answer is None:
                self._still_waiting(command, deadline, phases)
                continue
            if phases is not None:
                phases.done(answer[0])
            if ticket in self.group.on_reply(*answer):
                return ticket

    def _still_waiting(self, command: Command, deadline: float, phases: StartUp | None) -> None:
        owing = self.group.owing()
        if phases is not None:
            phases.waiting(owing)
        if time.monotonic() >= deadline:
            raise WorkersLost(self.epoch, tuple(owing), f"ranks {owing} did not answer in time")

    def _receive(self, deadline: float | None = None) -> tuple[int, int, Reply]:
        """The next answer. Raises WorkersLost when a rank's process has ended, is stopped or silent, its link is
        broken, or nothing has come by the deadline."""
        answer = self._poll(deadline)
        if answer is None:
            owing = self.group.owing()
            raise WorkersLost(self.epoch, tuple(owing), f"ranks {owing} did not answer in time")
        return answer

    def _poll(self, deadline: float | None) -> tuple[int, int, Reply] | None:
        """As `_receive`, but None at the deadline."""
        assert self.link is not None
        while True:
            left = LOOK if deadline is None else min(LOOK, max(0.0, deadline - time.monotonic()))
            try:
                answer = self.link.receive(left)
            except LinkError as e:
                lost = self.launcher.lost()
                cause = "; ".join(f"its process {how}" for how in lost.values()) or str(e)
                raise WorkersLost(self.epoch, tuple(lost) or e.ranks, cause) from None
            if answer is not None:
                return answer
            self._look_for_losses()
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def _look_for_losses(self) -> None:
        assert self.link is not None
        lost = self.launcher.lost()
        if not lost:
            lost = self.health.look(self.link.pulses(), time.monotonic(), lambda pid: process_state(pid) in ("T", "t"))
        if lost:
            raise WorkersLost(self.epoch, tuple(lost), "; ".join(f"its process {how}" for how in lost.values()))

    def _on_exit(self) -> None:
        """From another thread: end the wait for an answer that may never come."""
        if self.link is not None:
            self.link.wake()
        self.on_loss()

    def check(self) -> None:
        """Look for ranks that ended or fell silent while nothing was running; about once a second."""
        if self.link is None:
            return
        try:
            self._look_for_losses()
        except WorkersLost as e:
            self._lost(e)

    def _lost(self, loss: WorkersLost) -> None:
        """The one place where lost ranks are dealt with."""
        self._die(self._failed_by(loss))

    def _failed_by(self, loss: WorkersLost, phase: str = "") -> Failed:
        """What the first lost rank would have said itself."""
        if not phase:
            phase = type(self.group.open[0].command).__name__ if self.group.open else "idle"
            phase = {"StepPlan": "step"}.get(phase, phase.lower())
        self.broken = True
        return Failed(loss.ranks[0] if loss.ranks else 0, phase, loss.cause, "")

    def close(self) -> None:
        """Answer what is open, end the ranks. Idempotent."""
        if self.core is not None:
            self._abort_all(FinishReason.ABORT, None)
        self.launcher.closing()
        if self.link is None:
            self.launcher.kill()
        else:
            if not self.broken:
                try:
                    deadline = time.monotonic() + EXIT_TIMEOUT
                    while self.group.open:
                        self.group.on_reply(*self._receive(deadline))
                    self._ask(Exit(), EXIT_TIMEOUT)
                except (WorkersLost, LinkError) as e:
                    logger.warning("while ending: %s", e)
                    self.broken = True
            if self.broken:
                self.launcher.kill()
            self.launcher.close()
            self.link.close()
            self.link = None
        self.core = None

    # -- running

    def handle(self, message: ToEngine) -> None:
        """A front end's message. Requests that can't run are answered at once."""
        assert self.core is not None
        match message:
            case Submit():
                request = Request(
                    message.id, message.prompt, message.params, message.seed, max_tokens=message.max_tokens,
                    eos_ids=message.eos_ids, arrival=time.monotonic(), priority=message.priority,
                    output=list(message.output),
                )  # fmt: skip
                self._emit(self.core.admit(request))
            case Cancel():
                self._emit(self.core.cancel(message.id))
            case Report():
                self._report()
            case Shutdown():
                self.stopping = True

    def _report(self) -> None:
        """Answer a Report; ranks that only they can look into are asked first, between two steps."""
        if self.dead is not None or all(here(member) for member in self.members):
            self._tell_census({})
        else:
            self._reports.append(self.call("resident"))

    def _tell_census(self, resident: dict[int, int]) -> None:
        parallel = self.config.parallel
        layout = Layout(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        state = "busy" if self.busy() else "idle"
        self.emit(Processes(census(self.members, layout, self.epoch, self.group.owing(), resident, state)))

    def _answer_reports(self) -> None:
        while self._reports and self._reports[0].done():
            try:
                resident = dict(enumerate(self._reports.pop(0).result()))
            except (CallFailed, UserError):  # a worker class of the user's, which may not say
                resident = {}
            self._tell_census(resident)

    def busy(self) -> bool:
        """Is there anything to do without a new message?"""
        return self.core is not None and self.core.has_requests()

    def turn(self) -> bool:
        """One round; True if something was computed. A rank's failure ends the engine; open requests are answered."""
        core, link = self.core, self.link
        assert core is not None and link is not None
        try:
            while core.in_flight < self.config.scheduler.depth:
                plan = core.plan(time.monotonic())
                if plan is None:
                    break
                ticket = self.group.submit(plan, time.monotonic())
                link.send(ticket.number, plan)
            if not self.group.open:
                return False
            for ticket in self.group.on_reply(*self._receive()):
                self._complete(ticket)
            self._answer_reports()
        except WorkersLost as e:
            self._lost(e)
        except LinkError as e:
            self._lost(WorkersLost(self.epoch, e.ranks, str(e)))
        return True

    def call(self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Pending:
        """Have every rank run a worker's method after the steps that are on their way. Raises CodecError for arguments
        that can't travel, EngineDead."""
        if self.dead is not None or self.link is None:
            raise EngineDead(self.dead.message if self.dead is not None else "the engine was closed")
        command = Call(method, args, kwargs or {})
        encode_command(command)  # refused here, on every back end alike, and before a rank is owed to
        ticket = self.group.submit(command, time.monotonic())
        self.link.send(ticket.number, command)
        return Pending(ticket, self._wait)

    def _wait(self, ticket: Ticket, deadline: float | None) -> None:
        """Carry on until `ticket` is closed or the deadline has come. Raises EngineDead when a rank is lost."""
        try:
            while not ticket.closed and self.dead is None:
                answer = self._poll(deadline)
                if answer is None:
                    return
                for done in self.group.on_reply(*answer):
                    self._complete(done)
        except WorkersLost as e:
            self._lost(e)
        if not ticket.closed:
            raise EngineDead(self.dead.message if self.dead is not None else "the engine was closed")

    def _complete(self, ticket: Ticket) -> None:
        assert self.core is not None
        if isinstance(ticket.command, Call):
            return  # whoever asked looks at the ticket
        if ticket.failed is not None:
            self._die(self._root_cause(ticket.failed))
            return
        result = ticket.replies[self.answering]
        if isinstance(result, StepResult):
            self._emit(self.core.commit(result), stepped=True)

    def _root_cause(self, failed: Failed) -> Failed:
        """A rank that only says that another did not come waits for what that one has to say, or for its end."""
        deadline = time.monotonic() + LAST_WORDS
        while failed.kind == "peer":
            try:
                _, _, reply = self._receive(deadline)
            except WorkersLost as e:
                return self._failed_by(e, failed.phase) if e.cause and self.launcher.lost() else failed
            if isinstance(reply, Failed):
                failed = reply
        return failed

    def _emit(self, deltas: list[Delta], *, stepped: bool = False) -> None:
        if deltas or stepped:
            assert self.core is not None
            self.emit(Output(deltas, self.core.stats()))

    def _abort_all(self, reason: FinishReason, error: str | None) -> None:
        assert self.core is not None
        deltas = []
        for request in self.core.snapshot():
            for delta in self.core.cancel(request.id, reason):
                delta.error = error
                deltas.append(delta)
        self._emit(deltas)

    def _die(self, failed: Failed) -> None:
        error = failure(failed)
        logger.error("the engine ends: %s\n%s", error, failed.traceback)
        self.broken = self.broken or self.group.world_size > 1  # other ranks may wait for the one that failed
        self._abort_all(FinishReason.ERROR, str(error))
        self.dead = Dead(failed.kind, str(error), failed.traceback)
        self.stopping = True
        self.emit(self.dead)

