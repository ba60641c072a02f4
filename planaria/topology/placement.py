"""Who goes where: a pure function of what there is and what is asked for.

The rules, in order: nobody that is kept moves; a tensor group sits on one node (with `span`: as many of them as
possible do, and the rest spread); the driver's node first, then nodes by id in natural order, then devices by id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from planaria.errors import CapacityError, ConfigError
from planaria.topology.cluster import Bundle, Cluster, Node, cluster_of_bundles
from planaria.topology.layout import Coords, Layout


class Infeasible(CapacityError):
    """There is no such placement on this cluster (a larger one may have it). `why` is one line with both numbers;
    `nearest` the largest layout that fits instead, no tensor group over several nodes, if any; `needed` and `found`
    count devices."""

    def __init__(self, why: str, nearest: Layout | None, needed: int, found: int, options: str = "") -> None:
        super().__init__(why + (f"; {nearest}{options} would fit" if nearest is not None else ""))
        self.why, self.nearest, self.needed, self.found = why, nearest, needed, found


class RankSlot(NamedTuple):
    """A rank's place. `node` and `device` are the cluster's ids; a bundle's index where it was made of bundles."""

    rank: int
    coords: Coords
    node: str
    device: int


class Placement:
    """Slots by rank. Equal if layout and slots are."""

    def __init__(self, layout: Layout, slots: Sequence[RankSlot]) -> None:
        self.layout, self.slots = layout, tuple(slots)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and (self.layout, self.slots) == (other.layout, other.slots)

    def __hash__(self) -> int:
        return hash((self.layout, self.slots))

    def __repr__(self) -> str:
        return f"Placement({self.layout}: {', '.join(f'{s.rank} on {s.node}/{s.device}' for s in self.slots)})"

    def group(self, *axes: str) -> tuple[tuple[RankSlot, ...], ...]:
        """All groups along these axes (see Layout.groups), as slots."""
        return tuple(tuple(self.slots[rank] for rank in ranks) for ranks in self.layout.groups(*axes))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes with ranks on them, by their lowest rank."""
        return tuple(dict.fromkeys(slot.node for slot in self.slots))

    def on(self, node: str) -> tuple[RankSlot, ...]:
        """A node's slots by rank; a rank's index in it is its local rank."""
        return tuple(slot for slot in self.slots if slot.node == node)

    def spanning(self) -> tuple[tuple[RankSlot, ...], ...]:
        """Tensor groups that lie on more than one node: correct, but each layer's sums cross the network."""
        return tuple(group for group in self.group("tp") if len({slot.node for slot in group}) > 1)

    def lines(self) -> list[str]:
        """For people, a line per node: what would start where."""
        by_node: dict[str, list[RankSlot]] = {}
        for slot in self.slots:
            by_node.setdefault(slot.node, []).append(slot)
        return [
            f"{node}: " + ", ".join(f"rank {s.rank} (pp {s.coords.pp} tp {s.coords.tp}) on {s.device}" for s in slots)
            for node, slots in by_node.items()
        ]


def place(
    cluster: Cluster, layout: Layout, *, keep: Placement | None = None, span: bool = False, driver_inside: bool = False
) -> Placement:
    """A place for every rank. Raises Infeasible.

    keep: an earlier placement; a rank whose coordinates are in `layout` and whose device is in `cluster` stays there.
    span: let a tensor group spread over nodes where it can't be on one. driver_inside: a rank must be on the driver's
    node.
    """
    nodes = cluster.ordered()
    taken = _kept(nodes, layout, keep)
    used = set(taken.values())
    free = {node.id: [d.id for d in node.devices if (node.id, d.id) not in used] for node in nodes}
    for devices in free.values():
        devices.reverse()  # the next one to give is the last of the list
    groups = layout.groups("tp")
    rest: list[tuple[int, ...]] = []  # groups that no node can take alone
    bound: list[tuple[int, str, tuple[int, ...]]] = []  # missing ranks, node that holds the others, group
    whole: list[tuple[int, ...]] = []
    for group in groups:
        held = {taken[rank][0] for rank in group if rank in taken}
        if not held:
            whole.append(group)
        elif len(held) > 1:
            rest.append(group)
        else:
            bound.append((sum(rank not in taken for rank in group), held.pop(), group))
    # Fewest missing first: this leaves the most groups on one node.
    for missing, id, group in sorted(bound, key=lambda item: (item[0], item[2])):
        if missing > len(free[id]):
            rest.append(group)
        else:
            _fill(group, taken, _devices(free, id))
    at = 0
    for node in nodes:
        while at < len(whole) and len(free[node.id]) >= layout.tp:
            _fill(whole[at], taken, _devices(free, node.id))
            at += 1
    rest += whole[at:]
    found, needed = cluster.num_devices, layout.size
    if rest and (not span or needed > found):
        nearest = shrink(cluster, layout)  # also with `span`: nobody wants a group over nodes who can have none
        raise Infeasible(_why(nodes, layout, rest, taken), nearest if nearest != layout else None, needed, found)
    spare = _devices(free, *(node.id for node in nodes))
    for group in sorted(rest):
        held_first = dict.fromkeys(taken[rank][0] for rank in group if rank in taken)
        _fill(group, taken, itertools.chain(_devices(free, *held_first), spare))
    placement = Placement(layout, [RankSlot(rank, layout.coords(rank), *taken[rank]) for rank in range(layout.size)])
    if driver_inside and not any(slot.node == cluster.head for slot in placement.slots):
        raise Infeasible(
            f"no rank would be on the driver's node {cluster.head}, and the driver was asked to be among the ranks",
            None, needed, found,
        )  # fmt: skip
    return placement


