"""Ranks on several nodes without Ray: this node's by a launcher of its own, the others' by an agent on each.

Agents come to a port that is bound before anything else starts, over an encrypted connection whose keys are derived
from the deployment's secret. Each node has the same number of ranks. An agent that is gone takes its ranks with it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from planaria.config.digest import compared, hash_fields
from planaria.config.options import EngineConfig, ParallelConfig
from planaria.config.secret import deployment_secret
from planaria.errors import CapacityError, RanksDiffer
from planaria.executor import node_messages as messages
from planaria.executor.boot import Place, RankBoot
from planaria.executor.launcher.fixed import Fixed
from planaria.executor.launcher.process import ProcessLauncher
from planaria.executor.link.faults import LinkError, PeerLost
from planaria.executor.link.keys import Keys
from planaria.executor.link.tcp import TcpLink
from planaria.executor.node_messages import (
    AllEnded,
    End,
    Ended,
    FromAgent,
    Here,
    Refused,
    Replace,
    Run,
    Start,
    Started,
    ToAgent,
    Trouble,
    Welcome,
)
from planaria.executor.patience import Patience
from planaria.node import resolve_host
from planaria.topology import Cluster, Layout, Node, Placement, place

logger = logging.getLogger("planaria.engine")

JOIN_TIMEOUT = 600.0  # seconds for all nodes to come
START_TIMEOUT = 60.0
END_TIMEOUT = 8.0  # an agent waits 5 s for its ranks before it kills them
_DIGEST = "configuration "


class LocalLauncher(Protocol):
    """Of this node's ranks."""

    on_exit: Callable[[], None]

    def start(self) -> list[Place]: ...

    def run(self, boots: Sequence[RankBoot]) -> None: ...

    def replace(self, ranks: Sequence[int]) -> list[Place]: ...

    def lost(self) -> dict[int, str]: ...

    def closing(self) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


def placement_of(parallel: ParallelConfig) -> Placement:
    """Which ranks each node has, nodes named by their rank."""
    nodes = [Node.of(str(number), parallel.local_world_size) for number in range(parallel.nnodes)]
    layout = Layout(pp=parallel.pipeline_parallel_size, tp=parallel.tensor_parallel_size)
    return place(Cluster(tuple(nodes), "0"), layout, span=True)


def nodes_launcher(config: EngineConfig, module: str) -> NodesLauncher:
    """Of node 0; ranks run `module`. Raises ConfigError for a secret that is missing or bad."""
    return NodesLauncher(
        config.parallel, lambda ranks, address: ProcessLauncher(module, ranks, address),
        deployment_secret(config.parallel), what_must_agree(config),
    )  # fmt: skip


def what_must_agree(config: EngineConfig) -> dict[str, str]:
    """Of the same command on all nodes: values, or digests of them."""
    return {f"{_DIGEST}{name}": digest for name, digest in hash_fields(config).items()} | compared(config)


class _Agent:
    """A node as the driver sees it: expected -> here -> started; gone when its connection is."""

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number, self.ranks = number, tuple(ranks)
        self.here: Here | None = None
        self.places: tuple[Place, ...] = ()
        self.started = False
        self.ended: dict[int, str] = {}
        self.all_ended = False
        self.gone = ""  # why

    def __str__(self) -> str:
        return f"node {self.number}" + (f" ({self.here.node}, {self.here.address})" if self.here else "")


