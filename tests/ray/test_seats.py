"""Which devices on Ray an engine takes when a rank is lost, or wanted: decided from what Ray says. No Ray here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from planaria.env import RaySettings
from planaria.executor.ray import seats as module
from planaria.executor.ray.groups import Group
from planaria.executor.ray.members import Member, Missing
from planaria.executor.ray.recruits import Recruits
from planaria.executor.ray.seats import Seat, Seats
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


def group_of(layout: Layout, *nodes: str, owned: bool = True, others: tuple[tuple[int, str], ...] = ()) -> Group:
    slots = [Slot(rank, layout.coords(rank), node, rank) for rank, node in enumerate(nodes)]
    group = Group(object(), list(range(len(nodes))), Placement(layout, slots), owned=False, others=others)
    group.owned = owned
    group.remove = lambda: None  # type: ignore[method-assign]
    return group


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(ray: Ray, first: Group) -> tuple[Seats, list[Seat]]:
        def single(node: str) -> Group:
            def remove() -> None:
                ray.free[node] += 1

            ray.free[node] -= 1
            group = group_of(Layout(), node)
            group.remove = remove  # type: ignore[method-assign]
            return group

        def bundles(resource: str, nodes: list[str], names: list[str]) -> list[Group] | None:
            if any(ray.free[node] < nodes.count(node) for node in nodes):
                return None
            ray.made += names
            return [single(node) for node in nodes]

        monkeypatch.setattr(module, "obtain", lambda *args: first)
        monkeypatch.setattr(module, "single_bundles", bundles)
        seats: Any = Seats(ray, "S", RaySettings(), "x")  # type: ignore[arg-type]
        return seats, seats.obtain(None, first.placement.layout)

    return make


def test_a_lost_ranks_own_place_comes_first_then_a_device_that_is_free(make: Any) -> None:
    ray = Ray(a=0, b=0, c=1)
    seats, (first, second) = make(ray, group_of(TWO, "a", "b"))
    seats.back([second])
    assert seats.find(TWO, {0: first}) == {1: second}
    seats.back([second])
    ray.free.pop("b")  # Ray has given up the node
    found = seats.find(TWO, {0: first})
    assert found[1].node == "c" and found[1].group is not first.group and ray.made == ["x-1"]


def test_a_node_whose_raylet_is_gone_is_passed_over_before_ray_knows(make: Any) -> None:
    ray = Ray(a=0, b=0, c=1)
    seats, (first, second) = make(ray, group_of(TWO, "a", "b"))
    ray.deaf.add("b")
    seats.back([second])
    assert seats.find(TWO, {0: first})[1].node == "c"
    ray.free["c"] = 0
    with pytest.raises(Infeasible) as e:
        seats.find(Layout(pp=3), {0: first})
    assert e.value.nearest == Layout()


def test_what_did_not_come_up_is_not_tried_again_at_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(a=0, b=0)
    seats, (first, second) = make(ray, group_of(TWO, "a", "b"))
    seats.distrust({"b"})
    seats.back([second])
    with pytest.raises(Infeasible):
        seats.find(TWO, {0: first})
    now = module.time.monotonic() + module.DISTRUST
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    assert seats.find(TWO, {0: first}) == {1: second}


def test_devices_that_somebody_else_took_are_not_waited_for(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(a=0, b=0, c=1)
    seats, (first, _) = make(ray, group_of(TWO, "a", "b"))
    monkeypatch.setattr(module, "single_bundles", lambda *args: None)
    with pytest.raises(Infeasible) as e:
        seats.find(TWO, {0: first})
    assert e.value.nearest == Layout()


def test_of_a_users_group_only_its_spare_bundles_are_used(make: Any) -> None:
    ray = Ray(a=4, b=4)
    seats, (first, second) = make(ray, group_of(TWO, "a", "b", owned=False, others=((5, "b"),)))
    found = seats.find(TWO, {0: first})
    assert found == {1: Seat("b", first.group, 5)} and not ray.made
    with pytest.raises(Infeasible):
        seats.find(TWO, {0: first})
    seats.back([second])
    seats.trim()
    assert seats.find(TWO, {0: first}) == {1: second}, "it is never given back"


def test_a_tensor_group_stays_together_and_what_was_added_is_given_back(make: Any) -> None:
    layout = Layout(pp=2, tp=2)
    ray = Ray(a=0, b=1, c=2)
    seats, held = make(ray, group_of(layout, "a", "a", "b", "b"))
    found = seats.find(layout, {0: held[0], 1: held[1]})
    assert [seat.node for seat in found.values()] == ["c", "c"], "b has one"
    seats.back(found.values())
    seats.trim()
    assert seats.groups == [held[0].group] and ray.free["c"] == 2
    assert seats.find(layout, {0: held[0], 1: held[1]}, only=3).keys() == {3}


def lent(monkeypatch: pytest.MonkeyPatch, ray: Ray, **nodes: tuple[str, ...]) -> tuple[Seats, dict[str, LaneGroup]]:
    """Groups by name, with a bundle on each of these nodes, and who may be lent them."""

    def lane_group(lane: LaneGroup, layout: Layout, *_: object) -> Group:
        group = group_of(layout, *nodes[lane.id], owned=False)
        group.lent = lane.made
        return group

    monkeypatch.setattr(module, "lane_group", lane_group)
    monkeypatch.setattr(module, "single_bundles", lambda _, homes, names: [group_of(Layout(), home) for home in homes])
    lanes = {name: LaneGroup(name, tuple(range(len(homes)))) for name, homes in nodes.items()}
    return Seats(ray, "S", RaySettings(), "x"), lanes  # type: ignore[arg-type]


def test_lanes_that_are_added_sit_in_the_groups_lent_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the devices that are free on a node before; and in nobody's when they are taken back."""
    ray, layout = Ray(a=4, b=0, c=0), Layout(tp=2, dp=2)
    seats, lanes = lent(monkeypatch, ray, one=("a", "a"), two=("b", "b"), three=("c", "c"))
    first = seats.obtain_lanes([lanes["one"]], Layout(tp=2))
    assert [(seat.node, seat.bundle) for seat in first] == [("a", 0), ("a", 1)]
    held = dict(enumerate(first))
    seats.lend([lanes["one"], lanes["two"]], layout)
    found = seats.find(layout, held)
    assert [(rank, seat.node, seat.bundle) for rank, seat in found.items()] == [(2, "b", 0), (3, "b", 1)]
    seats.lend([lanes["one"]], layout)
    seats.back(found.values())
    assert {seat.node for seat in seats.find(layout, held).values()} == {"a"}, "what is left is free on Ray"
    seats.lend([lanes["one"], lanes["two"]], layout)
    assert seats.find(layout, held) == found


