"""A simulated host: processes that take time to start, and may die on the way. Each is on a device of a node; devices
leave and come back, one by one or a whole node at once, and some kill what is started on them. Which process is which
rank, and where, the shipping Pool decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from planaria.errors import CapacityError
from planaria.executor.boot import SPARE, RankBoot
from planaria.executor.launcher.process import PoolLauncher
from planaria.hosts.host import News, Place, Program, Slot
from planaria.hosts.pool import cluster_of
from planaria.topology import Cluster, Infeasible, Layout, Node, shrink
from tests.sim.process import NOTICED, Process

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

FIRST_PID = 50_000_000  # no real one is so high
LONGEST_TRY = 40.0  # seconds between tries, at most


class Device:
    """gone: nobody can start anything there. bad: what is started there dies. going: it will be gone, and what is there
    works on until then."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.gone = self.bad = self.going = False

    @property
    def is_well(self) -> bool:
        return not (self.gone or self.bad or self.going)


class SimHost:
    """See Host."""

    def __init__(self, sim: Simulation, nodes: Sequence[int]) -> None:
        self.sim, self.world = sim, sim.world
        self.devices = [Device(node) for node, count in enumerate(nodes) for _ in range(count)]
        self.all: list[Process] = []

    def slots(self) -> Cluster:
        nodes: dict[str, list[int]] = {}
        for number, device in enumerate(self.devices):
            if not (device.gone or device.going):
                nodes.setdefault(str(device.node), []).append(number)
        return Cluster(tuple(Node.of(node, numbers) for node, numbers in nodes.items()), "0")

    def need(self, processes: int, spares: int) -> None: ...

    def spawn(self, slot: Slot, entry: Program, boot: bytes | None, news: News, *, rank: int = -1) -> Process:
        if self.sim.faults.strikes("launch fails", None):
            raise OSError(11, "Resource temporarily unavailable")
        device = self.devices[slot[1]]
        process = Process(self.sim, FIRST_PID + len(self.all), device, slot)
        self.all.append(process)
        if device.bad or self.sim.faults.strikes("launch dies", None):
            self.sim.faults.kill(process, self.world.random.uniform(0.0, 0.5))
        return process

    def await_starts(self, children: Iterable[Any], timeout: float) -> None: ...

    def await_ends(self, children: Iterable[Any], timeout: float) -> list[Any]:
        """A process that is killed is gone in no time, and known to be a moment later."""
        children, until = list(children), self.world.now + timeout
        while any(process.alive for process in children) and self.world.step(until):
            pass
        while not all(process.ended or process.alive for process in children):
            self.world.pass_by(NOTICED)
        return [process for process in children if not process.ended]

    def absent(self) -> list[str]:
        return []

    def close(self) -> None: ...


class SimLauncher(PoolLauncher):
    name = "sim"
    host: SimHost  # type: ignore[assignment]  # its children are simulated processes

    def __init__(self, sim: Simulation, nodes: Sequence[int], layout: Layout, num_spares: int) -> None:
        self.sim, self.world = sim, sim.world
        host: Any = SimHost(sim, nodes)
        world = sim.world
        super().__init__(host, "", layout, spares=num_spares, clock=world.clock, pause=world.pass_by)
        self.pool.tries.longest = self.pool.longest = LONGEST_TRY
        self.devices, self.all = self.host.devices, self.host.all

    @property
    def ranks(self) -> dict[int, Any]:
        return self.pool.ranks

    @property
    def spares(self) -> list[Any]:
        return self.pool.spares

    def nodes(self) -> set[int]:
        """That ranks are on."""
        return {process.device.node for process in self.ranks.values()}

    @property
    def is_closing(self) -> bool:
        return self._closing

    def notice(self) -> float:
        return NOTICED * self.world.random.random()

    def ended(self, process: Process) -> None:
        self._news(process)  # type: ignore[arg-type]

    def best(self, layout: Layout) -> Layout | None:
        """The largest one up to this that the devices which are well could have; over nodes where this may be, too."""
        well = Counter(str(device.node) for device in self.devices if device.is_well)
        return shrink(cluster_of(well), layout, span=True)

    def start(self) -> list[Place]:
        self.world.pass_by(self.sim.takes(0.01))
        return super().replace((), self.layout)

    def run(self, boots: Sequence[RankBoot]) -> None:
        for boot in boots:
            process = self.ranks[boot.rank]
            if process.epoch < 0 and process.link is None and not process.begun:
                process.begun = self.world.awake()
            process.moved = process.moved or process.rank not in (SPARE, boot.rank)
            self.world.note("rank {} is pid {}", boot.rank, process.pid)
            process.boot(boot, self.sim.link)

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        self.sim.rules.fenced()
        if self.sim.faults.strikes("launch is slow", None):
            self.world.pass_by(self.world.random.uniform(1.0, 30.0))
        self.sim.rules.replacing(ranks)
        self.pool.end([*ranks, *self.leaving])
        if self.sim.faults.strikes("no device", None):
            raise CapacityError("no device is free")
        try:
            return super().replace((), layout)
        except Infeasible as e:
            self.world.note("{} devices for {}", e.found, layout)
            self.sim.rules.short_of_devices(e.found, layout)
            raise

    def give_up(self, ranks: Sequence[int]) -> None:
        self.sim.rules.giving_up(ranks)
        super().give_up(ranks)

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        return self.pool.prepare(layout, lambda place: boot)  # type: ignore[arg-type,return-value]

    def stand_by(self, boot: RankBoot) -> None:
        self.pool.stand_by(lambda place: boot)  # type: ignore[arg-type,return-value]

    def settle(self, ranks: Sequence[int]) -> None:
        self.world.pass_by(NOTICED)
