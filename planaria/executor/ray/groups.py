"""Placement groups: use the one given, the enclosing one, or make one. Where each rank goes is `place()`'s decision."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from planaria.env import RaySettings
from planaria.errors import CapacityError, ConfigError
from planaria.executor.patience import FIRST, Patience
from planaria.executor.ray.cluster import HINT, Connection
from planaria.topology import (
    Bundle,
    Infeasible,
    LaneGroup,
    Layout,
    Placement,
    RankSlot,
    cluster_of_bundles,
    place,
    place_at,
    shrink,
)

logger = logging.getLogger("planaria.ray")

LOOK = 1.0  # seconds between looks at a cluster that is too small
NODE_LABEL = "ray.io/node-id"


class PlacedGroup:
    """A placement group and where in it each rank goes: rank i in bundle `bundles[i]` on node `nodes[i]`. owned: made
    here, and removed here; lent: made for the engine by somebody else; neither: the user's. others: of its bundles with
    a device and their nodes, those that no rank goes to."""

    added = False  # of one bundle, beside those that the engine began with

    def __init__(
        self, handle: Any, bundles: list[int], placement: Placement, owned: bool,
        others: Sequence[tuple[int, str]] = (), lent: bool = False,
    ) -> None:  # fmt: skip
        self.handle, self.bundles, self.placement, self.owned, self.lent = handle, bundles, placement, owned, lent
        self.others = tuple(others)

    def remove(self) -> None:
        """Only what was created here. Idempotent."""
        if self.owned:
            self.owned = False
            from ray.util import remove_placement_group

            remove_placement_group(self.handle)


def obtain(
    connection: Connection, given: str | None, layout: Layout, resource: str, settings: RaySettings, name: str
) -> PlacedGroup:
    """given: name or hexadecimal id of the user's group. Raises ConfigError for a rule broken, CapacityError when the
    cluster stays too small."""
    from ray.util import get_current_placement_group

    handle = find_group(given) if given is not None else get_current_placement_group()
    if handle is not None:
        return _reuse(connection, handle, given or "the enclosing one", layout, resource, settings)
    if settings.bundle_indices is not None:
        indices = ",".join(map(str, settings.bundle_indices))
        rule = "are of a placement group, and none is given"
        raise ConfigError("bundle indices", indices, rule, "add --placement-group, or leave them out")
    return _create(connection, layout, resource, settings, name)


def find_group(given: str) -> Any:
    """The user's group of this name or hexadecimal id. Raises ConfigError."""
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


def check_bundles(bundles: list[Bundle], layout: Layout, resource: str, fraction: float, of: str = "") -> None:
    """Pure. of: which group, where there are several. Raises ConfigError: too few bundles with a device, or one with
    less than a rank asks for."""
    holding = [bundle for bundle in bundles if bundle.devices]
    for bundle in holding:
        if bundle.devices < fraction:
            raise ConfigError(
                "placement group", f"{of}bundle {bundle.index}",
                f"reserves {bundle.devices:g} x {resource}, a rank asks for {fraction:g}",
                "reserve a whole device, or lower $PLANARIA_RAY_FRACTION",
            )  # fmt: skip
    if len(holding) < layout.size:
        raise ConfigError(
            "placement group", f"{of}{len(bundles)} bundles",
            f"{len(holding)} of them hold a device ({resource}), {layout} needs {layout.size}",
            "give a larger group, or lower --tensor-parallel-size or --pipeline-parallel-size",
        )  # fmt: skip


def _reuse(
    connection: Connection, handle: Any, called: str, layout: Layout, resource: str, settings: RaySettings
) -> PlacedGroup:
    bundles = bundles_of(table_of(handle, called, layout, resource, settings.wait), resource)
    if settings.bundle_indices is not None:
        placement = place_at(bundles, layout, settings.bundle_indices)
    else:
        cluster = cluster_of_bundles(bundles, head=connection.node)
        check_bundles(bundles, layout, resource, settings.fraction)
        placement = place(cluster, layout, span=True, driver_inside=settings.driver_inside)
    return _in_bundles(handle, bundles, placement)


def lane_group(lane: LaneGroup, layout: Layout, resource: str, settings: RaySettings) -> PlacedGroup:
    """layout: of one lane. Raises ConfigError for a rule broken, CapacityError when it stays without its nodes."""
    handle = find_group(lane.id)
    bundles = bundles_of(table_of(handle, lane.id, layout, resource, settings.wait), resource)
    check_bundles(bundles, layout, resource, settings.fraction)
    placement = place_at(bundles, layout, lane.bundles[: layout.size])
    return _in_bundles(handle, bundles, placement, lent=lane.made)


