"""The user's placement groups, one for each engine of a fleet (D4). They are read and used, never removed.

Where a rank goes is `pack_groups`' decision. The engine itself sits in a bundle without a device on the node of its
rank 0, if the group has one; else on that node, and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from planaria.env import RaySettings
from planaria.errors import ConfigError
from planaria.executor.ray.groups import bundles_of, check_bundles, find_group, table_of
from planaria.topology import Layout, Packing, pack_groups


class GivenGroups:
    """names: names or hexadecimal ids; the first is engine 0's. local_ranks: each one's index among those of its node;
    None: in their order. Raises ConfigError."""

    def __init__(
        self, names: Sequence[str], resource: str, settings: RaySettings, local_ranks: Sequence[int] | None = None
    ) -> None:
        self.names, self.resource, self.settings, self.local_ranks = names, resource, settings, local_ranks
        self.handles = [find_group(name) for name in names]
        ids = [handle.id.hex() for handle in self.handles]
        for name, id in zip(names, ids, strict=True):
            if ids.count(id) > 1:
                raise ConfigError("--placement-group", name, "is given twice", "give each engine a group of its own")
        self._tables: dict[int, dict[str, Any]] = {}

    def pack(self, layout: Layout, wait: float, known: Container[int] = (), *, head: str) -> Packing:
        """Its engines in the first groups, as their bundles are placed now or within `wait` seconds; known: engines
        that are in theirs. Raises ConfigError, CapacityError."""
        if layout.dp > len(self.handles):
            raise ConfigError(
                "--placement-group", ",".join(self.names),
                f"has {len(self.handles)} groups, one for each engine, and {layout.dp} engines were asked for",
                f"ask for at most {len(self.handles)} engines",
            )  # fmt: skip
        replica, bundles = Layout(layout.pp, 1, layout.pcp, layout.tp), []
        for number, (name, handle) in enumerate(zip(self.names, self.handles, strict=True)):
            if number == layout.dp:
                break
            if number not in known:
                self._tables[number] = table_of(handle, name, replica, self.resource, wait)
            bundles.append(bundles_of(self._tables[number], self.resource))
            check_bundles(bundles[-1], replica, self.resource, self.settings.fraction, f"{name}, ")
        local_ranks = None if self.local_ranks is None else self.local_ranks[: layout.dp]
        return pack_groups(bundles, local_ranks, layout, head=head)

    def seat(self, engine: int, node: str) -> tuple[int, float] | None:
        """A bundle without a device on this node, and its cores; None where there is none."""
        table = self._tables[engine]
        for index, wants in sorted(table["bundles"].items()):
            if table["bundles_to_node_id"][index] == node and not wants.get(self.resource) and wants.get("CPU"):
                return index, wants["CPU"]
        return None
