"""How a fleet's engines share nodes: the strategies of `--ray-dp-pack-strategy`, as a pure function.

Engines go in order of their numbers onto nodes in order, the head first. `strict`: every node that is used holds the
same number of engines. `fill`: the head its share, every other node as many as fit. With both, an engine lies within
one node. `span`: an engine takes whole nodes, several of them. An engine that is kept does not move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planaria.errors import ConfigError
from planaria.topology.cluster import Bundle, Cluster, Node, cluster_of_bundles
from planaria.topology.layout import Layout
from planaria.topology.nearest import LOCAL, STRATEGY, devices, head_too_small, too_few
from planaria.topology.placement import Infeasible, Placement, RankSlot, per_node, place

STRATEGIES = ("strict", "fill", "span")
SIZE = "--data-parallel-size"


class Packing(NamedTuple):
    """Where the engines of a fleet go. `layout`: of the fleet, its `dp` is how many there are; `engines`: a placement
    each, by number; `local_ranks`: each engine's index among those of its node (0 with `span`); `strategy`: "" where
    none was at work; `local`: engines on each node (strict), or on the head (fill); `skipped`: a line for each node
    that was passed over."""

    layout: Layout
    engines: tuple[Placement, ...]
    local_ranks: tuple[int, ...]
    strategy: str = ""
    local: int = 0
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, placement: Placement) -> Packing:
        """The engines of a placement that has them as its axis `dp`."""
        replica = _replica(placement.layout)
        engines = []
        for first in range(0, placement.layout.size, replica.size):
            slots = placement.slots[first : first + replica.size]
            engines.append(Placement(replica, [RankSlot(n, replica.coords(n), *s[2:]) for n, s in enumerate(slots)]))
        return cls(placement.layout, tuple(engines), _local_ranks(engines))

    def slots(self) -> Iterator[RankSlot]:
        """Of all engines, with ranks and coordinates in the fleet."""
        for number, engine in enumerate(self.engines):
            first = number * engine.layout.size
            for rank, coords, node, device in engine.slots:
                yield RankSlot(first + rank, coords._replace(dp=number), node, device)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes with ranks on them, by their lowest rank."""
        return tuple(dict.fromkeys(node for engine in self.engines for node in engine.nodes))

    def only(self, engines: Sequence[int]) -> Packing:
        """These, numbered anew."""
        ranks = tuple(self.local_ranks[n] for n in engines)
        return self._replace(engines=tuple(self.engines[n] for n in engines), local_ranks=ranks)

    def with_places(self, engines: Sequence[int], found: Packing, layout: Layout) -> Packing:
        """As `found` has them, in this order. All others have no place."""
        nowhere = Placement(_replica(layout), ()), 0
        places = dict(zip(engines, zip(found.engines, found.local_ranks, strict=True), strict=True))
        rows = [places.get(n, nowhere) for n in range(layout.dp)]
        return found._replace(
            layout=layout, engines=tuple(engine for engine, _ in rows), local_ranks=tuple(rank for _, rank in rows)
        )

    def bundles(self, engine: int) -> tuple[Bundle, ...]:
        """An engine's placement group: a device for each rank, pinned to its node, then one without a device, where
        the engine itself sits beside its rank 0."""
        slots = self.engines[engine].slots
        ranks = [Bundle(slot.rank, slot.node, 1.0) for slot in slots]
        return (*ranks, Bundle(len(slots), slots[0].node, 0.0))


def pack(
    cluster: Cluster, layout: Layout, strategy: str = "strict", local: int | None = None, *, keep: Packing | None = None
) -> Packing:
    """A place for every rank of the `layout.dp` engines.

    local: engines on each node (strict), on the head (fill); None: the most that fit there. keep: an earlier packing,
    for a fleet that grows, shrinks or has lost some: its engines stay, and those that are missing fill the nodes in
    order. `cluster` then has both the free devices and those of the engines that stay.

    Raises ConfigError for a rule that no larger cluster would mend, DoesNotFit for too few devices.
    """
    nodes = cluster.ordered()
    _check(nodes, cluster, layout, strategy, local)
    if keep is not None:
        return _beside(nodes, layout, strategy, keep)
    if strategy == "span":
        return _span(nodes, layout)
    return _within(nodes, layout, strategy, local)


