"""Which devices on Ray an engine takes when a rank is lost, or wanted: decided from what Ray says. No Ray here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from planaria.env import RaySettings
from planaria.executor.ray import bundles as module
from planaria.executor.ray.bundles import BundlePool, HeldBundle
from planaria.executor.ray.groups import PlacedGroup
from planaria.executor.ray.members import Member, Missing
from planaria.executor.ray.spares import Spares
from planaria.topology import Cluster, Infeasible, LaneGroup, Layout, Node, Placement, Slot

TWO = Layout(pp=2)


class Ray:
    """Free devices by node, and which nodes' raylets answer."""

    def __init__(self, **free: int) -> None:
        self.free, self.deaf, self.made = free, set[str](), list[str]()

    def snapshot(self, resource: str) -> Cluster:
        return Cluster(tuple(Node.of(id, count) for id, count in self.free.items()), "a")

    def raylet_answers(self, node: str) -> bool:
        return node not in self.deaf


def group_of(layout: Layout, *nodes: str, owned: bool = True, others: tuple[tuple[int, str], ...] = ()) -> PlacedGroup:
    slots = [Slot(rank, layout.coords(rank), node, rank) for rank, node in enumerate(nodes)]
    group = PlacedGroup(object(), list(range(len(nodes))), Placement(layout, slots), owned=False, others=others)
    group.owned = owned
    group.remove = lambda: None  # type: ignore[method-assign]
    return group


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(ray: Ray, first: PlacedGroup) -> tuple[BundlePool, list[HeldBundle]]:
        def single(node: str) -> PlacedGroup:
            def remove() -> None:
                ray.free[node] += 1

            ray.free[node] -= 1
            group = group_of(Layout(), node)
            group.remove = remove  # type: ignore[method-assign]
            return group

        def bundles(resource: str, nodes: list[str], names: list[str]) -> list[PlacedGroup] | None:
            if any(ray.free[node] < nodes.count(node) for node in nodes):
                return None
            ray.made += names
            return [single(node) for node in nodes]

        monkeypatch.setattr(module, "obtain", lambda *args: first)
        monkeypatch.setattr(module, "single_bundles", bundles)
        bundles: Any = BundlePool(ray, "S", RaySettings(), "x")  # type: ignore[arg-type]
        return bundles, bundles.obtain(None, first.placement.layout)

    return make


def test_a_lost_ranks_own_place_comes_first_then_a_device_that_is_free(make: Any) -> None:
    ray = Ray(a=0, b=0, c=1)
    bundles, (first, second) = make(ray, group_of(TWO, "a", "b"))
    bundles.back([second])
    assert bundles.find(TWO, {0: first}) == {1: second}
    bundles.back([second])
    ray.free.pop("b")  # Ray has given up the node
    found = bundles.find(TWO, {0: first})
    assert found[1].node == "c" and found[1].group is not first.group and ray.made == ["x-1"]


def test_a_node_whose_raylet_is_gone_is_passed_over_before_ray_knows(make: Any) -> None:
    ray = Ray(a=0, b=0, c=1)
    bundles, (first, second) = make(ray, group_of(TWO, "a", "b"))
    ray.deaf.add("b")
    bundles.back([second])
    assert bundles.find(TWO, {0: first})[1].node == "c"
    ray.free["c"] = 0
    with pytest.raises(Infeasible) as e:
        bundles.find(Layout(pp=3), {0: first})
    assert e.value.nearest == Layout()


def test_what_did_not_come_up_is_not_tried_again_at_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(a=0, b=0)
    bundles, (first, second) = make(ray, group_of(TWO, "a", "b"))
    bundles.distrust({"b"})
    bundles.back([second])
    with pytest.raises(Infeasible):
        bundles.find(TWO, {0: first})
    now = module.time.monotonic() + module.DISTRUST
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    assert bundles.find(TWO, {0: first}) == {1: second}


