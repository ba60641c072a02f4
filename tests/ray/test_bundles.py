"""Which devices on Ray an engine takes when a rank is lost, or wanted: decided from what Ray says. No Ray here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from planaria.env import RaySettings
from planaria.executor.ray import bundles as module
from planaria.executor.ray import cluster
from planaria.executor.ray.bundles import BundlePool, HeldBundle
from planaria.executor.ray.cluster import Connection, Distrusted
from planaria.executor.ray.groups import PlacedGroup
from planaria.hosts.host import News, Place, Program, Slot
from planaria.hosts.pool import Pool
from planaria.topology import Cluster, Infeasible, LaneGroup, Layout, Node, Placement, RankSlot

TWO = Layout(pp=2)


class Ray:
    """Free devices by node, and which nodes' raylets answer."""

    def __init__(self, **free: int) -> None:
        self.free, self.silent, self.made = free, set[str](), list[str]()
        self.distrusted = Distrusted()

    def snapshot(self, resource: str) -> Cluster:
        return Cluster(tuple(Node.of(id, count) for id, count in self.free.items()), "a")

    def raylet_answers(self, node: str) -> bool:
        return node not in self.silent

    deaf = Connection.deaf


class Actor:
    """In place of one: it comes up where there is a bundle for it."""

    leaving = stopped = False
    said = ""
    code = 0

    def __init__(self, bundles: BundlePool, slot: Slot, rank: int) -> None:
        self.slot, self.rank, self.place, self.ended = slot, rank, Place(-1, "home", slot[0], pid=1), ""
        try:
            self.bundle: Any = bundles.hold(slot)
        except OSError as e:
            self.ended, self.place = str(e), Place(-1, "home", slot[0])

    def tell(self, message: bytes) -> None: ...

    def kill(self) -> None:
        self.ended = self.ended or "was killed"


class Host:
    """As a RayHost, with these in place of actors."""

    def __init__(self, bundles: BundlePool) -> None:
        self.bundles, self.actors = bundles, list[Actor]()

    @property
    def used(self) -> set[Slot]:
        return {actor.slot for actor in self.actors if not actor.ended}

    def slots(self) -> Cluster:
        return self.bundles.cluster(self.used)

    def need(self, processes: int, spares: int) -> None: ...

    def spawn(self, slot: Slot, entry: Program, boot: bytes | None, news: News, *, rank: int = -1) -> Actor:
        self.actors.append(Actor(self.bundles, slot, rank))
        return self.actors[-1]

    def await_starts(self, children: Iterable[Actor], timeout: float) -> None: ...

    def await_ends(self, children: Iterable[Actor], timeout: float) -> list[Actor]:
        return []

    def absent(self) -> list[str]:
        return []

    def close(self) -> None: ...


class Engine:
    """Of ranks in bundles."""

    def __init__(self, ray: Ray, bundles: BundlePool, first: Placement | None, layout: Layout) -> None:
        self.ray, self.bundles, self.host, self.layout = ray, bundles, Host(bundles), layout
        self.pool = Pool(
            self.host, Program(""), lambda: 0.0, lambda child: None, on_each=False,  # type: ignore[arg-type]
            deal=lambda *what: bundles.deal(*what, self.pool.living()),
        )  # fmt: skip
        self.pool.placement = first
        if first is not None:
            self.replace()

    def replace(self, *lost: int, layout: Layout | None = None) -> list[HeldBundle]:
        """Where ranks are now. Raises as Pool."""
        self.pool.end(lost)
        self.bundles.look()
        self.pool.replace((), layout or self.layout)
        return self.there

    @property
    def there(self) -> list[HeldBundle]:
        ranks: Any = self.pool.ranks
        return [actor.bundle for _, actor in sorted(ranks.items())]

    @property
    def nodes(self) -> str:
        return "".join(bundle.node for bundle in self.there)


def group_of(layout: Layout, *nodes: str, owned: bool = True, others: tuple[tuple[int, str], ...] = ()) -> PlacedGroup:
    slots = [RankSlot(rank, layout.coords(rank), node, rank) for rank, node in enumerate(nodes)]
    group = PlacedGroup(object(), list(range(len(nodes))), Placement(layout, slots), owned=False, others=others)
    group.owned = owned
    group.remove = lambda: None  # type: ignore[method-assign]
    return group


