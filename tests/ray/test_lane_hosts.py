"""Which lanes of an engine have a group, and in which it sits: decided from what there is room for. No Ray here."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config.options import EngineConfig, ParallelConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError
from planaria.executor.ray import lane_hosts as module
from planaria.executor.ray.lane_hosts import LaneHosts
from planaria.topology import Infeasible, LaneGroup
from planaria.topology.table import CameUp


class Places:
    """Room for so many; a lane on a node that is gone is stranded. Groups have ids by which of them they are."""

    given = None

    def __init__(self, room: int) -> None:
        self.room_for, self.made = room, 0
        self.groups: dict[int, Any] = {}
        self.gone: set[int] = set()
        self.up: list[tuple[int, str]] = []

    def grow(self, lanes: Iterable[int]) -> None:
        new = [lane for lane in lanes if lane not in self.groups]
        if len(self.groups) + len(new) > self.room_for:
            raise Infeasible(f"{self.room_for} fit", None, len(new), self.room_for)
        for lane in new:
            self.made += 1
            self.groups[lane] = SimpleNamespace(id=bytes([self.made]))
            self.gone.discard(lane)

    def open(self, size: int) -> None:
        self.grow(range(size))

    def room(self, lane: int) -> bool:
        return len(self.groups) < self.room_for

    def stranded(self, lane: int) -> bool:
        return lane in self.gone or lane not in self.groups

    def let_go(self, lane: int) -> None:
        del self.groups[lane]

    release = let_go

    def bundles(self, lane: int) -> list[int]:
        return [0, 1]

    def spawn(self, lane: int, *what: Any) -> str:
        return f"in lane {lane}"

    def came_up(self, lane: int, node: str) -> None:
        self.up.append((lane, node))

    def differences(self, lane: int, places: list[CameUp]) -> list[str]:
        return [f"lane {lane}: {[at.node for at in places]}"]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "NO_PLACE", 0.0)

    def make(room: int, lanes: int) -> tuple[LaneHosts, Places]:
        config = EngineConfig(
            model=None, checkpoint={}, served_model_name="", scheduler=None, cache=None,  # type: ignore[arg-type]
            device=None, parallel=ParallelConfig(tensor_parallel_size=2, lanes=lanes),  # type: ignore[arg-type]
        )  # fmt: skip
        hosts, places = LaneHosts(config, RaySettings()), Places(room)
        hosts.places = places  # type: ignore[assignment]
        hosts.open(1)
        return hosts, places

    return make


def sits(hosts: LaneHosts) -> Any:
    return hosts.spawn(0, "", {}, 0.0, lambda child: None)


def groups(*made: int) -> tuple[LaneGroup, ...]:
    return tuple(LaneGroup(f"{number:02x}", (0, 1)) for number in made)


def test_a_lane_that_is_added_gets_a_group_before_and_loses_it_after(make: Any) -> None:
    hosts, places = make(3, 2)
    assert hosts.fields_of(0) == {"placement_group": None, "lane_groups": groups(1, 2)}
    assert hosts.lend(3) == groups(1, 2, 3)
    assert hosts.fields_of(0)["lane_groups"] == groups(1, 2), "not before the engine has it"
    hosts.take_back(2)  # it could not have it
    assert sorted(places.groups) == [0, 1]
    assert hosts.lend(3) == groups(1, 2, 4)
    hosts.take_back(3)
    assert hosts.fields_of(0)["lane_groups"] == groups(1, 2, 4)
    with pytest.raises(CapacityError, match="3 fit"):
        hosts.lend(4)
    assert hosts.lend(1) == groups(1) and sorted(places.groups) == [0, 1, 2], "its ranks are still there"
    hosts.take_back(1)
    assert hosts.fields_of(0)["lane_groups"] == groups(1)


def test_another_process_of_the_engine_goes_where_there_are_nodes(make: Any) -> None:
    hosts, places = make(2, 2)
    never = threading.Event()
    hosts.renew(0, never)
    assert places.made == 2, "nothing was lost"
    places.gone = {0}
    assert hosts.stranded(0)
    places.room_for = 1
    hosts.renew(0, never)
    assert hosts.fields_of(0)["lane_groups"] == groups(2) and sits(hosts) == "in lane 1" and not hosts.stranded(0)
    assert hosts.differences(0, [CameUp("a")] * 2) == [], "these are not the lanes that were planned"
    places.room_for = 2
    hosts.renew(0, never)
    assert hosts.fields_of(0)["lane_groups"] == groups(3, 2) and sits(hosts) == "in lane 0"
    hosts.came_up(0, "a")
    assert places.up == [(0, "a")]
    places.gone, places.room_for = {0, 1}, 0
    with pytest.raises(CapacityError, match="0 fit"):
        hosts.renew(0, never)
    assert not hosts.room(0)
    places.room_for = 1
    assert hosts.room(0)
    hosts.release(0)
    assert not places.groups


def test_ranks_are_compared_lane_by_lane(make: Any) -> None:
    hosts, _ = make(2, 2)
    nodes = [CameUp(node) for node in "aabb"]
    assert hosts.differences(0, nodes) == ["lane 0: ['a', 'a']", "lane 1: ['b', 'b']"]
    assert hosts.differences(0, nodes[:3]) == [], "it has another layout"
