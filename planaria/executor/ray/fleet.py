"""Where the engines of a fleet are on a cluster: a placement group for each (D1), made for a packing (D2) or given by
the user (D4). All calls block; who has an event loop makes them from a thread.

Rules: a fleet starts as a whole, or nothing of it is left; a group that was given is never removed. What is here
outlives an engine's process: the next one comes up in the same group, unless a node of it is gone; then in another.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from planaria.config.options import EngineConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError, ConfigError, PlanariaError
from planaria.executor.patience import FIRST, Patience
from planaria.executor.ray.actors import Actors
from planaria.executor.ray.child import Order, RayChild
from planaria.executor.ray.cluster import HINT, Connection, bounded, connect
from planaria.executor.ray.given import GivenGroups
from planaria.executor.ray.groups import on_nodes
from planaria.hosts.host import News
from planaria.node import Memories
from planaria.topology import Cluster, Device, Infeasible, Layout, Node
from planaria.topology.packing import Packing, pack
from planaria.topology.table import CameUp, differences, rows, said, short

logger = logging.getLogger("planaria.ray")

READY = 30.0  # seconds for a group whose places were free a moment ago
NO_PLACE = 60.0  # seconds to wait for a place where no engine has any
SETTLE = 10.0  # seconds in which Ray learns that what a removed group had is free
LOOK = 0.25


class EngineSeat(NamedTuple):
    """Where the engine itself sits: in this bundle of its group, None: in none; so many cores of it."""

    node: str
    bundle: int | None
    cores: float


class RayHosts:
    """config: of the fleet; on_packing: hears the table, before the first engines are started. `packing` and `groups`
    are of the engines there are."""

    def __init__(
        self, config: EngineConfig, settings: RaySettings, on_packing: Callable[[str], None] = lambda table: None
    ) -> None:
        self.config, self.settings, self.on_packing = config, settings, on_packing
        self.instance = secrets.token_hex(3)
        self.connection: Connection | None = None
        self.resource = ""
        self.given: GivenGroups | None = None
        self.packing: Packing | None = None
        self.groups: dict[int, Any] = {}  # by engine
        self.actors: Actors  # engines, with a connection
        self._cluster_then = Cluster(())  # that the packing was made for
        self._removed = -math.inf  # when a group was
        self._came_up: dict[int, str] = {}  # nodes that engines said they are on
        self._lock = threading.RLock()  # engines start at the same time

    def open(self, size: int) -> None:
        """Connect, and have a group for each of `size` engines. Raises ConfigError, CapacityError."""
        parallel = self.config.parallel
        self.connection = connect(self.settings.address, self.layout(size).size, parallel.ray_runtime_env)
        self.resource = self.connection.resource(self.config.device.device)
        self.actors = Actors(self.connection, parallel, self.resource, self.instance)
        try:
            if self.settings.bundle_indices is not None:
                indices = ",".join(map(str, self.settings.bundle_indices))
                rule = f"are of one placement group, and there are {size} engines"
                raise ConfigError("bundle indices", indices, rule, "leave $PLANARIA_RAY_BUNDLES out")
            if parallel.placement_groups:
                self.given = GivenGroups(
                    parallel.placement_groups, self.resource, self.settings, parallel.placement_group_local_ranks
                )
            self.grow(range(size))
        except BaseException:
            self.close()
            raise
        assert self.packing is not None
        source = self.connection.source(self.resource, parallel.placement_groups)
        self.on_packing(said(source, self.packing, self._cluster_then))

    def layout(self, size: int) -> Layout:
        parallel = self.config.parallel
        return Layout(pp=parallel.pipeline_parallel_size, dp=size, tp=parallel.tensor_parallel_size)

    def plan(self, wanted: Sequence[int], wait: float = READY) -> Packing:
        """The fleet with a place for each of these engines; those that have one stay. wait: seconds for groups that
        were given. Raises ConfigError, CapacityError."""
        parallel, old = self.config.parallel, self.packing
        size = 1 + max([*wanted, len(old.engines) - 1 if old is not None else 0])
        if self.given is not None:
            head = self._headed(self.connected.snapshot(self.resource)).head
            wait = self.settings.wait if old is None else wait
            packing = self.given.pack(self.layout(size), wait, self.groups, head=head)
        else:
            cluster, strategy = self._cluster(), parallel.ray_dp_pack_strategy
            if old is None:
                packing = pack(cluster, self.layout(size), strategy, parallel.data_parallel_size_local)
            else:
                there = sorted(self.groups)
                layout = self.layout(len(there) + len(wanted))
                found = pack(cluster, layout, strategy, keep=old.only(there))
                packing = old.with_places([*there, *wanted], found, self.layout(size))
            self._cluster_then = cluster
        if self.settings.driver_inside and self.connected.node not in packing.nodes:
            raise Infeasible(
                f"no engine would be on the driver's node {self.connected.node}, and it was asked to hold one",
                None, packing.layout.size, 0,
            )  # fmt: skip
        return packing

    def grow(self, engines: Iterable[int]) -> None:
        """Groups for those of these engines that have none; none is left where one can't be had. Raises as `plan`."""
        with self._lock:
            self._seat_all([engine for engine in engines if engine not in self.groups])

    def room(self, engine: int) -> bool:
        """Is there a place for one that has none, or whose node is gone?"""
        with self._lock:
            try:
                self.plan([engine], 0.0)
            except CapacityError:
                return False
            return True

    def _seat_all(self, wanted: Sequence[int]) -> None:
        """With the lock."""
        if not wanted:
            return
        while True:
            packing = self._plan_when_settled(wanted)
            nodes = {node for engine in wanted for node in packing.engines[engine].nodes}
            if self.given is not None or not self.connected.deaf(nodes):
                break
        made: dict[int, Any] = {}
        try:
            for engine in wanted:
                made[engine] = self._make(packing, engine)
            for engine, group in made.items():
                if self.given is None and not group.wait(READY):
                    self.connected.distrusted.add(packing.engines[engine].nodes)
                    raise CapacityError(f"the placement group of engine {engine} was not made within {READY:g} s")
        except BaseException:
            for group in made.values():
                self._remove(group)
            raise
        self.packing = packing
        self.groups |= made

    def renew(self, engine: int, stop: threading.Event) -> None:
        """Before an engine begins: where it has no group, or a node of its group is gone, it gets another. Where there
        is no place, and no other engine has one, it is waited for, until `stop` too. Raises as `plan`."""
        patience = Patience(logger.warning, NO_PLACE, FIRST)
        while self.stranded(engine):
            with self._lock:
                if engine in self.groups:
                    logger.warning("a node of engine %d is gone: it gets another place", engine)
                    self.let_go(engine)
                try:
                    return self._seat_all([engine])
                except CapacityError as e:
                    why = str(e)
                    if patience.over or not all(self.stranded(other) for other in self.groups):
                        raise
            patience.tell(f"waiting for a place for engine {engine}: {why}; {HINT}")
            if stop.wait(LOOK):
                raise CapacityError(why)

    def let_go(self, engine: int) -> None:
        """Remove its group. It is to have another."""
        with self._lock:
            self._remove(self.groups.pop(engine))

    def stranded(self, engine: int) -> bool:
        """Has it no group, or is a node of it gone, whether Ray has noticed or not?"""
        if self.packing is None or engine not in self.groups:
            return True
        return bool(self.connected.deaf({*self.packing.engines[engine].nodes, self.seat(engine).node}))

    def release(self, engine: int) -> None:
        """It is not coming back."""
        with self._lock:
            group = self.groups.pop(engine, None)
            if group is not None:
                self._remove(group)
            self._came_up.pop(engine, None)
            if self.packing is not None:
                size = max(1, 1 + max(self.groups, default=0))  # several that leave do so in any order
                kept = self.packing
                self.packing = kept._replace(
                    layout=self.layout(size), engines=kept.engines[:size], local_ranks=kept.local_ranks[:size]
                )

    def share(self, engine: int) -> int:
        """Engines whose first rank is on the same node as this one's."""
        assert self.packing is not None
        home = self.packing.engines[engine].slots[0].node
        return sum(each.slots[0].node == home for each in self.packing.engines if each.slots)

    def close(self) -> None:
        """Remove what was made. Idempotent."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        self.actors.close()
        if connection.alive:
            for group in self.groups.values():
                self._remove(group)
        self.groups = {}
        connection.close()

    # -- where an engine's group has what

    def bundles(self, engine: int) -> list[int]:
        """By rank."""
        assert self.packing is not None
        slots = self.packing.engines[engine].slots
        return [slot.device if self.given is not None else slot.rank for slot in slots]

    def seat(self, engine: int) -> EngineSeat:
        assert self.packing is not None
        placement = self.packing.engines[engine]
        node = placement.slots[0].node
        if self.given is None:
            return EngineSeat(node, placement.layout.size, self.connected.seat_cores(self.resource))
        bundle, cores = self.given.seat(engine, node) or (None, 0.0)
        return EngineSeat(node, bundle, min(1.0, cores))

    def settings_of(self, engine: int, ranks: int) -> dict[str, str]:
        """Environment variables of its process. ranks: as many as it begins with."""
        return {"PLANARIA_RAY_BUNDLES": ",".join(map(str, self.bundles(engine)[:ranks]))}

    def fields_of(self, engine: int) -> dict[str, Any]:
        """Fields of its ParallelConfig."""
        assert self.packing is not None
        local_rank = self.packing.local_ranks[engine]
        return {"placement_group": self.groups[engine].id.hex(), "data_parallel_rank_local": local_rank}

    def spawn(self, engine: int, entry: str, variables: Mapping[str, str], limit: float, news: News) -> RayChild:
        """Its process, in its place. entry: of its life; variables: of its environment; limit: seconds to come up."""
        assert self.packing is not None
        node = self.seat(engine).node
        nodes = node, *self.packing.engines[engine].nodes
        options, on_host = _options(self.seat(engine), self.groups[engine]), self.config.device.platform.on_host
        shares = (engine, self.config.parallel.layout.size) if on_host else None
        order = Order(None, nodes, options, variables, engine=True, shares=shares)
        return self.actors.spawn((node, engine), entry, lambda: order, limit, news)

    def memories(self, child: RayChild) -> Memories:
        """Of an engine's machine, which is not this one."""
        return self.actors.memories(child.place.home, child.slot[1])

    # -- is it as planned

    def came_up(self, engine: int, node: str) -> None:
        """It says that it is there."""
        self._came_up[engine] = node

    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        """A line for each of its ranks, and one for itself, that is not where it was planned. places: by rank."""
        if self.packing is None or engine not in self.groups:
            return []
        found, planned = [], self.seat(engine).node
        node = self._came_up.get(engine, planned)
        if node != planned:
            found.append(f"engine {engine} was planned on {short(planned)} and is on {short(node)}")
        own = [row for row in rows(self.packing, self._cluster_then) if row.dp == engine]
        # Ray gives out accelerators by itself: a row's number is of those that are free on the node.
        return found + differences(own, places, self.bundles(engine), numbered=False)

    # -- groups

    @property
    def connected(self) -> Connection:
        """Raises PlanariaError: it has been closed."""
        if self.connection is None:
            raise PlanariaError("the server has left Ray: it is closing")
        return self.connection

    def _plan_when_settled(self, wanted: Sequence[int]) -> Packing:
        """As `plan`; what a group had that was removed a moment ago is waited for."""
        while True:
            try:
                return self.plan(wanted)
            except Infeasible:
                if time.monotonic() - self._removed > SETTLE:
                    raise
            time.sleep(LOOK)

    def _headed(self, cluster: Cluster) -> Cluster:
        """By the node that is to come first; it must be there when the fleet starts."""
        try:
            return cluster.headed_by(self.config.parallel.data_parallel_address)
        except ConfigError:
            if self.packing is None:
                raise
            return cluster

    def _cluster(self) -> Cluster:
        """What is free and has a core for the engine beside it, but for nodes that did not answer of late, and what the
        engines there are have, on nodes that are gone too: they don't move before they begin again. Ray knows with a
        delay what groups have taken."""
        total = {node.id: len(node.devices) for node in self.connected.snapshot(self.resource, free=False).nodes}
        snapshot = self._headed(self.connected.snapshot(self.resource, ranks=self.layout(1).size))
        own: dict[str, list[int]] = {}
        engines = [self.packing.engines[engine] for engine in self.groups] if self.packing is not None else []
        for slot in (slot for engine in engines for slot in engine.slots):
            own.setdefault(slot.node, []).append(slot.device)
        return beside(snapshot, total, own, self.connected.distrusted)

    def _make(self, packing: Packing, engine: int) -> Any:
        if self.given is not None:
            return self.given.handles[engine]
        cores = self.connected.seat_cores(self.resource)
        bundles = [
            ({self.resource: bundle.devices} if bundle.devices else {"CPU": cores}, bundle.node)
            for bundle in packing.bundles(engine)
        ]
        return on_nodes(bundles, f"planaria-{self.instance}-dp{engine}")

    def _remove(self, group: Any) -> None:
        """If it was made here."""
        if self.given is not None:
            return
        from ray.util import remove_placement_group

        self._removed = time.monotonic()
        bounded("remove a placement group", functools.partial(remove_placement_group, group))


def beside(free: Cluster, total: Mapping[str, int], own: Mapping[str, Sequence[int]], dark: Container[str]) -> Cluster:
    """Pure. What is free, less `dark` nodes, and what engines have of their `own`, on nodes that are gone too. total:
    devices of each node."""
    nodes = []
    for node in free.nodes:
        if node.id in dark and node.id != free.head:
            continue
        held = own.get(node.id, [])
        others = (id for id in range(len(held) + len(node.devices)) if id not in held)
        room = max(0, total.get(node.id, 0) - len(held)) if node.id not in dark else 0
        found = [next(others) for _ in node.devices[:room]]
        nodes.append(Node(node.id, tuple(Device(id) for id in sorted([*held, *found])), node.addresses))
    there = {node.id for node in nodes}
    nodes += [Node.of(id, sorted(held), "") for id, held in own.items() if id not in there]
    return Cluster(tuple(nodes), free.head)


def _options(seat: EngineSeat, group: Any) -> dict[str, Any]:
    """For the actor that sits there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    if seat.bundle is None:
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(seat.node, soft=False)}
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=seat.bundle, placement_group_capture_child_tasks=False
    )
    return {"num_cpus": seat.cores, "scheduling_strategy": strategy}