def test_lanes_without_a_place_are_fewer_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a group that is the user's is all there is."""
    layout = Layout(dp=2)
    for made, more in ((True, 1), (False, 0)):
        seats, lanes = lent(monkeypatch, Ray(a=0, b=1), one=("a",))
        with pytest.raises(Infeasible) as e:
            seats.obtain_lanes([msgspec.structs.replace(lanes["one"], made=made)], layout)
        assert e.value.why == "1 of 2 lanes have no place" and e.value.nearest == Layout()
        found = seats.find(Layout(), {})
        assert found[0].node == "a" and found[0].group is seats.groups[0]
        if more:
            assert seats.find(layout, found)[1].node == "b"
        else:
            with pytest.raises(Infeasible):
                seats.find(layout, found)


class Members:
    """One that can't be made, for whatever reason."""

    instance = "x"
    connection: Any = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def make(self, seats: list[Seat], names: list[str], limit: float) -> list[Member]:
        raise self.error


@pytest.mark.parametrize("error", [Missing("late", [], []), TimeoutError("late"), RuntimeError("Ray is going")])
def test_a_seat_in_which_nobody_came_up_is_free_again(make: Any, error: Exception) -> None:
    ray = Ray(a=1)
    seats, first = make(ray, group_of(TWO, "a", "a"))
    recruits = Recruits(Members(error), seats, lambda member: None)  # type: ignore[arg-type]
    recruits._boot, recruits._layout = SimpleNamespace(), TWO  # type: ignore[assignment]
    held = {rank: SimpleNamespace(seat=seat) for rank, seat in enumerate(first)}
    recruits._held = held  # type: ignore[assignment]
    for _ in range(3):
        with pytest.raises(type(error)):
            recruits._make()
        assert len(seats._free) == 1 and len(ray.made) == 1, "the one device there is is asked for once"
        seats._distrusted.clear()
