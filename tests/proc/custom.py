"""Classes that options name by import path: a launcher, a worker, extensions of a worker."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.executor.boot import RankBoot
from planaria.executor.launcher.inline import InlineLauncher
from planaria.executor.launcher.process import ProcessLauncher
from planaria.hosts.host import Child, Place
from planaria.protocol import Allocate, Command, Failed, Load, Reply, StepPlan, StepResult
from planaria.worker.guard import guard
from planaria.worker.null import NullRank
from planaria.worker.worker import Worker, make_rank
from tests.reference_worker import HashWorker

POISON = 7
SEEN = "TEST_SEEN"  # the environment variable: a file, there while a test counts the tokens that its clients have got
AHEAD = 160  # tokens that a HashRank may draw before clients have got them
BEHIND = 0.25  # seconds that a step waits for them at most
LATE = "TEST_LATE"  # a file: while it is there, a HashRank doesn't get ready


class NiceLauncher(ProcessLauncher):
    """Ranks that leave other programs the cores first."""

    name = "nice"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__("planaria.worker.main", range(config.parallel.world_size))

    def start(self) -> list[Place]:
        places = super().start()
        for place in places:
            os.setpriority(os.PRIO_PROCESS, place.pid, 5)
        return places


class ShortLauncher(ProcessLauncher):
    """Can't start a process while there is a file that $TEST_NO_DEVICE names."""

    name = "short"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__("planaria.worker.main", range(config.parallel.world_size))
        spawn = self.host.spawn

        def short(*what: Any, **named: Any) -> Child:
            if os.path.exists(os.environ["TEST_NO_DEVICE"]):
                raise OSError(errno.EAGAIN, "no device, as asked")
            return spawn(*what, **named)

        self.host.spawn = short  # type: ignore[method-assign]


class OwnLauncher(InlineLauncher):
    """One rank in the engine's own process."""

    name = "own"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(make_rank)


class CountingWorker(Worker):
    """Knows how many commands it was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commands: list[str] = []

    def handle(self, command: Command) -> Reply:
        self.commands.append(type(command).__name__)
        return super().handle(command)

    def what_came(self) -> list[str]:
        return self.commands


class Extension:
    """Methods for collective_rpc. rank, mesh: the worker's."""

    rank: int
    mesh: Any

    def where(self, *, add: int = 0) -> list[int]:
        return [self.rank + add, os.getpid(), self.mesh.tp.size]

    def fail_on(self, rank: int) -> str:
        if self.rank == rank:
            raise ValueError("as asked")
        return "fine"

    def wait_for(self, path: str) -> str:
        """Until somebody makes the file."""
        while not os.path.exists(path):
            threading.Event().wait(0.01)
        return "done"

    def end(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(3)

    def something(self) -> object:
        return threading.Lock()


class Clients:
    """How far those are who get the tokens that are drawn here. Nobody counts: they are as far as they can be. Who
    counts from the beginning again, as the next run of streams does, has seen nothing of what was drawn before."""

    def __init__(self) -> None:
        self.drawn = self._first = self._last = 0
        self._counted = False

    def _behind(self) -> int:
        try:
            seen = int.from_bytes(Path(os.environ.get(SEEN, "/none")).read_bytes(), "little")
        except OSError:
            self._counted = False
            return 0
        if not self._counted or seen < self._last:
            self._counted, self._first, self.drawn = True, seen, 0
        self._last = seen
        return self.drawn - (seen - self._first)

    def wait(self) -> None:
        end = time.monotonic() + BEHIND
        while self._behind() > AHEAD and time.monotonic() < end:
            time.sleep(0.002)


class HashRank(NullRank):
    """No model: each token is a function of the whole history before it, the seed and the position, so that a lost,
    repeated or foreign token changes all that follow. A step takes a moment, and longer where clients are slow, so that
    what a test does when they have got some tokens is done in the middle; a prompt that begins with POISON kills
    the process; if there is a file that $TEST_MISTAKE names, it is removed, and a step's answer can't be."""

    def __init__(self, boot: RankBoot, *args: Any) -> None:
        super().__init__(boot)
        self.clients = Clients()

    def handle(self, command: Command) -> Reply:
        if isinstance(command, Allocate):
            while os.path.exists(os.environ.get(LATE, "/none")):
                time.sleep(0.005)
            config = self.boot.config
            self.worker = HashWorker(command.num_blocks, config.cache.block_size, config.model.vocab_size)  # type: ignore[assignment]
        if isinstance(command, StepPlan):
            for row in command.lanes[0]:
                if row.fresh is not None and row.fresh.tokens[0] == POISON:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.005)
            self.clients.wait()
        reply = super().handle(command)
        if isinstance(reply, StepResult):
            self.clients.drawn += sum(len(lane.tokens) for lane in reply.lanes)
        if isinstance(reply, StepResult) and (path := Path(os.environ.get("TEST_MISTAKE", "/none"))).exists():
            path.unlink()
            reply = msgspec.structs.replace(reply, step=reply.step + 7)
        return reply


HASHED = {"worker_cls": f"{__name__}.HashRank", "max_model_len": 512}  # of an LLM or an engine


class Overcommitted(HashRank):
    """Runs out of memory in a late step, as long as it has as many KV blocks as at first."""

    LATE = 90
    blocks: tuple[int, int] | None = None  # at first, now

    def handle(self, command: Command) -> Reply:
        if isinstance(command, Allocate):
            self.blocks = (self.blocks[0] if self.blocks else command.num_blocks), command.num_blocks
        if isinstance(command, StepPlan) and command.step == self.LATE and self.blocks and len(set(self.blocks)) == 1:
            return guard(self.rank, "step", self._exhaust)
        return super().handle(command)

    def _exhaust(self) -> Reply:
        raise MemoryError


class ClashesWithMethod:
    def handle(self) -> None: ...


class ClashesWithField:
    def model(self) -> None: ...


class NotAWorker:
    pass


class Unlucky(Worker):
    """Of whose ranks the second can't have the first of new weights."""

    def _load(self, command: Load) -> Reply:
        if self.rank == 1 and self.config.weights_number == 1:
            return Failed(self.rank, "load", "no luck", "", "model")
        return super()._load(command)


class FailsToBegin(Worker):
    def __init__(self, *args: Any) -> None:
        raise RuntimeError("no licence")
