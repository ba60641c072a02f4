"""The router: books that balance whatever happens, even loads, prefixes that draw requests only while that pays."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.router import BLOCK, SAVED, WORK, Router, draw, prefix_keys
from planaria.wire import EngineStats

FULL = 100_000  # tokens of KV


def fleet(count: int, capacity: int | None = None, seed: int = 0) -> Router:
    router = Router(seed)
    for id in range(count):
        router.join(id, capacity)
    return router


def prompt(number: int, blocks: int = 4) -> list[int]:
    """Tokens that begin like no other number's."""
    return [number] * (blocks * BLOCK)


def send(router: Router, name: str, tokens: list[int], max_tokens: int = 16) -> int | str:
    id = router.choose(tokens, max_tokens)
    assert id is not None
    router.sent(name, id, len(tokens), max_tokens)
    return id


def test_draws_are_those_of_splitmix64() -> None:
    # Known answers of the authors' program, seed 1234567.
    assert [draw(1234567, i) for i in range(3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def test_nobody_there_is_nobody_chosen() -> None:
    router = Router()
    assert router.choose([1, 2, 3], 5) is None
    router.join("a")
    router.set_up("a", False)
    assert router.choose([1, 2, 3], 5) is None


def test_the_same_calls_make_the_same_choices_in_another_process() -> None:
    program = (
        "from planaria.core.router import Router\n"
        "r = Router(7)\n"
        "[r.join(f'e{i}') for i in range(9)]\n"
        "out = []\n"
        "for i in range(200):\n"
        "    out.append(r.choose([i] * 100, 8)); r.sent(str(i), out[-1], 100, 8)\n"
    )  # fmt: skip
    here: dict[str, list[str]] = {}
    exec(program, here)
    there = subprocess.run(
        [sys.executable, "-c", program + "print(*out)"], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "5"},
    )  # fmt: skip
    assert there.stdout.split() == here["out"]


@pytest.mark.row("D9")
def test_work_goes_where_least_is() -> None:
    router = fleet(2)
    assert {send(router, "a", prompt(1)), send(router, "b", prompt(2))} == {0, 1}
    router.ended("a")
    router.ended("b")
    router.sent("large", 0, 50_000, 16)
    assert [send(router, str(n), prompt(n)) for n in range(10)] == [1] * 10
    router.ended("large")
    assert send(router, "next", prompt(20)) == 0


def test_many_engines_get_an_even_share() -> None:
    router = fleet(1000)
    for n in range(5000):
        send(router, str(n), [n] * 8)
    loads = router.loads().values()
    assert max(loads) < 2.0 * sum(loads) / len(loads)  # among random ones the unluckiest gets three times the mean


def test_a_prefix_draws_its_requests_to_one_engine() -> None:
    router = fleet(16)
    first = send(router, "first", prompt(7, 16))
    router.ended("first")
    for n in range(30):  # a conversation that grows, while other requests come
        assert send(router, f"turn {n}", prompt(7, 16) + [n] * n) == first
        router.ended(f"turn {n}")
        send(router, f"other {n}", prompt(100 + n, 1))


def test_a_prefix_is_given_up_when_its_engine_has_far_more_to_do() -> None:
    router = fleet(16)
    first = send(router, "first", prompt(7))
    router.ended("first")
    router.sent("large", first, SAVED * 4 * BLOCK, 16)
    assert send(router, "second", prompt(7)) != first
    router.ended("large")
    router.ended("second")
    assert send(router, "third", prompt(7)) != first  # the latest of those that hold it


def test_what_an_engine_held_is_forgotten_when_it_recovers() -> None:
    router = fleet(2)
    first = send(router, "first", prompt(7))
    router.ended("first")
    router.set_up(first, False)
    router.set_up(first, True)
    router.sent("small", first, 1, 1)
    assert send(router, "second", prompt(7)) != first
    assert first in router


def test_a_salt_keeps_its_prefixes_to_itself() -> None:
    router = fleet(4)
    home = router.choose(prompt(7), 1, "mine")
    assert [len(router._cached(prefix_keys(prompt(7), salt))) for salt in ("mine", "yours", "")] == [1, 0, 0]
    assert home is not None and router.choose(prompt(7), 1, "mine") == home


def test_no_more_prefixes_are_remembered_than_allowed() -> None:
    router = Router(memory=8)
    router.join(0)
    router.join(1)
    send(router, "old", prompt(1))
    send(router, "new", prompt(2))
    assert len(router._holders) == 8
    send(router, "newer", prompt(3, 2))
    assert len(router._holders) == 8
    known = [list(router._cached(prefix_keys(prompt(n))).values()) for n in (1, 2, 3)]
    assert known == [[2 * BLOCK], [4 * BLOCK], [2 * BLOCK]]  # the end of the oldest went


def test_one_that_drains_or_recovers_gets_nothing_new() -> None:
    router = fleet(4)
    router.drain(1)
    router.set_up(2, False)
    assert {send(router, str(n), prompt(n)) for n in range(40)} == {0, 3}
    router.drain(1, False)
    router.set_up(2, True)
    assert {send(router, str(n), prompt(n)) for n in range(40, 80)} >= {1, 2}


def test_one_that_leaves_takes_its_requests_along() -> None:
    router = fleet(2)
    router.sent("a", 0, 100, 10)
    router.sent("b", 1, 100, 10)
    assert router.leave(0) == ["a"]
    router.ended("a")  # the last words are heard by nobody
    router.progressed("a", 1)
    router.snapshot(0, EngineStats(kv_usage=1.0))
    assert router.requests(1) == ["b"] and list(router.loads()) == [1]
    assert router.choose(prompt(1), 5) == 1


def test_a_request_that_migrates_counts_once() -> None:
    router = fleet(2)
    router.sent("a", 0, 100, 10)
    router.progressed("a", 3)
    router.sent("a", 1, 103, 7)
    assert router.loads() == {0: 0, 1: (1 + WORK) * 103 + 7}


def test_the_same_id_joins_once() -> None:
    router = fleet(1)
    with pytest.raises(ValueError, match="0 is in the fleet already"):
        router.join(0)


@pytest.mark.row("D9")
def test_a_snapshot_is_the_truth_and_what_happens_after_it_corrects_it() -> None:
    router = fleet(2, FULL)
    router.snapshot(0, EngineStats(kv_usage=0.5))  # another front end's requests
    assert router.loads() == {0: FULL // 2, 1: 0}
    router.sent("a", 0, 1000, 100)
    assert router.loads()[0] == FULL // 2 + (1 + WORK) * 1000 + 100  # to hold and to compute, then the output
    router.progressed("a", 1)
    assert router.loads()[0] == FULL // 2 + 1000 + 100
    router.snapshot(0, EngineStats(running=1, kv_usage=1001 / FULL))  # the others ended
    assert router.loads()[0] == 1001 + 99
    router.ended("a")
    assert router.loads()[0] == 0


def test_requests_of_others_that_wait_are_load() -> None:
    router = fleet(2, FULL)
    router.snapshot(0, EngineStats(waiting=10))
    assert router.loads()[0] > 0
    assert send(router, "a", prompt(1)) == 1


def test_a_full_engine_is_passed_over() -> None:
    router = Router()
    router.join("small", 2000)
    router.join("large", 100_000)
    router.sent("a", "small", 500, 16)
    router.sent("b", "large", 530, 16)
    assert send(router, "c", prompt(1, 20), 16) == "large"  # it would wait at the other, which has less to do


def test_requests_that_begin_anew_are_work_again() -> None:
    router = fleet(1)
    router.sent("a", 0, 100, 50)
    router.progressed("a", 20)
    assert router.loads()[0] == 100 + 20 + 30
    router.set_up(0, False)
    assert router.loads()[0] == (1 + WORK) * 120 + 30
    router.progressed("a", 1)
    assert router.loads()[0] == 121 + 29


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "progress", "end", "join", "leave", "drain", "open", "down", "up",
                         "snapshot", "move"]),
        st.integers(0, 40), st.integers(0, 7), st.integers(1, 300),
    ),
    max_size=100,
)  # fmt: skip


