"""What ranks of an epoch wait for among themselves: collectives, what a stage hands to the next, experts that travel.

Rule "deadlock": a rank that has passed a meeting never comes back to it; who waits for it there waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planaria.protocol import Command, Failed, Regroup, SendExperts, StepPlan
from planaria.topology import Layout
from planaria.topology.experts import Maps

if TYPE_CHECKING:
    from tests.sim.link import SimLink
    from tests.sim.simulation import Simulation


class Gate:
    """Collectives: a rank goes on when those that it needs have come. One that is dead or failed breaks them. Ranks of
    all lanes meet in each step, as those do that share experts."""

    def __init__(self, sim: Simulation, link: SimLink) -> None:
        self.sim, self.link = sim, link
        self.layout = Layout()  # as Regroup says
        self.here: dict[int, tuple[int, Command]] = {}  # rank -> what it has come to
        self.done = [-1] * link.num_ranks  # rank -> last number that it is through with
        self.before: dict[int, int] = {}  # a step's number -> that of the step before it in its turn
        self._last: dict[int, int] = {}
        self.broken = ""
        self.in_force: dict[int, Maps] = {}  # a step's number -> the maps when it was planned
        self._agreed: dict[tuple[int, ...], tuple[object, ...]] = {}  # ranks -> what they agreed on last
        self.beside: dict[int, SendExperts] = {}  # ranks whose exchange of experts waits for others, beside steps

    def sent(self, number: int, command: StepPlan) -> None:
        self.before[number] = self._last.get(command.turn, -1)
        self._last[command.turn] = number
        self.in_force[number] = self.sim.maps_in_force()

    def arrive(self, rank: int, number: int, command: Command) -> None:
        self.here[rank] = number, command
        worker = self.link.ports[rank].worker
        if worker is not None and worker.context is not None:
            worker.context.give()
        if isinstance(command, Regroup):
            self.layout, size = command.layout, self.link.num_ranks
            self.sim.world.require(self.layout.size == size, "layout", f"{command} for {size} ranks")
        if self.broken:
            self._break(rank)
        else:
            self._look()
            self._passed(rank, number - 1)

    def answered(self, rank: int, number: int, command: Command) -> None:
        if isinstance(command, StepPlan | Regroup):
            self.done[rank] = number
            self._look()
        self._passed(rank, number)

    def _passed(self, rank: int, number: int) -> None:
        """This rank comes to nothing any more that has this number or a lower one."""
        if self.broken:
            return
        for waiting, (at, command) in self.here.items():
            late = at <= number and waiting != rank and rank in self._peers(waiting, command)
            where = f"{type(command).__name__} {at}"
            self.sim.world.require(not late, "deadlock", f"rank {waiting} waits in {where} for rank {rank}: past it")

    def _look(self) -> None:
        for rank, (number, command) in list(self.here.items()):
            if self.here.get(rank) == (number, command) and self._ready(rank, number, command):
                peers = self._peers(rank, command)
                for peer in peers:
                    del self.here[peer]
                if isinstance(command, StepPlan):
                    self._agree(number, peers)
                    for worker in filter(None, (self.link.ports[peer].worker for peer in peers)):
                        if worker.context is not None:
                            worker.context.see()
                for peer in peers:
                    self.link.ports[peer].go(number, command)

    def _peers(self, rank: int, command: Command) -> Sequence[int]:
        if isinstance(command, Regroup):
            return range(len(self.done))
        group = self.layout.group(rank, "dp", "pcp", "tp")
        if isinstance(command, SendExperts):
            return [peer for peer in group if self.link.ports[peer].experts.takes_part(command.moves)]
        return group

    def _ready(self, rank: int, number: int, command: Command) -> bool:
        layout, peers = self.layout, self._peers(rank, command)
        if any(self.here.get(peer, (-1, None))[0] != number for peer in peers):
            return False
        if isinstance(command, Regroup | SendExperts) or layout.pp == 1:
            return True
        if layout.coords(rank).pp:  # what the stage before hands over
            return all(self.done[peer - layout.tp * layout.pcp] >= number for peer in peers)
        return all(self.done[last] >= self.before[number] for last in layout.drawing)  # tokens come back from there

    def _agree(self, number: int, peers: Sequence[int]) -> None:
        """On where experts are. What they agreed on last need not be looked at again."""
        first, *others = [self.link.ports[peer].experts for peer in peers]
        if first.travel:
            planned = self.in_force[number]
            what = (planned, first.stamp, *(other.stamp for other in others))
            if self._agreed.get(tuple(peers)) != what:
                first.meets(others, planned)
                self._agreed[tuple(peers)] = what

    def aside(self, rank: int, command: SendExperts) -> None:
        """This rank has begun to exchange experts beside its steps."""
        if self.broken:
            self.link.ports[rank].misses(self.broken)
            return
        self.beside[rank] = command
        peers = self._peers(rank, command)
        if all(peer in self.beside and self.beside[peer].version == command.version for peer in peers):
            for peer in peers:
                del self.beside[peer]
                process, seconds = self.link.ports[peer], self.sim.world.random.choice([0.005, 0.05, 0.3])
                process.later(self.sim.takes(seconds), process.received, command)

    def broke(self, rank: int, why: Failed) -> None:
        """This rank can't go on; whoever waits for it hears so."""
        if not self.broken:
            self.broken = f"rank {rank} failed in {why.phase}: {why.message}"
        for peer in list(self.here):
            self._break(peer)
        for peer in self.beside:
            self.link.ports[peer].misses(self.broken)
        self.beside.clear()

    def _break(self, rank: int) -> None:
        number, command = self.here.pop(rank)
        phase = {StepPlan: "step", SendExperts: "experts"}.get(type(command), "groups")
        process = self.link.ports[rank]
        process.later(self.sim.takes(0.05), process.fail, number, Failed(rank, phase, self.broken, "", "peer"))
