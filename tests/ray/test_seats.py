"""Which devices on Ray an engine takes when a rank is lost, or wanted: decided from what Ray says. No Ray here."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.env import RaySettings
from planaria.executor.ray import seats as module
from planaria.executor.ray.groups import Group
from planaria.executor.ray.seats import Seat, Seats
from planaria.topology import Cluster, Infeasible, Layout, Node, Placement, Slot

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
