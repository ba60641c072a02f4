"""Processes on several nodes without Ray: this node's, and the others' by an agent on each; and ranks on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from planaria.config.digest import compared, hash_fields
from planaria.config.options import EngineConfig, ParallelConfig
from planaria.config.secret import deployment_secret
from planaria.errors import CapacityError
from planaria.executor.launcher.peers import CONFIGURATION, NodeChild, NodePeers
from planaria.executor.launcher.process import PoolLauncher
from planaria.executor.link.keys import Keys
from planaria.executor.node_messages import PURPOSE
from planaria.hosts.host import Child, News, Place, Program, Slot
from planaria.hosts.local import HERE, LocalChild, LocalHost
from planaria.node import resolve_host
from planaria.topology import Cluster, Infeasible, Layout, Node, Placement, RankSlot, place

logger = logging.getLogger("planaria.engine")

JOIN_TIMEOUT = 600.0  # seconds for all nodes to come
AGAIN = 5.0  # more than the heartbeat's timeout, for nodes to come to another engine


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
            slots.append(RankSlot(engine * one.layout.size + rank, coords._replace(dp=engine), where, device))
    return Placement(msgspec.structs.replace(one.layout, dp=parallel.data_parallel_size), slots)


def _share(parallel: ParallelConfig, layout: Layout) -> int:
    """Of each node."""
    return -(-layout.size // parallel.nodes_per_engine)


def nodes_launcher(
    config: EngineConfig, module: str, *, again: bool = False, imports: Sequence[str] = ()
) -> NodesLauncher:
    """Of node 0; ranks run `module`, forked with `imports`. Raises ConfigError for a secret that is missing or bad."""
    return NodesLauncher(
        config.parallel, module, deployment_secret(config.parallel), what_must_agree(config), again=again,
        spares=config.faults.spare_workers, imports=imports,
    )  # fmt: skip


def what_must_agree(config: EngineConfig) -> dict[str, str]:
    """Of the same command on all nodes: values, or digests of them. Weights that came later aren't of a command."""
    later = ("weights_number", "checkpoint.") if config.checkpoint.get("updated") else ("weights_number",)
    fields = {name: digest for name, digest in hash_fields(config).items() if not name.startswith(later)}
    return {f"{CONFIGURATION}{name}": digest for name, digest in fields.items()} | compared(config)


class NodesHost:
    """See Host: this node, and others by an agent on each. They come to a port that is bound before anything starts,
    over an encrypted connection whose keys are derived from the deployment's secret. parallel: nnodes are all;
    same: what must be equal on them; forks: see LocalHost."""

    def __init__(
        self, parallel: ParallelConfig, secret: bytes, same: Mapping[str, str],
        forks: Mapping[str, Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self.parallel = parallel
        self.address = resolve_host(parallel.master_addr)
        self.local = LocalHost(address=self.address, forks=forks)
        self.peers = NodePeers(parallel.nnodes - 1, same)
        self.last = True  # agents end with this
        self._room = 0
        self._keys = Keys.derive(secret, parallel.nnodes - 1, PURPOSE)

    def open(self, timeout: float, *, must: bool = True) -> None:
        """Listen, and wait for all nodes; see NodePeers.await_all. Raises CapacityError, RanksDiffer."""
        self.peers.await_all(f"{self.parallel.master_addr} port {self.listen()}", timeout, must=must)

    def listen(self) -> int:
        """Returns the port. Raises CapacityError. Idempotent."""
        parallel = self.parallel
        return self.peers.listen(self.address, parallel.master_port, self._keys, parallel.heartbeat_timeout)

    def slots(self) -> Cluster:
        with self.peers.changed:
            others = [
                Node.of(str(peer.number), len(peer.here.accelerators) or self._room)
                for peer in self.peers.here() if peer.here is not None and not peer.leaving
            ]  # fmt: skip
        return Cluster((*self.local.slots().nodes, *others), HERE)

    def need(self, processes: int, spares: int) -> None:
        share = -(-processes // self.parallel.nodes_per_engine)
        self.local.need(share, spares)
        self._room = max(self._room, share + spares)

    def spawn(self, slot: Slot, entry: Program, boot: bytes | None, news: News, *, rank: int = -1) -> Child:
        if slot[0] == HERE:
            return self.local.spawn(slot, entry, boot, news)
        return self.peers.spawn(self.peers.all[int(slot[0]) - 1], slot, entry, boot, news)

    def await_starts(self, children: Iterable[Child], timeout: float) -> None:
        self.peers.await_starts([child for child in children if isinstance(child, NodeChild)], timeout)

    def await_ends(self, children: Iterable[Child], timeout: float) -> list[Child]:
        children, began = list(children), time.monotonic()
        self.local.await_ends([child for child in children if isinstance(child, LocalChild)], timeout)
        left = max(0.0, began + timeout - time.monotonic())
        self.peers.await_ends([child for child in children if isinstance(child, NodeChild)], left)
        return [child for child in children if not child.ended]

    def absent(self) -> list[str]:
        return [f"{peer} is gone: {peer.gone}" for peer in self.peers.absent()]

    def close(self) -> None:
        self.peers.close(last=self.last)
        self.local.close()


class NodesLauncher(PoolLauncher):
    """Each node has the same number of ranks, as long as all are there. An agent that is gone takes its ranks with it:
    they go to nodes that are left, or there are fewer. When it comes again, spares are made ready there, and ranks go
    back. Other arguments as NodesHost's; again: another engine had these nodes before; one that doesn't come soon is
    gone."""

    host: NodesHost

    def __init__(
        self, parallel: ParallelConfig, module: str, secret: bytes, same: Mapping[str, str], *,
        join_timeout: float = JOIN_TIMEOUT, again: bool = False, spares: int = 0, imports: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.again, self.join_timeout = again, join_timeout
        if again:  # an agent looks every second or two, once it knows that the last engine is gone
            self.join_timeout = min(join_timeout, parallel.heartbeat_timeout + AGAIN)
        host = NodesHost(parallel, secret, same, {module: imports})
        super().__init__(host, module, parallel.layout, host.address, spares=spares)
        self.tell_port: Callable[[int], None] = lambda port: None  # where nodes are to come, before they are waited for
        self._spanning: list[list[int]] = []
        self._warn_of_spanning(placement_of(parallel))

    def start(self) -> list[Place]:
        """Wait for all nodes, then start all ranks. Raises RanksDiffer, CapacityError: the port can't be listened on, a
        node did not come, or did not start its ranks; where there was an engine before, Infeasible without a node."""
        self.tell_port(self.host.listen())
        while True:
            self.host.open(self.join_timeout, must=not self.again)
            try:
                return super().start()
            except OSError as e:
                raise CapacityError(f"ranks can't be started: {e}") from None
            except Infeasible:
                if self.again or not self.host.peers.absent():  # else one went while they started
                    raise

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        places = super().replace(ranks, layout)
        if self.pool.placement is not None:
            self._warn_of_spanning(self.pool.placement)
        return places

    def closing(self) -> None:
        super().closing()
        self.host.peers.closing, self.host.last = True, not self.followed

    def _warn_of_spanning(self, placement: Placement) -> None:
        spanning = [[slot.rank for slot in group] for group in placement.spanning()]
        for group in spanning if spanning != self._spanning else []:
            ranks = ", ".join(map(str, group))
            logger.warning("ranks %s of one tensor group are on several nodes: each layer waits for the network", ranks)
        self._spanning = spanning
