"""Which experts are repeated and where they go; moving them, stopped anywhere, loses none."""

from __future__ import annotations

import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.published_greedy import greedy
from planaria.core.eplb.places import least
from planaria.core.eplb.policy import LoadWindow, balance, balancedness, rank_loads, replicate, settled
from planaria.core.eplb.rearrangement import Rearrangement, Step, missing_copies, resized, transfers
from planaria.topology.experts import ExpertMap


def loads(num: int) -> st.SearchStrategy[list[int]]:
    flat = st.lists(st.integers(0, 1000), min_size=num, max_size=num)
    skewed = st.permutations([10_000 // (i + 1) for i in range(num)])
    return flat | skewed


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """A layer's load, slots and ranks, uneven ones among them."""
    num = draw(st.integers(1, 24))
    return draw(loads(num)), num + draw(st.integers(0, 12)), draw(st.integers(1, 9))


@given(questions())
def test_every_expert_has_a_slot_and_no_layer_is_worse_than_dealt_in_order(asked: tuple[list[int], int, int]) -> None:
    load, slots, ranks = asked
    (made,) = balance([load], slots, ranks)
    assert (len(made.slots), made.num_ranks, made.num_experts) == (slots, ranks, len(load))  # a map misses no expert
    assert balance([load], slots, ranks) == (made,)
    linear = ExpertMap.linear(len(load), ranks, slots - len(load))
    assert balancedness([load], [made]) >= balancedness([load], [linear])
    assert sum(rank_loads(load, made)) == pytest.approx(sum(load))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.data())
@pytest.mark.row("E6")
def test_at_least_as_balanced_as_the_published_greedy(
    here: int, nodes: int, each: int, groups: int, data: st.DataObject
) -> None:
    ranks = here * nodes
    slots = ranks * each
    num = groups * data.draw(st.integers(1, 4))
    assume(num <= slots)
    load = data.draw(loads(num))
    (made,) = balance([load], slots, ranks, num_groups=groups, num_nodes=nodes)
    theirs = greedy(load, slots, ranks, groups, nodes)
    assert balancedness([load], [made]) >= balancedness([load], [theirs])


def slots_with(made: ExpertMap, expert: int) -> list[int]:
    return [slot for slot, held in enumerate(made.slots) if held == expert]


@pytest.mark.row("E3")
def test_hot_experts_are_repeated_on_ranks_of_their_own() -> None:
    load = [90, 30, 10, 10, 10, 10]
    assert replicate(load, 8) == [3, 1, 1, 1, 1, 1]
    (made,) = balance([load], 8, 4)
    assert balancedness([load], [made]) == pytest.approx(1.0)
    assert len({made.rank_of(slot) for slot in slots_with(made, 0)}) == 3
    with pytest.raises(ValueError, match="5 slots are too few for 6 experts"):
        balance([load], 5, 4)


def together(made: ExpertMap) -> bool:
    """Is each pair of experts, with all replicas, on one of two nodes?"""
    node_of = [{made.rank_of(slot) // 2 for slot in slots_with(made, e)} for e in range(8)]
    return all(len(node_of[e] | node_of[e + 1]) == 1 for e in range(0, 8, 2))


@given(loads(8), loads(8), st.sampled_from([0.0, 0.05, 1.0]))
@pytest.mark.row("E6")
def test_groups_stay_on_a_node_where_they_divide_it(load: list[int], after: list[int], least_gain: float) -> None:
    """Unless experts dealt in order are more balanced than any such map."""

    def made(load: list[int], now: ExpertMap | None) -> ExpertMap:
        given = [now] if now else None
        return balance([load], 12, 4, num_groups=4, num_nodes=2, now=given, least_gain=least_gain)[0]

    linear = ExpertMap.linear(8, 4, 4)  # the redundant slots are far from their experts
    one = made(load, None)
    near = made(after, one)
    if least_gain == 0:
        assert together(near) or balancedness([after], [near]) >= balancedness([after], [linear])
    for found, tokens in ((one, load), (made(load, one), load)):
        assert together(found) or balancedness([tokens], [found]) >= balancedness([tokens], [linear])
    assert balancedness([after], [near]) >= balancedness([after], [made(after, None)]) - least_gain


def test_groups_that_divide_no_node_are_none() -> None:
    load = [[7, 1, 9, 3, 8, 2, 40, 5], [1, 1, 1, 1, 1, 1, 1, 1]]
    assert all(map(together, balance(load, 12, 4, num_groups=4, num_nodes=2)))
    assert balance(load, 12, 4, num_groups=3, num_nodes=2) == balance(load, 12, 4)


@given(questions(), st.data())
def test_ranks_keep_what_they_can(asked: tuple[list[int], int, int], data: st.DataObject) -> None:
    load, slots, ranks = asked
    (old,) = balance([data.draw(loads(len(load)))], slots, ranks)
    (free,), (kept,) = balance([load], slots, ranks), balance([load], slots, ranks, now=[old])
    assert balancedness([load], [kept]) >= balancedness([load], [free])
    (near,) = balance([load], slots, ranks, now=[old], least_gain=0.1)
    assert balancedness([load], [near]) >= balancedness([load], [free]) - 0.1
    assert balance([load], slots, ranks, now=[kept]) == (kept,)  # asked again it is left alone
    assert balance([load], slots, ranks, now=[old], least_gain=1.0) == (old,)
    turned = ExpertMap(len(load), ranks, free.slots[::-1])  # the same ranks in another order
    if slots % ranks == 0:
        (back,) = balance([load], slots, ranks, now=[turned])
        assert back == turned


# -- load


def step(*layers: list[int]) -> bytes:
    flat = [count for layer in layers for count in layer]
    return struct.pack(f"<{len(flat)}q", *flat)


@given(st.lists(st.lists(st.integers(0, 1 << 40), min_size=6, max_size=6), max_size=12), st.integers(1, 5))
@pytest.mark.row("E1")
def test_the_window_is_the_last_steps(steps: list[list[int]], size: int) -> None:
    window = LoadWindow(2, 3, size)
    for counts in steps:
        window.add(step(counts))
    last = steps[-size:]
    sums = [sum(counts[i] for counts in last) for i in range(6)]
    assert window.total() == [sums[:3], sums[3:]]
    assert window.steps == len(last)


@given(st.lists(st.integers(1, 7), max_size=12), st.integers(1, 9))
def test_a_window_of_load_that_comes_for_several_steps_holds_no_more_than_it_must(each: list[int], size: int) -> None:
    window = LoadWindow(1, 1, size)
    for number in each:
        window.add(step([number]), number)
    fewest = next((n for n in range(len(each)) if sum(each[-n:] if n else []) >= size), len(each))
    assert window.total() == [[sum(each[len(each) - fewest :])]]
    assert window.steps == sum(each[len(each) - fewest :])


def test_load_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes of load are not 1 layers x 3 experts"):
        LoadWindow(1, 3, 10).add(step([1, 2]))


@pytest.mark.row("E4")
def test_balancedness_is_mean_over_maximum_of_all_layers() -> None:
    placed = ExpertMap.linear(4, 2)
    assert balancedness([[3, 3, 1, 1]], [placed]) == pytest.approx(4 / 6)
    assert balancedness([[3, 3, 1, 1], [0, 0, 0, 0], [0, 0, 5, 5]], [placed] * 3) == pytest.approx(9 / 16)
    assert balancedness([[0, 0, 0, 0]], [placed]) == 1.0
    assert rank_loads([8, 2, 2, 2], ExpertMap(4, 2, (0, 1, 2, 0, 0, 3))) == pytest.approx([20 / 3, 22 / 3])


# -- moving


class Ranks:
    """Their memory, as the steps say: slots, and weights that were prepared."""

    def __init__(self, maps: tuple[ExpertMap, ...]) -> None:
        self.slots = {(layer, s): e for layer, placed in enumerate(maps) for s, e in enumerate(placed.slots)}
        self.aside: dict[tuple[int, int], int] = {}
        self.maps = maps
        self.lost: set[int] = set()

    def prepare(self, done: Step) -> None:
        for move in done.moves:
            held = [self.slots[move.layer, s] for s in self.maps[move.layer].span(move.source or 0)]
            assert move.source is not None and move.expert in held  # it is read from where it is
            self.aside[move.layer, move.slot] = move.expert

    def commit(self, ranks: set[int]) -> None:
        """The word reaches these ranks."""
        for (layer, slot), expert in list(self.aside.items()):
            if self.maps[layer].rank_of(slot) in ranks:
                self.slots[layer, slot] = expert
                del self.aside[layer, slot]

    def check(self, maps: tuple[ExpertMap, ...], lost: set[int]) -> None:
        """What the maps in force say is there is there, on every rank that is."""
        for layer, placed in enumerate(maps):
            for rank in set(range(placed.num_ranks)) - lost:
                assert [self.slots[layer, s] for s in placed.span(rank)] == list(placed.of(rank))


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[tuple[ExpertMap, ...], tuple[ExpertMap, ...], int]:
    num, ranks, layers = draw(st.integers(1, 10)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    more = draw(st.integers(0, 6))

    def one() -> ExpertMap:
        slots = [*range(num), *(draw(st.integers(0, num - 1)) for _ in range(more))]
        return ExpertMap(num, ranks, tuple(draw(st.permutations(slots))))

    old, new = (tuple(one() for _ in range(layers)) for _ in range(2))
    return old, new, draw(st.integers(0, 8)) * 100


@given(rearrangements())
def test_all_steps_lead_to_the_new_maps(asked: tuple[tuple[ExpertMap, ...], tuple[ExpertMap, ...], int]) -> None:
    old, new, limit = asked
    moving = Rearrangement(old, new, 100, limit)
    ranks, everybody = Ranks(old), set(range(old[0].num_ranks))
    steps = moved = 0
    while (one := moving.prepare()) is not None:
        ranks.prepare(one)
        ranks.check(moving.maps, set())  # what is used stays as it was
        assert one.bytes == 100 * sum(move.source != move.target for move in one.moves)
        circle = len({move.layer for move in one.moves}) == 1
        assert one.bytes <= limit or circle
        ranks.commit(everybody)
        ranks.check(moving.commit(), set())
        steps, moved = steps + 1, moved + one.bytes
    assert moving.done
    for placed, wanted in zip(moving.maps, new, strict=True):
        for rank in everybody:
            assert sorted(placed.of(rank)) == sorted(wanted.of(rank))
    needed = 100 * sum(map(missing_copies, old, new))
    assert moving.bytes_needed == needed <= moved
    if all(len(set(placed.of(rank))) == len(placed.of(rank)) for placed in new for rank in everybody):
        assert moved == needed
    if old == new:
        assert steps == 0


@given(rearrangements(), st.integers(0, 6), st.sampled_from(["before", "prepared", "committing"]), st.data())
def test_ranks_lost_anywhere_leave_complete_maps(
    asked: tuple[tuple[ExpertMap, ...], tuple[ExpertMap, ...], int], after: int, when: str, data: st.DataObject
) -> None:
    """Every expert is on a rank that is there, or is named as to be read from the checkpoint."""
    old, new, limit = asked
    moving = Rearrangement(old, new, 100, limit)
    everybody = set(range(old[0].num_ranks))
    ranks = Ranks(old)
    for _ in range(after):
        if (one := moving.prepare()) is None:
            break
        ranks.prepare(one)
        moving.commit()
        ranks.commit(everybody)
    lost = data.draw(st.sets(st.sampled_from(sorted(everybody)), min_size=1))
    if when != "before" and (one := moving.prepare()) is not None:
        ranks.prepare(one)
        if when == "committing":
            moving.commit()
            ranks.commit(data.draw(st.sets(st.sampled_from(sorted(everybody)))))  # some heard it,
            ranks.commit(everybody - lost)  # the others learn it from the version
    maps = moving.maps
    ranks.check(maps, lost)
    for layer, placed in enumerate(maps):
        there = {ranks.slots[layer, s] for rank in everybody - lost for s in placed.span(rank)}
        held = [set() if rank in lost else set(placed.of(rank)) for rank in range(placed.num_ranks)]
        moves = transfers(layer, held, placed)
        assert {m.expert for m in moves} == {expert for rank in lost for expert in placed.of(rank)}
        assert {m.target for m in moves} <= lost and not {m.source for m in moves} & lost
        assert {m.expert for m in moves if m.source is None} == set(range(placed.num_experts)) - there


def test_experts_in_a_circle_are_one_step() -> None:
    old, new = ExpertMap.linear(3, 3), ExpertMap(3, 3, (1, 2, 0))
    moving = Rearrangement([old], [new], 100, 100)
    one = moving.prepare()
    assert one is not None and one.bytes == 300 and sorted(move.slot for move in one.moves) == [0, 1, 2]
    assert moving.commit() == (new,) and moving.done and moving.bytes_needed == 300
    with pytest.raises(ValueError, match="form the group again"):
        Rearrangement([old], [ExpertMap.linear(3, 2)], 100, 100)


def test_with_a_free_replica_experts_go_one_by_one() -> None:
    old, new = ExpertMap(3, 2, (0, 1, 2, 0)), ExpertMap(3, 2, (0, 1, 2, 1))
    moving = Rearrangement([old], [new], 100, 100)
    one = moving.prepare()
    assert one is not None and [(m.expert, m.slot, m.source, m.target) for m in one.moves] == [(1, 3, 0, 1)]
    assert len(moving.steps) == 0


def test_what_replicas_cover() -> None:
    def sources(placed: ExpertMap, lost: int) -> dict[int, int | None]:
        held = [() if rank == lost else placed.of(rank) for rank in range(placed.num_ranks)]
        return {move.expert: move.source for move in transfers(0, held, placed)}

    assert sources(ExpertMap(4, 3, (0, 1, 1, 2, 3, 0)), 0) == {0: 2, 1: 1}
    assert sources(ExpertMap.linear(4, 2), 1) == {2: None, 3: None}
    assert sources(ExpertMap.linear(4, 2), 2) == {}


# -- another number of ranks


@given(questions(), st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=6), st.integers(0, 3))
def test_a_resize_moves_little_and_loses_nothing(
    asked: tuple[list[int], int, int], drawn: list[int | None], leaving: int
) -> None:
    """drawn: for each new rank the one of before whose memory it has. leaving: as many more that can still be read."""
    load, slots, ranks = asked
    (old,) = balance([load], slots, ranks)
    came_from = [r if r is not None and r < ranks and r not in drawn[:i] else None for i, r in enumerate(drawn)]
    held = [sorted(set(old.of(r))) if r is not None else [] for r in came_from]
    new = resized(held, len(load), slots)
    assert (new.num_ranks, len(new.slots)) == (len(came_from), slots)
    held += [sorted(set(old.of(r))) for r in range(ranks) if r not in came_from][:leaving]
    moves = transfers(3, held, new)
    there = {expert for experts in held for expert in experts}
    for rank in range(new.num_ranks):
        sent = [move.expert for move in moves if move.target == rank]
        assert set(sent) == set(new.of(rank)) - set(held[rank]) and len(sent) == len(set(sent))
    for move in moves:
        assert move.layer == 3 and new.slots[move.slot] == move.expert and new.rank_of(move.slot) == move.target
        assert (move.source is None) == (move.expert not in there)
        assert move.source is None or move.expert in held[move.source]
    if slots == len(load):  # without replicas no map needs less
        assert len(moves) == least(held[: new.num_ranks], new)


def test_growing_and_shrinking() -> None:
    all_of, first, second = list(range(8)), [0, 1, 2, 3], [4, 5, 6, 7]
    two = resized([all_of, []], 8, 8)
    assert (two.of(0), two.of(1)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert {(m.expert, m.source) for m in transfers(0, [all_of, []], two)} == {(e, 0) for e in second}
    one = resized([first], 8, 8)
    back = transfers(0, [first, second], one)
    assert {(m.expert, m.source, m.target) for m in back} == {(e, 1, 0) for e in second}
    assert all(m.source is None for m in transfers(0, [first], one))  # the other rank is lost
    three = resized([first, second, []], 8, 8)
    assert [three.of(rank) for rank in range(3)] == [(0, 1, 2), (4, 5, 6), (3, 7)]
    assert resized([first, second, []], 8, 9).of(2) == (3, 7, 0)
    assert resized([[0, 1, 2, 3], [0, 1]], 4, 4).slots == (2, 3, 0, 1)  # who has less has less of a choice
    with pytest.raises(ValueError, match="7 slots are too few for 8"):
        resized([first, second], 8, 7)
    with pytest.raises(ValueError, match="rank 0 has 4 slots, not 3"):
        settled([[0, 1, 2], [3, 4, 5, 6, 7]], ExpertMap.linear(8, 2))