def place_at(bundles: Iterable[Bundle], layout: Layout, indices: Sequence[int]) -> Placement:
    """Rank i in bundle `indices[i]`, whatever that spans. ConfigError: not as many as ranks, one twice, one that isn't
    there or holds no device."""
    table = {bundle.index: bundle for bundle in bundles}
    given = ",".join(map(str, indices))

    def refuse(rule: str, fix: str) -> ConfigError:
        return ConfigError("bundle indices", given, rule, fix)

    if len(indices) != layout.size:
        raise refuse(f"are {len(indices)} for {layout.size} ranks ({layout})", "give one for each rank")
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if list(indices).count(index) > 1)
        raise refuse(f"name bundle {twice} twice", "a bundle holds one rank")
    device_at = {device.id: node.id for node in cluster_of_bundles(table.values()).nodes for device in node.devices}
    for index in indices:
        if index not in device_at:
            what = "holds no device" if index in table else f"is not in the placement group of {len(table)}"
            usable = ", ".join(map(str, sorted(device_at))) or "none"
            raise refuse(f"bundle {index} {what}", f"bundles with a device: {usable}")
    return Placement(
        layout, [RankSlot(rank, layout.coords(rank), device_at[index], index) for rank, index in enumerate(indices)]
    )


def shrink(cluster: Cluster, layout: Layout, *, span: bool = False) -> Layout | None:
    """The largest layout that fits and exceeds `layout` along no axis: itself, if it fits. None if nothing does. Of
    prefill context ranks a number that divides theirs, so that a block's tokens can be dealt to them.

    Among equally large ones: the most lanes, then the most stages (those that stay keep more of their weights).
    """
    sizes = [len(node.devices) for node in cluster.nodes]
    best: tuple[tuple[int, int, int, int], Layout] | None = None
    for tp in range(1, min(layout.tp, sum(sizes) if span else max(sizes, default=0)) + 1):
        room = sum(sizes) // tp if span else sum(size // tp for size in sizes)
        for dp in range(1, min(layout.dp, room) + 1):
            for pcp in divisors(layout.pcp, room // dp):
                pp = min(layout.pp, room // (dp * pcp))
                found = Layout(pp, dp, pcp, tp)
                key = (found.size, dp, pp, pcp)
                if best is None or key > best[0]:
                    best = key, found
    return best[1] if best is not None else None


def divisors(number: int, most: int) -> list[int]:
    """Those up to `most`."""
    return [some for some in range(1, min(number, most) + 1) if number % some == 0]


def _kept(nodes: list[Node], layout: Layout, keep: Placement | None) -> dict[int, tuple[str, int]]:
    """(node, device) by rank of those that stay."""
    if keep is None:
        return {}
    there = {(node.id, device.id) for node in nodes for device in node.devices}
    return {
        layout.rank(slot.coords): (slot.node, slot.device)
        for slot in keep.slots
        if layout.holds(slot.coords) and (slot.node, slot.device) in there
    }


def _devices(free: Mapping[str, list[int]], *nodes: str) -> Iterator[tuple[str, int]]:
    """The free devices of these nodes in order, each taken as it is given."""
    for node in nodes:
        while free[node]:
            yield node, free[node].pop()


def _fill(group: tuple[int, ...], taken: dict[int, tuple[str, int]], devices: Iterator[tuple[str, int]]) -> None:
    """Give the ranks of `group` that have no place the next ones of `devices`."""
    for rank in group:
        if rank not in taken:
            taken[rank] = next(devices)


def per_node(nodes: Sequence[Node]) -> str:
    """How many devices each node has, of the first few."""
    some = ", ".join(f"{node.id} {len(node.devices)}" for node in nodes[:8]) or "no nodes"
    return some + (f", and {len(nodes) - 8} more nodes" if len(nodes) > 8 else "")


def _why(nodes: list[Node], layout: Layout, rest: list[tuple[int, ...]], taken: dict[int, tuple[str, int]]) -> str:
    needed, found = layout.size, sum(len(node.devices) for node in nodes)
    many = "s" if needed > 1 else ""
    if found < needed:
        return f"{layout} needs {needed} device{many}, the cluster has {found} ({per_node(nodes)})"
    group = min(rest)
    if any(rank in taken for rank in group):
        return f"ranks {', '.join(map(str, group))} are one tensor group, and with those that stay they span nodes"
    most = max((len(node.devices) for node in nodes), default=0)
    return (
        f"{layout} needs {layout.size // layout.tp} times {layout.tp} devices on one node; the cluster has {found} "
        f"devices, at most {most} on a node"
    )
