"""An engine for one event loop, whatever becomes of its processes. Implements `planaria.wire.EngineClient`.

When the engine's process ends, another is started and every open sequence goes on in it with the tokens it has: its
sink hears nothing but a pause. The limit is the one for lost ranks; when it is used up every sink hears an error. A
sequence that was there at several deaths is run alone, and answered with an error if that kills its engine too
(`planaria.core.quarantine`): a dead engine can't keep that account.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from planaria.config.options import EngineConfig
from planaria.core.quarantine import Quarantine
from planaria.errors import CapacityError, EngineDead, ModelError, PlanariaError, UserError
from planaria.executor.reformations import Reformations
from planaria.node import node_name, process_state, resident_bytes
from planaria.server.engine_client import EXIT_TIMEOUT, Ended, EngineProcess
from planaria.server.journal import Entry, Journal
from planaria.types import Delta, FinishReason
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    EngineStats,
    FromEngine,
    Output,
    Phase,
    Processes,
    ProcessInfo,
    Progress,
    Recovery,
    Report,
    Sink,
    StartUpNews,
    Submit,
)

logger = logging.getLogger("planaria.server")

REPORT_TIMEOUT = 2.0  # seconds an engine gets to say which processes there are; between two steps it looks
COMING_UP = 3600.0  # seconds without a word while it loads, or while its ranks begin anew
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
        make: Callable[[EngineConfig, Callable[[FromEngine], None]], EngineProcess] = EngineProcess,
    ) -> None:
        self.config, self.on_progress, self.make = config, on_progress, make
        self.facts: EngineFacts | None = None
        self.stats = EngineStats()
        self.last_progress = time.monotonic()
        self.dead: Dead | None = None
        self.on_recovery: Callable[[Recovery], None] = lambda message: None
        self.engine: EngineProcess | None = None
        self.up = False  # the engine of now can admit
        self.journal = Journal()
        self.quarantine = Quarantine()
        # The agents of other nodes end with their engine: another would wait for them in vain.
        limit = 0 if config.parallel.over_nodes else config.faults.recovery_limit
        self.limit = Reformations(limit, config.faults.recovery_window)
        self._before = EngineStats()  # what the engines before this one have counted
        self._tokens = 0  # that came from this engine
        self._recovery: Recovery | None = None  # of the engine's process, while it is on
        self._since = 0.0  # when it began
        self._regrouping = False  # the engine's ranks begin anew
        self._ready = asyncio.Event()
        self._closing = False
        self._reports: list[asyncio.Future[list[ProcessInfo]]] = []  # who waits for the next one
        self._task: asyncio.Task[None] | None = None

    # -- the engine's processes, one after the other

    async def start(self) -> None:
        """Start the first; `ready` says when it can admit."""
        self.engine = self.make(self.config, self._hear)
        await self.engine.start()
        self._task = asyncio.create_task(self._supervise(self.engine))

    async def _supervise(self, engine: EngineProcess) -> None:
        try:
            while self._goes_on(engine, await engine.ended(self._most_silent)):
                self.engine = engine = self.make(self.config, self._hear)
                await engine.start()
                if self._closing:  # meanwhile
                    engine.kill()
        except Exception as e:
            logger.exception("no other engine could be started")
            self._die(Dead("error", f"no other engine could be started: {e}"))

    def _goes_on(self, engine: EngineProcess, ended: Ended) -> bool:
        """The engine has ended: shall there be another?"""
        self.up, was_up, regrouping = False, self.up, self._regrouping
        self._regrouping = False
        if self._closing or self.dead is not None:
            return False
        said = ended.said
        cause = f"the engine process {engine.pid} {ended.how}" + (f": {said.message}" if said is not None else "")
        open = [entry for entry in self.journal if entry.sent]
        phase = "start-up" if not was_up else "recovery" if regrouping else "step" if open else "idle"
        if [entry.id for entry in open] != [self.quarantine.running]:
            self.quarantine.running = None  # it wasn't alone yet
        convict = self.quarantine.fault([entry.id for entry in open])
        if convict is not None:
            error = "the engine died again and again while it ran this request, and nothing else"
            self._end(convict, FinishReason.ERROR, error)
        progressed, self._tokens = self._tokens > 0 or convict is not None, 0
        if not self.limit.allowed(time.monotonic(), progressed):
            self._die(Dead("error", cause, said.detail if said is not None else ""))
            return False
        for entry in self.journal:
            entry.sent = entry.leaving = False
        self._before = self.stats
        if self._recovery is None:
            self._since = time.monotonic() - ended.detect
        self._recovery = Recovery(0, [], phase, cause, said.detail if said is not None else "")
        self.on_recovery(self._recovery)
        logger.warning("%s in %s; starting another, %d requests are open", cause, phase, len(self.journal))
        return True

    def _most_silent(self) -> float | None:
        if not self.up or self._regrouping:
            return COMING_UP
        return self.config.faults.step_timeout + MARGIN if len(self.journal) else None

    def _on_facts(self, facts: EngineFacts) -> None:
        assert self.engine is not None
        self.engine.connected()
        self.facts, self.up = facts, True
        self.last_progress = time.monotonic()
        self._ready.set()
        self._admit()
        if self._recovery is not None:
            self._recovered(facts)

    def _recovered(self, facts: EngineFacts) -> None:
        assert self._recovery is not None
        total = time.monotonic() - self._since
        inside = facts.seconds.get("engine", 0.0)
        parts = {part: seconds for part, seconds in facts.seconds.items() if part != "engine"}
        sent = [entry for entry in self.journal if entry.sent]
        done = msgspec.structs.replace(
            self._recovery, seconds={"process": total - inside, **parts, "total": total}, layout=facts.layout,
            pids=facts.ranks, requests=len(self.journal),
            tokens=sum(len(entry.submit.prompt) + len(entry.tokens) for entry in sent),
        )  # fmt: skip
        self._recovery = None
        self.on_recovery(done)
        logger.warning(
            "another engine goes on after %.2f s: %s\n  %d requests go on; %d tokens are computed again", total,
            ", ".join(f"{part} {seconds:.2f}" for part, seconds in done.seconds.items() if part != "total"),
            done.requests, done.tokens,
        )  # fmt: skip

    def _die(self, dead: Dead) -> None:
        """There will be no other: everybody is told."""
        if self.dead is None:
            self.dead, self.up = dead, False
            self._ready.set()
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

    # -- sequences

    def submit(self, message: Submit, sink: Sink) -> None:
        if self.dead is not None:
            sink(Delta(message.id, len(message.output), [], FinishReason.ERROR, error=self.dead.message))
            return
        if not len(self.journal):
            self.last_progress = time.monotonic()
        entry = self.journal.open(message, sink)
        if self.quarantine.faults:
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

    def _send(self, entry: Entry) -> None:
        assert self.engine is not None
        entry.sent = True
        self.engine.send(entry.resubmit())

    def _admit(self) -> None:
        """Give the engine what it may have now: everything open, the oldest first, or one suspect and nothing else."""
        if not self.up:
            return
        assert self.engine is not None
        entries = list(self.journal)
        alone = self.quarantine.next(entry.id for entry in entries)
        if alone is not None:
            others = [entry for entry in entries if entry.sent and entry.id != alone]
            for entry in others:
                if not entry.leaving:
                    entry.leaving = True
                    self.engine.send(Cancel(entry.id))
            if others:
                return  # the engine says when it has let go of them
            entries = [entry for entry in entries if entry.id == alone]
        for entry in entries:
            if not entry.sent:
                self._send(entry)

    def _clear(self, id: str) -> None:
        """A token, or its end, shows that a sequence is not what failed."""
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
                if message.stats.step != self.stats.step or not len(self.journal):
                    self.last_progress = time.monotonic()
                self.stats = _added(self._before, message.stats)
                for delta in message.deltas:
                    self._deliver(delta)
            case EngineFacts():
                self._on_facts(message)
            case Recovery():
                self._regrouping = not message.seconds
                self.on_recovery(message)
            case Progress() | Phase():
                if self.on_progress is not None and self.facts is None:
                    self.on_progress(message)
            case Processes():
                self._on_processes(message)
            case Dead():
                if message.kind != "crash":
                    self._die(message)

    def _deliver(self, delta: Delta) -> None:
        entry = self.journal.get(delta.request_id)
        if entry is None:
            return
        if entry.leaving and delta.finish is FinishReason.ABORT:  # the engine has let go of it
            entry.sent = entry.leaving = False
            self._admit()
            return
        told = entry.take(delta)
        if told is None:
            return
        self._tokens += len(told.tokens)
        if told.finish is not None:
            self.journal.close(told.request_id)
        self._clear(told.request_id)
        entry.sink(told)

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

    def _on_processes(self, message: Processes) -> None:
        for waiting in self._reports:
            if not waiting.done():
                waiting.set_result(message.processes)
        self._reports = []


def _added(before: EngineStats, now: EngineStats) -> EngineStats:
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
    )
