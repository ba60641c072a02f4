"""What there is to place ranks on: a snapshot, made by whoever can ask (Ray, node agents), never changed here."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from planaria.errors import ConfigError


class Device(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One place for one rank: an accelerator, a CPU slot, or a placement group's bundle. `id` is unique on its node;
    `memory` in bytes, 0: unknown."""

    id: int
    kind: str = ""
    memory: int = 0


class Node(msgspec.Struct, frozen=True, array_like=True):
    """A machine and its free devices. Its `id` is whatever names it for the launcher; `addresses` those by which other
    nodes reach it, where that matters."""

    id: str
    devices: tuple[Device, ...]
    addresses: tuple[str, ...] = ()

    @classmethod
    def of(cls, id: str, devices: int | Iterable[int], *addresses: str) -> Node:
        """`devices`: how many (ids from 0), or their ids."""
        ids = range(devices) if isinstance(devices, int) else devices
        return cls(id, tuple(Device(i) for i in ids), addresses)


class Cluster(msgspec.Struct, frozen=True, array_like=True):
    """`nodes` in any order; `head` is the driver's node, which need not have devices. Raises ValueError for a node or
    device that is named twice."""

    nodes: tuple[Node, ...]
    head: str = ""

    def __post_init__(self) -> None:
        if len({node.id for node in self.nodes}) < len(self.nodes):
            raise ValueError("a cluster names a node twice")
        for node in self.nodes:
            if len({device.id for device in node.devices}) < len(node.devices):
                raise ValueError(f"node {node.id} names a device twice")

    @property
    def num_devices(self) -> int:
        return sum(len(node.devices) for node in self.nodes)

    def headed_by(self, address: str | None) -> Cluster:
        """The same, the node of this address being the head; None: as it is. Raises ConfigError."""
        having = [node.id for node in self.nodes if address in node.addresses]
        if address is None or self.head in having:
            return self
        if not having:
            there = ", ".join(sorted({each for node in self.nodes for each in node.addresses})[:8]) or "none"
            raise ConfigError(
                "--data-parallel-address", address, "no node of the cluster has it, and it is to come first",
                f"give one of {there}, or leave it out: then the server's node does",
            )  # fmt: skip
        return Cluster(self.nodes, min(having, key=natural))

    def ordered(self) -> list[Node]:
        """The driver's node, then the others by id in natural order (node2 before node10); devices ascending."""
        nodes = sorted(self.nodes, key=lambda node: (node.id != self.head, natural(node.id)))
        return [Node(n.id, tuple(sorted(n.devices, key=lambda device: device.id)), n.addresses) for n in nodes]


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key in which numbers inside a text count as numbers."""
    parts = re.split(r"([0-9]+)", text)
    return (*((1, int(part), "") if i % 2 else (0, 0, part) for i, part in enumerate(parts)), (0, 0, text))


class Bundle(msgspec.Struct, frozen=True, array_like=True):
    """A row of a placement group's table: its index in the group, its node, how many devices it reserves."""

    index: int
    node: str
    devices: float


class LaneGroup(msgspec.Struct, frozen=True, array_like=True):
    """A placement group that holds a lane of an engine, by its id. bundles: of the lane's ranks, in their order; made:
    for it, so that devices beside it are the engine's to take, too; else it is the user's."""

    id: str
    bundles: tuple[int, ...]
    made: bool = True


def cluster_of_bundles(bundles: Iterable[Bundle], *, head: str = "") -> Cluster:
    """Each bundle with a device is one; its id is the bundle's index. Those without are skipped; ConfigError for one
    that reserves more than one."""
    nodes: dict[str, list[Device]] = {}
    for bundle in bundles:
        if bundle.devices > 1:
            raise ConfigError(
                "placement group", f"bundle {bundle.index}", f"reserves {bundle.devices:g} devices, a rank takes one",
                "make one bundle for each device",
            )  # fmt: skip
        if bundle.devices:
            nodes.setdefault(bundle.node, []).append(Device(bundle.index))
    return Cluster(tuple(Node(id, tuple(devices)) for id, devices in nodes.items()), head)
