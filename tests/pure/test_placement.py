"""Placement: the laws, and for small sizes the same answers as trying everything."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.errors import ConfigError
from planaria.topology import (
    AXES,
    Bundle,
    Cluster,
    Device,
    Infeasible,
    Layout,
    Node,
    Placement,
    RankSlot,
    cluster_of_bundles,
    place,
    place_at,
    shrink,
)

degrees = st.integers(1, 3)
layouts = st.builds(Layout, pp=degrees, dp=st.integers(1, 2), pcp=st.integers(1, 2), tp=degrees)
names = st.sampled_from(["head", "node1", "node2", "node10", "a", "b7", "b70", "c"])


@st.composite
def clusters(draw: st.DrawFn, num_nodes: int = 5, most: int = 6) -> Cluster:
    ids = draw(st.lists(names, unique=True, max_size=num_nodes))
    nodes = [Node.of(id, draw(st.sets(st.integers(0, 9), max_size=most))) for id in ids]
    return Cluster(tuple(nodes), draw(st.sampled_from([*ids, "elsewhere"])))


def attempt(cluster: Cluster, layout: Layout, **options: object) -> Placement | None:
    try:
        return place(cluster, layout, **options)  # type: ignore[arg-type]
    except Infeasible:
        return None


def lone_groups(placement: Placement) -> int:
    return sum(len({slot.node for slot in group}) == 1 for group in placement.group("tp"))


@given(clusters(), layouts, st.booleans(), st.randoms(use_true_random=False))
def test_a_placement_uses_each_device_once_and_depends_on_no_order(cluster, layout, span, random) -> None:
    placement = attempt(cluster, layout, span=span)
    nodes = [Node(n.id, tuple(random.sample(n.devices, len(n.devices)))) for n in cluster.nodes]
    shuffled = Cluster(tuple(random.sample(nodes, len(nodes))), cluster.head)
    assert attempt(shuffled, layout, span=span) == placement
    if placement is None:
        return
    there = {(node.id, device.id) for node in cluster.nodes for device in node.devices}
    used = Counter((slot.node, slot.device) for slot in placement.slots)
    assert set(used) <= there and set(used.values()) == {1}
    assert [slot.rank for slot in placement.slots] == list(range(layout.size))
    assert [slot.coords for slot in placement.slots] == [layout.coords(rank) for rank in range(layout.size)]
    if not span:
        assert not placement.spanning()


@given(clusters(), layouts)
def test_nodes_come_in_order_the_drivers_first(cluster, layout) -> None:
    placement = attempt(cluster, layout)
    if placement is None:
        return
    fits = [node.id for node in cluster.ordered() if len(node.devices) >= layout.tp]
    assert list(placement.nodes) == fits[: len(placement.nodes)]
    for node in placement.nodes:
        devices = [slot.device for slot in placement.on(node)]
        assert (
            devices == sorted(device.id for n in cluster.nodes if n.id == node for device in n.devices)[: len(devices)]
        )


def test_natural_order() -> None:
    cluster = Cluster(tuple(Node.of(id, 1) for id in ("node10", "node9", "b", "node2", "01", "1")), "b")
    assert place(cluster, Layout(pp=6)).nodes == ("b", "01", "1", "node2", "node9", "node10")


@given(layouts, st.sets(st.sampled_from(AXES)))
@pytest.mark.row("P1")
def test_every_axis_partitions_the_world(layout, axes) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
    for group in groups:
        assert list(group) == sorted(group)
        for rank in group:
            assert layout.group(rank, *axes) == group
            assert layout.rank(layout.coords(rank)) == rank
        moved = [axis for axis in AXES if len({getattr(layout.coords(rank), axis) for rank in group}) > 1]
        assert set(moved) <= axes
    assert [layout.coords(rank) for rank in range(layout.size)] == sorted(layout.coords(r) for r in range(layout.size))


@given(clusters(), layouts, layouts, st.booleans(), st.data())
def test_keep_moves_nobody_whose_slot_is_still_there(cluster, before, layout, span, data) -> None:
    old = attempt(cluster, before, span=span)
    if old is None:
        return
    gone = data.draw(st.sets(st.sampled_from([(s.node, s.device) for s in old.slots])))
    left = Cluster(
        tuple(Node(n.id, tuple(d for d in n.devices if (n.id, d.id) not in gone)) for n in cluster.nodes), cluster.head
    )
    new = attempt(left, layout, keep=old, span=span)
    if new is None:
        assert not span or layout.size > left.num_devices
        return
    for slot in old.slots:
        if (slot.node, slot.device) not in gone and layout.holds(slot.coords):
            stays = new.slots[layout.rank(slot.coords)]
            assert (stays.node, stays.device) == (slot.node, slot.device)
    assert len({(s.node, s.device) for s in new.slots}) == layout.size


@given(clusters(), layouts, st.booleans(), names, st.sets(st.integers(0, 9)))
def test_what_fits_fits_on_any_larger_cluster(cluster, layout, span, name, more) -> None:
    nodes = {node.id: {device.id for device in node.devices} for node in cluster.nodes}
    nodes[name] = nodes.get(name, set()) | more
    larger = Cluster(tuple(Node.of(id, devices) for id, devices in nodes.items()), cluster.head)
    if attempt(cluster, layout, span=span) is not None:
        assert attempt(larger, layout, span=span) is not None


small = st.builds(Layout, pp=st.integers(1, 2), tp=st.integers(1, 3)).filter(lambda layout: layout.size <= 4)


@settings(max_examples=2 * settings.default.max_examples)
@given(clusters(num_nodes=3, most=3), small, small, st.booleans(), st.integers(0, 3))
def test_feasible_exactly_when_trying_everything_finds_one(cluster, layout, before, span, lost) -> None:
    """Also with kept ranks; and where tensor groups may spread, as few as possible do."""
    devices = sorted((node.id, device.id) for node in cluster.nodes for device in node.devices)
    kept: dict[int, tuple[str, int]] = {}
    old = attempt(cluster, before, span=span)
    if old is not None:
        old = Placement(before, old.slots[lost:])
        kept = {layout.rank(s.coords): (s.node, s.device) for s in old.slots if layout.holds(s.coords)}
    best = None
    for choice in itertools.permutations(devices, layout.size):
        if any(choice[rank] != place for rank, place in kept.items()):
            continue
        lone = lone_groups(Placement(layout, [RankSlot(r, layout.coords(r), *choice[r]) for r in range(layout.size)]))
        if span or lone == layout.size // layout.tp:
            best = max(lone, best or 0)
    placement = attempt(cluster, layout, keep=old, span=span)
    assert (placement is None) == (best is None)
    if placement is not None:
        assert lone_groups(placement) == best


def test_what_is_left_of_a_node_goes_where_it_makes_a_group_whole() -> None:
    """Two groups lack ranks of one node that has one device left: the group that lacks one gets it, the other spreads,
    its own node first."""
    layout = Layout(pp=2, tp=3)
    old = place(Cluster((Node.of("a", 6),)), layout)
    left = Cluster((Node.of("a", (0, 3, 4, 6)), Node.of("b", 3)), "b")
    new = place(left, layout, keep=old, span=True)
    assert [(s.node, s.device) for s in new.slots] == [("a", 0), ("b", 0), ("b", 1), ("a", 3), ("a", 4), ("a", 6)]
    more = Cluster((Node.of("a", (0, 3, 4, 6, 7)), Node.of("b", 3)), "b")
    new = place(more, layout, keep=old, span=True)
    assert [(s.node, s.device) for s in new.slots][:3] == [("a", 0), ("a", 7), ("b", 0)]


def test_shrink_takes_the_most_devices() -> None:
    assert shrink(Cluster((Node.of("a", 3),)), Layout(dp=2, tp=3)) == Layout(tp=3)
    assert shrink(Cluster((Node.of("a", 2), Node.of("b", 2))), Layout(pp=2, tp=3)) == Layout(pp=2, tp=2)
    assert shrink(Cluster((Node.of("a", 3),)), Layout(pp=2, tp=2)) == Layout(pp=2)


@settings(max_examples=2 * settings.default.max_examples)
@given(clusters(num_nodes=3, most=4), layouts, st.booleans())
def test_shrink_is_the_largest_that_fits(cluster, layout, span) -> None:
    fits = [
        smaller
        for pp, dp, pcp, tp in itertools.product(
            *(range(1, d + 1) for d in (layout.pp, layout.dp, layout.pcp, layout.tp))
        )
        if attempt(cluster, smaller := Layout(pp, dp, pcp, tp), span=span) is not None
    ]
    found = shrink(cluster, layout, span=span)
    if not fits:
        assert found is None
        return
    assert found in fits and found.size == max(each.size for each in fits)
    if layout in fits:
        assert found == layout
    else:
        with pytest.raises(Infeasible) as e:
            place(cluster, layout, span=span)
        assert e.value.nearest == shrink(cluster, layout)
        assert (e.value.needed, e.value.found) == (layout.size, cluster.num_devices)


def test_why_not() -> None:
    two = Cluster((Node.of("a", 3), Node.of("b", 3)), "a")
    with pytest.raises(Infeasible, match=r"tp=2 pp=4 needs 8 devices, the cluster has 6 \(a 3, b 3\); .* would fit"):
        place(two, Layout(pp=4, tp=2))
    with pytest.raises(
        Infeasible, match=r"tp=2 pp=3 needs 3 times 2 devices on one node; .* at most 3 on a node; tp=2 pp=2"
    ):
        place(two, Layout(pp=3, tp=2))
    assert [len(group) for group in place(two, Layout(pp=3, tp=2), span=True).spanning()] == [2]
    old = place(two, Layout(tp=2))
    alone = Cluster((Node.of("a", 1), Node.of("b", 3)), "a")
    with pytest.raises(Infeasible, match="ranks 0, 1 are one tensor group, and with those that stay they span nodes"):
        place(alone, Layout(tp=2), keep=old)
    with pytest.raises(Infeasible, match="the cluster has 0 \\(no nodes\\)"):
        place(Cluster(()), Layout())
    with pytest.raises(Infeasible, match="no rank would be on the driver's node c"):
        place(Cluster(two.nodes, "c"), Layout(tp=2), driver_inside=True)
    assert place(two, Layout(pp=2, tp=2)).lines() == [
        "a: rank 0 (pp 0 tp 0) on 0, rank 1 (pp 0 tp 1) on 1",
        "b: rank 2 (pp 1 tp 0) on 0, rank 3 (pp 1 tp 1) on 1",
    ]


def test_what_makes_no_sense_is_refused() -> None:
    for make in (
        lambda: Layout(tp=0),
        lambda: Cluster((Node.of("a", 1), Node.of("a", 1))),
        lambda: Cluster((Node("a", (Device(1), Device(1))),)),
        lambda: Layout(tp=2).coords(2),
        lambda: Layout().groups("ep"),
    ):
        with pytest.raises(ValueError):
            make()


BUNDLES = [Bundle(0, "b", 0), Bundle(1, "b", 1), Bundle(2, "a", 1), Bundle(3, "b", 1), Bundle(4, "head", 1)]


def test_a_placement_groups_bundles() -> None:
    cluster = cluster_of_bundles(BUNDLES, head="head")
    assert [(s.node, s.device) for s in place(cluster, Layout(pp=4)).slots] == [
        ("head", 4), ("a", 2), ("b", 1), ("b", 3)
    ]  # fmt: skip
    with pytest.raises(Infeasible, match="pp=5 needs 5 devices, the cluster has 4"):
        place(cluster, Layout(pp=5))
    with pytest.raises(ConfigError, match="bundle 7: reserves 2 devices"):
        cluster_of_bundles([Bundle(7, "a", 2)])


def test_the_users_bundle_indices() -> None:
    placement = place_at(BUNDLES, Layout(tp=2, pp=2), [3, 1, 4, 2])
    assert [(s.rank, s.node, s.device) for s in placement.slots] == [
        (0, "b", 3), (1, "b", 1), (2, "head", 4), (3, "a", 2)
    ]  # fmt: skip
    assert [[s.rank for s in group] for group in placement.spanning()] == [[2, 3]]
    for indices, rule in (
        ([1, 2, 3], "are 3 for 4 ranks"),
        ([1, 2, 3, 3], "name bundle 3 twice"),
        ([1, 2, 3, 0], "bundle 0 holds no device; bundles with a device: 1, 2, 3, 4"),
        ([1, 2, 3, 9], "bundle 9 is not in the placement group of 5"),
    ):
        with pytest.raises(ConfigError, match=rule):
            place_at(BUNDLES, Layout(tp=2, pp=2), indices)


LARGE = [
    (3_000, Layout(tp=8, pp=3_000)),
    pytest.param(10_000, Layout(tp=8, pp=10_000), marks=pytest.mark.long),
    pytest.param(10_000, Layout(tp=7, pp=11_000), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("nodes", "layout"), LARGE, ids=["even", "larger", "spanning"])
def test_a_large_cluster_takes_no_time(nodes: int, layout: Layout) -> None:
    cluster = Cluster(tuple(Node.of(f"node{i}", 8) for i in range(nodes)), f"node{nodes // 2}")
    for _ in range(3):
        began = time.process_time()  # of this process, so that a busy machine matters less
        placement = place(cluster, layout, span=True)
        seconds = time.process_time() - began
        assert len(placement.slots) == layout.size
        if seconds < nodes * 1e-4:
            return
    pytest.fail(f"{seconds:.2f} s three times")
