"""Placement groups: use the one given, the enclosing one, or make one. Where each rank goes is `place()`'s decision."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from planaria.env import RaySettings
from planaria.errors import ConfigError
from planaria.executor.ray.cluster import Connection
from planaria.executor.ray.waiting import Waiting, too_small
from planaria.topology import (
    Bundle,
    Infeasible,
    Layout,
    Placement,
    cluster_of_bundles,
    place,
    place_at,
    shrink,
)

logger = logging.getLogger("planaria.ray")

LOOK = 1.0  # seconds between looks at a cluster that is too small
NODE_LABEL = "ray.io/node-id"


class Group:
    """A placement group and where in it each rank goes: rank i in bundle `bundles[i]` on node `nodes[i]`."""

    def __init__(self, handle: Any, bundles: list[int], placement: Placement, owned: bool) -> None:
        self.handle, self.bundles, self.placement, self.owned = handle, bundles, placement, owned

    def remove(self) -> None:
        """Only what was created here. Idempotent."""
        if self.owned:
            self.owned = False
            from ray.util import remove_placement_group

            remove_placement_group(self.handle)


def obtain(
    connection: Connection, given: str | None, layout: Layout, resource: str, settings: RaySettings, name: str
) -> Group:
    """given: name or hexadecimal id of the user's group. Raises ConfigError for a rule broken, CapacityError when the
    cluster stays too small."""
    from ray.util import get_current_placement_group

    handle = _find(given) if given is not None else get_current_placement_group()
    if handle is not None:
        return _reuse(connection, handle, given or "the enclosing one", layout, resource, settings)
    if settings.bundle_indices is not None:
        indices = ",".join(map(str, settings.bundle_indices))
        rule = "are of a placement group, and none is given"
        raise ConfigError("bundle indices", indices, rule, "add --placement-group, or leave them out")
    return _create(connection, layout, resource, settings, name)


def _find(given: str) -> Any:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, get_placement_group

    if re.fullmatch(r"[0-9a-f]{36}", given):
        return PlacementGroup(PlacementGroupID(bytes.fromhex(given)))
    try:
        return get_placement_group(given)
    except ValueError:
        raise ConfigError(
            "--placement-group", given, "there is none of this name in the namespace",
            "give its id (`pg.id.hex()`), which any namespace sees",
        ) from None  # fmt: skip


def check_bundles(bundles: list[Bundle], layout: Layout, resource: str, fraction: float) -> None:
    """Pure. Raises ConfigError: too few bundles with a device, or one with less than a rank asks for."""
    holding = [bundle for bundle in bundles if bundle.devices]
    for bundle in holding:
        if bundle.devices < fraction:
            raise ConfigError(
                "placement group", f"bundle {bundle.index}",
                f"reserves {bundle.devices:g} x {resource}, a rank asks for {fraction:g}",
                "reserve a whole device, or lower $PLANARIA_RAY_FRACTION",
            )  # fmt: skip
    if len(holding) < layout.size:
        raise ConfigError(
            "placement group", f"{len(bundles)} bundles",
            f"{len(holding)} of them hold a device ({resource}), {layout} needs {layout.size}",
            "give a larger group, or lower --tensor-parallel-size or --pipeline-parallel-size",
        )  # fmt: skip


def _reuse(
    connection: Connection, handle: Any, called: str, layout: Layout, resource: str, settings: RaySettings
) -> Group:
    from ray.util import placement_group_table

    def created() -> dict[str, Any] | str:
        table: dict[str, Any] = placement_group_table(handle)
        state = table.get("state", "REMOVED")
        if state == "REMOVED":
            raise ConfigError("--placement-group", called, "is not in this cluster", "make one, or leave it out")
        return table if state == "CREATED" else f"it is {state.lower()}: the cluster has no room for its bundles"

    table = _wait(f"placement group {called}", created, settings.wait)
    if isinstance(table, str):
        raise too_small(layout, resource, layout.size, 0, table, settings.wait)
    bundles = [
        Bundle(index, table["bundles_to_node_id"][index], wants.get(resource, 0.0))
        for index, wants in sorted(table["bundles"].items())
    ]
    if settings.bundle_indices is not None:
        placement = place_at(bundles, layout, settings.bundle_indices)
    else:
        cluster = cluster_of_bundles(bundles, head=connection.node)
        check_bundles(bundles, layout, resource, settings.fraction)
        placement = place(cluster, layout, span=True, driver_inside=settings.driver_inside)
    return Group(handle, [slot.device for slot in placement.slots], placement, owned=False)


def _create(connection: Connection, layout: Layout, resource: str, settings: RaySettings, name: str) -> Group:
    from ray.util import placement_group, remove_placement_group

    inside = settings.driver_inside
    demand: list[Any] = []  # a group without nodes, so that an autoscaler sees what is wanted

    def placed() -> Group | str:
        try:
            placement = place(connection.snapshot(resource), layout, span=True, driver_inside=inside)
        except Infeasible as now:
            everything = connection.snapshot(resource, free=False)
            try:
                place(everything, layout, span=True, driver_inside=inside)
            except Infeasible:
                if connection.started or (inside and shrink(everything, layout, span=True) == layout):
                    raise  # no node that is added would help
                if not demand:
                    demand.append(placement_group([{resource: 1.0}] * layout.size, strategy="PACK"))
                elif demand[0].wait(0):
                    _drop(demand)
            else:
                _drop(demand)  # it may be what holds the devices
            return f"{now} (free ones; {everything.num_devices} in all)"
        _drop(demand)
        handle = placement_group(
            [{resource: 1.0}] * layout.size, strategy="PACK", name=name,
            bundle_label_selector=[{NODE_LABEL: slot.node} for slot in placement.slots],
        )  # fmt: skip
        if handle.wait(LOOK):
            return Group(handle, list(range(layout.size)), placement, owned=True)
        remove_placement_group(handle)
        return "devices that were free a moment ago are taken"

    def _drop(demand: list[Any]) -> None:
        while demand:
            remove_placement_group(demand.pop())

    began = time.monotonic()
    try:
        group: Group | str = _wait(f"{layout.size} x {resource} on Ray", placed, settings.wait)
    finally:
        _drop(demand)
    if isinstance(group, str):
        found = connection.snapshot(resource).num_devices
        raise too_small(layout, resource, layout.size, found, group, time.monotonic() - began)
    return group


def _wait(what: str, look: Callable[[], Any], limit: float) -> Any:
    """What `look` gives once that isn't text (why not yet); the last text at the limit."""
    waiting, began = Waiting(what, limit), time.monotonic()
    pause = 0.05
    while isinstance(found := look(), str):
        elapsed = time.monotonic() - began
        if waiting.over(elapsed):
            break
        for line in waiting.lines(elapsed, found):
            logger.warning("%s", line)
        time.sleep(min(pause, max(0.0, limit - elapsed)))
        pause = min(LOOK, 2 * pause)
    return found
