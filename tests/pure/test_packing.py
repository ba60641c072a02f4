"""How engines share nodes: the laws, the same answers as trying everything, and each refusal with its numbers."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.errors import ConfigError
from planaria.topology import (
    STRATEGIES,
    Bundle,
    Cluster,
    DoesNotFit,
    HeadTooSmall,
    Infeasible,
    Layout,
    Node,
    Packing,
    cluster_of_bundles,
    pack,
    pack_groups,
    place,
    place_at,
)
from planaria.topology.table import CameUp, differences, lines, remarks, rows, summary


def cluster_of(*sizes: int, head: int = 0) -> Cluster:
    """Nodes n0, n1 ... with so many devices."""
    nodes = [Node.of(f"n{i}", size, f"10.0.0.{i}") for i, size in enumerate(sizes)]
    return Cluster(tuple(nodes), f"n{head}")


NODES = ["node1", "node2", "node10", "a", "b7", "b70"]
layouts = st.builds(Layout, dp=st.integers(1, 4), pp=st.integers(1, 2), tp=st.integers(1, 3))
strategies = st.sampled_from(STRATEGIES)
locals_ = st.none() | st.integers(0, 4)


@st.composite
def clusters(draw: st.DrawFn, alike: bool = False) -> Cluster:
    ids = draw(st.lists(st.sampled_from(NODES), unique=True, min_size=1, max_size=5))
    same = draw(st.integers(1, 3))
    sizes = {id: draw(st.sampled_from((0, same))) if alike else None for id in ids}
    nodes = [
        Node.of(id, draw(st.sets(st.integers(0, 9), max_size=6)) if sizes[id] is None else sizes[id], id) for id in ids
    ]  # fmt: skip
    return Cluster(tuple(nodes), draw(st.sampled_from(ids)))


any_cluster = clusters() | clusters(alike=True)


def attempt(cluster: Cluster, layout: Layout, strategy: str, local: int | None, **more: Packing) -> Packing | None:
    try:
        return pack(cluster, layout, strategy, local, **more)
    except (Infeasible, ConfigError):
        return None


def engines_at(packing: Packing) -> Counter[str]:
    return Counter(engine.slots[0].node for engine in packing.engines)


@settings(deadline=None)
@given(any_cluster, layouts, strategies, locals_, st.randoms(use_true_random=False))
def test_laws(cluster, layout, strategy, local, random) -> None:
    """No order of the input matters; a device holds one rank; each strategy does what it says."""
    packing = attempt(cluster, layout, strategy, local)
    nodes = [Node(n.id, tuple(random.sample(n.devices, len(n.devices))), n.addresses) for n in cluster.nodes]
    assert attempt(Cluster(tuple(random.sample(nodes, len(nodes))), cluster.head), layout, strategy, local) == packing
    if packing is None:
        return
    slots = list(packing.slots())
    assert [slot.rank for slot in slots] == list(range(layout.size))
    assert [slot.coords for slot in slots] == [layout.coords(rank) for rank in range(layout.size)]
    there = {(node.id, device.id) for node in cluster.nodes for device in node.devices}
    used = Counter((slot.node, slot.device) for slot in slots)
    assert set(used) <= there and set(used.values()) == {1}
    at = engines_at(packing)
    if strategy == "span":
        taken = [node for engine in packing.engines for node in engine.nodes]
        assert len(set(taken)) == len(taken) and set(packing.local_ranks) == {0}
        sizes = {node.id: len(node.devices) for node in cluster.nodes}
        for engine in packing.engines:
            assert len(engine.nodes) > 1 and sum(sizes[node] for node in engine.nodes) == len(engine.slots)
    else:
        assert all(len(engine.nodes) == 1 and not engine.spanning() for engine in packing.engines)
        for node in at:
            mine = [packing.local_ranks[n] for n, engine in enumerate(packing.engines) if engine.slots[0].node == node]
            assert mine == list(range(at[node]))
    if strategy == "strict":
        assert set(at.values()) == {packing.local} and local in (None, packing.local)
    if strategy == "fill" and local is not None:
        assert at[cluster.head] == local
    order = [node.id for node in cluster.ordered()]
    assert list(at) == sorted(at, key=order.index)


def brute_force(cluster: Cluster, layout: Layout, strategy: str, local: int | None) -> bool:
    """Is there any way to deal engines to nodes that keeps the strategy's rule?"""
    nodes, world, dp = cluster.ordered(), layout.size // layout.dp, layout.dp
    if strategy == "span":
        sizes = [len(node.devices) for node in nodes if node.devices]
        if len(set(sizes)) != 1:
            return False
        for owners in itertools.product(range(-1, dp), repeat=len(sizes)):
            owned = [[size for size, owner in zip(sizes, owners, strict=True) if owner == n] for n in range(dp)]
            if all(len(mine) > 1 and sum(mine) == world for mine in owned):
                return True
        return False
    room = [len(node.devices) // world for node in nodes]
    for dealt in itertools.product(*(range(most + 1) for most in room)):
        if sum(dealt) != dp:
            continue
        if strategy == "strict":
            used = {count for count in dealt if count}
            if len(used) == 1 and (local is None or (used == {local} and dealt[0] == local)):
                return True
        elif local is None or dealt[0] == local:
            return True
    return False


@settings(deadline=None)
@given(any_cluster, layouts, strategies, locals_)
def test_feasible_exactly_when_trying_everything_finds_one(cluster, layout, strategy, local) -> None:
    if local is not None and (local > layout.dp or strategy == "span"):
        local = None
    assert (attempt(cluster, layout, strategy, local) is not None) == brute_force(cluster, layout, strategy, local)


@settings(deadline=None)
@given(any_cluster, layouts, strategies, locals_, st.sampled_from(NODES), st.sets(st.integers(0, 9)))
def test_what_fits_fits_on_any_larger_cluster(cluster, layout, strategy, local, name, more) -> None:
    """For `span` larger means more nodes of the same kind."""
    if attempt(cluster, layout, strategy, local) is None:
        return
    devices = {node.id: {device.id for device in node.devices} for node in cluster.nodes}
    if strategy == "span":
        devices.setdefault(name, next(have for have in devices.values() if have))
    else:
        devices[name] = devices.get(name, set()) | more
    larger = Cluster(tuple(Node.of(id, have, id) for id, have in devices.items()), cluster.head)
    assert attempt(larger, layout, strategy, local) is not None


@settings(deadline=None)
@given(any_cluster, layouts, layouts, strategies, st.data())
def test_keep_moves_nobody_whose_slot_is_still_there(cluster, before, after, strategy, data) -> None:
    """A fleet that grows, shrinks, changes its degrees, or has lost devices."""
    if data.draw(st.booleans()):
        after = Layout(dp=after.dp, pp=before.pp, tp=before.tp)
    old = attempt(cluster, before, strategy, None)
    if old is None:
        return
    gone = data.draw(st.sets(st.sampled_from([slot[2:] for slot in old.slots()]), max_size=3))
    left = Cluster(
        tuple(Node(n.id, tuple(d for d in n.devices if (n.id, d.id) not in gone), n.addresses) for n in cluster.nodes),
        cluster.head,
    )
    new = attempt(left, after, strategy, None, keep=old)
    if new is None:
        return
    now = {slot.coords: slot[2:] for slot in new.slots()}
    for slot in old.slots():
        if slot[2:] not in gone and after.holds(slot.coords):
            assert now[slot.coords] == slot[2:]
    assert len(set(now.values())) == after.size and set(now.values()) <= {
        (node.id, device.id) for node in left.nodes for device in node.devices
    }
    for number, engine in enumerate(old.engines[: after.dp]):
        if any(slot[2:] not in gone and after.holds(slot.coords) for slot in engine.slots):
            assert new.local_ranks[number] == old.local_ranks[number]
    for number, engine in enumerate(new.engines):
        others = [n for n, e in enumerate(new.engines) if n != number and e.slots[0].node == engine.slots[0].node]
        if strategy != "span" and len(engine.nodes) == 1:
            assert new.local_ranks[number] not in {new.local_ranks[n] for n in others}


@pytest.mark.row("D6")
def test_a_fleet_grows_beside_what_it_has_and_shrinks_from_its_end() -> None:
    cluster = cluster_of(4, 4, 2)
    old = pack(cluster, Layout(dp=2, tp=2), "strict", 1)
    assert [(e.slots[0].node, e.slots[0].device) for e in old.engines] == [("n0", 0), ("n1", 0)]
    grown = pack(cluster, Layout(dp=5, tp=2), "strict", keep=old)
    assert grown.engines[:2] == old.engines and grown.local_ranks == (0, 0, 0, 1, 1)
    assert [e.slots[0].node for e in grown.engines] == ["n0", "n1", "n2", "n0", "n1"]
    assert pack(cluster, Layout(dp=2, tp=2), keep=grown) == old._replace(local=grown.local)
    with pytest.raises(Infeasible, match=r"1 of 6 engines have no place.* 2 devices on one node, 0 are free; .*dp=5 w"):
        pack(cluster, Layout(dp=6, tp=2), keep=old)
    short = Cluster((Node.of("n0", (0,), "x"), *cluster.nodes[1:]), "n0")
    with pytest.raises(Infeasible, match="engine 0 lacks 1 device on n0, where its other ranks stay"):
        pack(short, Layout(dp=2, tp=2), keep=old)
    spans = pack(cluster_of(2, 2, 2, 2), Layout(dp=1, tp=2, pp=2), "span")
    assert pack(cluster_of(2, 2, 2, 2), Layout(dp=2, tp=2, pp=2), "span", keep=spans).nodes == ("n0", "n1", "n2", "n3")


def test_an_engine_beside_one_that_shrank_takes_whole_nodes() -> None:
    """The first keeps ranks on three nodes, and leaves some devices of two."""
    cluster = cluster_of(4, 4, 4, 4, 4)
    old = pack(cluster, Layout(pp=3, tp=4), "span")
    new = pack(cluster, Layout(dp=2, pp=4, tp=2), "span", keep=old)
    assert [engine.nodes for engine in new.engines] == [("n0", "n1", "n2"), ("n3", "n4")]


def where(packing: Packing) -> list[tuple[str, int, int]]:
    """Of each engine: its first node and device, and its local rank."""
    firsts = [engine.slots[0] for engine in packing.engines]
    return [(at.node, at.device, local) for at, local in zip(firsts, packing.local_ranks, strict=True)]


@pytest.mark.row("D2")
def test_strict() -> None:
    cluster = cluster_of(4, 3, 8, 4, head=2)
    packing = pack(cluster, Layout(dp=4, tp=2), "strict", 2)
    assert where(packing) == [("n2", 0, 0), ("n2", 2, 1), ("n0", 0, 0), ("n0", 2, 1)]
    packing = pack(cluster, Layout(dp=6, tp=2), "strict", 2)
    assert packing.skipped == ("n1 is skipped: room for 1 of 2 engines (3 devices, an engine takes 2)",)
    assert packing.nodes == ("n2", "n0", "n3")
    # left open: as many as the head holds, as long as all nodes hold as many
    assert pack(cluster, Layout(dp=4, tp=2)).local == 4
    assert pack(cluster, Layout(dp=6, tp=2)).local == 2
    assert pack(cluster_of(8, 8, 8, 8), Layout(dp=4, tp=8)).local == 1


@pytest.mark.row("D2")
def test_fill() -> None:
    cluster = cluster_of(4, 3, 8, 4, head=2)
    packing = pack(cluster, Layout(dp=5, tp=2), "fill", 1)
    assert where(packing) == [("n2", 0, 0), ("n0", 0, 0), ("n0", 2, 1), ("n1", 0, 0), ("n3", 0, 0)]
    assert where(pack(cluster, Layout(dp=5, tp=2), "fill"))[:4] == [("n2", 2 * i, i) for i in range(4)]
    beside = pack(cluster, Layout(dp=2, tp=2), "fill", 0)
    assert beside.nodes == ("n0",) and not beside.skipped
    assert pack(cluster_of(0, 4), Layout(dp=2, tp=2), "fill").skipped == (
        "n0 is skipped: room for 0 of 1 engines (0 devices, an engine takes 2)",
    )


@pytest.mark.row("D2")
def test_span() -> None:
    packing = pack(cluster_of(2, 2, 2, 2, 2), Layout(dp=2, tp=4), "span")
    assert [engine.nodes for engine in packing.engines] == [("n0", "n1"), ("n2", "n3")]
    assert packing.local_ranks == (0, 0) and summary(packing).endswith("4 nodes, span, 2 nodes for each engine")
    (line,) = remarks(packing, cluster_of(2, 2, 2, 2, 2))
    assert line.startswith("2 tensor groups span several nodes (the first: n0, n1)")
    inside = pack(cluster_of(0, 2, 2, 2, 2), Layout(dp=2, pp=2, tp=2), "span", 1)
    assert inside.nodes == ("n1", "n2", "n3", "n4") and not any(engine.spanning() for engine in inside.engines)


FOUR = cluster_of(8, 8, 4, 8)
UNEVEN = "n0 8, n1 8, n2 4, n3 8"
REFUSED = [
    # strategy, local, layout, cluster, error, what it says, what would fit
    ("strict", 2, Layout(dp=2, tp=8), FOUR, HeadTooSmall,
     "the head n0 is asked to hold 2 engines (--data-parallel-size-local) and has room for 1: it has 8 devices, an "
     "engine takes 8", "tp=8 dp=2 without --data-parallel-size-local"),
    ("fill", 3, Layout(dp=3, tp=4), FOUR, HeadTooSmall, "asked to hold 3 engines", "tp=4 dp=3 without --data-parallel"),
    ("strict", 1, Layout(dp=4, tp=8), FOUR, DoesNotFit,
     f"tp=8 dp=4 needs 4 engines of 8 devices (strict, 1 on each node), 3 fit; the cluster has 28 devices ({UNEVEN})",
     "tp=8 dp=3"),
    ("strict", None, Layout(dp=7, tp=4), FOUR, DoesNotFit, "(strict, 1 on each node), 4 fit",
     "tp=4 dp=7 with --ray-dp-pack-strategy fill"),
    ("fill", None, Layout(dp=8, tp=4), FOUR, DoesNotFit, "(fill, 2 on the head), 7 fit", "tp=4 dp=7"),
    ("fill", 1, Layout(dp=7, tp=4), FOUR, DoesNotFit, "(fill, 1 on the head), 6 fit",
     "tp=4 dp=7 without --data-parallel-size-local"),
    ("fill", 1, Layout(dp=8, tp=4), FOUR, DoesNotFit, "(fill, 1 on the head), 6 fit",
     "tp=4 dp=7 without --data-parallel-size-local"),
    ("strict", None, Layout(dp=2, tp=16), cluster_of(8, 8, 8, 8), DoesNotFit, "1 on each node), 0 fit",
     "tp=16 dp=2 with --ray-dp-pack-strategy span"),
    ("span", None, Layout(dp=3, tp=16), cluster_of(8, 8, 8, 8), DoesNotFit,
     "needs 3 engines of 16 devices (span, 2 nodes for each engine), 2 fit; the cluster has 32 devices", "tp=16 dp=2"),
    ("span", None, Layout(dp=1, tp=16), FOUR, ConfigError, f"equally many devices, and they have {UNEVEN}", ""),
    ("span", None, Layout(dp=1, tp=8), cluster_of(8, 8), ConfigError, "tp=8 takes 8 of a node's 8 devices", ""),
    ("span", None, Layout(dp=1, tp=12), cluster_of(8, 8), ConfigError, "takes 12 devices, a node has 8; .* of 8", ""),
    ("span", 2, Layout(dp=2, tp=16), cluster_of(8, 8), ConfigError, "-local 2: with --ray-dp-pack-strategy span", ""),
    ("strict", 2, Layout(dp=3, tp=1), FOUR, ConfigError, "size-local 2: 3 engines don't divide into nodes of ex", ""),
    ("strict", 0, Layout(dp=3, tp=1), FOUR, ConfigError, "--data-parallel-size-local 0: must be 1 to 3 with", ""),
    ("fill", 4, Layout(dp=3, tp=1), FOUR, ConfigError, "--data-parallel-size-local 4: must be 0 to 3 with", ""),
    ("loose", None, Layout(), FOUR, ConfigError, "strategy loose: is unknown; choose one of strict, fill, span", ""),
    ("strict", None, Layout(tp=2), cluster_of(0, 0), Infeasible, "tp=2 needs 2 devices, and no node has any", ""),
    ("strict", None, Layout(), Cluster(()), Infeasible, "needs 1 device, and no node has any", ""),
    ("strict", None, Layout(), cluster_of(1, head=4), ConfigError, "cluster head n4: is not among the nodes", ""),
    ("strict", None, Layout(), Cluster((Node.of("a", 1),), "a"), ConfigError, "cluster node a: has no address", ""),
    ("strict", None, Layout(), Cluster((Node.of("a", 1, "x", "y"),), "a"), ConfigError,
     "node a: has several addresses \\(x, y\\); give the one by which other nodes reach it", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=[f"{case[0]}, {case[5][:40]}" for case in REFUSED])
def test_refused(case) -> None:
    strategy, local, layout, cluster, error, says, fits = case
    if error is not ConfigError:
        says = says.replace("(", "\\(").replace(")", "\\)")
    with pytest.raises(error, match=says) as e:
        pack(cluster, layout, strategy, local)
    assert "\n" not in str(e.value)
    if fits:
        assert f"; {fits}" in str(e.value) and str(e.value).endswith("would fit")
        layout, strategy, local = e.value.instead
        assert pack(cluster, layout, strategy, local).layout == e.value.nearest


@pytest.mark.row("D3")
def test_the_numbers_of_a_refusal() -> None:
    with pytest.raises(HeadTooSmall) as head:
        pack(FOUR, Layout(dp=4, tp=4), "strict", 4)
    assert (head.value.asked, head.value.fitting, head.value.needed, head.value.found) == (4, 2, 16, 8)
    with pytest.raises(DoesNotFit) as few:
        pack(FOUR, Layout(dp=4, tp=8), "strict", 1)
    assert (few.value.needed, few.value.found, few.value.fitting) == (32, 28, 3)


@settings(deadline=None)
@given(any_cluster, layouts, strategies, locals_)
def test_what_is_said_to_fit_fits_and_is_no_smaller_than_any_other(cluster, layout, strategy, local) -> None:
    try:
        pack(cluster, layout, strategy, local)
    except DoesNotFit as e:
        found = 0 if e.instead is None else pack(cluster, *e.instead).layout.size
        smaller = [Layout(layout.pp, dp, layout.pcp, layout.tp) for dp in range(1, layout.dp + 1)]
        fewer = [each.size for each in smaller if attempt(cluster, each, strategy, local)]
        assert found >= max(fewer, default=0) and (found > 0) == any(node.devices for node in cluster.nodes)
        assert e.instead is None or all(a <= b for a, b in zip(e.instead.layout.shape, layout.shape, strict=True))
    except (Infeasible, ConfigError):
        pass


def test_an_engines_bundles() -> None:
    """A device for each rank on its node, and one without where the engine sits; placing into them changes nothing."""
    packing = pack(cluster_of(2, 2, 2, 2), Layout(dp=2, pp=2, tp=2), "span")
    assert packing.bundles(1) == (
        Bundle(0, "n2", 1), Bundle(1, "n2", 1), Bundle(2, "n3", 1), Bundle(3, "n3", 1), Bundle(4, "n2", 0)
    )  # fmt: skip
    again = place_at(packing.bundles(1), packing.engines[1].layout, range(4))
    assert [slot.node for slot in again.slots] == [slot.node for slot in packing.engines[1].slots]
    assert place(cluster_of_bundles(packing.bundles(0), head="n0"), Layout(pp=2, tp=2)).nodes == ("n0", "n1")


def test_engines_of_one_placement() -> None:
    whole = place(cluster_of(2, 4), Layout(dp=3, tp=2))
    packing = Packing.of(whole)
    assert tuple(packing.slots()) == whole.slots and packing.local_ranks == (0, 0, 1)
    assert all(engine.layout == Layout(tp=2) for engine in packing.engines)


GROUPS = [
    [Bundle(0, "b", 0), Bundle(1, "b", 1), Bundle(2, "a", 1)],
    [Bundle(0, "b", 1), Bundle(1, "b", 1), Bundle(2, "b", 1)],
]


@pytest.mark.row("D4")
def test_the_users_placement_groups() -> None:
    packing = pack_groups(GROUPS, [0, 1], Layout(dp=2, tp=2), head="b")
    assert [[(s.node, s.device) for s in e.slots] for e in packing.engines] == [
        [("b", 1), ("a", 2)], [("b", 0), ("b", 1)]
    ]  # fmt: skip
    assert packing.local_ranks == (0, 1)
    assert pack_groups(GROUPS, None, Layout(dp=2, tp=2), head="b").local_ranks == (0, 1)
    assert pack_groups([*GROUPS, [Bundle(0, "a", 1)]], None, Layout(dp=3), head="a").local_ranks == (0, 0, 1)
    for groups, local_ranks, layout, rule in (
        (GROUPS, [0, 1], Layout(dp=3, tp=2), "placement groups 2: are not one for each of the 3 engines; give 3"),
        (GROUPS, [0], Layout(dp=2, tp=2), "local ranks 1: are not one for each of the 2 placement groups"),
        (GROUPS, [0, 1], Layout(dp=2, tp=3), "of engine 0: 2 of 3 bundles hold a device, tp=3 needs 3"),
        (GROUPS, [1, 1], Layout(dp=2, tp=2), "local ranks 1 of engine 1: is engine 0's too, on node b"),
        (GROUPS, [0, -1], Layout(dp=2, tp=2), "local ranks -1 of engine 1: is below 0"),
        ([[Bundle(0, "a", 2)]], [0], Layout(), "bundle 0: reserves 2 devices, a rank takes one"),
    ):
        with pytest.raises(ConfigError, match=rule):
            pack_groups(groups, local_ranks, layout, head="b")


@pytest.mark.row("D3")
def test_the_node_that_comes_first() -> None:
    """By its address: its engines are the first ones, and it must be there."""
    cluster = Cluster((Node.of("n0", 1, "10.0.0.1"), Node.of("n1", 1, "10.0.0.2"), Node.of("n2", 1, "10.0.0.1")), "n0")
    assert cluster.headed_by(None) == cluster == cluster.headed_by("10.0.0.1")
    packing = pack(cluster.headed_by("10.0.0.2"), Layout(dp=3), "fill", 1)
    assert [engine.slots[0].node for engine in packing.engines] == ["n1", "n0", "n2"]
    assert Cluster(cluster.nodes, "n1").headed_by("10.0.0.1").head == "n0"
    with pytest.raises(ConfigError, match=r"--data-parallel-address x: no node .* one of 10\.0\.0\.1, 10\.0\.0\.2"):
        cluster.headed_by("x")


@pytest.mark.parametrize(
    ("nodes", "layout", "strategy"),
    [
        (3_000, Layout(dp=3_000, tp=8), "strict"),
        pytest.param(10_000, Layout(dp=10_000, tp=8), "strict", marks=pytest.mark.long),
        pytest.param(10_000, Layout(dp=20_000, tp=4), "fill", marks=pytest.mark.long),
        pytest.param(10_000, Layout(dp=5_000, tp=8, pp=2), "span", marks=pytest.mark.long),
    ],
)
def test_a_large_cluster_takes_no_time(nodes: int, layout: Layout, strategy: str) -> None:
    cluster = cluster_of(*[8] * nodes, head=nodes // 2)
    for _ in range(3):
        began = time.process_time()  # of this process, so that a busy machine matters less
        packing = pack(cluster, layout, strategy)
        seconds = time.process_time() - began
        assert packing.layout.size == 8 * nodes
        if seconds < nodes * 1e-4:
            return
    pytest.fail(f"{seconds:.2f} s three times")


# -- for people


def test_the_table() -> None:
    cluster = Cluster((Node.of("n0", 2, "10.0.0.1"), Node.of("f" * 56, 1)), "n0")
    packing = Packing.of(place(cluster, Layout(pp=3)))
    assert lines(rows(packing, cluster)) == [
        "RANK  DP  PP  TP  NODE          ADDRESS   DEVICE",
        "   0   0   0   0  n0            10.0.0.1       0",
        "   1   0   1   0  n0            10.0.0.1       1",
        "   2   0   2   0  ffffffffffff                 0",
    ]
    assert summary(packing) == "pp=3: 3 ranks on 2 nodes" and remarks(packing, cluster) == []
    assert summary(pack(FOUR, Layout(dp=3, tp=8))) == "tp=8 dp=3: 24 ranks on 3 nodes, strict, 1 engine on each"
    assert summary(pack(FOUR, Layout(dp=3, tp=4), "fill")).endswith("fill, 2 engines on the head")


def test_unlike_devices_in_an_engine_are_said() -> None:
    kinds = Cluster(
        tuple(Node(n.id, tuple(d.__class__(d.id, "old" if d.id > 1 else "new") for d in n.devices), n.addresses)
              for n in cluster_of(4, 4).nodes), "n0",
    )  # fmt: skip
    (line,) = remarks(pack(kinds, Layout(dp=2, tp=3)), kinds)
    assert line.startswith("engine 0 has unlike devices, 2 new, 1 old (so have 1 more engines)")
    assert remarks(pack(kinds, Layout(dp=4, tp=2)), kinds) == []


def test_what_came_up_elsewhere_is_said() -> None:
    cluster = cluster_of(2, 1)
    table = rows(Packing.of(place(cluster, Layout(pp=3))), cluster)
    as_planned = [CameUp("n0", (0,)), CameUp("n0", (), 1), CameUp("n1", (0,), -1)]
    assert differences(table, as_planned, [0, 1, 2]) == []
    elsewhere = [CameUp("n1", (0,)), CameUp("n0", (3,)), CameUp("n1")]
    assert differences(table, elsewhere) == [
        "rank 0 was planned on n0 and is on n1",
        "rank 1 was planned on device 1 of n0 and has 3",
    ]
    assert differences(table, elsewhere, numbered=False) == ["rank 0 was planned on n0 and is on n1"]
    assert differences(table, elsewhere[:2]) == [], "another layout by now"
    assert differences(table[:1], [CameUp("n0", (), 4)], [2]) == [
        "rank 0 was planned in bundle 2 (device 0 of n0) and is in bundle 4"
    ]
