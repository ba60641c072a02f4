"""A simulated link of one epoch.

It keeps the contract of real ones (planaria.executor.link.faults): each rank's messages come in order, a loss is
noticed and raised, an end is noticed and raised, and nothing comes after `close`, except where a fault asks for a
ghost: a message of an epoch that is over, or one that comes twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from planaria.executor.link.address import Address, Inside
from planaria.executor.link.faults import ConnectionLost, LinkClosed, LinkError, MessageLost
from planaria.hosts.host import Place
from planaria.protocol import Command, Failed, Hello, LaneResult, Reply, StepPlan
from tests.sim.gate import Gate
from tests.sim.process import Process, tokens_of

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

SLOWEST_NOTICE = 10.0  # seconds until a lost message is missed, where none follows


class SimLink:
    name = "simulated"

    def __init__(self, sim: Simulation, places: list[Place], epoch: int) -> None:
        self.sim, self.world, self.epoch, self.num_ranks = sim, sim.world, epoch, len(places)
        self.over = self.closed = self._woken = False
        self.ports: dict[int, Process] = {}
        self.gate = Gate(sim, self)
        self.had: dict[int, set[tuple[int, int]]] = {}  # by rank: layer and expert, when it joined
        self.heard: deque[tuple[int, int, Reply] | LinkError] = deque()
        self._waiting: list[list[tuple[int, Command]]] = [[] for _ in places]
        self._free = [[0.0, 0.0] for _ in places]  # rank -> when its channels (to, from) are free
        self._results: dict[tuple[int, int], dict[int, list[int] | bytes]] = {}
        self._haunted = False  # by what was said in other epochs
        self._gaps: dict[int, tuple[int, int]] = {}  # rank whose channel lost something -> its last pulse

    # -- the driver's side

    def address_of(self, rank: int) -> Address:
        return Inside()

    def pulses(self) -> list[tuple[int, int]]:
        return [
            self._gaps.get(rank) or (self.ports[rank].pulse() if rank in self.ports else (0, 0))
            for rank in range(self.num_ranks)
        ]

    def send(self, number: int, command: Command) -> None:
        self.sim.travel.sent(command)
        self.sim.faults.occasion()
        if self.over:
            raise LinkClosed("the link is closed")
        for rank, process in self.ports.items():
            if process.ended and self.world.random.random() < 0.5:
                raise ConnectionLost(f"the process of rank {rank} has ended", rank)
        if isinstance(command, StepPlan):
            self.gate.sent(number, command)
            self.sim.lanes.planned(command)
        if self.epoch and self.sim.faults.ghosts:
            self._haunted = self._haunted or self.sim.faults.strikes("late ghost", None)
            if self._haunted:
                self.sim.faults.haunt(self, number)
        for rank in range(self.num_ranks):
            if rank in self.ports and self.sim.faults.strikes("command lost", rank):
                self._gap(rank, ConnectionLost(f"rank {rank} missed a message and hung up", rank))
            elif rank not in self._gaps:
                self.world.at(self._delay(rank, 0), self._command, rank, number, command)

    def receive(self, timeout: float | None) -> tuple[int, int, Reply] | None:
        assert timeout is not None, "a wait without end"
        self.sim.faults.occasion()
        until = self.world.now + timeout
        while True:
            self.sim.rules.watch()
            if self.heard:
                heard = self.heard.popleft()
                if isinstance(heard, LinkError):
                    raise heard
                return heard
            if self._woken:
                self._woken = False
                return None
            if not self.world.step(until):
                return None

    def wake(self) -> None:
        self._woken = True

    def fence(self) -> None:
        self._end()

    def close(self) -> None:
        self.closed = True
        self._end()

    def _end(self) -> None:
        if self.over:
            return
        self.over = True
        for process in self.ports.values():
            self.world.at(0.001, self._over_at, process)

    def _over_at(self, process: Process) -> None:
        if process.alive and process.link is self and not process.hung:
            process.leave()

    # -- the ranks' side

    def attach(self, rank: int, process: Process) -> None:
        self.ports[rank] = process
        waiting, self._waiting[rank] = self._waiting[rank], []
        for number, command in waiting:
            process.take(number, command)

    def _command(self, rank: int, number: int, command: Command) -> None:
        process = self.ports.get(rank)
        if self.over or rank in self._gaps:
            return
        if process is None:
            self._waiting[rank].append((number, command))
        elif process.link is self and process.alive and not process.cut:
            if process.stopped:
                process.inbox.append((number, command))
                process.later(0.0, process.serve)
            else:
                process.take(number, command)

    def reply(self, rank: int, number: int, reply: Reply) -> None:
        if self.over or rank in self._gaps or self.ports[rank].cut:
            return
        if isinstance(reply, Hello):
            self.had[rank] = {(layer, expert) for layer, experts in reply.experts for expert in experts}
        if self.sim.faults.strikes("reply lost", rank):
            self._gap(rank, MessageLost(f"a message of rank {rank} is missing", rank))
            return
        delay = self._delay(rank, 1)
        self.world.at(delay, self.hear, (rank, number, reply))
        if self.sim.faults.strikes("reply twice", rank):
            self.world.at(delay + self.world.random.random(), self.hear, (rank, number, reply))
        if self.sim.faults.remembers:
            self.sim.faults.remember(self, (rank, number, reply))

    def peer_died(self, rank: int, process: Process) -> None:
        if self.over:
            return
        if not self.sim.scenario.quiet_peers:
            self.world.at(0.05, self.gate.broke, rank, Failed(rank, "step", "its process has ended", ""))
        self.world.at(self.sim.takes(0.1), self.hear, ConnectionLost(f"the process of rank {rank} has ended", rank))

    def _gap(self, rank: int, error: LinkError) -> None:
        """Nothing passes a channel any more that lost something; both ends notice, in a while."""
        self.sim.faults.harmed(self.ports[rank], "gap")
        self._gaps[rank] = self.ports[rank].pulse()
        self.world.at(self.sim.takes(SLOWEST_NOTICE / 3), self.hear, error)

    def hear(self, heard: Any) -> None:
        if not self.over:
            self.heard.append(heard)

    def _delay(self, rank: int, way: int) -> float:
        """Until a message of this channel arrives: in order."""
        free, now = self._free[rank], self.world.now - self.world.slept
        more = self.world.random.uniform(0.1, 3.0) if self.sim.faults.strikes("delay", rank) else 0.0
        free[way] = max(free[way], now + 0.0002 + 0.001 * self.world.random.random() + more)
        return free[way] - now

    def agree(self, step: int, lane: int, result: LaneResult) -> None:
        """All ranks of a lane compute the same."""
        mine = tokens_of(result)
        first = self._results.setdefault((step, lane), mine)
        self.world.require(first == mine, "ranks agree", f"step {step} gave {first} and {mine}")