def singles(ray: Ray) -> Any:
    """In place of `single_bundle`."""

    def single(resource: str, node: str, name: str) -> PlacedGroup | None:
        def remove() -> None:
            ray.free[node] += 1

        if not ray.free[node]:
            return None
        ray.free[node] -= 1
        ray.made.append(name)
        group = group_of(Layout(), node)
        group.remove = remove  # type: ignore[method-assign]
        return group

    return single


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(ray: Ray, first: PlacedGroup) -> Engine:
        monkeypatch.setattr(module, "obtain", lambda *args: first)
        monkeypatch.setattr(module, "single_bundle", singles(ray))
        bundles = BundlePool(ray, "S", RaySettings(), "x")  # type: ignore[arg-type]
        layout = first.placement.layout
        return Engine(ray, bundles, bundles.obtain(None, layout), layout)

    return make


def test_a_lost_ranks_own_place_comes_first_then_a_device_that_is_free(make: Any) -> None:
    ray = Ray(a=0, b=0, c=1)
    engine = make(ray, group_of(TWO, "a", "b"))
    first, second = engine.there
    assert engine.replace(1) == [first, second]
    ray.free.pop("b")  # Ray has given up the node
    found = engine.replace(1)
    assert found[0] == first and found[1].node == "c" and found[1].group is not first.group and ray.made == ["x-1"]


def test_a_node_whose_raylet_is_gone_is_passed_over_before_ray_knows(make: Any) -> None:
    ray = Ray(a=0, b=0, c=1)
    engine = make(ray, group_of(TWO, "a", "b"))
    ray.silent.add("b")
    engine.replace(1)
    assert engine.nodes == "ac"
    with pytest.raises(Infeasible) as e:
        engine.replace(1, layout=Layout(pp=3))
    assert e.value.nearest == TWO


def test_what_did_not_come_up_is_not_tried_again_at_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(a=0, b=0)
    engine = make(ray, group_of(TWO, "a", "b"))
    second = engine.there[1]
    ray.distrusted.add(["b"])
    with pytest.raises(Infeasible):
        engine.replace(1)
    now = cluster.time.monotonic() + cluster.DISTRUST
    monkeypatch.setattr(cluster.time, "monotonic", lambda: now)
    assert engine.replace()[1] == second


def test_who_lives_on_a_node_that_is_not_trusted_stays(make: Any) -> None:
    ray = Ray(a=0, b=0, c=2)
    engine = make(ray, group_of(Layout(pp=3), "a", "b", "b"))
    ray.distrusted.add(["b"])
    engine.replace(2)
    assert engine.nodes == "abc"