def _in_bundles(handle: Any, bundles: Sequence[Bundle], placement: Placement, *, lent: bool = False) -> PlacedGroup:
    used = [slot.device for slot in placement.slots]
    others = [(bundle.index, bundle.node) for bundle in bundles if bundle.devices and bundle.index not in used]
    return PlacedGroup(handle, used, placement, owned=False, others=others, lent=lent)


def table_of(handle: Any, called: str, layout: Layout, resource: str, wait: float) -> dict[str, Any]:
    """Ray's table of a user's group, once its bundles have their nodes. Raises ConfigError for one that is gone,
    CapacityError."""
    from ray.util import placement_group_table

    def created() -> dict[str, Any] | str:
        table: dict[str, Any] = placement_group_table(handle)
        state = table.get("state", "REMOVED")
        if state == "REMOVED":
            raise ConfigError("--placement-group", called, "is not in this cluster", "make one, or leave it out")
        return table if state == "CREATED" else f"it is {state.lower()}: the cluster has no room for its bundles"

    table: dict[str, Any] | str = _wait(f"placement group {called}", created, wait)
    if isinstance(table, str):
        raise too_small(layout, resource, layout.size, 0, table, wait)
    return table


def bundles_of(table: dict[str, Any], resource: str) -> list[Bundle]:
    """All of them, with their devices."""
    return [
        Bundle(index, table["bundles_to_node_id"][index], wants.get(resource, 0.0))
        for index, wants in sorted(table["bundles"].items())
    ]


def _create(connection: Connection, layout: Layout, resource: str, settings: RaySettings, name: str) -> PlacedGroup:
    from ray.util import placement_group, remove_placement_group

    inside = settings.driver_inside
    demand: list[Any] = []  # a group without nodes, so that an autoscaler sees what is wanted

    def placed() -> PlacedGroup | str:
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
        group = _pinned(placement, resource, name)
        return group if group is not None else "devices that were free a moment ago are taken"

    def _drop(demand: list[Any]) -> None:
        while demand:
            remove_placement_group(demand.pop())

    began = time.monotonic()
    try:
        group: PlacedGroup | str = _wait(f"{layout.size} x {resource} on Ray", placed, settings.wait)
    finally:
        _drop(demand)
    if isinstance(group, str):
        found = connection.snapshot(resource).num_devices
        raise too_small(layout, resource, layout.size, found, group, time.monotonic() - began)
    return group


def on_nodes(bundles: Sequence[tuple[dict[str, float], str]], name: str) -> Any:
    """Ask for a group: what each bundle reserves, and on which node. It may have to be waited for."""
    from ray.util import placement_group

    return placement_group(
        [wants for wants, _ in bundles], strategy="PACK", name=name,
        bundle_label_selector=[{NODE_LABEL: node} for _, node in bundles],
    )  # fmt: skip


def _pinned(placement: Placement, resource: str, name: str) -> PlacedGroup | None:
    """A group with a bundle for each rank on the node that was decided; None if there is no room for it any more."""
    from ray.util import remove_placement_group

    handle = on_nodes([({resource: 1.0}, slot.node) for slot in placement.slots], name)
    if handle.wait(LOOK):
        return PlacedGroup(handle, list(range(placement.layout.size)), placement, owned=True)
    remove_placement_group(handle)
    return None


def single_bundle(resource: str, node: str, name: str) -> PlacedGroup | None:
    """A group of one bundle on this node; None if it has no room any more."""
    one = Layout()
    return _pinned(Placement(one, [RankSlot(0, one.coords(0), node, 0)]), resource, name)


def _wait(what: str, look: Callable[[], Any], limit: float) -> Any:
    """What `look` gives once that isn't text (why not yet); the last text at the limit."""
    patience, pause = Patience(logger.warning, limit, FIRST), 0.05
    while isinstance(found := look(), str) and not patience.over:
        patience.tell(f"waiting for {what}: {found}; {HINT}")
        time.sleep(min(pause, max(0.0, limit - patience.waited)))
        pause = min(LOOK, 2 * pause)
    return found


def too_small(layout: Layout, resource: str, needed: int, found: int, why: str, elapsed: float) -> CapacityError:
    """The error that ends a wait in vain."""
    fix = "add nodes" if needed == 1 else "add nodes, or lower --tensor-parallel-size or --pipeline-parallel-size"
    what = f"{layout} needs {needed} x {resource} on Ray, {found} are available after {elapsed:.0f} s"
    return CapacityError(f"{what}: {why}; {fix}; {HINT}")
