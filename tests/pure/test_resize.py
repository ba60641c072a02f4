"""Resizes as transactions: what is refused, what is done once, what is said of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.resize import COMMITTED, KEPT, PREPARING, ROLLED_BACK, Refused, Resizes, Room, room_in_memory


@pytest.mark.row("D7")
def test_growing_and_shrinking_take_the_last_ones() -> None:
    books = Resizes()
    up, new = books.ask("a", 4, [0, 1], [0, 1])
    assert new and (up.before, up.after, up.start, up.stop, up.state) == (2, 4, [2, 3], [], PREPARING)
    books.enter("start", 10.0)
    books.commit(12.5)
    assert (up.state, up.phases, up.phase, books.current) == (COMMITTED, {"start": 2.5}, "", None)
    down, _ = books.ask("b", 1, [0, 1, 2, 3], [0, 1, 2, 3])
    assert (down.start, down.stop) == ([], [3, 2, 1])
    books.enter("drain", 20.0)
    assert down.phase == "drain"
    books.enter("migrate", 21.0)
    books.roll_back("nobody is up", 24.0)
    assert (down.state, down.reason) == (ROLLED_BACK, "nobody is up")
    assert down.phases == {"drain": 1.0, "migrate": 3.0} and [resize.id for resize in books] == ["a", "b"]


def test_the_same_id_is_the_same_transaction() -> None:
    books = Resizes()
    first, new = books.ask("a", 2, [0], [0])
    assert new and books.ask("a", 2, [0], [0]) == (first, False)
    books.enter("start", 0.0)
    books.commit(1.0)
    again, new = books.ask("a", 2, [0, 1], [0, 1])
    assert again is first and not new
    with pytest.raises(Refused, match="resize a was to 2 engines, not 3: give another id") as refused:
        books.ask("a", 3, [0, 1], [0, 1])
    assert refused.value.busy


def test_one_at_a_time() -> None:
    books = Resizes()
    books.ask("a", 2, [0], [0])
    books.enter("start", 0.0)
    with pytest.raises(Refused, match=r"resize a from 1 to 2 engines is under way \(start\); ask again") as refused:
        books.ask("b", 3, [0], [0])
    assert refused.value.busy
    books.roll_back("no room", 1.0)
    assert books.ask("b", 3, [0], [0])[1]


@pytest.mark.parametrize("size", [0, -1])
def test_nobody_left_is_refused(size: int) -> None:
    with pytest.raises(Refused, match="can't serve: ask for 1 or more") as refused:
        Resizes().ask("a", size, [0, 1], [0, 1])
    assert not refused.value.busy


def test_more_than_a_server_can_have_is_refused_at_once() -> None:
    with pytest.raises(Refused, match="more than a server can have: ask for 4096 at most"):
        Resizes().ask("a", 2**31, [0], [0])


def test_the_size_there_is_changes_nothing() -> None:
    resize, new = Resizes().ask("a", 2, [0, 1], [0, 1])
    assert not new and resize.state == COMMITTED and resize.phases == {}


def test_an_engine_that_was_given_up_is_replaced() -> None:
    resize, new = Resizes().ask("a", 2, [0, 1], [1])
    assert new and (resize.start, resize.stop) == ([0], [])


def test_only_the_latest_are_remembered() -> None:
    books = Resizes()
    for i in range(KEPT + 3):
        books.ask(str(i), 1, [0], [0])
    assert len(list(books)) == KEPT


@pytest.mark.row("D6")
def test_what_fits() -> None:
    room = room_in_memory(10 << 30, 3 << 30, 1)
    assert room.engines == 4 and "each needs 3.00 GiB" in room.why and "10.00 GiB are free" in room.why
    books = Resizes()
    with pytest.raises(Refused, match=r"^5 engines don't fit: each needs .*; 4 fit$") as refused:
        books.ask("a", 5, [0], [0], room)
    assert not refused.value.busy and list(books) == []
    assert books.ask("a", 4, [0], [0], room)[1]
    assert Resizes().ask("b", 6, range(7), range(7), Room(2, "x"))[1]  # those that run are there, whatever is free now


def test_lanes_of_one_engine_are_called_that() -> None:
    books = Resizes(unit="lane")
    with pytest.raises(Refused, match=r"^0 lanes can't serve: ask for 1 or more, or stop the server$"):
        books.ask("a", 0, [0, 1], [0, 1])
    assert books.ask("a", 1, [0, 1], [0, 1])[0].unit == "lane"
    with pytest.raises(Refused, match="resize a was to 1 lanes, not 3: give another id"):
        books.ask("a", 3, [0, 1], [0, 1])
    books.enter("re-form", 0.0)
    with pytest.raises(Refused, match=r"resize a from 2 to 1 lanes is under way \(re-form\)"):
        books.ask("b", 3, [0, 1], [0, 1])


@given(st.integers(0, 5), st.integers(1, 8), st.integers(1, 8), st.data())
def test_what_comes_of_it_is_the_size_asked_for(first: int, before: int, after: int, data: st.DataObject) -> None:
    """And the first engine stays."""
    engines = list(range(first, first + before))
    alive = data.draw(st.sets(st.sampled_from(engines), min_size=1))
    resize, _ = Resizes(first).ask("a", after, engines, alive)
    assert (set(engines) & alive | set(resize.start)) - set(resize.stop) == set(range(first, first + after))
    assert first not in resize.stop and not set(resize.start) & set(resize.stop)
