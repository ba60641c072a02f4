"""The devices on Ray that are an engine's: bundles of placement groups. Where a rank goes is `place()`'s decision.

Ray's groups neither grow nor give back a bundle, so there is a list of them: the first, which came into being as one,
or those that were lent, one for each lane; and a group of one bundle for each device that was added. Of a user's group
only its own spare bundles are used.

A bundle is free again only when whoever was in it is known to be gone. Those on a node that Ray has given up are lost:
when the node returns it has another id.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from planaria.env import RaySettings
from planaria.executor.ray.cluster import Connection, bounded
from planaria.executor.ray.groups import PlacedGroup, lane_group, obtain, single_bundles
from planaria.topology import Cluster, Infeasible, LaneGroup, Layout, Node, Placement, Slot, place

DISTRUST = 30.0  # seconds in which nothing is started on a node that did not answer
TRIES = 3  # to take devices that Ray calls free


class HeldBundle(NamedTuple):
    """A bundle that holds one device. node: Ray's id; number: in its group."""

    node: str
    group: PlacedGroup
    number: int


class BundlePool:
    """`obtain` the first ones, then `find` more; each is the caller's until it is given `back`. Any thread."""

    def __init__(self, connection: Connection, resource: str, settings: RaySettings, name: str) -> None:
        self.connection, self.resource, self.settings, self.name = connection, resource, settings, name
        self.groups: list[PlacedGroup] = []
        self._added = 0
        self._lent: dict[str, PlacedGroup] = {}  # by id, also those that are the engine's no more
        self._free: list[HeldBundle] = []
        self._distrusted: dict[str, float] = {}  # node -> until when
        self._lock = threading.RLock()

    @property
    def first(self) -> list[PlacedGroup]:
        """Those that the engine began with: one, or one for each lane."""
        return [group for group in self.groups if not group.added]

    def obtain(self, given: str | None, layout: Layout) -> list[HeldBundle]:
        """By rank. given: the user's group. Raises ConfigError, CapacityError."""
        group = obtain(self.connection, given, layout, self.resource, self.settings, self.name)
        self.groups.append(group)
        self._free += [HeldBundle(node, group, bundle) for bundle, node in group.others]
        return [
            HeldBundle(slot.node, group, bundle)
            for slot, bundle in zip(group.placement.slots, group.bundles, strict=True)
        ]

    def obtain_lanes(self, lanes: Sequence[LaneGroup], layout: Layout) -> list[HeldBundle]:
        """By rank, in groups that were made before, one for each lane. Raises Infeasible where there are fewer, and
        then those can be had by `find`; ConfigError, CapacityError."""
        with self._lock:
            self.lend(lanes, layout)
            if len(lanes) < layout.dp:
                lacks, nearest = layout.dp - len(lanes), Layout(layout.pp, len(lanes), layout.pcp, layout.tp)
                why = f"{lacks} of {layout.dp} lanes have no place"
                raise Infeasible(why, nearest, layout.size, nearest.size)
            bundles = [
                HeldBundle(slot.node, group, bundle)
                for group in self.groups[: layout.dp]
                for slot, bundle in zip(group.placement.slots, group.bundles, strict=True)
            ]
            self._free = [bundle for bundle in self._free if bundle not in bundles]
            return bundles

    def lend(self, lanes: Sequence[LaneGroup], layout: Layout) -> None:
        """These groups are the engine's, and no others but what was added. Who sits in another one may stay. layout:
        of the engine. Raises ConfigError, CapacityError."""
        with self._lock:
            one, known = Layout(layout.pp, 1, layout.pcp, layout.tp), self._lent
            new = [lane for lane in lanes if lane.id not in known]
            groups = [lane_group(lane, one, self.resource, self.settings) for lane in new]
            known |= {lane.id: group for lane, group in zip(new, groups, strict=True)}
            self.groups = [*(known[lane.id] for lane in lanes), *(group for group in self.groups if group.added)]
            for group in groups:
                own = zip(group.placement.slots, group.bundles, strict=True)
                self._free += [HeldBundle(slot.node, group, bundle) for slot, bundle in own]
                self._free += [HeldBundle(node, group, bundle) for bundle, node in group.others]

    def back(self, bundles: Collection[HeldBundle]) -> None:
        with self._lock:
            self._free += bundles

    def distrust(self, nodes: Collection[str]) -> None:
        """Nothing is started there for a while."""
        with self._lock:
            self._distrusted |= dict.fromkeys(nodes, time.monotonic() + DISTRUST)

    def find(self, layout: Layout, held: Mapping[int, HeldBundle], only: int | None = None) -> dict[int, HeldBundle]:
        """A bundle for each rank that isn't `held` (of these for `only` one), as close to its tensor group as there is
        one. Raises Infeasible; TimeoutError when Ray does not answer."""
        with self._lock:
            tries = 0
            while True:
                cluster, own = self._cluster(held)
                keep = [
                    Slot(rank, layout.coords(rank), bundle.node, own[bundle.node].index(bundle))
                    for rank, bundle in held.items()
                    if bundle.node in own and bundle in own[bundle.node]
                ]
                placement = _placed(cluster, own, layout, Placement(layout, keep))
                missing = [slot for slot in placement.slots if slot.rank not in held and only in (None, slot.rank)]
                deaf = {s.node for s in missing if not self.connection.raylet_answers(s.node)}
                if deaf:
                    self.distrust(deaf)
                elif (found := self._take(missing, own)) is not None:
                    return found
                elif (tries := tries + 1) == TRIES:
                    self.distrust({s.node for s in missing if s.device >= len(own[s.node])})

    def trim(self) -> None:
        """Give back devices that were added and that nobody is in."""
        with self._lock:
            for bundle in [bundle for bundle in self._free if bundle.group.added]:
                self._free.remove(bundle)
                self.groups.remove(bundle.group)
                bounded("remove a placement group", bundle.group.remove)

    def remove(self) -> None:
        """Of all groups those that were made here."""
        for group in self.groups:
            bounded("remove a placement group", group.remove)

    def _cluster(self, held: Mapping[int, HeldBundle]) -> tuple[Cluster, dict[str, list[HeldBundle]]]:
        """What there is, and for each node the bundles that its first devices stand for; the others are free on Ray."""
        now = self.connection.snapshot(self.resource)
        living = {node.id for node in now.nodes}
        dark = {node for node, until in self._distrusted.items() if time.monotonic() < until}
        self._free = [bundle for bundle in self._free if bundle.node in living]
        self.groups = [group for group in self.groups if not self._drop(group, living)]
        own: dict[str, list[HeldBundle]] = {id: [] for id in living}
        free_now = (bundle for bundle in self._free if bundle.node not in dark and bundle.group in self.groups)
        for bundle in [*held.values(), *free_now]:
            own.setdefault(bundle.node, []).append(bundle)
        free = {
            node.id: 0 if node.id in dark or not self._may_add else len(node.devices) for node in now.nodes
        }
        nodes = [Node.of(id, len(bundles) + free.get(id, 0)) for id, bundles in own.items()]
        return Cluster(tuple(nodes), now.head), own

    @property
    def _may_add(self) -> bool:
        """Devices that are in no group of the engine's?"""
        return any(group.owned or group.lent for group in self.groups)

    def _drop(self, group: PlacedGroup, living: Collection[str]) -> bool:
        """Take a group of one bundle away when its node is gone, so that Ray doesn't look for another place for it."""
        gone = group.added and not any(node in living for node in group.placement.nodes)
        if gone:
            bounded("remove a placement group", group.remove)
        return gone

    def _take(self, slots: Collection[Slot], own: Mapping[str, list[HeldBundle]]) -> dict[int, HeldBundle] | None:
        """BundlePool for these; None if devices that were free a moment ago are not."""
        found, new = dict[int, HeldBundle](), list[Slot]()
        for slot in slots:
            bundles = own[slot.node]
            if slot.device < len(bundles):
                found[slot.rank] = bundles[slot.device]
            else:
                new.append(slot)
        names = [f"{self.name}-{self._added + i}" for i in range(1, len(new) + 1)]  # Ray refuses one that lives
        self._added += len(new)
        groups = single_bundles(self.resource, [slot.node for slot in new], names)
        if groups is None:
            return None
        for slot, group in zip(new, groups, strict=True):
            group.added = True
            self.groups.append(group)
            found[slot.rank] = HeldBundle(slot.node, group, 0)
        taken = set(found.values())
        self._free = [bundle for bundle in self._free if bundle not in taken]
        return found


def _placed(cluster: Cluster, own: Mapping[str, list[HeldBundle]], layout: Layout, keep: Placement) -> Placement:
    """On bundles that there are, as long as no tensor group spans nodes for that; else on any device. Raises
    Infeasible."""
    bundles = Cluster(tuple(Node.of(id, len(there)) for id, there in own.items()), cluster.head)
    with contextlib.suppress(Infeasible):
        return place(bundles, layout, keep=keep)
    return place(cluster, layout, keep=keep, span=True)
