"""A placement for people: the table of ranks, what to know about it, and how it differs from where ranks came up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planaria.topology.cluster import Cluster
from planaria.topology.packing import Packing

_COLUMNS = ("RANK", "DP", "PP", "TP", "NODE", "ADDRESS", "DEVICE", "KIND")
_SHOWN = 8  # of what is named one by one


class TableRow(NamedTuple):
    """A rank of the fleet: coordinates, node, address ("" where unknown), device."""

    rank: int
    dp: int
    pp: int
    tp: int
    node: str
    address: str
    device: int
    kind: str


def rows(packing: Packing, cluster: Cluster, first: int = 0) -> list[TableRow]:
    """first: number of the first engine, of a fleet whose others are elsewhere."""
    before = first * packing.layout.size // packing.layout.dp
    addresses = {node.id: (node.addresses[0] if node.addresses else "") for node in cluster.nodes}
    kinds, none = _kinds(cluster), dict[int, str]()
    return [
        TableRow(before + rank, first + at.dp, at.pp, at.tp, node, addresses.get(node, ""), device,
            kinds.get(node, none).get(device, ""))
        for rank, at, node, device in packing.slots()
    ]  # fmt: skip


def _kinds(cluster: Cluster) -> dict[str, dict[int, str]]:
    return {node.id: {device.id: device.kind for device in node.devices} for node in cluster.nodes}


def lines(table: Iterable[TableRow]) -> list[str]:
    """A header, then a line for each row. Columns that say nothing are left out."""
    columns = list(zip(*table, strict=True))
    if not columns:
        return []
    columns[4] = tuple(map(short, columns[4]))
    texts = [list(map(str, column)) for column in columns]
    shown = [(name, column) for name, column in zip(_COLUMNS, texts, strict=True) if any(column)]
    wide = [max(len(name), *map(len, column)) for name, column in shown]
    right = [name not in ("NODE", "ADDRESS", "KIND") for name, _ in shown]
    form = "  ".join(f"{{:{'>' if r else '<'}{w}}}" for r, w in zip(right, wide, strict=True))
    return [
        form.format(*cells).rstrip()
        for cells in (tuple(name for name, _ in shown), *zip(*(column for _, column in shown), strict=True))
    ]


def short(node: str) -> str:
    """Ray's ids are 56 digits, of which the first tell them apart."""
    return node[:12] if len(node) > 32 else node


def summary(packing: Packing) -> str:
    """One line: `tp=8 dp=4: 32 ranks on 4 nodes, strict, 1 engine on each`."""
    layout, how = packing.layout, ""
    if packing.strategy:
        engines = "1 engine" if packing.local == 1 else f"{packing.local} engines"
        how = f", {packing.strategy}" + {"strict": f", {engines} on each", "fill": f", {engines} on the head"}.get(
            packing.strategy, f", {len(packing.engines[0].nodes)} nodes for each engine"
        )
    ranks, nodes = layout.size, len(packing.nodes)
    return f"{layout}: {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}{how}"


def remarks(packing: Packing, cluster: Cluster) -> list[str]:
    """What works and may surprise: nodes passed over, tensor groups over several nodes, unlike devices in an engine."""
    found = [*packing.skipped[:_SHOWN]]
    if len(packing.skipped) > _SHOWN:
        found.append(f"{len(packing.skipped) - _SHOWN} more nodes are skipped")
    wide = [engine for engine in packing.engines if len({slot.node for slot in engine.slots}) > 1]
    across = [group for engine in wide for group in engine.spanning()]
    if across:
        nodes = ", ".join(short(node) for node in dict.fromkeys(slot.node for slot in across[0]))
        found.append(
            f"{'1 tensor group spans' if len(across) == 1 else f'{len(across)} tensor groups span'} several nodes (the "
            f"first: {nodes}): each layer's sums "
            "cross the network"
        )  # fmt: skip
    kinds = _kinds(cluster)
    if len({kind for each in kinds.values() for kind in each.values()}) > 1:
        engines = [Counter(kinds[slot.node][slot.device] for slot in engine.slots) for engine in packing.engines]
        mixed = [(number, counts) for number, counts in enumerate(engines) if len(counts) > 1]
        for number, counts in mixed[:1]:
            each = ", ".join(f"{count} {kind or 'unknown'}" for kind, count in counts.items())
            more = f" (so have {len(mixed) - 1} more engines)" if len(mixed) > 1 else ""
            why = "the slowest sets the pace, the smallest the KV memory"
            found.append(f"engine {number} has unlike devices, {each}{more}: {why}")
    return found


def said(source: str, packing: Packing, cluster: Cluster, first: int = 0, notes: Iterable[str] = ()) -> str:
    """All of it, as `planaria plan` and `planaria serve` print it."""
    table = lines(rows(packing, cluster, first))
    return "\n".join([f"{source}: {summary(packing)}", *table, *remarks(packing, cluster), *notes])


class CameUp(NamedTuple):
    """Where a rank is. devices: their numbers, none where they have none; bundle: its index in the engine's placement
    group, below 0 where it is in no such one."""

    node: str
    devices: tuple[int, ...] = ()
    bundle: int = -1


def differences(
    planned: Sequence[TableRow], places: Sequence[CameUp], bundles: Sequence[int] = (), *, numbered: bool = True
) -> list[str]:
    """A line for each rank of an engine that is elsewhere than planned; none where it has another layout by now.
    places, bundles: where they are, and in which they were planned, in the order of `planned`; numbered: devices have
    numbers that mean the same."""
    if len(planned) != len(places):
        return []
    found = []
    for row, at, bundle in zip(planned, places, bundles or [at.bundle for at in places], strict=True):
        if at.node != row.node:
            found.append(f"rank {row.rank} was planned on {short(row.node)} and is on {short(at.node)}")
        elif numbered and at.devices and row.device not in at.devices:
            has = ", ".join(map(str, at.devices))
            found.append(f"rank {row.rank} was planned on device {row.device} of {short(row.node)} and has {has}")
        elif at.bundle >= 0 and at.bundle != bundle:
            was = f"bundle {bundle} (device {row.device} of {short(row.node)})"
            found.append(f"rank {row.rank} was planned in {was} and is in bundle {at.bundle}")
    return found
