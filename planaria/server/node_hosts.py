"""The nodes of a fleet without Ray, as its server has them: which of them are here, and what runs on each.

Rule: a fleet starts as a whole, when all nodes are here. A node that goes takes its engines with it; they wait for it,
and come up there again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from planaria.config.options import EngineConfig
from planaria.config.secret import deployment_secret
from planaria.errors import CapacityError
from planaria.executor.launcher.nodes import JOIN_TIMEOUT, NodesHost, fleet_placement, what_must_agree
from planaria.executor.launcher.peers import NodeChild, NodePeer
from planaria.executor.link.keys import Keys
from planaria.hosts.host import News, Program
from planaria.logs import current_level
from planaria.node import node_name
from planaria.server.engine_client import EngineHandle, EngineProcess
from planaria.topology import Cluster, Packing
from planaria.topology.table import CameUp, differences, rows
from planaria.wire import FromEngine, Listens

logger = logging.getLogger("planaria.server")

PART = "planaria.node_part"  # what a node's part of an engine of several nodes runs


class NodeHosts:
    """config: of the fleet. Implements `planaria.server.fleet.Hosts`. Raises ConfigError: no secret, or a bad one."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        nodes = config.parallel.engine_nodes
        assert nodes is not None
        self.nodes = nodes
        self._table = rows(Packing.of(fleet_placement(config.parallel)), Cluster((), ""))
        self._parts: dict[int, EngineConfig] = {}  # of engines of several nodes, by engine
        self._running: dict[tuple[int, int], NodeChild] = {}  # by engine and node
        self.watchers: list[Callable[[NodePeer], None]] = []  # hear of nodes that come and go; from a thread
        self._host = NodesHost(config.parallel, deployment_secret(config.parallel), what_must_agree(config))
        self.peers = self._host.peers
        self.peers.on_change = self._changed

    def open(self, size: int) -> None:
        """Wait for all nodes. Raises CapacityError, RanksDiffer."""
        self._host.open(JOIN_TIMEOUT)

    def grow(self, engines: Iterable[int]) -> None:
        """Raises CapacityError."""
        most, engines = self.config.parallel.data_parallel_size, list(engines)
        if max(engines) >= most:
            raise CapacityError(
                f"{self.nodes.nodes} nodes were given {most} engines, {self.nodes.local} on a node; to have more, "
                "start with a larger --data-parallel-size"
            )
        if away := [engine for engine in engines if not self.room(engine)]:
            peer = self.peers.all[self.nodes.of(away[0])[0] - 1]
            raise CapacityError(f"engine {away[0]} has its place on {peer}, which is not here")

    def room(self, engine: int) -> bool:
        """Is its node here?"""
        leader = self.nodes.of(engine)[0]
        return not leader or self.peers.all[leader - 1].takes_processes

    def release(self, engine: int) -> None:
        with self.peers.changed:
            self._parts.pop(engine, None)
            for peer in self._followers(engine):
                if (child := self._running.pop((engine, peer.number), None)) is not None:
                    child.kill()

    def close(self) -> None:
        """End what is left on other nodes, and their agents. Idempotent."""
        with self.peers.changed:
            self._parts = {}
        self._host.close()

    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        """See planaria.server.placed.Plan."""
        names = {"0": node_name()} | {str(peer.number): peer.here.node for peer in self.peers.here() if peer.here}
        own = [row._replace(node=names.get(row.node, row.node)) for row in self._table if row.dp == engine]
        return differences(own, places, numbered=not self.config.device.platform.on_host)

    # -- engines

    def make(self, config: EngineConfig, hear: Callable[[FromEngine], None]) -> EngineHandle:
        """An engine's process where its node is."""
        from planaria.server.node_engine import NodeEngine

        leader = self.nodes.of(config.parallel.data_parallel_index)[0]

        def heard(message: FromEngine) -> None:
            if isinstance(message, Listens):
                self._share(config, message.port)
            else:
                hear(message)

        if leader:
            return NodeEngine(self, self.peers.all[leader - 1], config, heard)
        return EngineProcess(config, heard)

    def _share(self, config: EngineConfig, port: int) -> None:
        """An engine of several nodes waits for the others at this port of its own node: they are to take part, as soon
        as they are here."""
        engine = config.parallel.data_parallel_index
        leader, address = self.nodes.of(engine)[0], config.parallel.master_addr
        if leader and (here := self.peers.all[leader - 1].here) is not None:
            address = here.address
        parallel = msgspec.structs.replace(config.parallel, master_addr=address, master_port=port)
        with self.peers.changed:
            self._parts[engine] = msgspec.structs.replace(config, parallel=parallel)
            for peer in self._followers(engine):
                if (child := self._running.pop((engine, peer.number), None)) is not None:
                    child.kill()
                self._take_part(engine, peer)

    def spawn(
        self, peer: NodePeer, engine: int, module: str, args: Sequence[str], config: EngineConfig, news: News,
        keys: Keys | None = None,
    ) -> NodeChild:  # fmt: skip
        """An engine, or a node's part of one, in its own seat there. keys: who may come to it. Raises OSError."""
        seat, ranks, here = self.nodes.seat(engine), config.parallel.local_world_size, peer.here
        own = here.accelerators if here and not config.device.platform.on_host else ()
        devices = own[seat * ranks : (seat + 1) * ranks]
        config = msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, devices=devices))
        boot = msgspec.msgpack.encode(config if keys is None else (config, keys))
        return self.peers.spawn(peer, (str(peer.number), seat), Program(module, tuple(args), devices), boot, news)

    # -- inside

    def _followers(self, engine: int) -> list[NodePeer]:
        return [self.peers.all[node - 1] for node in self.nodes.of(engine)[1:]]

    def _changed(self, peer: NodePeer) -> None:
        with self.peers.changed:
            for engine in self._parts if peer.takes_processes else ():
                child = self._running.get((engine, peer.number))
                if peer in self._followers(engine) and (child is None or child.ended):
                    self._take_part(engine, peer)
        for hears in list(self.watchers):
            hears(peer)

    def _take_part(self, engine: int, peer: NodePeer) -> None:
        """Its ranks are started there when the engine, on another node, asks for them."""
        if not peer.takes_processes:
            return
        config = self._parts[engine]
        rank = peer.number - self.nodes.of(engine)[0]
        config = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, node_rank=rank))

        def news(child: NodeChild) -> None:
            with self.peers.changed:
                if child.ended and child.code < 0 and self._running.get((engine, peer.number)) is child:
                    logger.warning("%s: its part of engine %d %s", peer, engine, child.ended)
                    if engine in self._parts:
                        self._take_part(engine, peer)

        self._running[engine, peer.number] = self.spawn(peer, engine, PART, (current_level(),), config, news)
