"""Who runs something alone in an engine that several servers use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.core.quarantine import ExclusiveUses


def test_a_turn_is_free_when_all_others_have_let_go() -> None:
    uses, servers = ExclusiveUses(), [0, 1, 2]
    uses.want(1, True, servers)
    assert uses.now is not None and uses.now.server == 1 and not uses.now.free
    uses.let_go(0, uses.now.serial)
    assert not uses.now.free
    uses.let_go(2, uses.now.serial)
    assert uses.now.free
    uses.want(1, False, servers)
    assert uses.now is None


def test_one_after_the_other_as_asked_for() -> None:
    uses, servers = ExclusiveUses(), [0, 1, 2]
    for server in (2, 0, 2):
        uses.want(server, True, servers)
    first = uses.now
    assert first is not None and first.server == 2
    uses.want(2, False, servers)
    assert uses.now is not None and uses.now.server == 0 and uses.now.serial > first.serial
    for server in (1, 2):
        uses.let_go(server, first.serial)  # of the use before
    assert not uses.now.free


def test_who_ends_holds_nobody_up() -> None:
    uses = ExclusiveUses()
    uses.want(0, True, [0, 1, 2])
    uses.want(1, True, [0, 1, 2])
    assert uses.now is not None
    uses.let_go(1, uses.now.serial)
    uses.left(2, [0, 1])
    assert uses.now.free
    uses.left(0, [1])
    assert uses.now.server == 1 and uses.now.free  # there is nobody else
    uses.left(1, [])
    assert uses.now is None


@given(st.lists(st.tuples(st.sampled_from(["want", "done", "let go", "end"]), st.integers(0, 3)), max_size=60))
def test_everyone_who_asks_gets_a_turn_with_nobody_else_in_the_engine(steps: list[tuple[str, int]]) -> None:
    uses, servers = ExclusiveUses(), [0, 1, 2, 3]
    wanting: list[int] = []
    for what, server in steps:
        if server not in servers:
            continue
        if what == "want":
            wanting += [server] if server not in wanting else []
            uses.want(server, True, servers)
        elif what == "done":
            wanting = [other for other in wanting if other != server]
            uses.want(server, False, servers)
        elif what == "end":
            servers = [other for other in servers if other != server]
            wanting = [other for other in wanting if other != server]
            uses.left(server, servers)
        elif uses.now is not None and uses.now.server != server:
            uses.let_go(server, uses.now.serial)
        assert (uses.now is None) == (not wanting)
        assert uses.now is None or uses.now.server == wanting[0]
    while uses.now is not None:
        serial, server = uses.now.serial, uses.now.server
        for other in servers:
            if other != server:
                uses.let_go(other, serial)
        assert uses.now.free and wanting.pop(0) == server
        uses.want(server, False, servers)
    assert not wanting