def pack_groups(
    groups: Sequence[Sequence[Bundle]], local_ranks: Sequence[int] | None, layout: Layout, *, head: str = ""
) -> Packing:
    """Each engine in a placement group of the user's; a slot's device is its bundle's index there. Bundles without a
    device are skipped. local_ranks: None: each engine's index among those whose first rank is on the same node.
    Raises ConfigError."""
    if len(groups) != layout.dp:
        rule = f"are not one for each of the {layout.dp} engines"
        raise ConfigError("placement groups", len(groups), rule, f"give {layout.dp}, or change {SIZE}")
    if local_ranks is not None and len(local_ranks) != len(groups):
        rule = f"are not one for each of the {len(groups)} placement groups"
        raise ConfigError("local ranks", len(local_ranks), rule, "give each engine its index on its node")
    replica, engines = _replica(layout), list[Placement]()
    for number, bundles in enumerate(groups):
        cluster = cluster_of_bundles(bundles, head=head)
        if cluster.num_devices < replica.size:
            raise ConfigError(
                "placement group", f"of engine {number}",
                f"{cluster.num_devices} of {len(bundles)} bundles hold a device, {replica} needs {replica.size}",
                "give a larger group",
            )  # fmt: skip
        engines.append(place(cluster, replica, span=True))
    if local_ranks is None:
        return Packing(layout, tuple(engines), _local_ranks(engines))
    taken: dict[tuple[str, int], int] = {}
    for number, (engine, local_rank) in enumerate(zip(engines, local_ranks, strict=True)):
        other = taken.setdefault((engine.slots[0].node, local_rank), number)
        if local_rank < 0 or other != number:
            rule = "is below 0" if local_rank < 0 else f"is engine {other}'s too, on node {engine.slots[0].node}"
            raise ConfigError("local ranks", f"{local_rank} of engine {number}", rule, "count a node's engines from 0")
    return Packing(layout, tuple(engines), tuple(local_ranks))


def _local_ranks(engines: Sequence[Placement]) -> tuple[int, ...]:
    """Each engine's index among those whose first rank is on the same node."""
    seen: Counter[str] = Counter()
    found = []
    for engine in engines:
        found.append(seen[engine.slots[0].node])
        seen[engine.slots[0].node] += 1
    return tuple(found)


def _replica(layout: Layout) -> Layout:
    return Layout(layout.pp, 1, layout.pcp, layout.tp)


def _check(nodes: list[Node], cluster: Cluster, layout: Layout, strategy: str, local: int | None) -> None:
    """Rules that don't depend on how many devices there are."""
    if strategy not in STRATEGIES:
        raise ConfigError(STRATEGY, strategy, "is unknown", f"choose one of {', '.join(STRATEGIES)}")
    if local is not None and not (strategy == "strict") <= local <= layout.dp:
        least = int(strategy == "strict")
        raise ConfigError(LOCAL, local, f"must be {least} to {layout.dp} with {STRATEGY} {strategy}")
    if strategy == "span" and local not in (None, 1):
        raise ConfigError(LOCAL, local, f"with {STRATEGY} span no engine is on one node", "leave it out")
    if strategy == "strict" and local is not None and layout.dp % local:
        raise ConfigError(
            LOCAL, local, f"{layout.dp} engines don't divide into nodes of exactly {local}",
            f"give a number that divides {layout.dp}, or use {STRATEGY} fill",
        )  # fmt: skip
    for node in nodes:
        if len(node.addresses) != 1:
            rule = f"has several addresses ({', '.join(node.addresses)})" if node.addresses else "has no address"
            raise ConfigError("cluster", f"node {node.id}", rule, "give the one by which other nodes reach it")
    if not cluster.num_devices:
        raise Infeasible(f"{layout} needs {devices(layout.size)}, and no node has any", None, layout.size, 0)
    if nodes[0].id != cluster.head:
        raise ConfigError("cluster", f"head {cluster.head or repr('')}", "is not among the nodes", "name one of them")


