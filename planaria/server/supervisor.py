"""An engine for one event loop, whatever becomes of its processes. Implements `planaria.wire.EngineClient`.

When the engine's process ends, another is started and every open sequence goes on in it with the tokens it has: its
sink hears nothing but a pause. The limit is the one for lost ranks; when it is used up every sink hears an error. A
sequence that was there at several deaths is run alone, and answered with an error if that kills its engine too
(`planaria.core.quarantine`): a dead engine can't keep that account.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from planaria.config.options import EngineConfig
from planaria.core.quarantine import Quarantine
from planaria.errors import CapacityError, EngineDead, ModelError, PlanariaError, UserError
from planaria.executor.reformations import Reformations
from planaria.executor.replay import Replay, told_replay
from planaria.executor.startup import parts_of
from planaria.node import node_name, process_state, resident_bytes
from planaria.server.engine_client import EXIT_TIMEOUT, Ended, EngineHandle, EngineProcess
from planaria.server.journal import Entry, Journal
from planaria.topology import LaneGroup, Layout
from planaria.types import Delta, FinishReason
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    EngineStats,
    ExpertLoads,
    ExpertStats,
    FromEngine,
    Leaving,
    Output,
    Phase,
    Placed,
    Processes,
    ProcessInfo,
    Progress,
    Recovery,
    Report,
    ReportExperts,
    Reshape,
    Reshaped,
    Share,
    Sink,
    StartUpNews,
    Submit,
)

logger = logging.getLogger("planaria.server")

REPORT_TIMEOUT = 2.0  # seconds an engine gets to say which processes there are; between two steps it looks
COMING_UP = 3600.0  # seconds without a word while it loads, or while its ranks begin anew
SHORTEST, LONGEST = 0.25, 30.0  # seconds between processes that don't come up
MARGIN = 30.0  # seconds: an engine that looks after its ranks' steps says so before it is given up itself


def error_of(dead: Dead) -> PlanariaError:
    """The exception that a message of the engine's end stands for."""
    kinds: dict[str, type[PlanariaError]] = {"model": ModelError, "user": UserError, "capacity": CapacityError}
    return kinds.get(dead.kind, EngineDead)(dead.message)


