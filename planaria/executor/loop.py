"""The driver: the only place where a core and its ranks meet time. One thread calls it.

`start` brings the ranks up, `handle` takes a front end's message, `turn` does one round: plan what can be planned,
carry it out, commit, and hand what came of it to `emit`. Ranks that are lost are dealt with in `_lost` and nowhere
else: the crew begins another epoch, and every open request is computed again from its tokens. When that leads nowhere,
the engine ends, and every open request is answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from planaria.config.options import EngineConfig
from planaria.core.engine import EngineCore
from planaria.errors import CallFailed, CapacityError, EngineDead, PlanariaError, UserError, WorkersLost
from planaria.executor.boot import Place
from planaria.executor.census import census, here
from planaria.executor.crew import Crew, Launcher, Link, Refusal, System, failure
from planaria.executor.link.codec import encode_command
from planaria.executor.link.faults import LinkError
from planaria.executor.pending import Pending
from planaria.executor.reformations import Reformations
from planaria.executor.worker_group import Ticket
from planaria.protocol import Call, Failed, StepPlan, StepResult
from planaria.topology import Layout
from planaria.types import Delta, FinishReason, Request
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    FromEngine,
    Output,
    Processes,
    Recovery,
    Report,
    Shutdown,
    Submit,
    ToEngine,
)

logger = logging.getLogger("planaria.engine")

Emit = Callable[[FromEngine], None]

LESS = 0.8  # of the KV memory it had, after a rank ran out of memory

__all__ = ["Emit", "EngineLoop", "Launcher", "Link"]


class EngineLoop:
    """`link_for(places, epoch)` makes the link to what the launcher started. `on_loss`, where set, is called from
    another thread when a rank's process ends: whoever sleeps outside `turn` then calls `check`."""

    def __init__(
        self, config: EngineConfig, launcher: Launcher, link_for: Callable[[list[Place], int], Any], emit: Emit,
        clock: Callable[[], float] = time.monotonic, system: System | None = None,
    ) -> None:  # fmt: skip
        self.config, self.emit, self.clock = config, emit, clock
        self.crew = Crew(config, launcher, link_for, emit, clock, system or System())
        parallel = config.parallel
        # the rank whose step results have tokens: tensor rank 0 of the last stage
        self.answering = parallel.tensor_parallel_size * (parallel.pipeline_parallel_size - 1)
        self.on_loss: Callable[[], None] = lambda: None
        # Where several processes run the same engine: the messages (and with `clock` the time) that all of them go by.
        self.agree: Callable[[ToEngine], ToEngine] = lambda message: message
        launcher.on_exit = self._on_exit
        self.core: EngineCore | None = None
        self.stopping = False
        self.dead: Dead | None = None
        self.limit = Reformations(config.faults.recovery_limit, config.faults.recovery_window)
        self._tokens = -1  # generated when the last epoch began
        self._failed_rank = -1  # that answered with a failure last, with no token since
        self._reports: list[Pending] = []  # ranks' answers that a Report waits for

    # -- starting and ending

    def start(self) -> EngineFacts:
        """Launch, meet, load, allocate. Raises ModelError, CapacityError, RanksDiffer or EngineDead."""
        began = self.clock()
        crew, config = self.crew, self.config
        try:
            self._come_up()
        except BaseException as e:
            crew.broken = crew.broken or crew.group.world_size > 1 or not isinstance(e, PlanariaError)
            crew.close()
            raise
        self.core = EngineCore(config.scheduler, config.cache, crew.num_blocks)
        self.core.epoch = crew.epoch
        crew.seconds["engine"] = self.clock() - began
        model = config.model
        crew.stand_by()
        return EngineFacts(
            model=config.served_model_name,
            max_model_len=config.scheduler.max_model_len,
            vocab_size=model.vocab_size,
            num_parameters=model.num_parameters,
            dtype=config.device.dtype,
            quantization=config.device.quantization,
            device=config.device.device,
            threads=config.device.threads,
            num_blocks=crew.num_blocks,
            block_size=config.cache.block_size,
            weight_bytes=crew.weight_bytes,
            executor=crew.launcher.name,
            link=crew.link.name if crew.link is not None else "",
            layout=crew.layout(),
            ranks=[member.pid for member in crew.members],
            seconds=crew.seconds,
        )

    def _come_up(self) -> None:
        """The first epoch, or the first that succeeds: a process that ends while it starts is replaced."""
        try:
            loss: WorkersLost | None = None
            while True:
                try:
                    if loss is None:
                        self.crew.start()
                    else:
                        self.crew.reform(loss)
                    return
                except WorkersLost as e:
                    loss = e
                    if not self._may_go_on(loss):
                        raise EngineDead(str(loss)) from None
                    logger.warning("%s; trying again", loss)
        except Refusal as e:
            if e.failed.kind in ("error", "peer") and e.failed.traceback:
                logger.error("%s\n%s", failure(e.failed), e.failed.traceback)
            raise failure(e.failed) from None

    def close(self) -> None:
        """Answer what is open, end the ranks. Idempotent."""
        if self.core is not None:
            self._abort_all(FinishReason.ABORT, None)
        self.crew.close()
        self.core = None

    # -- faults

    def _on_exit(self) -> None:
        """From another thread: end the wait for an answer that may never come."""
        link = self.crew.link
        if link is not None:
            link.wake()
        self.on_loss()

    def watches(self) -> bool:
        """Are there ranks whose silence must be looked for, by calling `check` about once a second?"""
        return self.crew.link is not None and bool(self.crew.link.pulses())

    def check(self) -> None:
        """Look for ranks that ended or fell silent while nothing was running; about once a second."""
        if self.crew.link is None or self.dead is not None:
            return
        try:
            self.crew.check()
        except WorkersLost as e:
            self._lost(e)

    def _may_go_on(self, loss: WorkersLost) -> bool:
        tokens = self.core.generation_tokens if self.core is not None else 0
        progressed, self._tokens = tokens != self._tokens and self.core is not None, tokens
        if progressed:
            self._failed_rank = -1
        return self.crew.launcher.replaces and self.limit.allowed(self.clock(), progressed)

    def _lost(self, loss: WorkersLost) -> None:
        """The one place where lost ranks are dealt with."""
        core = self.core
        assert core is not None
        began = self.clock()
        first = loss
        convicted = core.fault()
        self._emit(convicted)
        if convicted:
            self._tokens = -1  # an answer is progress: what ended the epochs before this one is out of the way
        replaced: set[int] = set()
        while True:
            if loss.kind == "capacity":
                self.crew.kv_share *= LESS
            # what killed a rank may have killed others, which is seen a moment later: that is the same attempt
            again = loss is first or not loss.dead or not loss.ranks or not replaced.isdisjoint(loss.ranks)
            if again and not self._may_go_on(loss):
                self._die(Failed(loss.ranks[0] if loss.ranks else 0, loss.phase, loss.cause, loss.traceback, loss.kind))
                return
            self.emit(Recovery(self.crew.epoch + 1, list(loss.ranks), loss.phase, loss.cause, loss.traceback))
            if not loss.dead and self._failed_rank in loss.ranks:
                loss.dead = True  # it failed twice with no token in between: another process may do better
            replaced.update(loss.ranks if loss.dead else ())
            self._failed_rank = loss.ranks[0] if loss.ranks and not loss.dead else -1
            try:
                seconds = self.crew.reform(loss)
                break
            except WorkersLost as e:
                loss = e
            except Refusal as e:
                self._die(e.failed)
                return
            except CapacityError as e:
                rank = loss.ranks[0] if loss.ranks else 0
                self._die(Failed(rank, loss.phase, f"{loss.cause}; it can't be replaced: {e}", loss.traceback))
                return
        crew = self.crew
        before = core.replayed_tokens
        self._emit(core.lost(crew.epoch, crew.num_blocks))
        seconds["total"] = self.clock() - began
        done = Recovery(
            crew.epoch, list(first.ranks), first.phase, first.cause, first.traceback, seconds, crew.layout(),
            [member.pid for member in crew.members], len(core.lane_of), core.replayed_tokens - before,
        )  # fmt: skip
        self.emit(done)
        logger.warning("%s", told(done, loss.dead))
        crew.stand_by()

    # -- running

    def handle(self, message: ToEngine) -> None:
        """A front end's message. Requests that can't run are answered at once."""
        assert self.core is not None
        try:
            message = message if self.dead is not None else self.agree(message)
        except LinkError as e:
            self._lost(WorkersLost(self.crew.epoch, e.ranks, str(e), self.crew.phase()))
            raise EngineDead(str(e)) from None
        match message:
            case Submit():
                request = Request(
                    message.id, message.prompt, message.params, message.seed, max_tokens=message.max_tokens,
                    eos_ids=message.eos_ids, arrival=self.clock(), priority=message.priority,
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
        if self.dead is not None or all(here(member) for member in self.crew.members):
            self._tell_census({})
        else:
            self._reports.append(self.call("resident"))

    def _tell_census(self, resident: dict[int, int]) -> None:
        parallel = self.config.parallel
        layout = Layout(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        state = "busy" if self.busy() else "idle"
        crew = self.crew
        spares = crew.launcher.spare_pids()
        self.emit(Processes(census(crew.members, layout, crew.epoch, crew.group.owing(), resident, state, spares)))

    def _answer_reports(self) -> None:
        while self._reports and self._reports[0].done():
            try:
                resident = dict(enumerate(self._reports.pop(0).result()))
            except (CallFailed, UserError):  # a worker class of the user's, which may not say
                resident = {}
            self._tell_census(resident)

    def busy(self) -> bool:
        """Is there anything to do without a new message?"""
        return self.core is not None and bool(self.core.has_requests() or self.crew.group.open or self._reports)

    def turn(self) -> bool:
        """One round; True if something was computed. Lost ranks are replaced; open requests are always answered."""
        core, crew = self.core, self.crew
        assert core is not None
        try:
            while core.in_flight < self.config.scheduler.depth:
                plan = core.plan(self.clock())
                if plan is None:
                    break
                crew.send(plan)
            self._answer_reports()  # some may have ended with their epoch
            if not crew.group.open:
                return False
            for ticket in crew.poll() or ():
                self._complete(ticket)
            self._answer_reports()
        except WorkersLost as e:
            self._lost(e)
        return True

    def call(self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Pending:
        """Have every rank run a worker's method after the steps that are on their way. Raises CodecError for arguments
        that can't travel, EngineDead."""
        if self.dead is not None or self.crew.link is None:
            raise EngineDead(self.dead.message if self.dead is not None else "the engine was closed")
        command = Call(method, args, kwargs or {})
        encode_command(command)  # refused here, on every back end alike, and before a rank is owed to
        try:
            ticket = self.crew.send(command)
        except WorkersLost as e:  # nobody has it
            self._lost(e)
            if self.dead is not None:
                raise EngineDead(self.dead.message) from None
            ticket = self.crew.send(command)
        return Pending(ticket, self._wait)

    def _wait(self, ticket: Ticket, deadline: float | None) -> None:
        """Carry on until `ticket` is closed or the deadline has come. Raises EngineDead."""
        try:
            while not ticket.closed and self.dead is None:
                done = self.crew.poll(deadline)
                if done is None:
                    return
                for each in done:
                    self._complete(each)
        except WorkersLost as e:
            self._lost(e)
        if not ticket.closed:
            raise EngineDead(self.dead.message if self.dead is not None else "the engine was closed")

    def _complete(self, ticket: Ticket) -> None:
        """Raises WorkersLost when a rank could not take the step."""
        assert self.core is not None
        if isinstance(ticket.command, Call):
            return  # whoever asked looks at the ticket
        if ticket.failed is not None:
            raise self.crew.loss_of(self.crew.root_cause(ticket.failed))
        result = ticket.replies[self.answering]
        if isinstance(result, StepResult) and isinstance(ticket.command, StepPlan):
            self.crew.stepped(ticket.command, result)
            self._emit(self.core.commit(result), stepped=True)

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
        self.crew.broken = True  # ranks may wait for one that failed
        self._abort_all(FinishReason.ERROR, str(error))
        self.dead = Dead(failed.kind, str(error), failed.traceback)
        self.stopping = True
        self.emit(self.dead)



def told(done: Recovery, replaced: bool) -> str:
    """The block of the log that says what happened and what was done."""
    ranks = ", ".join(map(str, done.ranks))
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in done.seconds.items() if part != "total")
    lines = [
        f"rank {ranks} failed in {done.phase}: {done.cause}",
        *(done.traceback.rstrip().splitlines() if done.traceback else ()),
        f"{'replaced it' if replaced else 'kept its process'}, began epoch {done.epoch} ({done.layout}) after "
        f"{done.seconds.get('total', 0.0):.2f} s: {parts}",
        f"{done.requests} requests go on; {done.tokens} tokens are computed again",
    ]
    return "\n  ".join(lines)
