"""Ranks on several nodes without Ray: this node's by a launcher of its own, the others' by an agent on each.

Agents come to a port that is bound before anything else starts, over an encrypted connection whose keys are derived
from the deployment's secret. Each node has the same number of ranks, as long as all are there. An agent that is gone
takes its ranks with it: they go to nodes that are left, or there are fewer. When it comes again, spares are made ready
there, and ranks go back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from planaria.config.digest import compared, hash_fields
from planaria.config.options import EngineConfig, ParallelConfig
from planaria.config.secret import deployment_secret
from planaria.errors import CapacityError
from planaria.executor import node_messages as messages
from planaria.executor.boot import Place, RankBoot, Room
from planaria.executor.launcher.agents import Agent, Agents
from planaria.executor.launcher.callers import CONFIGURATION
from planaria.executor.launcher.defaults import Defaults
from planaria.executor.launcher.process import SETTLE, ProcessLauncher
from planaria.executor.link.faults import LinkError
from planaria.executor.link.keys import Keys
from planaria.executor.node_messages import GiveUp, Prepare, Run
from planaria.node import resolve_host
from planaria.topology import Cluster, Infeasible, Layout, Node, Placement, Slot, place, shrink

logger = logging.getLogger("planaria.engine")

JOIN_TIMEOUT = 600.0  # seconds for all nodes to come
AGAIN = 5.0  # more than the heartbeat's timeout, for nodes to come to another engine
START_TIMEOUT = 60.0


def placement_of(parallel: ParallelConfig) -> Placement:
    """Which ranks of an engine each of its nodes has, nodes named by their rank."""
    nodes = [Node.of(str(number), _share(parallel, parallel.layout)) for number in range(parallel.nodes_per_engine)]
    return place(Cluster(tuple(nodes), "0"), parallel.layout, span=True)


def fleet_placement(parallel: ParallelConfig) -> Placement:
    """As `placement_of`, of one engine or of a fleet's."""
    one, nodes = placement_of(parallel), parallel.engine_nodes
    if nodes is None:
        return one
    slots = []
    for engine in range(parallel.data_parallel_size):
        for rank, coords, node, device in one.slots:
            where = str(nodes.of(engine)[int(node)])
            device += nodes.seat(engine) * parallel.local_world_size
            slots.append(Slot(engine * one.layout.size + rank, coords._replace(dp=engine), where, device))
    return Placement(msgspec.structs.replace(one.layout, dp=parallel.data_parallel_size), slots)