def _within(nodes: list[Node], layout: Layout, strategy: str, local: int | None) -> Packing:
    """Engines that lie within a node."""
    replica = _replica(layout)
    room = [len(node.devices) // replica.size for node in nodes]
    if local is not None and room[0] < local:
        raise head_too_small(nodes, layout, strategy, local, room[0])
    if local is not None:
        share = local
    else:
        share = _even_share(room, layout.dp) if strategy == "strict" else min(room[0], layout.dp)
    shares, skipped, left = [], [], layout.dp
    for number, (node, most) in enumerate(zip(nodes, room, strict=True)):
        if not left:
            break
        here = share if strategy == "strict" or number == 0 else most
        if not here and most:
            continue  # nobody asked for one there
        if here > most or not here:
            free = f"{devices(len(node.devices))}, an engine takes {replica.size}"
            skipped.append(f"{node.id} is skipped: room for {most} of {max(here, 1)} engines ({free})")
            continue
        shares.append((node, min(here, left)))
        left -= shares[-1][1]
    if left:
        asked = f"strict, {share} on each node" if strategy == "strict" else f"fill, {share} on the head"
        raise too_few(nodes, layout, strategy, local, layout.dp - left, asked)
    coords = [replica.coords(rank) for rank in range(replica.size)]
    engines: list[Placement] = []
    local_ranks: list[int] = []
    for node, here in shares:
        free_ids = iter([device.id for device in node.devices])
        for local_rank in range(here):
            taken = enumerate(zip(coords, free_ids, strict=False))
            engines.append(Placement(replica, [RankSlot(rank, at, node.id, id) for rank, (at, id) in taken]))
            local_ranks.append(local_rank)
    return Packing(layout, tuple(engines), tuple(local_ranks), strategy, share, tuple(skipped))


def _even_share(room: list[int], engines: int) -> int:
    """Engines on each node, where nobody says: the most that fit on the head, else the most that fit at all; with
    neither, what comes closest."""
    shares = [share for share in range(1, min(engines, max(room)) + 1) if engines % share == 0] or [1]
    fit = [share for share in shares if sum(most >= share for most in room) * share >= engines]
    on_head = [share for share in fit if share <= room[0]]
    return max(on_head or fit, default=max(shares, key=lambda share: sum(most >= share for most in room) * share))


def _span(nodes: list[Node], layout: Layout) -> Packing:
    """Engines that take whole nodes."""
    replica = _replica(layout)
    nodes = [node for node in nodes if node.devices]
    each = _nodes_each(nodes, replica)
    if len(nodes) < each * layout.dp:
        asked = f"span, {each} nodes for each engine"
        raise too_few(nodes, layout, "span", None, len(nodes) // each, asked)
    homes = (Cluster(tuple(nodes[i : i + each]), nodes[i].id) for i in range(0, each * layout.dp, each))
    engines = tuple(place(home, replica, span=True) for home in homes)
    return Packing(layout, engines, (0,) * layout.dp, "span", 1)


def _nodes_each(nodes: list[Node], replica: Layout) -> int:
    """Nodes that an engine takes. Raises ConfigError where it can't take whole ones."""
    sizes = sorted({len(node.devices) for node in nodes})
    if len(sizes) > 1:
        raise ConfigError(
            STRATEGY, "span", f"needs nodes with equally many devices, and they have {per_node(nodes)}",
            "use strict or fill, or leave some nodes out",
        )  # fmt: skip
    (size,) = sizes
    if replica.size <= size:
        rule = f"is for engines that one node can't hold; {replica} takes {replica.size} of a node's {size} devices"
        raise ConfigError(STRATEGY, "span", rule, "use strict or fill")
    if replica.size % size:
        raise ConfigError(
            STRATEGY, "span", f"gives an engine whole nodes; {replica} takes {replica.size} devices, a node has {size}",
            f"choose -tp and -pp so that their product is a multiple of {size}",
        )  # fmt: skip
    return replica.size // size


def _beside(nodes: list[Node], layout: Layout, strategy: str, keep: Packing) -> Packing:
    """The engines that are there stay; the missing ones fill what is free: with `strict` nodes that hold fewer than
    each held at first, then any."""
    replica = _replica(layout)
    free = {node.id: dict.fromkeys(device.id for device in node.devices) for node in nodes}
    there = {id: set(ids) for id, ids in free.items()}
    left: dict[int, Placement] = {}
    for number, engine in enumerate(keep.engines[: layout.dp]):
        stay = [s for s in engine.slots if s.device in there.get(s.node, ()) and replica.holds(s.coords)]
        if stay:
            left[number] = engine if stay == list(engine.slots) else Placement(engine.layout, stay)
        for slot in stay:
            del free[slot.node][slot.device]
    engines: dict[int, Placement] = {}
    taken: dict[str, set[int]] = {}  # local ranks by node
    local_ranks = list(keep.local_ranks[: layout.dp]) + [0] * (layout.dp - len(keep.engines))
    for number, engine in left.items():
        engines[number] = _completed(number, engine, replica, free)
        taken.setdefault(engine.slots[0].node, set()).add(local_ranks[number])
    missing = [number for number in range(layout.dp) if number not in engines]
    homes: Iterator[tuple[str, ...]]
    if strategy == "span":
        nodes = [node for node in nodes if node.devices]
        each = _nodes_each(nodes, replica)
        empty = [node.id for node in nodes if len(free[node.id]) == len(node.devices)]
        homes = (tuple(empty[i : i + each]) for i in range(0, len(empty) - each + 1, each))
    else:
        room = {node.id: len(free[node.id]) // replica.size for node in nodes}
        least = keep.local if strategy == "strict" else 0  # first every node holds as many as those there are
        short = {id: min(count, max(0, least - len(taken.get(id, ())))) for id, count in room.items()}
        rest = {id: count - short[id] for id, count in room.items()}
        homes = ((id,) for part in (short, rest) for id, count in part.items() for _ in range(count))
    for number, home in zip(missing, homes, strict=False):
        engines[number] = _completed(number, Placement(replica, ()), replica, free, home)
        on_node = taken.setdefault(home[0], set())
        local_ranks[number] = 0 if strategy == "span" else next(i for i in range(layout.dp) if i not in on_node)
        on_node.add(local_ranks[number])
    if len(engines) < layout.dp:
        found = sum(map(len, free.values()))
        why = (
            f"{layout.dp - len(engines)} of {layout.dp} engines have no place beside those that stay: each takes "
            f"{devices(replica.size)}{' of whole nodes' if strategy == 'span' else ' on one node'}, {found} are free"
        )
        fit = Layout(layout.pp, len(engines), layout.pcp, layout.tp) if engines else None
        raise Infeasible(why, fit, len(missing) * replica.size, found)
    return Packing(
        layout, tuple(engines[n] for n in range(layout.dp)), tuple(local_ranks), strategy, keep.local
    )  # fmt: skip


def _completed(
    number: int, engine: Placement, replica: Layout, free: dict[str, dict[int, None]], home: tuple[str, ...] = ()
) -> Placement:
    """The engine with all its ranks, on its nodes or those of `home`; what it gets is no longer free."""
    if len(engine.slots) == replica.size:
        return engine
    home = home or engine.nodes
    own = {id: [*free[id], *(slot.device for slot in engine.on(id))] for id in home}
    cluster = Cluster(tuple(Node.of(id, ids) for id, ids in own.items()), home[0])
    try:
        whole = place(cluster, replica, keep=engine, span=True)
    except Infeasible:
        lacks = devices(replica.size - len(engine.slots))
        why = f"engine {number} lacks {lacks} on {', '.join(home)}, where its other ranks stay"
        raise Infeasible(why, None, replica.size, cluster.num_devices) from None
    for slot in whole.slots:
        free[slot.node].pop(slot.device, None)
    return whole