@given(OPERATIONS, st.integers(0, 2**64))
def test_whatever_happens_the_books_balance(operations: list[tuple[str, int, int, int]], seed: int) -> None:
    router = Router(seed, memory=32)
    engines: dict[int, list[bool]] = {}  # up, draining
    where: dict[str, int] = {}
    for what, number, id, size in operations:
        name = f"r{number}"
        if what == "join" and id not in engines:
            router.join(id, 1000 if id % 2 else None)
            engines[id] = [True, False]
        elif what == "send":
            chosen = router.choose([number] * size, size)
            eligible = [id for id, (up, draining) in engines.items() if up and not draining]
            assert chosen in eligible if eligible else chosen is None
            if chosen is not None:
                router.sent(name, chosen, size, size)
                where[name] = chosen  # type: ignore[assignment]
        elif what == "progress":
            router.progressed(name, size)
        elif what == "end":
            router.ended(name)
            where.pop(name, None)
        elif id in engines:
            if what == "leave":
                gone = router.leave(id)
                assert sorted(gone) == sorted(n for n, at in where.items() if at == id)
                where = {n: at for n, at in where.items() if at != id}
                del engines[id]
            elif what in ("drain", "open"):
                router.drain(id, what == "drain")
                engines[id][1] = what == "drain"
            elif what in ("down", "up"):
                router.set_up(id, what == "up")
                engines[id][0] = what == "up"
            elif what == "snapshot":
                router.snapshot(id, EngineStats(kv_usage=size / 300, waiting=number % 3))
            elif what == "move" and name in where:
                router.sent(name, id, size, size)
                where[name] = id
        for id in engines:
            assert sorted(router.requests(id)) == sorted(n for n, at in where.items() if at == id)
        assert all(load >= 0 for load in router.loads().values())
        assert len(router._holders) <= 32
    for name in list(where):
        router.ended(name)
    for id in engines:
        router.snapshot(id, EngineStats())
    assert all(load == 0 for id, load in router.loads().items() if id % 2)  # those that know their KV
    for engine in router._engines.values():
        assert engine.held == engine.coming == engine.ahead == engine.unbegun == 0
