"""Is everything where it was planned? The plan is whoever's who places: the command line's for this node and those of
the same command, the cluster's hosts' for engines on Ray, an engine's own where it alone has its ranks on Ray.

A difference is said once, and stays in `/admin/fleet` for as long as it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from planaria.topology import Cluster, Device, Node, Packing, Placement, RankSlot
from planaria.topology.table import CameUp, differences, rows, said
from planaria.wire import EngineFacts, Placed

logger = logging.getLogger("planaria.server")


@runtime_checkable
class Plan(Protocol):
    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        """A line for each rank of an engine (and one for itself) that is elsewhere. places: by rank; with a layout
        other than the planned one there is nothing to say."""


class OwnPlan:
    """An engine's own."""

    def __init__(self, engine: int, message: Placed) -> None:
        layout = message.layout
        slots, devices, addresses = list[RankSlot](), dict[str, list[Device]](), dict[str, str]()
        for rank, (node, address, device, _) in enumerate(message.ranks):
            slots.append(RankSlot(rank, layout.coords(rank), node, device))
            devices.setdefault(node, []).append(Device(device))
            addresses[node] = address
        cluster = Cluster(tuple(Node(node, tuple(has), (addresses[node],)) for node, has in devices.items()))
        packing = Packing.of(Placement(layout, slots))
        first = engine * layout.dp  # with lanes it is the only one
        self.text = said(message.source, packing, cluster, first)
        self.rows = rows(packing, cluster, first)
        self.bundles = [bundle for _, _, _, bundle in message.ranks]

    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        """See Plan."""
        # Ray gives out accelerators by itself: a row's number is of those that are free on the node.
        return differences(self.rows, places, self.bundles, numbered=False)


class Check:
    """on_table hears an engine's own table, before its ranks are started for the first time."""

    def __init__(self) -> None:
        self.plan: Plan | None = None  # of the whole fleet
        self.on_table: Callable[[str], None] = lambda text: None
        self.found: dict[int, list[str]] = {}  # by engine
        self._own: dict[int, OwnPlan] = {}
        self._seen: dict[int, EngineFacts] = {}

    def placed(self, engine: int, message: Placed) -> None:
        """It says where its ranks are about to be started."""
        if self.plan is None:
            new = engine not in self._own
            self._own[engine] = OwnPlan(engine, message)
            if new:
                self.on_table(self._own[engine].text)

    def look(self, engine: int, facts: EngineFacts) -> None:
        """It has come up, or its ranks have, anew."""
        plan = self.plan or self._own.get(engine)
        if plan is None or self._seen.get(engine) is facts:
            return
        self._seen[engine] = facts
        found = plan.differences(engine, facts.places)
        for line in found:
            if line not in self.found.get(engine, ()):
                logger.warning("%s", line)
        self.found[engine] = found

    def forget(self, engine: int) -> None:
        """It has left."""
        for known in (self.found, self._own, self._seen):
            known.pop(engine, None)
