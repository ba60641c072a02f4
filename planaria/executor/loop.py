"""The driver: the only place where a core and its ranks meet time. One thread calls it.

`start` brings the ranks up, `handle` takes a front end's message, `step` does one round: plan what can be planned,
carry it out, commit, and hand what came of it to `emit`. Ranks that are lost, and layouts that are wished for, are
dealt with in `epochs` and nowhere else. When that leads nowhere, the engine ends, and every open request is answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.core import transfer
from planaria.core.engine import EngineCore, counting_blocks, full_blocks
from planaria.errors import EngineDead, PlanariaError, UserError, WorkersLost
from planaria.executor.backend import Launcher, Link
from planaria.executor.balancing import Balancing
from planaria.executor.boot import boots_for
from planaria.executor.epochs import Epochs
from planaria.executor.gang import Gang, Refusal, failure
from planaria.executor.layout_change import LayoutChanger
from planaria.executor.link.codec import encode_command
from planaria.executor.link.faults import LinkError
from planaria.executor.loras import LoraStore
from planaria.executor.new_weights import NewWeights
from planaria.executor.pending import Pending, PendingCalls
from planaria.executor.reply_ledger import Ticket
from planaria.executor.sleeper import Sleeper
from planaria.executor.status import Reports, facts_of
from planaria.executor.transition import Transition, Wish
from planaria.executor.watch import System
from planaria.hosts.host import Place
from planaria.protocol import Call, Command, Failed, KVNews, StepPlan, StepResult
from planaria.topology import Layout
from planaria.types import Delta, FinishReason
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    FromEngine,
    LoadLora,
    Output,
    Release,
    Report,
    ReportExperts,
    ResizeEngine,
    Share,
    Shutdown,
    Sleep,
    Submit,
    ToEngine,
    UnloadLora,
    UpdateWeights,
)

logger = logging.getLogger("planaria.engine")

Emit = Callable[[FromEngine], None]

STEP_TOKENS = 128  # of a step, for each thread of a CPU
LAST_SAVES = 2.0  # seconds for KV blocks to be written when the engine ends
SPARES_AFTER = 15.0  # seconds that a replay has the node's cores to itself, before another spare is started

__all__ = ["Emit", "EngineLoop", "Launcher", "Link"]


class EngineLoop:
    """`link_for(places, epoch)` makes the link to what the launcher started. `on_loss`, where set, is called from
    another thread when a rank's process ends: whoever sleeps outside `step` then calls `check`."""

    def __init__(
        self, config: EngineConfig, launcher: Launcher, link_for: Callable[[list[Place], int], Any], emit: Emit,
        clock: Callable[[], float] = time.monotonic, system: System | None = None,
    ) -> None:  # fmt: skip
        self.config, self.emit, self.clock = config, emit, clock
        self.gang = Gang(config, launcher, link_for, emit, clock, system or System())
        self.balancing = Balancing(config, self.gang, lambda: self._emit([], stepped=True))
        self.on_loss: Callable[[], None] = lambda: None
        # Where several processes run the same engine: the messages (and with `clock` the time) that all of them go by.
        self.agree: Callable[[ToEngine], ToEngine] = lambda message: message
        self.share: Callable[[bytes], tuple[int, list[bytes]]] = lambda data: (0, [data])  # see SpmdLink
        launcher.on_exit = self._on_exit
        self.core: EngineCore | None = None
        self.stopping = False
        self.dead: Dead | None = None
        say: Emit = lambda message: self.emit(message)  # noqa: E731
        self.epochs = Epochs(config, self.gang, clock, say, self._emit, self.balancing.formed)
        self.layout_change = LayoutChanger(config, self.gang, say, lambda: self.clock(), self._change, self._prepare)
        self.sleeper = Sleeper(self.gang, say, clock, lambda: settle(self), lambda: wake(self))
        self.new_weights = NewWeights(self, lambda: settle(self))
        self.loras = LoraStore(config, self.gang, lambda: self.clock())
        self.pending = PendingCalls(self.call)
        self.reports = Reports(self.gang, self.pending, self.busy, say)

    # -- starting and ending

    def start(self) -> EngineFacts:
        """Launch, meet, load, allocate. Raises ModelError, CapacityError, RanksDiffer or EngineDead."""
        began = self.clock()
        gang, config = self.gang, self.config
        try:
            come_up(self)
        except BaseException as e:
            gang.broken = gang.broken or gang.ledger.world_size > 1 or not isinstance(e, PlanariaError)
            gang.close()
            raise
        kv, layout = gang.kv, gang.layout
        self.core = EngineCore(
            config.scheduler, config.cache, gang.num_blocks, layout.dp, kv.indexes, adopt=kv.kept, scope=kv.scope,
            loras=config.lora.max_loras if config.lora is not None else 0,
        )  # fmt: skip
        self.core.epoch = gang.epoch
        if layout != gang.asked:
            self.core.lost(gang.epoch, gang.num_blocks, layout.pp, kept=kv.kept, indexes=kv.indexes)
        self.epochs.connect(self.core)
        kv.known, kv.counting = partial(full_blocks, self.core), partial(counting_blocks, self.core)
        self.limit_steps()
        gang.seconds["engine"] = self.clock() - began
        self.balancing.formed()
        gang.stand_by()
        return facts_of(config, gang, self.core)

    def close(self) -> None:
        """Answer what is open, end the ranks. Idempotent."""
        if self.core is not None:
            self._abort_all(FinishReason.ABORT, None)
            save_last(self)
        self.gang.close()
        self.core = None

    # -- faults

    def _on_exit(self) -> None:
        """From another thread: end the wait for an answer that may never come."""
        self.gang.watch.ending()
        link = self.gang.link
        if link is not None:
            link.wake()
        self.on_loss()

    def watches(self) -> bool:
        """Is `check` to be called about once a second: for ranks' silence, leases' end, adapters that come?"""
        lends = self.core is not None and any(lender.leases for lender in transfer.lenders(self.core.lanes))
        return lends or bool(self.loras.held) or (self.gang.link is not None and bool(self.gang.link.pulses()))

    def check(self) -> None:
        """Look for ranks that ended or fell silent while nothing was running; about once a second."""
        if self.gang.link is None or self.dead is not None:
            return
        look_at_core(self)
        try:
            self.gang.check()
            look_at_changes(self)
        except WorkersLost as e:
            self.begin_next(e)
        self._look_for_room()

    def _look_for_room(self) -> None:
        awake = self.dead is None and self.sleeper.level is None
        if awake and self.clock() >= self.layout_change.look_at:
            replay = self.epochs.replay
            self.layout_change.look_for_room(spares=replay is None or self.clock() - replay.began >= SPARES_AFTER)

    def _prepare(self, command: Command) -> None:
        """What all ranks are to do for another layout, while requests go on. Raises WorkersLost."""
        self.balancing.formed()  # what it was about is off: there will be other maps
        self.gang.send(command)

    def _has_work(self) -> bool:
        core = self.core
        return core is not None and bool(core.has_requests() or self.gang.ledger.open or core.loras.wanted)

    def _change(self, layout: Layout, why: str) -> None:
        """Another layout, by the same door as faults."""
        self.begin_next(Wish(layout, f"the layout becomes {layout}: {why}", self.gang.phase()))

    def begin_next(self, cause: WorkersLost | Wish) -> None:
        """The epoch ends, and the next begins, or none."""
        assert self.core is not None
        if (failed := self.epochs.begin_next(self.core, cause)) is not None:
            self.die(failed)
            return
        try:
            self.sleeper.again()
        except WorkersLost as e:
            self.begin_next(e)

    # -- running

    def handle(self, message: ToEngine) -> None:
        """A front end's message. Requests that can't run are answered at once."""
        assert self.core is not None
        try:
            message = message if self.dead is not None else self.agree(message)
        except LinkError as e:
            self.begin_next(WorkersLost(self.gang.epoch, e.ranks, str(e), self.gang.phase()))
            raise EngineDead(str(e)) from None
        match message:
            case Submit():
                waits = message.adapter and message.adapter not in self.loras.complete
                self._emit(self.loras.hold(message) if waits else self.core.admit(message.request(self.clock())))
            case Cancel():
                self._emit(self.core.cancel(message.id) + self.loras.end([message.id], FinishReason.ABORT, None))
            case Release():
                transfer.release(self.core.lanes, message.number, message.id)
                self._emit([], stepped=True)
            case LoadLora() | UnloadLora():
                self._emit(self.loras.hear(message, self.core))
            case Report():
                self.reports.ask(self.dead is not None)
            case ReportExperts():
                self.emit(self.balancing.report())
            case Share():
                share(self, message.engines)
            case ResizeEngine():
                try:
                    asleep = "it sleeps; wake it first" if self.sleeper.level is not None else ""
                    self.layout_change.ask(message, "the engine has ended" if self.dead is not None else asleep)
                except WorkersLost as e:
                    self.begin_next(e)
            case Sleep() | UpdateWeights():
                try:
                    carry_out(self, message)
                except WorkersLost as e:
                    self.begin_next(e)
            case Shutdown():
                self.stopping, self.gang.launcher.followed = True, message.followed

    def limit_steps(self) -> None:
        """With few threads a step of many tokens takes long, and every stream waits for it."""
        if self.core is not None and self.gang.link is not None and self.config.scheduler.auto_batched_tokens:
            threads = min(boot.threads for boot in boots_for(self.gang.config, self.gang.places, self.gang.link))
            together = self.gang.layout.tp * self.gang.layout.pcp
            self.core.limit_steps(threads * together * STEP_TOKENS)

    def busy(self) -> bool:
        """Is there anything to do without a new message?"""
        core, departure = self.core, self.layout_change.departure
        if self.sleeper.level is not None:
            return bool(self.gang.ledger.open or self.pending.open)
        return core is not None and bool(self._has_work() or self.pending.open or departure or core.transfers())

    def step(self) -> bool:
        """One round; True if something was computed. Lost ranks are replaced; open requests are always answered."""
        core, gang = self.core, self.gang
        assert core is not None
        self._look_for_room()
        look_at_core(self)
        try:
            look_at_changes(self)
            self.loras.place(core if self.sleeper.level is None else None)
            while core.in_flight < max(gang.layout.pp, self.config.scheduler.depth):
                plan = core.plan(self.clock()) if self.sleeper.level is None else None
                if plan is None:
                    break
                gang.send(plan)
            self.pending.answer()  # some may have ended with their epoch
            if not gang.ledger.open:
                return False
            for ticket in gang.poll() or ():
                self.complete(ticket)
        except WorkersLost as e:
            self.begin_next(e)
        return True

    def call(
        self, method: str | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Pending:
        """Have every rank run a worker's method, or a function of the worker, after the steps that are on their way.
        Raises CodecError for arguments that can't travel, UserError for a function that would have to, EngineDead."""
        if self.dead is not None or self.gang.link is None:
            raise EngineDead(self.dead.message if self.dead is not None else "the engine was closed")
        command = Call(method, args, kwargs or {})  # type: ignore[arg-type]  # a function stays in this process
        if isinstance(method, str):
            encode_command(command)  # refused here, on every back end alike, and before a rank is owed to
        elif self.gang.link.name != "direct":
            raise UserError(
                "collective_rpc takes a function only where the rank is in this process (executor uni); give the name "
                "of a worker's method (worker_extension_cls adds methods)"
            )
        try:
            ticket = self.gang.send(command)
        except WorkersLost as e:  # nobody has it
            self.begin_next(e)
            if self.dead is not None:
                raise EngineDead(self.dead.message) from None
            ticket = self.gang.send(command)
        return Pending(ticket, self._wait)

    def _wait(self, ticket: Ticket, deadline: float | None) -> None:
        """Carry on until `ticket` is closed or the deadline has come. Raises EngineDead."""
        try:
            while not ticket.closed and self.dead is None:
                done = self.gang.poll(deadline)
                if done is None:
                    return
                for each in done:
                    self.complete(each)
        except WorkersLost as e:
            self.begin_next(e)
        if not ticket.closed:
            raise EngineDead(self.dead.message if self.dead is not None else "the engine was closed")

    def complete(self, ticket: Ticket) -> None:
        """Raises WorkersLost when a rank could not take the step."""
        assert self.core is not None
        if isinstance(ticket.command, Call):
            self.balancing.told(ticket)
            return  # whoever else asked looks at the ticket
        if ticket.failed is not None:
            raise self.gang.loss_of(self.gang.root_cause(ticket.failed))
        if isinstance(ticket.command, StepPlan):
            if self.core.lanes[0].connector is not None:
                self.core.hear(news_of(ticket))
            drawn = [ticket.replies[rank] for rank in self.gang.layout.drawing]
            self._commit(ticket.command, [reply for reply in drawn if isinstance(reply, StepResult)])
        if self.layout_change.answered(ticket):
            return  # until ranks have left nothing is rearranged
        if isinstance(ticket.command, StepPlan):
            self.balancing.stepped(ticket)
        else:
            self.balancing.moved(ticket)

    def _commit(self, plan: StepPlan, parts: list[StepResult]) -> None:
        """parts: what was drawn in each lane."""
        assert self.core is not None
        result = parts[0]
        if len(parts) > 1:
            lanes, seconds = tuple(part.lanes[0] for part in parts), max(part.seconds for part in parts)
            result = StepResult(result.epoch, result.step, lanes, seconds)
        self.gang.watch.stepped(plan, result)
        self._emit(self.core.commit(result), stepped=True)

    def _emit(self, deltas: list[Delta], *, stepped: bool = False) -> None:
        if deltas or stepped:
            assert self.core is not None
            stats = self.core.stats()
            if self.balancing.stats is not None:
                stats = msgspec.structs.replace(stats, experts=self.balancing.stats)
            self.emit(Output(deltas, stats))
        if self.epochs.replay is not None and self.epochs.watch(deltas):
            self.layout_change.look_at = 0.0  # spares that waited for it are next

    def _abort_all(self, reason: FinishReason, error: str | None) -> None:
        assert self.core is not None
        self.layout_change.end(error or "the engine ends")
        deltas = self.loras.end(list(self.loras.held), reason, error)
        for request in self.core.snapshot():
            for delta in self.core.cancel(request.id, reason):
                delta.error = error
                deltas.append(delta)
        self._emit(deltas)

    def die(self, failed: Failed) -> None:
        error = failure(failed)
        logger.error("the engine ends: %s\n%s", error, failed.traceback)
        self.gang.broken = True  # ranks may wait for one that failed
        self.dead = Dead(failed.kind, str(error), failed.traceback)
        self.stopping = True
        self.emit(self.dead)  # first: there may be another engine for what is open
        self._abort_all(FinishReason.ERROR, str(error))


def news_of(ticket: Ticket) -> dict[int, KVNews]:
    """What ranks' connectors said with a step, by rank."""
    said = {rank: reply.kv for rank, reply in ticket.replies.items() if isinstance(reply, StepResult)}
    return {rank: news for rank, news in said.items() if news is not None}


def share(loop: EngineLoop, engines: int) -> None:
    """Take another share of the node's cores: at once where a rank computes alone, else with the next epoch."""
    gang = loop.gang
    device = msgspec.structs.replace(gang.config.device, sharers=engines)
    gang.config = msgspec.structs.replace(gang.config, device=device)
    if gang.link is not None and loop.dead is None and gang.ledger.world_size == 1:
        loop.limit_steps()
        (boot,) = boots_for(gang.config, gang.places, gang.link)
        loop.call("use_threads", (boot.threads,))


def save_last(loop: EngineLoop) -> None:
    """What is still to be written outside of memory when an engine ends, as far as that takes no long time."""
    until = loop.clock() + LAST_SAVES
    while loop.core is not None and loop.dead is None and not loop.gang.broken and loop.core.transfers():
        if loop.clock() >= until or loop.gang.link is None:
            return
        loop.step()


def come_up(loop: EngineLoop) -> None:
    """The first epoch, or the first that succeeds: a process that ends while it starts is replaced."""
    try:
        loss: WorkersLost | None = None
        while True:
            try:
                if loss is None:
                    loop.gang.start()
                else:
                    loop.gang.reform(Transition(loss, loop.gang.layout))
                return
            except WorkersLost as e:
                loss = e
                if not loop.epochs.may_go_on(None):
                    raise EngineDead(str(loss)) from None
                logger.warning("%s; trying again", loss)
    except Refusal as e:
        if e.failed.kind in ("error", "peer") and e.failed.traceback:
            logger.error("%s\n%s", failure(e.failed), e.failed.traceback)
        raise failure(e.failed) from None


def settle(loop: EngineLoop) -> None:
    """Wait for all that ranks have been told to do. Raises WorkersLost."""
    while loop.gang.ledger.open:
        for ticket in loop.gang.poll() or ():
            loop.complete(ticket)
    save_last(loop)


def look_at_core(loop: EngineLoop) -> None:
    """Leases whose time is over, which others hear of, and adapters that came, or didn't."""
    if loop.core is not None:
        over = transfer.expire(loop.core.lanes, loop.clock())
        if (deltas := loop.loras.look(loop.core)) or over:
            loop._emit(deltas, stepped=over)


def look_at_changes(loop: EngineLoop) -> None:
    """That are being prepared. Raises WorkersLost."""
    if loop.layout_change.underway:
        loop.layout_change.look(not loop._has_work())
    if loop.new_weights.asked is not None:
        loop.new_weights.look(why_not(loop))


def wake(loop: EngineLoop) -> str:
    """Another epoch begins, or why none does."""
    loop.begin_next(Wish(loop.gang.layout, "the engine wakes up", "asleep"))
    return loop.dead.message if loop.dead is not None else ""


def carry_out(loop: EngineLoop, asked: Sleep | UpdateWeights) -> None:
    """What a front end wants of the whole engine. Raises WorkersLost."""
    if isinstance(asked, Sleep):
        loop.sleeper.ask(asked, why_not(loop))
    else:
        loop.new_weights.ask(asked, why_not(loop))


def why_not(loop: EngineLoop) -> str:
    """Why another epoch can't be begun on purpose now, or ""."""
    if loop.dead is not None:
        return "the engine has ended"
    if not loop.gang.launcher.replaces:
        return f"ranks of the executor back end {loop.gang.launcher.name} can't begin another epoch"
    return "a change of the layout is on its way; wait for it" if loop.layout_change.underway else ""
