"""A simulated launcher: processes that take time to start, may die on the way, and take the places of others. Each is
on a device of a node; devices leave and come back, one by one or a whole node at once, and some kill what is started on
them. It keeps the contract of planaria.executor.gang.Launcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from planaria.errors import CapacityError
from planaria.executor.boot import Place, RankBoot
from planaria.node import home
from planaria.topology import Cluster, Infeasible, Layout, Node, shrink
from tests.sim.process import NOTICED, Process

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

FIRST_PID = 50_000_000  # no real one is so high
EXIT_TIMEOUT = 5.0
TRY_AGAIN, LONGEST_TRY = 5.0, 40.0  # seconds before a device that was given up is tried


class Device:
    """gone: nobody can start anything there. bad: what is started there dies. going: it will be gone, and what is there
    works on until then. given_up: what the launcher thinks."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.gone = self.bad = self.going = self.given_up = False
        self.tries = 0

    @property
    def is_well(self) -> bool:
        return not (self.gone or self.bad or self.going)


class SimLauncher:
    name = "sim"
    link, uses_ray, replaces = "queue", False, True

    def __init__(self, sim: Simulation, nodes: Sequence[int], num_ranks: int, num_spares: int) -> None:
        self.sim, self.world = sim, sim.world
        self.num_ranks, self.num_spares = num_ranks, num_spares
        self.on_exit: Callable[[], None] = lambda: None
        self.devices = [Device(node) for node, count in enumerate(nodes) for _ in range(count)]
        self.ranks: dict[int, Process] = {}
        self.spares: list[Process] = []
        self.all: list[Process] = []
        self._last: dict[int, Device] = {}  # of each rank
        self._try_at, self._pause = 0.0, TRY_AGAIN
        self._failing_until = 0.0
        self.is_closing = False

    @property
    def leaving(self) -> Sequence[int]:
        return [rank for rank, process in sorted(self.ranks.items()) if process.device.going]

    def notice(self) -> float:
        return NOTICED * self.world.random.random()

    def ended(self, process: Process) -> None:
        if not self.is_closing:
            self.on_exit()

    # -- what there is

    def start(self) -> list[Place]:
        self.world.pass_by(self.sim.takes(0.01))
        for rank in range(self.num_ranks):
            self._put(rank)
        return self._places()

    def _start(self, device: Device) -> Process:
        if self.sim.faults.strikes("launch fails", None):
            raise OSError(11, "Resource temporarily unavailable")
        process = Process(self.sim, FIRST_PID + len(self.all), device)
        self.all.append(process)
        if device.bad or self.sim.faults.strikes("launch dies", None):
            self.sim.faults.kill(process, self.world.random.uniform(0.0, 0.5))
        return process

    def _put(self, rank: int) -> None:
        if not self.spares:
            self._last[rank] = self._free()[0]
        process = self.ranks[rank] = self.spares.pop(0) if self.spares else self._start(self._free()[0])
        self._last[rank] = process.device
        self.world.note("rank {} is pid {} now", rank, process.pid)

    def _free(self) -> list[Device]:
        used = {process.device for process in [*self.ranks.values(), *self.spares]}
        return [d for d in self.devices if not (d.gone or d.going or d.given_up or d in used)]

    def _places(self) -> list[Place]:
        return [
            Place(rank, home(), f"node{process.device.node}", pid=process.pid)
            for rank, process in sorted(self.ranks.items())
        ]

    def best(self, layout: Layout) -> Layout | None:
        """The largest one up to this that the devices which are well could have."""
        return _largest(sum(device.is_well for device in self.devices), layout)

    # -- the contract

    def run(self, boots: Sequence[RankBoot]) -> None:
        for boot in boots:
            process = self.ranks[boot.rank]
            if process.epoch < 0 and process.link is None and not process.begun:
                process.begun = self.world.awake()
            process.rank = boot.rank
            process.boot(boot, self.sim.link)

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        self.sim.rules.fenced()
        if self.sim.faults.strikes("launch is slow", None):
            self.world.pass_by(self.world.random.uniform(1.0, 30.0))
        self.sim.rules.replacing(ranks)
        ending = [self.ranks.pop(rank) for rank in sorted({*ranks, *self.leaving}) if rank in self.ranks]
        self._end(ending)
        if self.sim.faults.strikes("no device", None):
            raise CapacityError("no device is free")
        self._count_spares()
        room = len(self.ranks) + len(self.spares) + len(self._free())
        if room < layout.size:
            self.world.note("{} devices for {}", room, layout)
            self.sim.rules.short_of_devices(room, layout)
            raise Infeasible(f"{layout} needs {layout.size} devices, {room} are left", _largest(room, layout),
                             layout.size, room)  # fmt: skip
        moving = [self.ranks.pop(rank) for rank in sorted(self.ranks) if rank >= layout.size]
        for rank in range(layout.size):
            if rank in self.ranks:
                continue
            if moving:
                process = self.ranks[rank] = moving.pop(0)
                process.moved = True
                self._last[rank] = process.device
            else:
                self._put(rank)
        self._end(moving)
        return self._places()

    def _end(self, processes: Sequence[Process]) -> None:
        for process in processes:
            process.end("was killed by its launcher")
        self.world.pass_by(self.sim.takes(0.005))
        while not all(process.ended for process in processes):
            self.world.pass_by(NOTICED)

    def give_up(self, ranks: Sequence[int]) -> None:
        self.sim.rules.giving_up(ranks)
        for rank in ranks:
            if rank in self._last:
                self._last[rank].given_up = True
                self.world.note("the device of rank {} is given up", rank)
        self._try_at = self.world.now + self._pause

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        self._count_spares()
        staying = len(self.ranks) - len(self.leaving)
        wanted, devices = self.num_spares + layout.size - staying, self._free()
        if self.world.now >= self._try_at:
            tried = {process.device for process in [*self.ranks.values(), *self.spares]}
            again = [device for device in self.devices if device.given_up and not device.gone and device not in tried]
            if again:
                devices += sorted(again, key=lambda device: device.tries)
                self._try_at, self._pause = self.world.now + self._pause, min(LONGEST_TRY, 2 * self._pause)
        with contextlib.suppress(OSError):
            self._fill(wanted, devices, boot)
        ready = [spare for spare in self.spares if spare.ready]
        for spare in ready:
            spare.device.given_up, self._pause = False, TRY_AGAIN
        return _largest(staying + len(ready), layout)

    def room_for(self, layout: Layout) -> bool:
        self._count_spares()
        room = len(self.ranks) + len(self.spares) + len(self._free())
        ready = len(self.ranks) + sum(spare.ready for spare in self.spares)
        return ready >= layout.size or (room >= layout.size and self.world.now >= self._failing_until)

    def stand_by(self, boot: RankBoot) -> None:
        self._count_spares()
        self._fill(self.num_spares, self._free(), boot)

    def _fill(self, wanted: int, devices: list[Device], boot: RankBoot) -> None:
        while len(self.spares) < wanted and devices:
            devices[0].tries += 1
            spare = self._start(devices.pop(0))
            spare.boot(boot, None)
            self.spares.append(spare)

    def _count_spares(self) -> None:
        for spare in self.spares:
            if spare.device.going:
                spare.end("was killed by its launcher")
        if any(spare.ended and spare.prepared is None for spare in self.spares):
            self._failing_until = self.world.now + TRY_AGAIN
        here = [spare for spare in self.spares if not (spare.ended or spare.device.going)]
        self.spares = sorted(here, key=lambda spare: not spare.ready)

    def spare_pids(self) -> list[int]:
        return [spare.pid for spare in self.spares]

    def lost(self) -> dict[int, str]:
        if self.is_closing:
            return {}
        return {rank: process.ended for rank, process in sorted(self.ranks.items()) if process.ended}

    def settle(self, ranks: Sequence[int]) -> None:
        self.world.pass_by(NOTICED)

    def closing(self) -> None:
        self.is_closing = True

    def close(self) -> None:
        self.is_closing = True
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
        self.is_closing = True
        for process in self.ranks.values():
            process.end("was killed by its launcher")
        self.close()


def _largest(devices: int, layout: Layout) -> Layout | None:
    return shrink(Cluster((Node.of("", devices),)), layout)
