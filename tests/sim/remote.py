"""A simulated engine process, as a server sees it: a socket, an end with an exit code, and behind them the shipping
core over the hash model. Its ranks are not simulated one by one (`simulation.py` does that): they compute, or they are
lost together and begin anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from planaria.core.engine import EngineCore
from planaria.core.transfer import LEASE, expire
from planaria.executor.recovery import layout_name
from planaria.hosts.host import how_it_ended
from planaria.hosts.kv_keys import Shape
from planaria.protocol import KVNews, StepPlan, StepResult
from planaria.server.engine_client import EngineProcess
from planaria.topology import Layout
from planaria.types import FinishReason, Request
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    EngineResized,
    FromEngine,
    Leaving,
    Output,
    Recovery,
    Release,
    ResizeEngine,
    Shutdown,
    Submit,
    ToEngine,
)
from tests.sim.memory import EngineMemory
from tests.sim.process import Died, Poisoned
from tests.sim.scenario import BLOCK_BYTES, MOST, VOCAB
from tests.sim.transfers import SimCopying

if TYPE_CHECKING:
    from planaria.config.options import EngineConfig
    from tests.reference_worker import HashWorker
    from tests.sim.deployment import Deployment

LOAD = 2.0  # seconds
SPURT = 3.0  # seconds until a message that was held back goes on, where none follows

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)


class SimEngineProcess(EngineProcess):
    """The shipping one; only its process and its socket are simulated."""

    def __init__(self, sim: Deployment, config: EngineConfig, hear: Callable[[FromEngine], None]) -> None:
        super().__init__(config, hear)
        self.sim = sim
        self.remote: Remote | None = None

    async def start(self) -> None:
        if not self.sim.can_start(self.config.parallel.data_parallel_index):
            raise OSError(11, "Resource temporarily unavailable")
        socket = SimSocket(self.sim)
        memory = self.sim.memory_of(self.memory) if self.memory is not None else None
        self.remote = socket.remote = Remote(self.sim, self.config, socket, memory)
        self.sim.started(self.remote)
        self.pid, self._socket, self._context = self.remote.pid, socket, socket  # type: ignore[assignment]
        self._listener = asyncio.create_task(self._listen())

    def connected(self) -> None: ...

    async def _wait(self) -> tuple[str, bool]:
        assert self.remote is not None
        code = await self.remote.wait()
        return how_it_ended(code), code > 0

    def kill(self) -> None:
        if self.remote is not None and self.remote.returncode is None:
            self.remote.kill()


class SimSocket:
    """In order both ways, except where a fault asks for another order, for a message twice, or for none."""

    def __init__(self, sim: Deployment) -> None:
        self.sim, self.world = sim, sim.world
        self.remote: Remote
        self.closed = False
        self._came: asyncio.Queue[bytes] = asyncio.Queue()
        self._free = [0.0, 0.0]  # when each way is
        self._held: bytes | None = None

    async def recv(self) -> bytes:
        return await self._came.get()

    def send(self, data: bytes) -> None:
        message = _DECODER.decode(data)
        self.remote.told_to_end = self.remote.told_to_end or isinstance(message, Shutdown)
        self.world.at(self._delay(0), self.remote.take, message)

    def close(self) -> None:
        self.closed = True

    def term(self) -> None: ...

    def say(self, message: FromEngine) -> None:
        data, sim, remote = _ENCODER.encode(message), self.sim, self.remote
        news = isinstance(message, Output) and any(delta.tokens for delta in message.deltas)
        final = isinstance(message, Output) and any(delta.finish is not None for delta in message.deltas)
        if news and not final and sim.strikes("said for nothing", remote):
            sim.harmed(remote, "gap")  # what follows shows it
            return
        if self._held is None and news and sim.strikes("said too late", remote):
            sim.harmed(remote, "gap")
            self._held = data
            self.world.at(SPURT, self._let_go)
            return
        delay = self._delay(1)
        self.world.at(delay, self._deliver, data)
        if isinstance(message, Output) and sim.strikes("said twice", remote):
            self.world.at(delay + self.world.random.random(), self._deliver, data)
        if self._held is not None:
            self.world.at(delay, self._let_go)

    def _let_go(self) -> None:
        if self._held is not None:
            data, self._held = self._held, None
            self._deliver(data)

    def _deliver(self, data: bytes) -> None:
        if not self.closed:
            self.remote.was_heard = True
            self._came.put_nowait(data)

    def _delay(self, way: int) -> float:
        free, now, chance = self._free, self.world.now - self.world.slept, self.world.random
        more = chance.uniform(0.1, 3.0) if self.sim.strikes("delay", self.remote) else 0.0
        free[way] = max(free[way], now + 0.0002 + 0.001 * chance.random() + more)
        return free[way] - now


class Remote:
    """`harm`: what was done to it, and when the server could first have acted on it; None: it is well. `since`: when
    it last began to be as it is."""

    is_hit = True  # by requests that no rank survives

    def __init__(self, sim: Deployment, config: EngineConfig, socket: SimSocket, memory: EngineMemory | None) -> None:
        self.sim, self.world, self.socket, self.memory = sim, sim.world, socket, memory
        self.index, self.layout = config.parallel.data_parallel_index, config.parallel.layout
        self.pid = sim.new_pid()
        self.returncode: int | None = None
        self.up = self.stopped = self.for_good = self.hung = self.regrouping = self.told_to_end = False
        self.gone = self.was_heard = self.had_tokens = False  # said that it gives up; was heard with steps, with tokens
        self.follows = False  # one that was lost
        self.slow = 1.0
        self.harm: tuple[str, float] | None = None
        self.since = self.stepped = self.world.awake()
        self.ended = 0.0
        self.core: EngineCore | None = None
        self.worker: HashWorker
        self.context = None  # it has all tokens
        self._plans: deque[StepPlan] = deque()
        self._busy = False
        self._life = 0
        self.copies: list[SimCopying] = []
        self.said: list[tuple[int, KVNews]] = []  # that is said again
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._inbox: list[ToEngine] = []
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.later(sim.takes(LOAD) + sim.delay_of_start(self), self._come_up)

    # -- as a process

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """By the server."""
        self.sim.rules.killed(self)
        self.end(-9)

    def end(self, code: int) -> None:
        if self.returncode is not None:
            return
        self.world.note("engine {} (pid {}) ends with {}", self.index, self.pid, code)
        self.returncode, self.up, self.since, self.ended = code, False, self.world.awake(), self.world.now
        self._leave_memory()
        self.sim.rules.ended(self)
        self._exit.set_result(code)

    def later(self, delay: float, act: Callable[..., None], *values: Any) -> None:
        """Unless it has ended by then; one that is stopped does it when it goes on."""
        self.world.at(delay, self._do, act, values)

    def _do(self, act: Callable[..., None], values: tuple[Any, ...]) -> None:
        if self.returncode is not None or self.hung:
            return
        if self.stopped:
            self._held.append((act, values))
        else:
            act(*values)

    def go_on(self) -> None:
        if not self.for_good and self.returncode is None:
            self.stopped, held, self._held = False, self._held, []
            for act, values in held:
                act(*values)

    # -- as an engine

    def _come_up(self) -> None:
        config = self.sim.scenario.config
        assert config.cache.memory is not None
        num_blocks = config.cache.memory // BLOCK_BYTES
        width = -(-(config.scheduler.max_model_len + config.scheduler.max_drafts) // config.cache.block_size) + 1
        self.shape = Shape(1, num_blocks, config.cache.block_size, config.scheduler.max_num_seqs, width)
        indexes, adopt = self.memory.open(self.layout, self.shape) if self.memory is not None else ((), False)
        self.core = EngineCore(config.scheduler, config.cache, num_blocks, 1, indexes, adopt=adopt)
        self.sim.counts["KV adopted"] += bool(self.core.lanes[0].held)
        self._new_worker()
        self.sim.transfers.connect(self)
        self.up, self.since = True, self.world.awake()
        blocks, size = self.core.lanes[0].num_blocks, config.cache.block_size
        self.socket.say(EngineFacts(
            "hash", config.scheduler.max_model_len, VOCAB, 1, "float32", "none", "cpu", 1, blocks, size, 0, "sim",
            "simulated", layout_name(self.layout), [self.pid], {},
            committed={name.hex(): held.length for name, held in self.core.lanes[0].held.items()},
        ))  # fmt: skip
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._handle(message)

    def _new_worker(self) -> None:
        assert self.core is not None
        self.worker = self.sim.make_worker(self, self.core.lanes[0].num_blocks)  # type: ignore[arg-type]
        if self.memory is not None:
            self.memory.hold(self.worker)

    def _leave_memory(self) -> None:
        """It ends, or loses its ranks, maybe in the midst of a step."""
        if self.core is None or self.memory is None:
            return
        self.memory.committed = self.core.committed
        if self._busy:
            plan = self._plans[0]
            with contextlib.suppress(Exception):
                self.worker.step(plan.step, plan.lanes[0], plan.freed_rows[0], plan.turn)

    def take(self, message: ToEngine) -> None:
        self._do(self._handle, (message,))

    def _handle(self, message: ToEngine) -> None:
        core = self.core
        if core is None:
            self._inbox.append(message)
            return
        match message:
            case Submit():
                self.output(core.admit(Request(
                    message.id, message.prompt, message.params, message.seed, max_tokens=message.max_tokens,
                    eos_ids=message.eos_ids, priority=message.priority, output=list(message.output),
                    lends=message.lends, lease=message.lease,
                )))  # fmt: skip
            case Cancel():
                self.output(core.cancel(message.id))
            case Release():
                self.sim.rules.released(self, message)
                self.output([], stepped=True)
            case ResizeEngine():
                self._resize_engine(message)
                return
            case Shutdown():
                for request in core.snapshot():
                    self.output(core.cancel(request.id, FinishReason.ABORT))
                self.end(0)
                return
        self._go()

    def output(self, deltas: list[Any], *, stepped: bool = False) -> None:
        if deltas or stepped:
            assert self.core is not None
            self.socket.say(Output(deltas, self.core.stats()))

    def _go(self) -> None:
        core = self.core
        if core is None or self.regrouping or self.returncode is not None:
            return
        if expire(core.lanes, self.world.now):
            self.output([], stepped=True)
        while core.in_flight < core.config.depth and (plan := core.plan(self.world.now)) is not None:
            self._plans.append(plan)
        if self._plans and not self._busy:
            self._busy = True
            count = sum(row.count for row in self._plans[0].lanes[0])
            self.later((0.01 + 0.0005 * count) * self.slow, self._step, self._life)

    def _step(self, life: int) -> None:
        if life != self._life:
            return
        assert self.core is not None
        plan, self._busy = self._plans.popleft(), False
        for rank, news in self.sim.transfers.copy(self, plan):
            self.core.hear({rank: news})
        try:
            lane = self.worker.step(plan.step, plan.lanes[0], plan.freed_rows[0], plan.turn)
        except Died:
            self.sim.harmed(self, "dead")
            self.end(-9)
            return
        except Poisoned:
            self.lose_ranks("RuntimeError: poisoned")
            return
        except ValueError as e:
            self.world.require(False, "plan", f"engine {self.index} can't carry out step {plan.step}: {e}")
        self.stepped = self.world.awake()
        deltas = self.core.commit(StepResult(plan.epoch, plan.step, (lane,)))
        self.output(deltas, stepped=True)
        if any(delta.lease for delta in deltas):
            self.sim.rules.lent(self)
            self.later(LEASE, self.sim.transfers.look, self)
        self.sim.occasion()
        self._go()

    # -- what may befall it

    def _resize_engine(self, wish: ResizeEngine) -> None:
        if self.regrouping:  # as its loop is about that, it reads this afterwards
            self.later(0.1, self._resize_engine, wish)
        elif wish.tp > MOST:
            self.socket.say(EngineResized(wish.id, layout_name(self.layout), "there are not so many heads"))
        else:
            self.lose_ranks("asked for", wish)

    def lose_ranks(self, cause: str, wish: ResizeEngine | None = None) -> None:
        """They begin anew, as `EngineLoop` has them do; maybe in another layout."""
        core = self.core
        if core is None or self.regrouping or self.hung or self.stopped:
            return
        self.regrouping, self.since = True, self.world.awake()
        if wish is None:
            self.sim.rules.ended(self)
        self._leave_memory()
        self._life, self._busy = self._life + 1, False
        self._plans.clear()
        if wish is None:
            self.output(core.fault())
            notice = Recovery(core.epoch + 1, [0], "step", cause)
        else:
            notice = Recovery(core.epoch + 1, [], "step", cause, kind="layout")
        self.socket.say(notice)
        self.later(self.world.random.uniform(0.3, 8.0), self._regroup, notice, wish)

    def _regroup(self, notice: Recovery, wish: ResizeEngine | None) -> None:
        assert self.core is not None
        self.layout = self.layout if wish is None else Layout(tp=wish.tp, pp=wish.pp)
        kept = wish is None and self.memory is not None
        indexes = self.memory.begin(self.layout, self.shape) if self.memory is not None and not kept else ()
        self.output(self.core.lost(notice.epoch, kept=kept, indexes=indexes), stepped=True)
        self._new_worker()
        self.sim.transfers.connect(self)
        self.regrouping, self.since = False, self.world.awake()
        name = layout_name(self.layout)
        self.socket.say(msgspec.structs.replace(notice, seconds={"total": 1.0}, layout=name, pids=[self.pid]))
        if wish is not None:
            self.socket.say(EngineResized(wish.id, name))
        self._go()

    def give_up(self) -> None:
        """It says itself that another would do no better."""
        self.gone = True
        self.sim.harmed(self, "given up")
        self.socket.say(Dead("error", "nothing helps"))
        self.end(1)

    def crash(self) -> None:
        self.sim.harmed(self, "dead")
        self.socket.say(Dead("crash", "AssertionError: a mistake"))
        self.end(1)

    def leave(self) -> None:
        """Somebody tells it to end."""
        self.later(0.0, self._leave)

    def _leave(self) -> None:
        if self.up:
            self.socket.say(Leaving())