def _share(parallel: ParallelConfig, layout: Layout) -> int:
    """Of each node."""
    return -(-layout.size // parallel.nodes_per_engine)


def placed(layout: Layout, counts: Mapping[str, int], before: Placement) -> Placement:
    """With so many places on each node. Tensor groups on one node count most, then that ranks stay where they are, if
    only the number of lanes changes (else they hold other weights), then that nodes have as many. Raises Infeasible."""
    share = -(-layout.size // len(counts))
    even = _cluster({node: min(share, count) for node, count in counts.items()})
    clusters = [cluster for cluster in (even, _cluster(counts)) if cluster.num_devices >= layout.size]
    found = [
        place(cluster, layout, keep=keep, span=True)
        for cluster in clusters or [_cluster(counts)]
        for keep in (before, None)
    ]
    return min(found, key=lambda placement: (len(placement.spanning()), _moved(placement, before)))


def _moved(placement: Placement, before: Placement) -> int:
    """Ranks on other nodes than before, which the present ones could have been."""
    layout, old = placement.layout, before.layout
    if (layout.tp, layout.pp) != (old.tp, old.pp):
        return 0
    return sum(now.node != then.node for now, then in zip(placement.slots, before.slots, strict=False))


def _cluster(counts: Mapping[str, int]) -> Cluster:
    return Cluster(tuple(Node.of(node, count) for node, count in counts.items()), "0")


def nodes_launcher(config: EngineConfig, module: str, *, again: bool = False) -> NodesLauncher:
    """Of node 0; ranks run `module`. Raises ConfigError for a secret that is missing or bad."""
    spares = config.faults.spare_workers
    return NodesLauncher(
        config.parallel, lambda ranks, address: ProcessLauncher(module, ranks, address, spares=spares),
        deployment_secret(config.parallel), what_must_agree(config), again=again,
    )  # fmt: skip


def what_must_agree(config: EngineConfig) -> dict[str, str]:
    """Of the same command on all nodes: values, or digests of them."""
    return {f"{CONFIGURATION}{name}": digest for name, digest in hash_fields(config).items()} | compared(config)


class NodesLauncher(Defaults):
    """make_local(ranks, address) gives the launcher of this node's ranks. same: what must be equal on all nodes. again:
    another engine had these nodes before; one that doesn't come soon is gone."""

    name = "mp"
    link, uses_ray, replaces = "queue", False, True

    def __init__(
        self, parallel: ParallelConfig, make_local: Callable[[Sequence[int], str], ProcessLauncher], secret: bytes,
        same: Mapping[str, str], *, join_timeout: float = JOIN_TIMEOUT, again: bool = False,
    ) -> None:  # fmt: skip
        self.parallel, self.join_timeout, self.again = parallel, join_timeout, again
        if again:  # an agent looks every second or two, once it knows that the last engine is gone
            self.join_timeout = min(join_timeout, parallel.heartbeat_timeout + AGAIN)
        self.on_exit: Callable[[], None] = lambda: None
        self.placement = placement_of(parallel)
        self._warn_of_spanning()
        self.address = resolve_host(parallel.master_addr)
        self.local = make_local(self._ranks_of(0), self.address)
        self.agents = Agents(parallel.nnodes - 1, same, _share(parallel, parallel.layout))
        self.local.on_exit = self.agents.on_loss = lambda: self.on_exit()
        self.keys = Keys.derive(secret, len(self.agents.all), messages.PURPOSE)
        self._closing = False

    # -- what an engine asks for

    def start(self) -> list[Place]:
        """Wait for all nodes, then start all ranks. Raises RanksDiffer, CapacityError: the port can't be listened on, a
        node did not come, or did not start its ranks; where there was an engine before, Infeasible without a node."""
        parallel = self.parallel
        try:
            self.agents.listen(self.address, parallel.master_port, self.keys, parallel.heartbeat_timeout)
        except LinkError as e:
            raise CapacityError(f"{e}; choose another --master-addr or --master-port, on every node") from None
        self.local.start()
        while True:
            self._await_nodes()
            try:
                return self.replace((), parallel.layout)
            except OSError as e:
                raise CapacityError(f"ranks can't be started on {e}") from None
            except Infeasible:
                if self.again or not self.agents.absent():  # else one went while they started
                    raise

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """See Launcher. Each on its own node while that is there and can have it."""
        self.local.end([rank for rank in ranks if rank in self._ranks_of(0)])
        for agent in self.agents.here():
            agent.losing |= {rank for rank in ranks if rank in self._ranks_of(agent.number)}
        self._need_slots(layout)
        while True:
            before, self.placement = self.placement, self._place(layout)
            if self.placement != before:
                self._warn_of_spanning()
            told = self._arrange()
            own = self.local.arrange(self._ranks_of(0))
            if told:
                return self._places(own)

    def run(self, boots: Sequence[RankBoot]) -> None:
        by_rank = {boot.rank: boot for boot in boots}
        for agent in self.agents.here():
            if ranks := self._ranks_of(agent.number):
                self.agents.post(agent, Run(tuple(by_rank[rank].encode() for rank in ranks)))
        self.local.run([by_rank[rank] for rank in self._ranks_of(0)])

    def give_up(self, ranks: Sequence[int]) -> None:
        self.local.give_up([rank for rank in ranks if rank in self._ranks_of(0)])
        for agent in self.agents.here():
            if theirs := [rank for rank in ranks if rank in self._ranks_of(agent.number)]:
                room = agent.room
                agent.room = Room(room.slots, room.good - len(theirs), room.ready)
                self.agents.post(agent, GiveUp(tuple(theirs)))

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        """See Launcher. Agents are asked; what they said last counts."""
        self._need_slots(layout)
        slots = self._counts(lambda room: room.slots)
        try:
            wanted = placed(layout, slots, self.placement)
        except Infeasible as e:
            if e.nearest is None:
                return None
            wanted = placed(e.nearest, slots, self.placement)
        self.local.get_ready(len(wanted.on("0")), boot)
        for agent in self.agents.here():
            self._prepare(agent, len(wanted.on(str(agent.number))), boot)
        return shrink(_cluster(self._counts(lambda room: room.ready)), layout, span=True)

    def room_for(self, layout: Layout) -> bool:
        """See Launcher."""
        self._need_slots(layout)
        if any(self._counts(lambda room: room.failing).values()):
            return False
        try:
            placed(layout, self._counts(lambda room: room.good), self.placement)
        except Infeasible:
            return False
        return True

    def stand_by(self, boot: RankBoot) -> None:
        self.local.stand_by(boot)
        for agent in self.agents.here():
            self._prepare(agent, len(agent.places), boot)

    def spare_pids(self) -> list[int]:
        """Of this node."""
        return self.local.spare_pids()

    def settle(self, ranks: Sequence[int]) -> None:
        self.local.settle(ranks)
        self.agents.settle(ranks, SETTLE)

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended though nobody asked, or whose node is gone, and how."""
        return {} if self._closing else dict(sorted((self.local.lost() | self.agents.lost()).items()))

    def closing(self) -> None:
        """From now on an end is no loss."""
        self._closing = self.agents.closing = True
        self.local.closing()

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Agents end too. Idempotent."""
        self._end(kill=False)

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too, and the agents."""
        self._end(kill=True)

    # -- inside

    def _end(self, *, kill: bool) -> None:
        self.closing()
        self.agents.tell_end(kill=kill, last=not self.followed)
        if kill:
            self.local.kill()
        else:
            self.local.close()
        self.agents.close()

    def _ranks_of(self, node: int) -> tuple[int, ...]:
        return tuple(slot.rank for slot in self.placement.on(str(node)))

    def _warn_of_spanning(self) -> None:
        for group in self.placement.spanning():
            ranks = ", ".join(str(slot.rank) for slot in group)
            logger.warning("ranks %s of one tensor group are on several nodes: each layer waits for the network", ranks)

    def _await_nodes(self) -> None:
        parallel = self.parallel
        where = f"{parallel.master_addr} port {parallel.master_port}"
        self.agents.await_all(where, self.join_timeout, must=not self.again)

    # -- placing

    def _need_slots(self, layout: Layout) -> None:
        """Without accelerators a node has room for its share of the largest layout so far."""
        share = _share(self.parallel, layout)
        self.local.more_slots(share)
        self.agents.need_slots(share)

    def _counts(self, of: Callable[[Room], int]) -> dict[str, int]:
        """By node, of those that are here."""
        own = of(self.local.capacity())
        with self.agents.changed:
            return {"0": own} | {str(agent.number): of(agent.room) for agent in self.agents.here()}

    def _place(self, layout: Layout) -> Placement:
        """Where its ranks are, or could be at once; else where there is room. Raises Infeasible."""
        with contextlib.suppress(Infeasible):
            return placed(layout, self._counts(lambda room: room.ready), self.placement)
        try:
            return placed(layout, self._counts(lambda room: room.good), self.placement)
        except Infeasible as e:
            gone = [f"{agent} is gone: {agent.gone}" for agent in self.agents.absent()]
            raise Infeasible("; ".join([*gone, e.why]), e.nearest, e.needed, e.found) from None

    def _arrange(self) -> bool:
        """See Agents.arrange."""
        ranks = {agent.number: self._ranks_of(agent.number) for agent in self.agents.all}
        return self.agents.arrange(ranks, START_TIMEOUT)

    def _places(self, own: Sequence[Place]) -> list[Place]:
        theirs = [place for agent in self.agents.all for place in agent.places]
        return sorted([*own, *theirs], key=lambda place: place.rank)

    def _prepare(self, agent: Agent, ranks: int, boot: RankBoot) -> None:
        """Unless all are ready, or it is about that already."""
        if not agent.preparing and agent.here is not None and agent.room.ready < ranks + agent.here.spares:
            self.agents.post(agent, Prepare(ranks, self.agents.slots, boot.encode()))
