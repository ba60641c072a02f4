"""The driver: the only place where a core, a gang and a link meet time. One thread calls it.

`start` brings the gang up, `handle` takes a front end's message, `turn` does one round: plan what can be planned,
carry it out, commit, and hand what came of it to `emit`. Every open request is answered, also when the engine dies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from planaria.config.options import EngineConfig
from planaria.core.engine import EngineCore
from planaria.errors import CapacityError, EngineDead, ModelError, PlanariaError, WorkersLost
from planaria.executor.gang import Gang
from planaria.executor.link.faults import LinkError
from planaria.executor.worker_group import Ticket, WorkerGroup
from planaria.protocol import Call, Command, Exit, Failed, Reply, StepResult
from planaria.types import Delta, FinishReason, Request
from planaria.wire import Cancel, Dead, EngineFacts, FromEngine, Output, Shutdown, Submit, ToEngine

logger = logging.getLogger("planaria.engine")

Emit = Callable[[FromEngine], None]


class Launcher(Protocol):
    name: str
    on_exit: Callable[[], None]  # called from any thread when a rank's process ends unasked

    def launch(self) -> Any: ...

    def pids(self) -> list[int]: ...

    def lost(self) -> dict[int, str]: ...

    def closing(self) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


class Link(Protocol):
    name: str

    def send(self, number: int, command: Command) -> None: ...

    def receive(self, timeout: float | None) -> tuple[int, int, Reply] | None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def failure(failed: Failed) -> PlanariaError:
    """The exception a front end should see for a rank's failure."""
    if failed.kind == "model":
        return ModelError(failed.message)
    if failed.kind == "capacity":
        return CapacityError(failed.message)
    return EngineDead(f"rank {failed.rank} failed in {failed.phase}: {failed.message}")


class EngineLoop:
    """`link_for(ranks)` makes the link to what the launcher started. `on_loss`, where set, is called from another
    thread when a rank's process ends: whoever sleeps outside `turn` then calls `check`."""

    def __init__(
        self, config: EngineConfig, launcher: Launcher, link_for: Callable[[Any], Link], emit: Emit,
        answering: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.launcher, self.link_for, self.emit = config, launcher, link_for, emit
        self.answering = answering  # the rank whose step results have tokens
        self.on_loss: Callable[[], None] = lambda: None
        launcher.on_exit = self._on_exit
        self.group = WorkerGroup(config.parallel.world_size)
        self.link: Link | None = None
        self.core: EngineCore | None = None
        self.epoch = 0
        self.broken = False  # a rank is lost: the link can't be trusted to answer
        self.stopping = False
        self.dead: Dead | None = None

    # -- starting and ending

    def start(self) -> EngineFacts:
        """Launch, load, allocate. Raises ModelError, CapacityError or EngineDead."""
        began = time.perf_counter()
        self.link = self.link_for(self.launcher.launch())
        config = self.config
        gang = Gang(config.cache, config.scheduler, cpu=config.device.device == "cpu")
        command: Command | None = gang.start()
        try:
            while command is not None:
                command = gang.on_done(list(self._ask(command).replies.values()))
        except WorkersLost as e:
            gang.failure = self._failed_by(e)
        if gang.failure is not None:
            error = failure(gang.failure)
            if gang.failure.kind == "error" and gang.failure.traceback:
                logger.error("%s\n%s", error, gang.failure.traceback)
            self.close()
            raise error
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
            link=self.link.name,
            layout=f"tp={config.parallel.tensor_parallel_size} pp={config.parallel.pipeline_parallel_size}",
            ranks=self.launcher.pids(),
            seconds=gang.seconds,
        )

    def _ask(self, command: Command) -> Ticket:
        """Send a command with nothing else in flight and wait for all ranks."""
        assert self.link is not None
        ticket = self.group.submit(command, time.monotonic())
        self.link.send(ticket.number, command)
        while True:
            if ticket in self.group.on_reply(*self._receive()):
                return ticket

    def _receive(self) -> tuple[int, int, Reply]:
        """The next answer. Raises WorkersLost when a rank's process has ended or its link is broken."""
        assert self.link is not None
        while True:
            try:
                answer = self.link.receive(None)
            except LinkError as e:
                lost = self.launcher.lost()
                cause = "; ".join(f"its process {how}" for how in lost.values()) or str(e)
                raise WorkersLost(self.epoch, tuple(lost) or e.ranks, cause) from None
            if answer is not None:
                return answer
            self._look_for_losses()

    def _look_for_losses(self) -> None:
        if lost := self.launcher.lost():
            raise WorkersLost(self.epoch, tuple(lost), "; ".join(f"its process {how}" for how in lost.values()))

    def _on_exit(self) -> None:
        """From another thread: end the wait for an answer that may never come."""
        if self.link is not None:
            self.link.wake()
        self.on_loss()

    def check(self) -> None:
        """Look for ranks that ended while nothing was running."""
        try:
            self._look_for_losses()
        except WorkersLost as e:
            self._lost(e)

    def _lost(self, loss: WorkersLost) -> None:
        """The one place where lost ranks are dealt with."""
        self._die(self._failed_by(loss))

    def _failed_by(self, loss: WorkersLost) -> Failed:
        """What the first lost rank would have said itself."""
        phase = type(self.group.open[0].command).__name__ if self.group.open else "idle"
        phase = {"StepPlan": "step"}.get(phase, phase.lower())
        self.broken = True
        return Failed(loss.ranks[0] if loss.ranks else 0, phase, loss.cause, "")

    def close(self) -> None:
        """Answer what is open, end the ranks. Idempotent."""
        if self.core is not None:
            self._abort_all(FinishReason.ABORT, None)
        if self.link is not None:
            self.launcher.closing()
            if not self.broken:
                try:
                    while self.group.open:
                        self.group.on_reply(*self._receive())
                    self._ask(Exit())
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
            case Shutdown():
                self.stopping = True

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
        except WorkersLost as e:
            self._lost(e)
        except LinkError as e:
            self._lost(WorkersLost(self.epoch, e.ranks, str(e)))
        return True

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a worker's method on every rank between steps; answers in rank order. Raises EngineDead if one failed."""
        while self.group.open:
            self.turn()
        ticket = self._ask(Call(method, args, kwargs))
        if ticket.failed is not None:
            raise failure(ticket.failed)
        return [getattr(ticket.replies[rank], "value", None) for rank in sorted(ticket.replies)]

    def _complete(self, ticket: Ticket) -> None:
        assert self.core is not None
        if ticket.failed is not None:
            self._die(ticket.failed)
            return
        result = ticket.replies[self.answering]
        if isinstance(result, StepResult):
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
        self._abort_all(FinishReason.ERROR, str(error))
        self.dead = Dead(failed.kind, str(error), failed.traceback)
        self.stopping = True
        self.emit(self.dead)