class SupervisedEngine:
    """Start with `await start()`; `on_progress` hears how the first start goes. `make` is for tests."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[StartUpNews], None] | None = None,
        make: Callable[[EngineConfig, Callable[[FromEngine], None]], EngineHandle] = EngineProcess,
    ) -> None:
        self.config, self.on_progress, self.make = config, on_progress, make
        self.facts: EngineFacts | None = None
        self.stats = EngineStats()
        self.last_progress = time.monotonic()
        self.dead: Dead | None = None
        self.lacks_place = False  # that is why
        self.on_recovery: Callable[[Recovery], None] = lambda message: None
        self.on_change: Callable[[], None] = lambda: None  # of `state`; before anybody hears of an end
        self.on_step: Callable[[], None] = lambda: None  # `stats` are new
        self.on_placed: Callable[[Placed], None] = lambda message: None  # where its ranks are about to be started
        self.on_leaving: Callable[[], None] = self.restart  # somebody told the engine's process to end
        self.index = config.parallel.data_parallel_index
        self.engine: EngineHandle | None = None
        self.up = False  # the engine of now can admit
        self.journal = Journal()
        self.quarantine = Quarantine()
        self.limit = Reformations(config.faults.recovery_limit, config.faults.recovery_window)
        self._before = EngineStats()  # what the engines before this one have counted
        self._tokens = 0  # that came from this engine
        self._recovery: Recovery | None = None  # of the engine's process, while it is on
        self._since = 0.0  # when it began
        self._ended = Ended("")  # with it
        self._replay: Replay | None = None
        self._regrouping = False  # the engine's ranks begin anew
        self.on_purpose = False  # and not because of a fault
        self._ready = asyncio.Event()
        self._closing = False
        self._left = asyncio.Event()  # by `close`
        self._failed = 0  # processes in a row that did not come up
        self._restarting = False  # the process ends because `restart` was called
        self._reports: list[asyncio.Future[list[ProcessInfo]]] = []  # who waits for the next one
        self._loads: list[asyncio.Future[ExpertLoads]] = []  # who waits for the next ones
        self._reshapes: dict[str, asyncio.Future[Reshaped]] = {}  # who waits for which
        self._task: asyncio.Task[None] | None = None
        self.log: Callable[..., None] = logger.warning  # of losses; of several servers one says them

    @property
    def state(self) -> str:
        """loading, ready, recovering (its ranks begin anew) or ended."""
        if self.dead is not None:
            return "ended"
        if not self.up:
            return "loading"
        return "recovering" if self._regrouping else "ready"

    def share(self, engines: int) -> None:
        """So many engines use this node's cores from now on."""
        device = msgspec.structs.replace(self.config.device, sharers=engines)
        self.config = msgspec.structs.replace(self.config, device=device)
        if self.up:
            assert self.engine is not None
            self.engine.send(Share(engines))

    # -- the engine's processes, one after the other

    async def start(self) -> None:
        """Start the first; `ready` says when it can admit."""
        self.engine = self.make(self.config, self._hear)
        await self.engine.start()
        self._task = asyncio.create_task(self._supervise(self.engine))

    async def _supervise(self, engine: EngineHandle | None) -> None:
        """engine: one that has started; None: it is to be followed."""
        unborn: Ended | None = None
        try:
            while engine is None or self._goes_on(engine, unborn or await engine.ended(self._most_silent)):
                await self._back_off()
                if self._closing:
                    return
                self.engine = engine = self.make(self.config, self._hear)
                engine.again, unborn = self.facts is not None, None
                try:
                    await engine.start()
                except CapacityError:
                    raise
                except (PlanariaError, OSError, zmq.ZMQError) as e:  # no descriptor, process or memory for now
                    unborn = Ended(f"did not come up: {e}")
                if self._closing:  # meanwhile
                    engine.kill()
        except CapacityError as e:
            self.lacks_place = not self._closing
            self._die(Dead("error", f"there is no place for another engine: {e}"))
        except Exception as e:
            logger.exception("no other engine could be started")
            self._die(Dead("error", f"no other engine could be started: {e}"))

    async def _back_off(self) -> None:
        """Wait before another process is started: the longer, the more of them did not come up."""
        if self._failed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), min(LONGEST, SHORTEST * 2.0 ** (self._failed - 1)))

    def revive(self) -> None:
        """It was given up because there was no place for it, and now there is one."""
        self.dead, self.lacks_place = None, False
        self._ready.clear()
        self._task = asyncio.create_task(self._supervise(None))
        self.on_change()

    def _goes_on(self, engine: EngineHandle, ended: Ended) -> bool:
        """The engine has ended: shall there be another?"""
        self.up, was_up, regrouping = False, self.up, self._regrouping
        self._failed = 0 if was_up or self._restarting else self._failed + 1
        for id in list(self._reshapes):
            self._on_reshaped(Reshaped(id, "", "the engine's process ended meanwhile"))
        self._regrouping, self.on_purpose, self._replay = False, False, None
        if self._closing or self.dead is not None:
            return False
        if self._restarting:
            logger.info("the engine process %d %s as it was told; starting another", engine.pid, ended.how)
            self._begin_anew()
            self.on_change()
            return True
        said = ended.said
        cause = f"the engine process {engine.pid} {ended.how}" + (f": {said.message}" if said is not None else "")
        open = [entry for entry in self.journal if entry.sent]
        phase = "start-up" if not was_up else "recovery" if regrouping else "step" if self._busy() else "idle"
        if [entry.id for entry in open] != [self.quarantine.running]:
            self.quarantine.running = None  # it wasn't alone yet
        convict = self.quarantine.fault([entry.id for entry in open])
        if convict is not None:
            error = "the engine died again and again while it ran this request, and nothing else"
            self._end(convict, FinishReason.ERROR, error)
        progressed = self._progressed() or convict is not None
        self._tokens = 0
        if not self.limit.allowed(time.monotonic(), progressed):
            self._die(Dead("error", cause, said.detail if said is not None else ""))
            return False
        self._begin_anew()
        if self._recovery is None:
            self._since, self._ended = time.monotonic() - ended.detect - ended.fence, ended
        self._recovery = Recovery(0, [], phase, cause, said.detail if said is not None else "", engine=self.index)
        self.on_recovery(self._recovery)
        self.on_change()
        self.log("%s in %s; starting another, %d requests are open", cause, phase, self._count())
        return True

    def _busy(self) -> bool:
        """Had the engine that has ended anything to do?"""
        return any(entry.sent for entry in self.journal)

    def _count(self) -> int:
        """Sequences that were open when it ended, whosever they are."""
        return len(self.journal)

    def _cost(self, done: Recovery) -> str:
        """What goes on after it, for people."""
        return f"\n  {done.requests} requests go on; {done.tokens} tokens are computed again"

    def _progressed(self) -> bool:
        """Did a sequence get a token from the engine that has ended?"""
        return self._tokens > 0

    def _begin_anew(self) -> None:
        """For another process nothing has been sent yet."""
        for entry in self.journal:
            entry.sent = entry.leaving = False
        self._before = self.stats
        self._restarting = False

    def restart(self) -> None:
        """End the engine's process and start another; what is open goes on in it."""
        if self.up:
            assert self.engine is not None
            self.up, self._restarting = False, True
            self.engine.end(followed=True)
            asyncio.get_running_loop().call_later(EXIT_TIMEOUT, self._make_end, self.engine)
            self.on_change()

    def _make_end(self, engine: EngineHandle) -> None:
        if self.engine is engine and self._restarting:
            engine.kill()

    def _most_silent(self) -> float | None:
        if not self.up or self._regrouping:
            return COMING_UP
        return self.config.faults.step_timeout + MARGIN if len(self.journal) or self._reshapes else None

    def _on_facts(self, facts: EngineFacts) -> None:
        assert self.engine is not None
        self.engine.connected()
        self.facts, self.up = facts, True
        self.stats = added(self._before, EngineStats())  # it has done nothing yet, in epoch 0
        self.last_progress = time.monotonic()
        self._ready.set()
        if self.engine.config.device.sharers != self.config.device.sharers:  # dealt anew while it came up
            self.share(self.config.device.sharers)
        self._admit()
        if self._recovery is not None:
            self._recovered(facts)
        self.on_change()

    def _recovered(self, facts: EngineFacts) -> None:
        assert self._recovery is not None
        total = time.monotonic() - self._since
        parts = {"detect": self._ended.detect, "fence": self._ended.fence, "replace": 0.0}
        parts |= {part: seconds for part, seconds in parts_of(facts.seconds).items() if part != "replace"}
        parts["replace"] = total - sum(parts.values())  # what is left: the process, until its ranks are there
        sent = [entry for entry in self.journal if entry.sent]
        done = msgspec.structs.replace(
            self._recovery, seconds={**parts, "total": total}, layout=facts.layout,
            pids=facts.ranks, requests=len(self.journal),
            tokens=sum(len(entry.submit.prompt) + len(entry.tokens) for entry in sent),
        )  # fmt: skip
        self._recovery = None
        self.on_recovery(done)
        self.log(
            "another engine goes on after %.2f s: %s%s", total,
            ", ".join(f"{part} {seconds:.2f}" for part, seconds in done.seconds.items() if part != "total"),
            self._cost(done),
        )  # fmt: skip
        if going := [entry.id for entry in self.journal if entry.tokens]:
            self._replay = Replay(done, going, time.monotonic())

    def _die(self, dead: Dead) -> None:
        """There will be no other: everybody is told."""
        if self.dead is None:
            self.dead, self.up = dead, False
            self._ready.set()
            self.on_change()
        for entry in self.journal:
            self._end(entry.id, FinishReason.ERROR, dead.message)

    async def ready(self) -> EngineFacts:
        await self._ready.wait()
        if self.dead is not None:
            raise error_of(self.dead)
        assert self.facts is not None
        return self.facts

    async def close(self) -> None:
        """End the engine and wait for it. Idempotent."""
        if self._closing or self.engine is None:
            return
        self._closing = True
        self._left.set()
        if self.up:
            self.engine.end()
        else:  # while it loads it hears nothing, and it has nobody to answer
            self.engine.kill()
        if self._task is not None:
            done, _ = await asyncio.wait({self._task}, timeout=EXIT_TIMEOUT)
            if not done:
                logger.warning("the engine process %d did not end in %.0f s: killed", self.engine.pid, EXIT_TIMEOUT)
                self.engine.kill()
                await self._task

    # -- layouts

    async def reshape(self, tp: int, pp: int, dp: int = 0, groups: Sequence[LaneGroup] = ()) -> Reshaped:
        """Have other ranks; dp: lanes, 0: as many as now; groups: see Reshape. Processes that come later,
        after a fault, have them from the start."""
        name = f"engine {self.index}"
        if not self.up or self.engine is None or self._closing:
            return Reshaped("", self.facts.layout if self.facts is not None else "", f"{name} is {self.state}")
        id = uuid.uuid4().hex[:8]
        waiting: asyncio.Future[Reshaped] = asyncio.get_running_loop().create_future()
        self._reshapes[id] = waiting
        self.engine.send(Reshape(id, tp, pp, dp, tuple(groups)))
        done = await waiting
        if not done.error:
            self.config = self.config.with_layout(Layout(pp, dp or self.config.parallel.lanes, tp=tp))
        return done

    def _on_reshaped(self, message: Reshaped) -> None:
        waiting = self._reshapes.pop(message.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    # -- sequences

    def submit(self, message: Submit, sink: Sink) -> None:
        if self.dead is not None:
            sink(Delta(message.id, len(message.output), [], FinishReason.ERROR, error=self.dead.message))
            return
        if not len(self.journal):
            self.last_progress = time.monotonic()
        entry = self.journal.open(message, sink)
        if self._limited():
            self._admit()
        elif self.up:
            self._send(entry)

    def cancel(self, request_id: str) -> None:
        entry = self.journal.close(request_id)
        if entry is None:
            return
        if entry.sent and not entry.leaving and self.up:
            assert self.engine is not None
            self.engine.send(Cancel(request_id))
        self._clear(request_id)

    def had(self, request_id: str) -> bool:
        """Was this sequence with the process that is there, or with the one that has just ended?"""
        entry = self.journal.get(request_id)
        return entry is not None and (entry.sent or request_id in self.quarantine.faults)

    def give(self, request_id: str) -> Entry | None:
        """Let go of a sequence, with the tokens it has: another engine goes on with it. Nothing more of it is heard."""
        entry = self.journal.get(request_id)
        self.cancel(request_id)
        return entry

    def _send(self, entry: Entry) -> None:
        assert self.engine is not None
        entry.sent = True
        self.engine.send(entry.resubmit())

    def _limited(self) -> bool:
        """Must a new sequence be held back, perhaps?"""
        return bool(self.quarantine.faults)

    def _admit(self) -> None:
        """Give the engine what it may have now: everything open, the oldest first, or one suspect and nothing else."""
        if not self.up:
            return
        assert self.engine is not None
        entries = list(self.journal)
        alone = self.quarantine.next(entry.id for entry in entries)
        if alone is not None:
            if self._take_back(entry for entry in entries if entry.id != alone):
                return  # the engine says when it has let go of them
            entries = [entry for entry in entries if entry.id == alone]
        for entry in entries:
            if not entry.sent:
                self._send(entry)

    def _take_back(self, entries: Iterable[Entry]) -> bool:
        """Have the engine let go of what it has of these. Is there anything that it must let go of first?"""
        assert self.engine is not None
        sent = [entry for entry in entries if entry.sent]
        for entry in sent:
            if not entry.leaving:
                entry.leaving = True
                self.engine.send(Cancel(entry.id))
        return bool(sent)

    def _clear(self, id: str) -> None:
        """A token, or its end, shows that a sequence is not what failed, and that it goes on."""
        if self._replay is not None and (told := self._replay.heard(id, time.monotonic())) is not None:
            self._replay = None
            self.on_recovery(told)
            self.log("%s", told_replay(told))
        if self.quarantine.faults:
            self.quarantine.cleared(id)
            self._admit()

    def _end(self, id: str, reason: FinishReason, error: str) -> None:
        entry = self.journal.close(id)
        if entry is not None:
            self._clear(id)
            entry.sink(Delta(id, len(entry.tokens), [], reason, error=error))

    # -- what the engine says

    def _hear(self, message: FromEngine) -> None:
        """Raises Gap, which costs the engine its process."""
        match message:
            case Output():
                stats = added(self._before, message.stats)
                if stats.step != self.stats.step or not len(self.journal):
                    self.last_progress = time.monotonic()
                self.stats = stats
                self.on_step()
                for delta in message.deltas:
                    self._deliver(delta)
            case EngineFacts():
                self._on_facts(message)
            case Recovery():
                self._regrouping, self.on_purpose = not message.seconds, message.kind == "layout"
                if self._regrouping:
                    self._replay = None  # from now on it is the engine that tells how that goes
                if message.seconds and self.facts is not None:
                    self.facts = msgspec.structs.replace(
                        self.facts, layout=message.layout, ranks=message.pids, places=message.places
                    )
                self.on_recovery(msgspec.structs.replace(message, engine=self.index))
                self.on_change()
            case Progress() | Phase():
                if self.on_progress is not None and self.facts is None:
                    self.on_progress(message)
            case Placed():
                self.on_placed(message)
            case Processes():
                self._on_processes(message)
            case ExpertLoads():
                self._on_loads(message)
            case Reshaped():
                self._on_reshaped(message)
            case Leaving():
                self.on_leaving()
            case Dead():
                # One that has served may lack room only for a while: memory that ranks before it have not let go of.
                passing = message.kind == "capacity" and self.facts is not None and not self.up
                if message.kind != "crash" and not passing:
                    self._die(message)

    def _deliver(self, delta: Delta) -> None:
        entry = self.journal.get(delta.request_id)
        if entry is None:
            return
        if entry.leaving and delta.finish is FinishReason.ABORT:  # the engine has let go of it
            entry.sent = entry.leaving = False
            if self.up:
                self._admit()
            return
        if self._ends_as_told() and delta.finish is FinishReason.ABORT:
            return
        told = entry.take(delta)
        if told is None:
            return
        self._tokens += len(told.tokens)
        if told.finish is not None:
            self.journal.close(told.request_id)
        self._clear(told.request_id)
        entry.sink(told)

    def _ends_as_told(self) -> bool:
        """The engine lets go of what it has because it ends: its successor goes on."""
        return self._restarting

    # -- for people

    async def report(self) -> list[ProcessInfo]:
        """All of the engine's processes; only its own, and what it does, where it can't answer."""
        assert self.engine is not None
        if self.dead is not None:
            state = "ended"
        elif not self.up:
            state = "loading"  # it listens when it is ready
        elif process_state(self.engine.pid) == "T":
            state = "stopped"
        else:
            waiting: asyncio.Future[list[ProcessInfo]] = asyncio.get_running_loop().create_future()
            self._reports.append(waiting)
            self.engine.send(Report())
            try:
                return await asyncio.wait_for(waiting, REPORT_TIMEOUT)
            except TimeoutError:
                self._reports.remove(waiting)
                state = f"silent for {REPORT_TIMEOUT:g} s"
        pid = self.engine.pid
        return [ProcessInfo("engine", None, {}, pid, node_name(), self.stats.epoch, state, resident_bytes(pid))]

    async def experts(self) -> ExpertLoads | None:
        """Experts' load and places; None where the engine can't answer, or records none."""
        if not self.up or self.engine is None:
            return None
        waiting: asyncio.Future[ExpertLoads] = asyncio.get_running_loop().create_future()
        self._loads.append(waiting)
        self.engine.send(ReportExperts())
        try:
            found = await asyncio.wait_for(waiting, REPORT_TIMEOUT)
        except TimeoutError:
            self._loads.remove(waiting)
            return None
        return found if found.layers else None

    def _on_loads(self, message: ExpertLoads) -> None:
        for waiting in self._loads:
            if not waiting.done():
                waiting.set_result(message)
        self._loads = []

    def _on_processes(self, message: Processes) -> None:
        for waiting in self._reports:
            if not waiting.done():
                waiting.set_result(message.processes)
        self._reports = []


async def all_ready(engines: Iterable[SupervisedEngine]) -> None:
    """Wait until all can admit. Raises what keeps the first one that can't."""
    try:
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(engine.ready())
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None


def added(before: EngineStats, now: EngineStats) -> EngineStats:
    """Counters go on from one engine to the next; the rest is the present one's."""
    if not before.step:
        return now
    return msgspec.structs.replace(
        now,
        step=before.step + now.step,
        prefix_queries=before.prefix_queries + now.prefix_queries,
        prefix_hits=before.prefix_hits + now.prefix_hits,
        preemptions=before.preemptions + now.preemptions,
        prompt_tokens=before.prompt_tokens + now.prompt_tokens,
        generation_tokens=before.generation_tokens + now.generation_tokens,
        replayed_tokens=before.replayed_tokens + now.replayed_tokens,
        experts=_experts_added(before.experts, now.experts),
    )


def _experts_added(before: ExpertStats | None, now: ExpertStats | None) -> ExpertStats | None:
    if before is None or now is None:
        return now or before
    return msgspec.structs.replace(
        now,
        rearrangements=before.rearrangements + now.rearrangements,
        bytes_moved=before.bytes_moved + now.bytes_moved,
        rearranged_at=now.rearranged_at or before.rearranged_at,
    )
