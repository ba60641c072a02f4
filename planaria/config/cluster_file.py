"""A cluster as a file: {"nodes": [{"id", "address", "devices": [{"index", "kind", "memory"}]}]}.

The head is the node with `"head": true`, else the one with the smallest id in natural order (node2 before node10).
`kind` and `memory` (bytes, or text like "80GiB") may be left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from planaria.config.json_option import UNREADABLE
from planaria.config.sizes import parse_bytes
from planaria.errors import ConfigError
from planaria.topology import Cluster, Device, Node
from planaria.topology.cluster import natural

_FORM = 'write {"nodes": [{"id": "node0", "address": "10.0.0.1", "devices": [{"index": 0}]}]}'

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Device(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    index: _Count
    kind: str = ""
    memory: _Count | str = 0


class _Node(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    id: Annotated[str, msgspec.Meta(min_length=1)]
    devices: list[_Device]
    address: str | list[str] = ""
    head: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    nodes: list[_Node]


def read_cluster(path: Path) -> Cluster:
    """Raises ConfigError that names the field."""
    try:
        return cluster_from(path.read_bytes(), str(path))
    except OSError as e:
        raise ConfigError("--cluster", path, f"can't be read: {e.strerror}") from None


def cluster_from(data: bytes, name: str) -> Cluster:
    """name: of the file, for errors. Raises ConfigError."""
    try:
        nodes = msgspec.json.decode(data, type=_File).nodes
    except msgspec.ValidationError as e:
        raise ConfigError("--cluster", name, str(e).replace("`$.", "`").replace("`$`", "the file"), _FORM) from None
    except UNREADABLE as e:
        raise ConfigError("--cluster", name, f"is not JSON: {e}", _FORM) from None
    _once("id", [(node.id, f"nodes[{i}]") for i, node in enumerate(nodes)], name)
    heads = [node.id for node in nodes if node.head]
    if len(heads) > 1:
        raise ConfigError("--cluster", name, f"`head` is true in {' and '.join(heads)}", "mark one node")
    return Cluster(
        tuple(_node(node, f"nodes[{i}]", name) for i, node in enumerate(nodes)),
        heads[0] if heads else min((node.id for node in nodes), key=natural, default=""),
    )


def _node(node: _Node, at: str, name: str) -> Node:
    _once("index", [(device.index, f"{at}.devices[{i}]") for i, device in enumerate(node.devices)], name)
    addresses = [node.address] if isinstance(node.address, str) else node.address
    return Node(
        node.id,
        tuple(
            Device(device.index, device.kind, _memory(device.memory, f"{at}.devices[{i}]", name))
            for i, device in enumerate(node.devices)
        ),
        tuple(address for address in addresses if address),
    )


def _memory(given: int | str, at: str, name: str) -> int:
    if isinstance(given, int):
        return given
    try:
        return parse_bytes(given, "")
    except ConfigError as e:
        raise ConfigError("--cluster", name, f"`{at}.memory` {given!r} {e.rule}", e.fix) from None


def _once(field: str, found: list[tuple[str, str]] | list[tuple[int, str]], name: str) -> None:
    seen: dict[object, str] = {}
    for value, at in found:
        if value in seen:
            rule = f"`{at}.{field}` is {value!r}, which `{seen[value]}.{field}` is too"
            raise ConfigError("--cluster", name, rule, f"each {field} once")
        seen[value] = at
