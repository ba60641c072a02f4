"""The devices on Ray that are an engine's: bundles of placement groups, as slots of its nodes.

Ray's groups neither grow nor give back a bundle, so there is a list of them: the first, which came into being as one,
or those that were lent, one for each lane; and a group of one bundle for each device that was added. Of a user's group
only its own spare bundles are used. A node's slots are its bundles, and devices that are free on Ray.

Those on a node that Ray has given up are lost: when the node returns it has another id.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from planaria.env import RaySettings
from planaria.executor.ray.cluster import Connection, bounded
from planaria.executor.ray.groups import PlacedGroup, lane_group, obtain, single_bundle
from planaria.hosts.host import Slot
from planaria.topology import Cluster, Device, Infeasible, LaneGroup, Layout, Node, Placement, RankSlot, place

TRIES = 3  # to take devices that Ray calls free


class HeldBundle(NamedTuple):
    """A bundle that holds one device. node: Ray's id; number: in its group."""

    node: str
    group: PlacedGroup
    number: int


class BundlePool:
    """`obtain` the first ones, `look` what there is now; then `hold` any slot. Any thread."""

    def __init__(self, connection: Connection, resource: str, settings: RaySettings, name: str) -> None:
        self.connection, self.resource, self.settings, self.name = connection, resource, settings, name
        self.groups: list[PlacedGroup] = []
        self.looked = 0.0  # when
        self._now = Cluster(())  # free devices of living nodes, then
        self._added = self._taken = 0  # groups of one bundle: names, and how many there were
        self._lent: dict[str, PlacedGroup] = {}  # by id, also those that are the engine's no more
        self._slots: dict[Slot, HeldBundle] = {}
        self._lock = threading.RLock()

    @property
    def first(self) -> list[PlacedGroup]:
        """Those that the engine began with: one, or one for each lane."""
        return [group for group in self.groups if not group.added]

    def obtain(self, given: str | None, layout: Layout) -> Placement:
        """given: the user's group. Raises ConfigError, CapacityError."""
        group = obtain(self.connection, given, layout, self.resource, self.settings, self.name)
        self.groups.append(group)
        self._number(group)
        return _on([slot.node for slot in group.placement.slots], layout)

    def obtain_lanes(self, lanes: Sequence[LaneGroup], layout: Layout) -> Placement:
        """In groups that were made before, one for each lane. Raises Infeasible where there are fewer, and then those
        can be had; ConfigError, CapacityError."""
        self.lend(lanes, layout)
        if len(lanes) < layout.dp:
            lacks, nearest = layout.dp - len(lanes), Layout(layout.pp, len(lanes), layout.pcp, layout.tp)
            raise Infeasible(f"{lacks} of {layout.dp} lanes have no place", nearest, layout.size, nearest.size)
        return _on([slot.node for group in self.groups[: layout.dp] for slot in group.placement.slots], layout)

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
                self._number(group)

    def look(self) -> None:
        """Ask Ray. Raises TimeoutError when it does not answer."""
        while True:
            at, taken = time.monotonic(), self._taken
            now = self.connection.snapshot(self.resource)
            if taken == self._taken:  # else it counts one as free that isn't
                break
        with self._lock:
            self._now, self.looked = now, at
            living = {node.id for node in now.nodes}
            self.groups = [group for group in self.groups if not self._drop(group, living)]
            self._slots = {slot: bundle for slot, bundle in self._slots.items() if bundle.node in living}

    def cluster(self, used: Collection[Slot]) -> Cluster:
        """Slots as of the last look, on nodes that are not distrusted; and those that are in use."""
        with self._lock:
            nodes = []
            for node in self._now.nodes:
                dark = node.id in self.connection.distrusted
                numbers = {number for id, number in self._slots if id == node.id}
                there = {
                    number for number in numbers
                    if (node.id, number) in used or (not dark and self._slots[node.id, number].group in self.groups)
                }  # fmt: skip
                if not dark and self._may_add:
                    free = (number for number in itertools.count() if number not in numbers)
                    there.update(itertools.islice(free, len(node.devices)))
                if there:
                    nodes.append(Node(node.id, tuple(map(Device, sorted(there))), node.addresses))
            return Cluster(tuple(nodes), self._now.head)

    def deal(
        self, layout: Layout, counts: Mapping[str, int], before: Placement | None, alive: Collection[int]
    ) -> Placement:
        """With so many slots on each node: in bundles that there are, as long as no tensor group spans nodes for that.
        Ranks that live stay where they were before; all do where none lives. Raises Infeasible."""
        if before is not None and alive:
            before = Placement(before.layout, [slot for slot in before.slots if slot.rank in alive])
        with self._lock:
            own = Counter(id for (id, _), bundle in self._slots.items() if bundle.group in self.groups)
            head = self._now.head
        held = {node: min(count, own[node]) for node, count in counts.items()}
        clusters = [Cluster(tuple(Node.of(*each) for each in of.items()), head) for of in (held, counts)]
        try:
            return place(clusters[0], layout, keep=before)
        except Infeasible:
            return place(clusters[1], layout, keep=before, span=True)

    def hold(self, slot: Slot) -> HeldBundle:
        """Its bundle, which is made where it is a device that was free. Waits. Raises OSError: its node does not
        answer, or the device is somebody else's by now; then the node is distrusted."""
        node = slot[0]
        if self.connection.deaf([node]):
            raise OSError(f"the raylet of node {node} does not answer")
        if slot in self._slots:
            return self._slots[slot]
        for _ in range(TRIES):
            with self._lock:
                self._added += 1
                name = f"{self.name}-{self._added}"  # Ray refuses one that lives
            if (group := single_bundle(self.resource, node, name)) is not None:
                return self._add(slot, group)
        self.connection.distrusted.add([node])
        raise OSError(f"devices of node {node} that were free a moment ago are taken")

    def _add(self, slot: Slot, group: PlacedGroup) -> HeldBundle:
        with self._lock:
            group.added = True
            self._taken += 1
            self.groups.append(group)
            nodes = (Node(n.id, n.devices[n.id == slot[0] :], n.addresses) for n in self._now.nodes)
            self._now = Cluster(tuple(nodes), self._now.head)  # one device less
            self._slots[slot] = HeldBundle(slot[0], group, 0)
            return self._slots[slot]

    def trim(self, used: Collection[Slot]) -> None:
        """Give back devices that were added and that nobody is in."""
        with self._lock:
            for slot, bundle in list(self._slots.items()):
                if bundle.group.added and slot not in used:
                    del self._slots[slot]
                    self.groups.remove(bundle.group)
                    bounded("remove a placement group", bundle.group.remove)

    def remove(self) -> None:
        """Of all groups those that were made here."""
        for group in self.groups:
            bounded("remove a placement group", group.remove)

    def _number(self, group: PlacedGroup) -> None:
        """Its bundles are slots: those of ranks first."""
        own = [(slot.node, bundle) for slot, bundle in zip(group.placement.slots, group.bundles, strict=True)]
        for node, bundle in [*own, *((node, bundle) for bundle, node in group.others)]:
            number = next(number for number in itertools.count() if (node, number) not in self._slots)
            self._slots[node, number] = HeldBundle(node, group, bundle)

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


def _on(nodes: Sequence[str], layout: Layout) -> Placement:
    """Ranks on these nodes."""
    return Placement(layout, [RankSlot(rank, layout.coords(rank), node, 0) for rank, node in enumerate(nodes)])
