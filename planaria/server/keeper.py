"""The processes of one engine, one after the other: started, watched, restarted, ended.

When the engine's process ends, another is started and every open sequence goes on in it with the tokens it has: its
client hears nothing but a pause. The limit is the one for lost ranks; when it is used up everybody hears an error. What
the engine has of sequences is in `engine.py`; of a server of several API processes they have them, each its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from planaria.config.options import EngineConfig
from planaria.core.kv_index import name_of
from planaria.core.quarantine import ExclusiveUses
from planaria.errors import CapacityError, PlanariaError
from planaria.executor.recovery import Reformations, Replay, told_replay
from planaria.executor.startup import parts_of
from planaria.hosts.memory import KVMemory
from planaria.hosts.pool import BackOff
from planaria.hosts.weights import WeightsMemory
from planaria.node import node_name, process_state, resident_bytes
from planaria.server import questions
from planaria.server.background import in_thread
from planaria.server.engine import Engine
from planaria.server.engine_client import EXIT_TIMEOUT, Ended, EngineHandle, EngineProcess
from planaria.server.questions import PendingAnswers, Questions
from planaria.server.stream import Stream
from planaria.server.wishes import EngineWishes
from planaria.topology import LaneGroup, Layout
from planaria.wire import (
    Dead,
    EngineFacts,
    EngineResized,
    ExpertLoads,
    FromEngine,
    Leaving,
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
    Slept,
    StartUpNews,
    WeightsUpdated,
)

logger = logging.getLogger("planaria.server")

SHORTEST, LONGEST = 0.25, 30.0  # seconds between processes that don't come up

Make = Callable[[EngineConfig, Callable[[FromEngine], None]], EngineHandle]


def _lacking(stream: Stream, facts: EngineFacts) -> int:
    """Of its tokens that an engine which has come up must compute again: all but the last could be there."""
    submit = stream.resubmit()
    name = name_of(submit.id, submit.prompt, submit.seed, submit.cache_salt, submit.adapter).hex()
    return max(0, len(stream.history()) - 1 - facts.committed.get(name, 0))


class EngineKeeper:
    """Start with `await start()`; `on_progress` hears how the first start goes. make: a process; shared_in: of several
    API processes, which have its sequences, the folder where its sockets have their names; weights: memory for them, of
    all engines of this node; names: a folder for those names, where others than API processes come too."""

    def __init__(
        self, config: EngineConfig, on_progress: Callable[[StartUpNews], None] | None = None,
        make: Make = EngineProcess, shared_in: str | None = None, weights: WeightsMemory | None = None,
        names: str | None = None,
    ) -> None:  # fmt: skip
        self.config, self.on_progress, self.make, self.shared_in = config, on_progress, make, shared_in
        self.weights, self.names = weights, names
        self.index = config.parallel.data_parallel_index
        self.engine = Engine(self.index)
        self.engine.on_news, self.engine.on_replayed = self._hear, self._replayed
        self.on_recovery: Callable[[Recovery], None] = lambda message: None
        self.on_process: Callable[[], None] = lambda: None  # another has been started, or has ended
        self.on_placed: Callable[[Placed], None] = lambda message: None  # where its ranks are about to be started
        self.on_leaving: Callable[[], None] = self.restart  # somebody told the engine's process to end
        self.on_no_place: Callable[[], object] = lambda: None  # it was given up because there is no place for it
        self.handle: EngineHandle | None = None  # of the process of now
        self.number = 0  # of it
        self.memory: KVMemory | None = None  # of the node, for its KV
        self.ended: Ended | None = None  # how it did
        self.as_told = False  # because it was told to
        self.exclusive_uses = ExclusiveUses()  # of API processes, to run something alone
        self.questions = Questions()
        self.limit = Reformations(config.faults.recovery_limit, config.faults.recovery_window)
        self._recovery: Recovery | None = None  # of the engine's process, while it is on
        self._since = 0.0  # when it began
        self._how = Ended("")  # with it
        self._closing = False
        self.lent = False  # it has no process: another server's engine goes on in its place, or it is unloaded
        self._left = asyncio.Event()  # by `close` and `lend`
        self._pause = BackOff(LONGEST, SHORTEST)  # for processes that don't come up
        self._resizing = PendingAnswers[EngineResized]()
        self.wishes = EngineWishes(self.engine)
        self.task: asyncio.Task[None] | None = None

    def share(self, engines: int) -> None:
        """So many engines use this node's cores from now on."""
        device = msgspec.structs.replace(self.config.device, sharers=engines)
        self.config = msgspec.structs.replace(self.config, device=device)
        if self.engine.up:
            self.engine.send(Share(engines))

    # -- processes

    async def prepare(self) -> None:
        """Have all there that `start` can have before there is room for another engine. Raises as `start`."""
        await self._another().prepare()

    async def start(self) -> None:
        """Start the first; `engine.ready` says when it can admit."""
        handle = self.handle or self._another()
        await self._begin(handle)
        self.task = asyncio.create_task(self._supervise(handle))

    def _another(self) -> EngineHandle:
        self.handle = self.engine.connection = handle = self.make(self.config, self.engine.hear)
        handle.again, handle.shared_in = self.engine.facts is not None, self.shared_in or self.names
        keepers = self.weights.keepers if self.weights is not None else None
        if handle.shares_memory and self.memory is None and (self.config.device.platform.on_host or keepers):
            self.memory = KVMemory.make(self.config.parallel.layout.size, keepers)
        handle.memory, handle.weights = self.memory, self.weights
        return handle

    async def _begin(self, handle: EngineHandle) -> None:
        await handle.start()
        self.number, self.ended = self.number + 1, None
        self.on_process()

    async def _supervise(self, handle: EngineHandle | None) -> None:
        """handle: of one that has started; None: it is to be followed."""
        unborn: Ended | None = None
        try:
            while handle is None or self._goes_on(handle, unborn or await handle.ended(self._most_silent)):
                if (pause := self._pause.at - time.monotonic()) > 0:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._left.wait(), pause)
                if self._closing or self.lent:
                    return
                handle, unborn = self._another(), None
                try:
                    await self._begin(handle)
                except CapacityError:
                    raise
                except (PlanariaError, OSError, zmq.ZMQError) as e:  # no descriptor, process or memory for now
                    unborn = Ended(f"did not come up: {e}")
                if self._closing or self.lent:  # meanwhile
                    handle.kill()
        except CapacityError as e:
            self.engine.die(Dead("error", f"there is no place for another engine: {e}"))
            if not self._closing:
                self.on_no_place()
        except Exception as e:
            logger.exception("no other engine could be started")
            self.engine.die(Dead("error", f"no other engine could be started: {e}"))

    def revive(self) -> None:
        """It was given up because there was no place for it, and now there is one."""
        self.task = asyncio.create_task(self._supervise(None))
        self.engine.revive()

    def _goes_on(self, handle: EngineHandle, ended: Ended) -> bool:
        """The process has ended: shall there be another?"""
        engine = self.engine
        was_up, regrouping, count, told = engine.up, engine.regrouping, self._count(), engine.restarting
        self.ended, self.as_told = ended, told or self._closing
        self.on_process()
        if was_up or told:
            self._pause.worked()
        else:
            self._pause.failed(time.monotonic())
        self._resizing.answer_all(EngineResized("", "", "the engine's process ended meanwhile"))
        self.wishes.ended(self.config)
        elsewhere = self._progressed_elsewhere()
        progressed = engine.down(self.as_told or engine.dead is not None) or elsewhere
        if self._closing or engine.dead is not None:
            return False
        if self.lent:
            engine.on_change()
            return False
        if told:
            logger.info("the engine process %d %s as it was told; starting another", handle.pid, ended.how)
            engine.on_change()
            return True
        said, detail = ended.said, ended.said.detail if ended.said is not None else ""
        cause = f"the engine process {handle.pid} {ended.how}" + (f": {said.message}" if said is not None else "")
        phase = "start-up" if not was_up else "recovery" if regrouping else "step" if count else "idle"
        if not self.limit.allowed(time.monotonic(), progressed):
            engine.die(Dead("error", cause, detail))
            return False
        if self._recovery is None:
            self._since, self._how = time.monotonic() - ended.detect - ended.fence, ended
        self._recovery = Recovery(0, [], phase, cause, detail, engine=self.index)
        self.on_recovery(self._recovery)
        engine.on_change()
        logger.warning("%s in %s; starting another, %d requests are open", cause, phase, self._count())
        return True

    def _count(self) -> int:
        """Sequences that are open, whosever they are."""
        stats, engine = self.engine.stats, self.engine
        return len(engine.streams) if self.shared_in is None else stats.running + stats.waiting

    def _progressed_elsewhere(self) -> bool:
        """Did API processes' sequences get anywhere? One that is run alone is found out, or cleared."""
        if self.shared_in is None and self.names is None:
            return False
        alone = self.exclusive_uses.now is not None and self.exclusive_uses.now.free
        return alone or self.engine.stats.generation_tokens > self.engine.before.generation_tokens

    def restart(self) -> None:
        """End the process and start another; what is open goes on in it."""
        engine, handle = self.engine, self.handle
        if engine.up and handle is not None:
            engine.up, engine.restarting = False, True
            self._ask_to_end(handle)
            engine.on_change()

    async def lend(self, *, kill: bool = True) -> None:
        """End the process, however, and start no other; returns when it has ended. What is open waits here for an
        engine of another server, or for `take_back`. kill: else it is asked to end, if it hears."""
        engine, handle = self.engine, self.handle
        assert handle is not None and self.task is not None
        hears, self.lent, engine.up, engine.restarting = engine.up and not kill, True, False, True
        self._left.set()
        self._ask_to_end(handle) if hears else handle.kill()
        engine.on_change()
        await asyncio.wait({self.task})

    def take_back(self) -> None:
        """If it was lent: start another process."""
        if not self.lent:
            return
        self.lent, self._recovery = False, None
        self._left.clear()
        self.engine.on_news = self._hear
        self.task = asyncio.create_task(self._supervise(None))

    def _ask_to_end(self, handle: EngineHandle) -> None:
        handle.end(followed=True)
        asyncio.get_running_loop().call_later(EXIT_TIMEOUT, self._make_end, handle)

    def _make_end(self, handle: EngineHandle) -> None:
        if self.handle is handle and self.engine.restarting:
            handle.kill()

    def _most_silent(self) -> float | None:
        return self.engine.most_silent(self.config.faults.step_timeout, bool(self._resizing) or self.wishes.waits)

    def _came_up(self, facts: EngineFacts) -> None:
        assert self.handle is not None
        self.handle.connected()
        if self.handle.config.device.sharers != self.config.device.sharers:  # dealt anew while it came up
            self.share(self.config.device.sharers)
        if self._recovery is not None:
            self._recovered(self._recovery, facts)

    def _recovered(self, recovery: Recovery, facts: EngineFacts) -> None:
        engine, total = self.engine, time.monotonic() - self._since
        parts = {"detect": self._how.detect, "fence": self._how.fence, "replace": 0.0}
        parts |= {part: seconds for part, seconds in parts_of(facts.seconds).items() if part != "replace"}
        parts["replace"] = total - sum(parts.values())  # what is left: the process, until its ranks are there
        done = msgspec.structs.replace(
            recovery, seconds={**parts, "total": total}, layout=facts.layout, pids=facts.ranks,
            requests=len(engine.streams), tokens=sum(_lacking(stream, facts) for stream in engine.sent()),
        )  # fmt: skip
        self._recovery = None
        self.on_recovery(done)
        cost = f"\n  {done.requests} requests go on; {done.tokens} tokens are computed again"
        logger.warning(
            "another engine goes on after %.2f s: %s%s", total,
            ", ".join(f"{part} {seconds:.2f}" for part, seconds in done.seconds.items() if part != "total"),
            cost if self.shared_in is None else "",  # the API processes know it, and /health shows it
        )  # fmt: skip
        if going := [stream.name for stream in engine.streams.values() if stream.tokens]:
            engine.replay = Replay(done, going, time.monotonic())

    def _replayed(self, told: Recovery) -> None:
        self.on_recovery(told)
        logger.warning("%s", told_replay(told))

    async def close(self) -> None:
        """End the process and wait for it. Idempotent."""
        if self._closing or self.handle is None:
            return
        self._closing = True
        self._left.set()
        if self.lent:
            return
        if self.engine.up:
            self.handle.end()
        else:  # while it loads it hears nothing, and it has nobody to answer
            self.handle.kill()
        if self.task is not None:
            done, _ = await asyncio.wait({self.task}, timeout=EXIT_TIMEOUT)
            if not done:
                logger.warning("the engine process %d did not end in %.0f s: killed", self.handle.pid, EXIT_TIMEOUT)
                self.handle.kill()
                await self.task
        if self.memory is not None:
            await in_thread(self.memory.end)
        if self.weights is not None and self.handle.shares_memory:
            await in_thread(functools.partial(self.weights.forget, self.index))

    # -- what it is asked, and says

    async def resize(self, tp: int, pp: int, dp: int = 0, groups: Sequence[LaneGroup] = ()) -> EngineResized:
        """Have other ranks; dp: lanes, 0: as many as now; groups: see ResizeEngine. Processes that come later,
        after a fault, have them from the start."""
        engine = self.engine
        if not engine.up or self._closing:
            layout = engine.facts.layout if engine.facts is not None else ""
            return EngineResized("", layout, f"engine {self.index} is {engine.state}")
        done = await self._resizing.ask(lambda id: engine.send(ResizeEngine(str(id), tp, pp, dp, tuple(groups))))
        if not done.error:
            self.config = self.config.with_layout(Layout(pp, dp or self.config.parallel.lanes, tp=tp))
        return done

    def _hear(self, message: FromEngine) -> None:
        match message:
            case EngineFacts():
                self._came_up(message)
                self.wishes.came_up(message, self.config)
            case Slept() | WeightsUpdated():
                self.wishes.hear(message)
            case Recovery():
                self.on_recovery(msgspec.structs.replace(message, engine=self.index))
            case Progress() | Phase():
                if self.on_progress is not None and self.engine.facts is None:
                    self.on_progress(message)
            case Placed():
                self.on_placed(message)
            case Processes() | ExpertLoads():
                self.questions.answer(message)
            case EngineResized():
                self._resizing.answer(int(message.id), message)
            case Leaving():
                self.on_leaving()

    async def report(self) -> list[ProcessInfo]:
        """All of the engine's processes; only its own, and what it does, where it can't answer."""
        engine, pid = self.engine, self.handle.pid if self.handle is not None else 0
        if engine.dead is not None:
            state = "ended"
        elif not engine.up:
            state = "loading"  # it listens when it is ready
        elif process_state(pid) == "T":
            state = "stopped"
        else:
            said = await self.questions.ask(Report(), Processes, engine.send)
            if said is not None:
                return said.processes
            state = f"silent for {questions.ANSWER_LIMIT:g} s"
        return [ProcessInfo("engine", None, {}, pid, node_name(), engine.stats.epoch, state, resident_bytes(pid))]


async def experts_at(keeper: EngineKeeper) -> ExpertLoads | None:
    """Experts' load and places; None where the engine can't answer, or records none."""
    if not keeper.engine.up:
        return None
    found = await keeper.questions.ask(ReportExperts(), ExpertLoads, keeper.engine.send)
    return found if found is not None and found.layers else None


async def all_ready(keepers: Iterable[EngineKeeper]) -> None:
    """Wait until all can admit. Raises what keeps the first one that can't."""
    try:
        async with asyncio.TaskGroup() as group:
            for keeper in keepers:
                group.create_task(keeper.engine.ready())
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