def test_devices_that_somebody_else_took_are_not_waited_for(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(a=0, b=0, c=1)
    bundles, (first, _) = make(ray, group_of(TWO, "a", "b"))
    monkeypatch.setattr(module, "single_bundles", lambda *args: None)
    with pytest.raises(Infeasible) as e:
        bundles.find(TWO, {0: first})
    assert e.value.nearest == Layout()


def test_of_a_users_group_only_its_spare_bundles_are_used(make: Any) -> None:
    ray = Ray(a=4, b=4)
    bundles, (first, second) = make(ray, group_of(TWO, "a", "b", owned=False, others=((5, "b"),)))
    found = bundles.find(TWO, {0: first})
    assert found == {1: HeldBundle("b", first.group, 5)} and not ray.made
    with pytest.raises(Infeasible):
        bundles.find(TWO, {0: first})
    bundles.back([second])
    bundles.trim()
    assert bundles.find(TWO, {0: first}) == {1: second}, "it is never given back"


def test_a_tensor_group_stays_together_and_what_was_added_is_given_back(make: Any) -> None:
    layout = Layout(pp=2, tp=2)
    ray = Ray(a=0, b=1, c=2)
    bundles, held = make(ray, group_of(layout, "a", "a", "b", "b"))
    found = bundles.find(layout, {0: held[0], 1: held[1]})
    assert [bundle.node for bundle in found.values()] == ["c", "c"], "b has one"
    bundles.back(found.values())
    bundles.trim()
    assert bundles.groups == [held[0].group] and ray.free["c"] == 2
    assert bundles.find(layout, {0: held[0], 1: held[1]}, only=3).keys() == {3}


def lent(
    monkeypatch: pytest.MonkeyPatch, ray: Ray, **nodes: tuple[str, ...]
) -> tuple[BundlePool, dict[str, LaneGroup]]:
    """Groups by name, with a bundle on each of these nodes, and who may be lent them."""

    def lane_group(lane: LaneGroup, layout: Layout, *_: object) -> PlacedGroup:
        group = group_of(layout, *nodes[lane.id], owned=False)
        group.lent = lane.made
        return group

    monkeypatch.setattr(module, "lane_group", lane_group)
    monkeypatch.setattr(module, "single_bundles", lambda _, homes, names: [group_of(Layout(), home) for home in homes])
    lanes = {name: LaneGroup(name, tuple(range(len(homes)))) for name, homes in nodes.items()}
    return BundlePool(ray, "S", RaySettings(), "x"), lanes  # type: ignore[arg-type]


def test_lanes_that_are_added_sit_in_the_groups_lent_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the devices that are free on a node before; and in nobody's when they are taken back."""
    ray, layout = Ray(a=4, b=0, c=0), Layout(tp=2, dp=2)
    bundles, lanes = lent(monkeypatch, ray, one=("a", "a"), two=("b", "b"), three=("c", "c"))
    first = bundles.obtain_lanes([lanes["one"]], Layout(tp=2))
    assert [(bundle.node, bundle.number) for bundle in first] == [("a", 0), ("a", 1)]
    held = dict(enumerate(first))
    bundles.lend([lanes["one"], lanes["two"]], layout)
    found = bundles.find(layout, held)
    assert [(rank, bundle.node, bundle.number) for rank, bundle in found.items()] == [(2, "b", 0), (3, "b", 1)]
    bundles.lend([lanes["one"]], layout)
    bundles.back(found.values())
    assert {bundle.node for bundle in bundles.find(layout, held).values()} == {"a"}, "what is left is free on Ray"
    bundles.lend([lanes["one"], lanes["two"]], layout)
    assert bundles.find(layout, held) == found


def test_lanes_without_a_place_are_fewer_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a group that is the user's is all there is."""
    layout = Layout(dp=2)
    for made, more in ((True, 1), (False, 0)):
        bundles, lanes = lent(monkeypatch, Ray(a=0, b=1), one=("a",))
        with pytest.raises(Infeasible) as e:
            bundles.obtain_lanes([msgspec.structs.replace(lanes["one"], made=made)], layout)
        assert e.value.why == "1 of 2 lanes have no place" and e.value.nearest == Layout()
        found = bundles.find(Layout(), {})
        assert found[0].node == "a" and found[0].group is bundles.groups[0]
        if more:
            assert bundles.find(layout, found)[1].node == "b"
        else:
            with pytest.raises(Infeasible):
                bundles.find(layout, found)


class Members:
    """One that can't be made, for whatever reason."""

    instance = "x"
    connection: Any = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def make(self, bundles: list[HeldBundle], names: list[str], limit: float) -> list[Member]:
        raise self.error


@pytest.mark.parametrize("error", [Missing("late", [], []), TimeoutError("late"), RuntimeError("Ray is going")])
def test_a_seat_in_which_nobody_came_up_is_free_again(make: Any, error: Exception) -> None:
    ray = Ray(a=1)
    bundles, first = make(ray, group_of(TWO, "a", "a"))
    spares = Spares(Members(error), bundles, lambda member: None)  # type: ignore[arg-type]
    spares._boot, spares._layout = SimpleNamespace(), TWO  # type: ignore[assignment]
    held = {rank: SimpleNamespace(bundle=bundle) for rank, bundle in enumerate(first)}
    spares._held = held  # type: ignore[assignment]
    for _ in range(3):
        with pytest.raises(type(error)):
            spares._make()
        assert len(bundles._free) == 1 and len(ray.made) == 1, "the one device there is is asked for once"
        bundles._distrusted.clear()
