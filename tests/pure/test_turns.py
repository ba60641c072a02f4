"""Whose turn it is in an engine that several servers use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.core.quarantine import Turns


def test_a_turn_is_free_when_all_others_have_let_go() -> None:
    turns, servers = Turns(), [0, 1, 2]
    turns.want(1, True, servers)
    assert turns.now is not None and turns.now.server == 1 and not turns.now.free
    turns.let_go(0, turns.now.serial)
    assert not turns.now.free
    turns.let_go(2, turns.now.serial)
    assert turns.now.free
    turns.want(1, False, servers)
    assert turns.now is None


def test_one_after_the_other_as_asked_for() -> None:
    turns, servers = Turns(), [0, 1, 2]
    for server in (2, 0, 2):
        turns.want(server, True, servers)
    first = turns.now
    assert first is not None and first.server == 2
    turns.want(2, False, servers)
    assert turns.now is not None and turns.now.server == 0 and turns.now.serial > first.serial
    for server in (1, 2):
        turns.let_go(server, first.serial)  # of the turn before
    assert not turns.now.free


def test_who_ends_holds_nobody_up() -> None:
    turns = Turns()
    turns.want(0, True, [0, 1, 2])
    turns.want(1, True, [0, 1, 2])
    assert turns.now is not None
    turns.let_go(1, turns.now.serial)
    turns.left(2, [0, 1])
    assert turns.now.free
    turns.left(0, [1])
    assert turns.now.server == 1 and turns.now.free  # there is nobody else
    turns.left(1, [])
    assert turns.now is None


@given(st.lists(st.tuples(st.sampled_from(["want", "done", "let go", "end"]), st.integers(0, 3)), max_size=60))
def test_everyone_who_asks_gets_a_turn_with_nobody_else_in_the_engine(steps: list[tuple[str, int]]) -> None:
    turns, servers = Turns(), [0, 1, 2, 3]
    wanting: list[int] = []
    for what, server in steps:
        if server not in servers:
            continue
        if what == "want":
            wanting += [server] if server not in wanting else []
            turns.want(server, True, servers)
        elif what == "done":
            wanting = [other for other in wanting if other != server]
            turns.want(server, False, servers)
        elif what == "end":
            servers = [other for other in servers if other != server]
            wanting = [other for other in wanting if other != server]
            turns.left(server, servers)
        elif turns.now is not None and turns.now.server != server:
            turns.let_go(server, turns.now.serial)
        assert (turns.now is None) == (not wanting)
        assert turns.now is None or turns.now.server == wanting[0]
    while turns.now is not None:
        serial, server = turns.now.serial, turns.now.server
        for other in servers:
            if other != server:
                turns.let_go(other, serial)
        assert turns.now.free and wanting.pop(0) == server
        turns.want(server, False, servers)
    assert not wanting