def test_devices_that_somebody_else_took_are_not_waited_for(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(a=0, c=1)
    engine = make(ray, group_of(Layout(), "a"))
    monkeypatch.setattr(module, "single_bundle", lambda *args: None)
    with pytest.raises(Infeasible) as e:
        engine.replace(layout=TWO)
    assert e.value.nearest == Layout() and engine.nodes == "a"


def test_what_was_taken_is_not_counted_as_free_before_ray_says_so(make: Any) -> None:
    ray = Ray(a=0, b=2)
    engine = make(ray, group_of(Layout(), "a"))
    engine.replace(layout=TWO)
    assert engine.nodes == "ab"
    assert [len(node.devices) for node in engine.host.slots().nodes] == [1, 2]


@pytest.mark.row("R4")
def test_of_a_users_group_only_its_spare_bundles_are_used(make: Any) -> None:
    ray = Ray(a=4, b=4)
    engine = make(ray, group_of(TWO, "a", "b", owned=False, others=((5, "b"),)))
    first, second = engine.there
    engine.pool.give_up([1])
    assert engine.replace(1) == [first, HeldBundle("b", first.group, 5)] and not ray.made
    with pytest.raises(Infeasible):
        engine.replace(layout=Layout(pp=3))
    engine.pool.bad.clear()
    engine.bundles.trim(engine.host.used)
    assert engine.replace(1) in ([first, second], [first, HeldBundle("b", first.group, 5)]), "it is never given back"


def test_a_tensor_group_stays_together_and_what_was_added_is_given_back(make: Any) -> None:
    layout = Layout(pp=2, tp=2)
    ray = Ray(a=0, b=1, c=2)
    engine = make(ray, group_of(layout, "a", "a", "b", "b"))
    first = engine.there[0].group
    engine.pool.give_up([2, 3])
    engine.replace(2, 3)
    assert engine.nodes == "aacc", "b has one"
    engine.bundles.trim(engine.host.used)
    assert {bundle.node for bundle in engine.there if bundle.group is not first} == {"c"}
    engine.pool.bad.clear()
    engine.pool.end([2, 3])
    engine.bundles.trim(engine.host.used)
    assert engine.bundles.groups == [first] and ray.free["c"] == 2


def lent(
    monkeypatch: pytest.MonkeyPatch, ray: Ray, **nodes: tuple[str, ...]
) -> tuple[BundlePool, dict[str, LaneGroup]]:
    """Groups by name, with a bundle on each of these nodes, and who may be lent them."""

    def lane_group(lane: LaneGroup, layout: Layout, *_: object) -> PlacedGroup:
        group = group_of(layout, *nodes[lane.id], owned=False)
        group.lent = lane.made
        return group

    monkeypatch.setattr(module, "lane_group", lane_group)
    monkeypatch.setattr(module, "single_bundle", singles(ray))
    lanes = {name: LaneGroup(name, tuple(range(len(homes)))) for name, homes in nodes.items()}
    return BundlePool(ray, "S", RaySettings(), "x"), lanes  # type: ignore[arg-type]


def test_lanes_that_are_added_sit_in_the_groups_lent_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the devices that are free on a node before; and in nobody's when they are taken back."""
    ray, one, layout = Ray(a=4, b=0, c=0), Layout(tp=2), Layout(tp=2, dp=2)
    bundles, lanes = lent(monkeypatch, ray, one=("a", "a"), two=("b", "b"), three=("c", "c"))
    engine = Engine(ray, bundles, bundles.obtain_lanes([lanes["one"]], one), one)
    assert [(bundle.node, bundle.number) for bundle in engine.there] == [("a", 0), ("a", 1)]
    bundles.lend([lanes["one"], lanes["two"]], layout)
    both = engine.replace(layout=layout)
    assert [(bundle.node, bundle.number) for bundle in both[2:]] == [("b", 0), ("b", 1)]
    engine.replace(layout=one)
    bundles.lend([lanes["one"]], layout)
    engine.replace(layout=layout)
    assert engine.nodes == "aaaa", "what is left is free on Ray"
    engine.replace(layout=one)
    bundles.trim(engine.host.used)
    bundles.lend([lanes["one"], lanes["two"]], layout)
    assert engine.replace(layout=layout) == both


def test_lanes_without_a_place_are_fewer_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a group that is the user's is all there is."""
    layout = Layout(dp=2)
    for made, more in ((True, 1), (False, 0)):
        ray = Ray(a=0, b=1)
        bundles, lanes = lent(monkeypatch, ray, one=("a",))
        with pytest.raises(Infeasible) as e:
            bundles.obtain_lanes([msgspec.structs.replace(lanes["one"], made=made)], layout)
        assert e.value.why == "1 of 2 lanes have no place" and e.value.nearest == Layout()
        engine = Engine(ray, bundles, None, Layout())
        assert engine.replace()[0].group is bundles.groups[0] and engine.nodes == "a"
        if more:
            assert engine.replace(layout=layout)[1].node == "b"
        else:
            with pytest.raises(Infeasible):
                engine.replace(layout=layout)


def test_a_seat_in_which_nobody_came_up_is_free_again(make: Any) -> None:
    """And the one device there is is asked for once."""
    ray = Ray(a=1)
    engine = make(ray, group_of(TWO, "a", "a"))
    engine.pool.num_spares = 1
    for _ in range(3):
        engine.bundles.look()
        engine.pool.stand_by(lambda place: b"")
        (spare,) = engine.pool.spares
        spare.ended = "did not come up"
        engine.pool.stand_by(lambda place: b"")
        assert not engine.pool.spares
        engine.pool._reserve.clear()  # time goes by
    assert ray.made == ["x-1"] and ray.free == {"a": 0}
