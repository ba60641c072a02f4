"""The nodes of a fleet without Ray, as its server has them: which of them are here, and what is said to each.

Rule: a fleet starts as a whole, when all nodes are here. A node that goes takes its engines with it; they wait for it,
and come up there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.config.secret import deployment_secret
from planaria.errors import CapacityError
from planaria.executor import engine_messages as messages
from planaria.executor.engine_messages import EngineEnded, LeavePart, Leaves, Listening, TakePart
from planaria.executor.launcher.callers import Caller, Callers
from planaria.executor.launcher.nodes import JOIN_TIMEOUT, fleet_placement, what_must_agree
from planaria.executor.link.faults import LinkError
from planaria.executor.link.keys import Keys
from planaria.executor.node_messages import AllEnded, End
from planaria.node import node_name, resolve_host
from planaria.server.engine_client import EngineHandle, EngineProcess
from planaria.topology import Cluster, Packing
from planaria.topology.table import CameUp, differences, rows
from planaria.wire import FromEngine

logger = logging.getLogger("planaria.server")


class Host(Caller):
    """leaving: it was told to end. on_news: hears what is said of its engines' processes, by number, and with None that
    it came or went; called from the thread."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.leaving = False
        self.on_news: dict[int, Callable[[Listening | EngineEnded | None], None]] = {}

    @property
    def takes_engines(self) -> bool:
        return self.here is not None and not self.leaving


class _Hosts(Callers[Host]):
    def __init__(self, count: int, same: dict[str, str], parts: Callable[[Host], list[TakePart]]) -> None:
        super().__init__([Host(number + 1) for number in range(count)], same, messages.encode, messages.decode)
        self.parts = parts

    def came(self, agent: Host) -> None:
        agent.leaving = False
        for part in self.parts(agent):
            self.post(agent, part)
        self._tell(agent)

    def heard(self, agent: Host, message: Any) -> None:
        match message:
            case AllEnded():
                agent.all_ended = True
            case Leaves():
                agent.leaving = True
                logger.info("%s was told to end: its engines are taken off it", agent)
            case Listening() | EngineEnded():
                if (on_news := agent.on_news.get(message.number)) is not None:
                    on_news(message)

    def went(self, agent: Host, why: str) -> None:
        with self.changed:
            self._tell(agent)

    def _tell(self, agent: Host) -> None:
        for on_news in list(agent.on_news.values()):
            on_news(None)


class NodeHosts:
    """config: of the fleet. Implements `planaria.server.fleet.Hosts`. Raises ConfigError: no secret, or a bad one."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        nodes = config.parallel.engine_nodes
        assert nodes is not None
        self.nodes = nodes
        self._table = rows(Packing.of(fleet_placement(config.parallel)), Cluster((), ""))
        self._parts: dict[int, EngineConfig] = {}  # of engines of several nodes, by engine
        self._numbers = itertools.count(1)
        self._hosts = _Hosts(nodes.nodes - 1, what_must_agree(config), self._parts_of)
        self._keys = Keys.derive(deployment_secret(config.parallel), nodes.nodes - 1, messages.PURPOSE)

    def open(self, size: int) -> None:
        """Wait for all nodes. Raises CapacityError, RanksDiffer."""
        parallel = self.config.parallel
        address, port = resolve_host(parallel.master_addr), parallel.master_port
        try:
            self._hosts.listen(address, port, self._keys, parallel.heartbeat_timeout)
        except LinkError as e:
            raise CapacityError(f"{e}; choose another --master-addr or --master-port, on every node") from None
        self._hosts.await_all(f"{parallel.master_addr} port {port}", JOIN_TIMEOUT)

    def grow(self, engines: Iterable[int]) -> None:
        """Raises CapacityError."""
        most, engines = self.config.parallel.data_parallel_size, list(engines)
        if max(engines) >= most:
            raise CapacityError(
                f"{self.nodes.nodes} nodes were given {most} engines, {self.nodes.local} on a node; to have more, "
                "start with a larger --data-parallel-size"
            )
        if away := [engine for engine in engines if not self.room(engine)]:
            host = self._hosts.all[self.nodes.of(away[0])[0] - 1]
            raise CapacityError(f"engine {away[0]} has its place on {host}, which is not here")

    def room(self, engine: int) -> bool:
        """Is its node here?"""
        leader = self.nodes.of(engine)[0]
        return not leader or self._hosts.all[leader - 1].takes_engines

    def release(self, engine: int) -> None:
        with self._hosts.changed:
            if self._parts.pop(engine, None) is not None:
                for host in self._followers(engine):
                    self._hosts.post(host, LeavePart(engine))

    def close(self) -> None:
        """End what is left on other nodes, and their agents. Idempotent."""
        with self._hosts.changed:
            self._hosts.closing = True
            self._hosts.changed.notify_all()
            for host in self._hosts.here():
                self._hosts.post(host, End(kill=False))
        self._hosts.close()

    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        """See planaria.server.placed.Plan."""
        names = {"0": node_name()} | {str(host.number): host.here.node for host in self._hosts.here() if host.here}
        own = [row._replace(node=names.get(row.node, row.node)) for row in self._table if row.dp == engine]
        if len(own) != len(places):
            return []  # it has another layout now
        if self.config.device.device == "cpu":
            places = [at._replace(devices=()) for at in places]
        return differences(own, {row.rank: at for row, at in zip(own, places, strict=True)})

    # -- engines

    def make(self, config: EngineConfig, hear: Callable[[FromEngine], None]) -> EngineHandle:
        """An engine's process where its node is."""
        from planaria.server.node_engine import NodeEngine

        index = config.parallel.data_parallel_index
        leader = self.nodes.of(index)[0]
        if leader:
            return NodeEngine(self, self._hosts.all[leader - 1], config, hear)
        self.share(index, config)
        return EngineProcess(config, hear)

    def share(self, engine: int, config: EngineConfig) -> None:
        """An engine of several nodes begins: the others are to take part, as soon as they are here. config: as its own
        process has it."""
        if config.parallel.nnodes > 1:
            with self._hosts.changed:
                self._parts[engine] = config
                for host in self._followers(engine):
                    self._hosts.post(host, self._part(engine, host))

    def post(self, host: Host, message: Any) -> None:
        self._hosts.post(host, message)

    def register(self, host: Host, loop: asyncio.AbstractEventLoop, hear: Callable[[Any], None]) -> int:
        """A number for a process there. hear: gets what is said of it, and None when the node comes or goes."""
        number = next(self._numbers)

        def tell(news: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(hear, news)

        with self._hosts.changed:
            host.on_news[number] = tell
        return number

    def forget(self, host: Host, number: int) -> None:
        with self._hosts.changed:
            host.on_news.pop(number, None)

    # -- inside

    def _followers(self, engine: int) -> list[Host]:
        return [self._hosts.all[node - 1] for node in self.nodes.of(engine)[1:]]

    def _parts_of(self, host: Host) -> list[TakePart]:
        return [self._part(engine, host) for engine in self._parts if host in self._followers(engine)]

    def _part(self, engine: int, host: Host) -> TakePart:
        config = self._parts[engine]
        rank = host.number - self.nodes.of(engine)[0]
        config = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, node_rank=rank))
        return TakePart(engine, self.nodes.seat(engine), msgspec.msgpack.encode(config))
