"""An engine for one event loop, whatever becomes of its processes. Implements `planaria.wire.EngineClient`.

When the engine's process ends, another is started and every open sequence goes on in it with the tokens it has: its
sink hears nothing but a pause. The limit is the one for lost ranks; when it is used up every sink hears an error. Here
are its processes, one after the other; what it has of sequences is in `engine_queue.py`.
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
from planaria.errors import CapacityError, EngineDead, ModelError, PlanariaError, UserError
from planaria.executor.reformations import Reformations
from planaria.executor.replay import Replay, told_replay
from planaria.executor.startup import parts_of
from planaria.node import node_name, process_state, resident_bytes
from planaria.server import questions
from planaria.server.engine_client import EXIT_TIMEOUT, Ended, EngineHandle, EngineProcess
from planaria.server.engine_queue import EngineQueue
from planaria.server.questions import Questions
from planaria.server.stream import Stream
from planaria.topology import LaneGroup, Layout
from planaria.types import Delta, FinishReason
from planaria.wire import (
    Dead,
    EngineFacts,
    EngineResized,
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
    ResizeEngine,
    Share,
    Sink,
    StartUpNews,
    Submit,
    ToEngine,
)

logger = logging.getLogger("planaria.server")

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
        self.queue = EngineQueue(self.index, self.send, lambda: self.up)
        self.queue.on_replayed = self._replayed
        self.questions = Questions()
        self.limit = Reformations(config.faults.recovery_limit, config.faults.recovery_window)
        self._before = EngineStats()  # what the engines before this one have counted
        self._recovery: Recovery | None = None  # of the engine's process, while it is on
        self._since = 0.0  # when it began
        self._ended = Ended("")  # with it
        self._regrouping = False  # the engine's ranks begin anew
        self.on_purpose = False  # and not because of a fault
        self._ready = asyncio.Event()
        self._closing = False
        self._left = asyncio.Event()  # by `close`
        self._failed = 0  # processes in a row that did not come up
        self._resizing: dict[str, asyncio.Future[EngineResized]] = {}  # who waits for which
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
            self.send(Share(engines))

    def send(self, message: ToEngine) -> None:
        """To the process of now, which is up."""
        assert self.engine is not None
        self.engine.send(message)

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
        self._failed = 0 if was_up or self.queue.restarting else self._failed + 1
        for id in list(self._resizing):
            self._on_resized(EngineResized(id, "", "the engine's process ended meanwhile"))
        self._regrouping, self.on_purpose, self.queue.replay = False, False, None
        if self._closing or self.dead is not None:
            return False
        if self.queue.restarting:
            logger.info("the engine process %d %s as it was told; starting another", engine.pid, ended.how)
            self._begin_anew()
            self.on_change()
            return True
        said = ended.said
        cause = f"the engine process {engine.pid} {ended.how}" + (f": {said.message}" if said is not None else "")
        phase = "start-up" if not was_up else "recovery" if regrouping else "step" if self._busy() else "idle"
        progressed = self.queue.fault() or self._progressed()
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
        return bool(self.queue.sent())

    def _count(self) -> int:
        """Sequences that were open when it ended, whosever they are."""
        return len(self.queue)

    def _cost(self, done: Recovery) -> str:
        """What goes on after it, for people."""
        return f"\n  {done.requests} requests go on; {done.tokens} tokens are computed again"

    def _progressed(self) -> bool:
        """Did others' sequences get a token from the engine that has ended?"""
        return False

    def _begin_anew(self) -> None:
        """For another process."""
        self.queue.begin_anew()
        self._before = self.stats

    def restart(self) -> None:
        """End the engine's process and start another; what is open goes on in it."""
        if self.up:
            assert self.engine is not None
            self.up, self.queue.restarting = False, True
            self.engine.end(followed=True)
            asyncio.get_running_loop().call_later(EXIT_TIMEOUT, self._make_end, self.engine)
            self.on_change()

    def _make_end(self, engine: EngineHandle) -> None:
        if self.engine is engine and self.queue.restarting:
            engine.kill()

    def _most_silent(self) -> float | None:
        if not self.up or self._regrouping:
            return COMING_UP
        return self.config.faults.step_timeout + MARGIN if len(self.queue) or self._resizing else None

    def _on_facts(self, facts: EngineFacts) -> None:
        assert self.engine is not None
        self.engine.connected()
        self.facts, self.up = facts, True
        self.stats = added(self._before, EngineStats())  # it has done nothing yet, in epoch 0
        self.last_progress = time.monotonic()
        self._ready.set()
        if self.engine.config.device.sharers != self.config.device.sharers:  # dealt anew while it came up
            self.share(self.config.device.sharers)
        self.queue.admit()
        if self._recovery is not None:
            self._recovered(facts)
        self.on_change()

    def _recovered(self, facts: EngineFacts) -> None:
        assert self._recovery is not None
        total = time.monotonic() - self._since
        parts = {"detect": self._ended.detect, "fence": self._ended.fence, "replace": 0.0}
        parts |= {part: seconds for part, seconds in parts_of(facts.seconds).items() if part != "replace"}
        parts["replace"] = total - sum(parts.values())  # what is left: the process, until its ranks are there
        done = msgspec.structs.replace(
            self._recovery, seconds={**parts, "total": total}, layout=facts.layout,
            pids=facts.ranks, requests=len(self.queue),
            tokens=sum(len(stream.history()) for stream in self.queue.sent()),
        )  # fmt: skip
        self._recovery = None
        self.on_recovery(done)
        self.log(
            "another engine goes on after %.2f s: %s%s", total,
            ", ".join(f"{part} {seconds:.2f}" for part, seconds in done.seconds.items() if part != "total"),
            self._cost(done),
        )  # fmt: skip
        if going := [stream.name for stream in self.queue.streams.values() if stream.tokens]:
            self.queue.replay = Replay(done, going, time.monotonic())

    def _replayed(self, told: Recovery) -> None:
        self.on_recovery(told)
        self.log("%s", told_replay(told))

    def _die(self, dead: Dead) -> None:
        """There will be no other: everybody is told."""
        if self.dead is None:
            self.dead, self.up = dead, False
            self._ready.set()
            self.on_change()
        self.queue.end_all(dead.message)

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

    async def resize(self, tp: int, pp: int, dp: int = 0, groups: Sequence[LaneGroup] = ()) -> EngineResized:
        """Have other ranks; dp: lanes, 0: as many as now; groups: see ResizeEngine. Processes that come later,
        after a fault, have them from the start."""
        name = f"engine {self.index}"
        if not self.up or self.engine is None or self._closing:
            return EngineResized("", self.facts.layout if self.facts is not None else "", f"{name} is {self.state}")
        id = uuid.uuid4().hex[:8]
        waiting: asyncio.Future[EngineResized] = asyncio.get_running_loop().create_future()
        self._resizing[id] = waiting
        self.engine.send(ResizeEngine(id, tp, pp, dp, tuple(groups)))
        done = await waiting
        if not done.error:
            self.config = self.config.with_layout(Layout(pp, dp or self.config.parallel.lanes, tp=tp))
        return done

    def _on_resized(self, message: EngineResized) -> None:
        waiting = self._resizing.pop(message.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    # -- sequences

    def submit(self, message: Submit, sink: Sink) -> None:
        self.take(Stream(message, sink))

    def take(self, stream: Stream) -> None:
        """Go on with a sequence."""
        stream.engine = self
        if self.dead is not None:
            stream.tell(Delta(stream.name, len(stream.tokens), [], FinishReason.ERROR, error=self.dead.message))
            return
        if not len(self.queue):
            self.last_progress = time.monotonic()
        self.queue.put(stream)

    def cancel(self, name: str) -> None:
        self.queue.remove(name)

    # -- what the engine says

    def _hear(self, message: FromEngine) -> None:
        """Raises Gap, which costs the engine its process."""
        match message:
            case Output():
                stats = added(self._before, message.stats)
                if stats.step != self.stats.step or not len(self.queue):
                    self.last_progress = time.monotonic()
                self.stats = stats
                self.on_step()
                for delta in message.deltas:
                    self.queue.deliver(delta)
            case EngineFacts():
                self._on_facts(message)
            case Recovery():
                self._regrouping, self.on_purpose = not message.seconds, message.kind == "layout"
                if self._regrouping:
                    self.queue.replay = None  # from now on it is the engine that tells how that goes
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
            case Processes() | ExpertLoads():
                self.questions.answer(message)
            case EngineResized():
                self._on_resized(message)
            case Leaving():
                self.on_leaving()
            case Dead():
                # One that has served may lack room only for a while: memory that ranks before it have not let go of.
                passing = message.kind == "capacity" and self.facts is not None and not self.up
                if message.kind != "crash" and not passing:
                    self._die(message)

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
            said = await self.questions.ask(Report(), Processes, self.send)
            if said is not None:
                return said.processes
            state = f"silent for {questions.ANSWER_LIMIT:g} s"
        pid = self.engine.pid
        return [ProcessInfo("engine", None, {}, pid, node_name(), self.stats.epoch, state, resident_bytes(pid))]

    async def experts(self) -> ExpertLoads | None:
        """Experts' load and places; None where the engine can't answer, or records none."""
        if not self.up or self.engine is None:
            return None
        found = await self.questions.ask(ReportExperts(), ExpertLoads, self.send)
        return found if found is not None and found.layers else None


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
