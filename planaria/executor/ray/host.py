"""A Ray cluster as a host of ranks: each an actor in its bundle. What Ray has is looked at now and then, in a thread,
because it takes a while to answer, and may hang: whoever decides only sees what was there at the last look.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings
from planaria.executor.ray.actor import Whereabouts
from planaria.executor.ray.actors import Actors, on_node
from planaria.executor.ray.bundles import BundlePool
from planaria.executor.ray.child import Order, RayChild
from planaria.executor.ray.cluster import Connection, connect
from planaria.executor.ray.names import actor_name, spare_name
from planaria.hosts.host import NOWHERE, Child, News, Program, Slot
from planaria.topology import Cluster
from planaria.topology.platforms import PLATFORMS

logger = logging.getLogger("planaria.ray")

LOOK = 2.0  # seconds between looks, while anybody asks
JOIN = 3.0


class RayHost:
    """See Host. A program's module is `package.module:class` of a life. device: "cpu" or an accelerator's name."""

    def __init__(self, parallel: ParallelConfig, settings: RaySettings, device: str) -> None:
        self.parallel, self.settings, self.device = parallel, settings, device
        self.instance = secrets.token_hex(3)
        self.layout = parallel.layout  # for names
        self.limit = settings.wait  # seconds for an actor to come up
        self.address = "127.0.0.1"  # of this node, for those elsewhere
        self.connection: Connection | None = None
        self.bundles: BundlePool
        self.actors: Actors
        self._children: dict[Slot, RayChild] = {}
        self._names: set[str] = set()
        self._wake, self._over = threading.Event(), False
        self._looking: threading.Thread | None = None

    def open(self, slots: int) -> None:
        """Connect. slots: how many ranks a cluster that is started for this takes. Raises ConfigError."""
        connection = connect(self.settings.address, slots, self.parallel.ray_runtime_env)
        try:
            resource = connection.resource(self.device)
            self.bundles = BundlePool(connection, resource, self.settings, f"planaria-{self.instance}")
            self.actors = Actors(connection, self.parallel, resource, self.instance, self._bundle_of)
        except Exception:
            connection.close()
            raise
        self.connection, self.address = connection, connection.address

    def _bundle_of(self, at: Whereabouts) -> int:
        groups = [group.handle.id.hex() for group in self.bundles.first]
        return at.bundle if at.group in groups else -1

    # -- see Host

    def slots(self) -> Cluster:
        if self._looking is None:
            self._looking = threading.Thread(target=self._look, name="planaria-ray-look", daemon=True)
            self._looking.start()
        self._wake.set()
        return self.bundles.cluster(self._used())

    def here(self) -> dict[Slot, tuple[int, ...]]:
        """Slots on the driver's machine that there was anybody in, and their accelerators."""
        return {slot: child.at.devices for slot, child in self._children.items() if child.here and child.at is not None}

    def _used(self) -> set[Slot]:
        return {slot for slot, child in list(self._children.items()) if not child.gone.is_set()}

    def _look(self) -> None:
        while not self._over:
            self._wake.wait()
            self._wake.clear()
            if not self._over and time.monotonic() - self.bundles.looked >= LOOK:
                try:
                    self.bundles.look()
                except Exception as e:  # it is going, or slow
                    logger.debug("Ray: %s", e)
                    time.sleep(LOOK)

    def need(self, processes: int, spares: int) -> None:
        """Nothing is counted here."""

    def spawn(self, slot: Slot, entry: Program, boot: bytes | None, news: News, *, rank: int = -1) -> RayChild:
        order = functools.partial(self._order, slot, self._name(rank))
        child = self.actors.spawn(slot, entry.module, order, self.limit, news)
        if slot[1] != NOWHERE:
            self._children[slot] = child
        if boot is not None:
            child.tell(boot)
        return child

    def _name(self, rank: int) -> str:
        """Each is used once: Ray refuses one that lives, and a replacement starts while the one it replaces dies."""
        name: Callable[[int], str] = functools.partial(spare_name, self.instance)
        if rank >= 0:
            name = functools.partial(actor_name, self.instance, self.layout, rank)
        found = next(each for each in map(name, itertools.count()) if each not in self._names)
        self._names.add(found)
        return found

    def _order(self, slot: Slot, name: str) -> Order:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        platform = PLATFORMS[self.device]
        shares = (0, self.parallel.layout.size) if platform.on_host or platform.keeps else None
        if slot[1] == NOWHERE:
            return Order(name, (slot[0],), on_node(slot[0]), shares=shares)
        bundle = self.bundles.hold(slot)
        strategy = PlacementGroupSchedulingStrategy(
            bundle.group.handle, placement_group_bundle_index=bundle.number, placement_group_capture_child_tasks=False
        )
        fraction, resource = self.settings.fraction, self.bundles.resource
        wants: dict[str, Any] = (
            {"num_gpus": fraction} if resource == "GPU" else {"num_cpus": fraction} if resource == "CPU"
            else {"resources": {resource: fraction}}
        )  # fmt: skip
        options = {**wants, "scheduling_strategy": strategy}
        return Order(name, (slot[0],), options, shares=shares, keeps=platform.keeps)

    def await_starts(self, children: Iterable[Child], timeout: float) -> None:
        """Each has its own limit."""
        self.actors.await_starts(children)

    def await_ends(self, children: Iterable[Child], timeout: float) -> list[Child]:
        return self.actors.await_ends(children, timeout) if self.connection is not None else []

    def absent(self) -> list[str]:
        return []

    def trim(self) -> None:
        """Give back what was added and isn't used."""
        self.bundles.trim(self._used())

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        self._over = True
        self._wake.set()
        if self._looking is not None:
            self._looking.join(JOIN)
        self.actors.close()
        if connection.answers():
            self.bundles.remove()
        connection.close()
