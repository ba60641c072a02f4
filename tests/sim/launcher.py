"""A simulated launcher: processes that take time to start, may die on the way, and are replaced by spares or new ones.
It keeps the contract of planaria.executor.crew.Launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from planaria.errors import CapacityError
from planaria.executor.boot import SPARE, Place, RankBoot
from planaria.node import home
from tests.sim.process import NOTICED, Process

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

FIRST_PID = 50_000_000  # no real one is so high
EXIT_TIMEOUT = 5.0


class SimLauncher:
    name = "sim"
    link, uses_ray, replaces = "queue", False, True

    def __init__(self, sim: Simulation, num_ranks: int, num_spares: int) -> None:
        self.sim, self.world = sim, sim.world
        self.num_ranks, self.num_spares = num_ranks, num_spares
        self.on_exit: Callable[[], None] = lambda: None
        self.ranks: dict[int, Process] = {}
        self.spares: list[Process] = []
        self.all: list[Process] = []
        self._closing = False

    def notice(self) -> float:
        return NOTICED * self.world.random.random()

    def ended(self, process: Process) -> None:
        if not self._closing:
            self.on_exit()

    def start(self) -> list[Place]:
        self.world.pass_by(self.sim.takes(0.01))
        for rank in range(self.num_ranks):
            self.ranks[rank] = self._start()
        return self._places()

    def _start(self) -> Process:
        process = Process(self.sim, FIRST_PID + len(self.all))
        self.all.append(process)
        if self.sim.strikes("launch dies", None):
            self.sim.kill(process, self.world.random.uniform(0.0, 0.5))
        return process

    def _places(self) -> list[Place]:
        return [Place(rank, home(), "sim", pid=process.pid) for rank, process in sorted(self.ranks.items())]

    def run(self, boots: Sequence[RankBoot]) -> None:
        for boot in boots:
            process = self.ranks[boot.rank]
            if process.epoch < 0 and process.link is None and not process.begun:
                process.begun = self.world.awake()
            process.rank = boot.rank
            process.boot(boot.rank, self.sim.link)

    def replace(self, ranks: Sequence[int]) -> list[Place]:
        self.sim.fenced()
        if self.sim.strikes("launch is slow", None):
            self.world.pass_by(self.world.random.uniform(1.0, 30.0))
        self.sim.replacing(ranks)
        for rank in ranks:
            self.ranks[rank].end("was killed by its launcher")
        self.world.pass_by(self.sim.takes(0.005))
        for rank in ranks:
            while self.ranks[rank].alive or not self.ranks[rank].ended:
                self.world.pass_by(NOTICED)
            if self.sim.strikes("launch fails", None):
                raise OSError(11, "Resource temporarily unavailable")
            if self.sim.strikes("no device", None):
                raise CapacityError("no device is free")
            self.spares = [spare for spare in self.spares if not spare.ended]
            self.ranks[rank] = self.spares.pop(0) if self.spares else self._start()
            self.world.note("rank {} is pid {} now", rank, self.ranks[rank].pid)
        return self._places()

    def stand_by(self, boot: RankBoot) -> None:
        self.spares = [spare for spare in self.spares if not spare.ended]
        while len(self.spares) < self.num_spares:
            spare = self._start()
            spare.boot(SPARE, None)
            self.spares.append(spare)

    def spare_pids(self) -> list[int]:
        return [spare.pid for spare in self.spares]

    def lost(self) -> dict[int, str]:
        if self._closing:
            return {}
        return {rank: process.ended for rank, process in sorted(self.ranks.items()) if process.ended}

    def settle(self, ranks: Sequence[int]) -> None:
        self.world.pass_by(NOTICED)

    def closing(self) -> None:
        self._closing = True

    def close(self) -> None:
        self._closing = True
        for spare in self.spares:
            spare.end("was killed by its launcher")
        mine = [*self.ranks.values(), *self.spares]
        until = self.world.now + EXIT_TIMEOUT
        while any(process.alive for process in mine) and self.world.step(until):
            pass
        for process in mine:
            process.end("was killed by its launcher")
        self.ranks, self.spares = {}, []

    def kill(self) -> None:
        self._closing = True
        for process in self.ranks.values():
            process.end("was killed by its launcher")
        self.close()