class NodesLauncher(Fixed):
    """make_local(ranks, address) gives the launcher of this node's ranks. same: what must be equal on all nodes."""

    name = "mp"
    link, uses_ray, replaces = "queue", False, True

    def __init__(
        self, parallel: ParallelConfig, make_local: Callable[[Sequence[int], str], LocalLauncher], secret: bytes,
        same: Mapping[str, str], *, join_timeout: float = JOIN_TIMEOUT,
    ) -> None:  # fmt: skip
        self.parallel, self.same, self.join_timeout = parallel, dict(same), join_timeout
        self.on_exit: Callable[[], None] = lambda: None
        self.placement = placement_of(parallel)
        for group in self.placement.spanning():
            ranks = ", ".join(str(slot.rank) for slot in group)
            logger.warning("ranks %s of one tensor group are on several nodes: each layer waits for the network", ranks)
        self.address = resolve_host(parallel.master_addr)
        self.local = make_local([slot.rank for slot in self.placement.on("0")], self.address)
        self.local.on_exit = self._on_local_exit
        self.agents = [
            _Agent(number, [slot.rank for slot in self.placement.on(str(number))])
            for number in range(1, parallel.nnodes)
        ]
        self.keys = Keys.derive(secret, len(self.agents), messages.PURPOSE)
        self._link: TcpLink | None = None
        self._thread: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[tuple[_Agent, ToAgent]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closing = self._over = False

    # -- what an engine asks for

    def start(self) -> list[Place]:
        """Wait for all nodes, then start all ranks. Raises RanksDiffer, CapacityError: the port can't be listened on, a
        node did not come, or did not start its ranks."""
        try:
            self._link = TcpLink.create(
                len(self.agents), host=self.address, port=self.parallel.master_port, keys=self.keys,
                heartbeat=self.parallel.heartbeat_timeout, encode=messages.encode, decode=messages.decode,
            )  # fmt: skip
        except LinkError as e:
            raise CapacityError(f"{e}; choose another --master-addr or --master-port, on every node") from None
        self._thread = threading.Thread(target=self._serve, args=(self._link,), name="nodes", daemon=True)
        self._thread.start()
        places = self.local.start()
        self._await_nodes(self._link)
        for agent in self.agents:
            self._post(agent, Start(agent.ranks))
        return sorted([*places, *self._await_places(self.agents)], key=lambda place: place.rank)

    def replace(self, ranks: Sequence[int]) -> list[Place]:
        """Each on its own node. Raises CapacityError when that is gone."""
        with self._changed:
            told = [agent for agent in self.agents if set(agent.ranks) & set(ranks)]
            if gone := next((agent for agent in self.agents if agent.gone), None):
                raise CapacityError(f"{gone} is gone, and with it the place of ranks {list(gone.ranks)}: {gone.gone}")
            kept = [place for agent in self.agents if agent not in told for place in agent.places]
            for agent in told:
                agent.places = ()
                for rank in ranks:
                    agent.ended.pop(rank, None)
        for agent in told:
            self._post(agent, Replace(tuple(rank for rank in ranks if rank in agent.ranks)))
        kept += self.local.replace([rank for rank in ranks if rank in {slot.rank for slot in self.placement.on("0")}])
        return sorted([*kept, *self._await_places(told)], key=lambda place: place.rank)

    def _await_places(self, agents: Sequence[_Agent]) -> list[Place]:
        """Raises CapacityError when a node does not start its ranks."""
        with self._changed:
            self._changed.wait_for(lambda: all(a.places or a.gone for a in agents), START_TIMEOUT)
        for agent in agents:
            if not agent.places:
                raise CapacityError(f"{agent} did not start its ranks: {agent.gone or f'{START_TIMEOUT:.0f} s passed'}")
        return [place for agent in agents for place in agent.places]

    def run(self, boots: Sequence[RankBoot]) -> None:
        by_rank = {boot.rank: boot for boot in boots}
        for agent in self.agents:
            self._post(agent, Run(tuple(by_rank[rank].encode() for rank in agent.ranks if rank in by_rank)))
        self.local.run([by_rank[slot.rank] for slot in self.placement.on("0") if slot.rank in by_rank])

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended though nobody asked, or whose node is gone, and how."""
        if self._closing:
            return {}
        found = dict(self.local.lost())
        for agent in self.agents:
            for rank in agent.ranks if agent.gone else agent.ended:
                found[rank] = agent.ended.get(rank) or f"is out of reach: {agent} is gone: {agent.gone}"
        return dict(sorted(found.items()))

    def closing(self) -> None:
        """From now on an end is no loss."""
        self._closing = True
        self.local.closing()

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Agents end too. Idempotent."""
        self._end(False)

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too, and the agents."""
        self._end(True)

    # -- inside

    def _end(self, kill: bool) -> None:
        self.closing()
        told = [agent for agent in self.agents if agent.started and not agent.gone and not agent.all_ended]
        if not self._over:
            for agent in told:
                self._post(agent, End(kill))
        if kill:
            self.local.kill()
        else:
            self.local.close()
        if self._over or self._link is None or self._thread is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: all(agent.all_ended or agent.gone for agent in told), END_TIMEOUT)
        for agent in told:
            if not agent.all_ended:
                logger.warning("%s did not say that its ranks have ended %s", agent, agent.gone)
        self._over = True
        self._link.wake()
        self._thread.join(END_TIMEOUT)

    def _await_nodes(self, link: TcpLink) -> None:
        patience = Patience(logger.info, self.join_timeout)
        where = f"{self.parallel.master_addr} port {self.parallel.master_port}"
        while absent := [agent for agent in self.agents if agent.here is None]:
            names = ", ".join(str(agent.number) for agent in absent)
            what = f"waiting for node{'s' * (len(absent) > 1)} {names} of {self.parallel.nnodes} to come to {where}"
            if refused := link.refused["unauthenticated"] + link.refused["handshake"]:
                what += f"; {refused} connection{'s' * (refused > 1)} had another secret"
            if patience.over:
                raise CapacityError(
                    f"gave up {what} after {patience.waited:.0f} s; run the same command there with its --node-rank"
                )
            patience.tell(what)
            with self._changed:
                self._changed.wait_for(lambda: all(agent.here for agent in self.agents), min(1.0, patience.pause()))
        for agent in self.agents:
            assert agent.here is not None
            if why := _difference(agent, agent.here.same, self.same):
                self._post(agent, Refused(why))
                raise RanksDiffer(why)

    def _on_local_exit(self) -> None:
        self.on_exit()

    def _post(self, agent: _Agent, message: ToAgent) -> None:
        self._outbox.put((agent, message))
        if self._link is not None:
            self._link.wake()

    def _serve(self, link: TcpLink) -> None:
        """The thread that owns the link: sends what is posted, takes in what agents say."""
        try:
            while not self._over or not self._outbox.empty():
                while not self._outbox.empty():
                    agent, message = self._outbox.get()
                    if not agent.gone:
                        link.send(0, message, to=agent.number - 1)
                try:
                    item = link.receive(None)
                except PeerLost as e:
                    for peer in e.ranks:
                        link.forget(peer)
                        self._gone(self.agents[peer], "its connection broke")
                else:
                    if item is not None:
                        self._hear(link, self.agents[item[0]], item[2])
        except LinkError as e:
            for agent in self.agents:
                self._gone(agent, str(e))
        finally:
            link.close()

    def _hear(self, link: TcpLink, agent: _Agent, message: FromAgent) -> None:
        match message:
            case Here():
                agent.here, agent.gone = message, ""
                link.send(0, Welcome(), to=agent.number - 1)
                logger.info("%s is here", agent)
            case Started():
                agent.places, agent.started = message.places, True
            case Ended():
                agent.ended[message.rank] = f"{message.how} on {agent}"
                if not self._closing:
                    self.on_exit()
            case AllEnded():
                agent.all_ended = True
            case Trouble():
                link.forget(agent.number - 1)
                self._gone(agent, message.message)
        with self._changed:
            self._changed.notify_all()

    def _gone(self, agent: _Agent, why: str) -> None:
        """Before its ranks were started it may come again."""
        if not self._closing:
            logger.warning("%s is gone: %s", agent, why)
        if agent.started or self._closing:
            agent.gone = why
        else:
            agent.here = None
        with self._changed:
            self._changed.notify_all()
        if agent.started and not self._closing:
            self.on_exit()


def _difference(agent: _Agent, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            values = f": it has {theirs.get(name, 'nothing')}, node 0 has {ours.get(name, 'nothing')}"
            said = "" if name.startswith(_DIGEST) else values
            return f"{agent} differs in {name}{said}; run the same command on every node"
    return ""
