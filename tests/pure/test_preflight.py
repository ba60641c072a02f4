"""What is checked before ranks load: the judgement, and the looking."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from planaria.executor.preflight import Door, Needs, NodeFacts, check_node, doors_of_others, look, reach, unreachable
from planaria.protocol import Hello


def hello(rank: int, **fields: Any) -> Hello:
    given = {"home": f"home {rank}", "node": f"node{rank}", "address": f"10.0.0.{rank + 1}", "door": 400 + rank}
    return Hello(rank, 1, **{**given, **fields})


ENOUGH = NodeFacts("here", 10_000)


@pytest.mark.parametrize(
    ("facts", "needs", "said"),
    [
        (ENOUGH, Needs(64, 1 << 20, (("127.0.0.1", 0),)), ""),
        (
            NodeFacts("here", 100), Needs(16),
            "here: 16 ranks need 192 file descriptors, 100 are left; raise the limit (ulimit -n)",
        ),
        (
            NodeFacts("here", 10_000, futex="darwin has no futex"), Needs(2, 1),
            "here: darwin has no futex, which ranks need to share memory; use --disable-custom-all-reduce",
        ),
        (
            NodeFacts("here", 10_000, memory_file="File too large"), Needs(2, 64 << 20),
            "here: no memory file of 64 MiB can be made: File too large; raise the limit on memory, or use "
            "--disable-custom-all-reduce",
        ),
        (
            NodeFacts("here", 10_000, taken={("10.0.0.9", 29501): "Address already in use"}), Needs(2),
            "here: can't listen on 10.0.0.9 port 29501: Address already in use; choose another port",
        ),
        (
            NodeFacts("here", 10_000, taken={("10.0.0.9", 1): "not an address of this node"}), Needs(2),
            "here: can't listen on 10.0.0.9 port 1: not an address of this node; give an address of this node",
        ),
    ],
)  # fmt: skip
def test_what_a_node_lacks(facts: NodeFacts, needs: Needs, said: str) -> None:
    assert check_node(facts, needs) == ([said] if said else [])


def test_looking_at_this_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        endpoints = (("127.0.0.1", 0), ("127.0.0.1", port), ("192.0.2.1", 0))
        facts = look("here", Needs(2, 1 << 30, endpoints))
    assert facts.taken == {
        ("127.0.0.1", port): "Address already in use", ("192.0.2.1", 0): "not an address of this node",
    }  # fmt: skip
    assert not facts.futex and not facts.memory_file
    left = look("here", Needs()).files_left
    with ExitStack() as files:
        for _ in range(5):
            files.enter_context(open(os.devnull))
        assert look("here", Needs()).files_left == left - 5


def test_a_limit_on_files_stops_a_memory_file() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert look("here", Needs(2, 1 << 30)).memory_file == "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_who_has_to_be_reached() -> None:
    members = [hello(0), hello(1), hello(2, home="home 0"), hello(3, door=0)]
    assert doors_of_others(members[0], members) == {1: ("10.0.0.2", 401)}
    assert doors_of_others(members[1], members) == {0: ("10.0.0.1", 400), 2: ("10.0.0.3", 402)}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_reach(host: str) -> None:
    try:
        doors = {rank: Door(host) for rank in range(3)}
    except OSError:
        pytest.skip(f"this machine has no {host}")
    endpoints = {rank: (host, door.port) for rank, door in doors.items()}
    assert reach(endpoints, 5.0) == {}
    assert reach({}, 5.0) == {}
    doors[1].close()
    endpoints[7] = ("no such name.invalid", 1)
    failed = reach(endpoints, 5.0)
    assert list(failed) == [1, 7] and failed[1] == "Connection refused"
    for door in doors.values():
        door.close()


def test_an_address_that_swallows_packets() -> None:
    """A listener whose backlog is full answers nobody, like a firewall that drops."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(address)
        assert reach({3: address}, 0.2) == {3: "no answer in 0.2 s"}
        for one in held:
            one.close()


@pytest.mark.row("R12")
def test_a_pair_that_does_not_meet_is_named() -> None:
    members = [hello(0), hello(1), hello(2, address="127.0.0.1")]
    assert unreachable(members[1], members, {}) == ""
    assert unreachable(members[1], members, {0: "Connection refused"}) == (
        "rank 1 on node1 (10.0.0.2) can't reach rank 0 on node0 at 10.0.0.1 port 400: Connection refused; let "
        "nodes reach one another at every port, or set $PLANARIA_HOST_IP there to an address that they reach"
    )
    assert unreachable(members[1], members, {2: "no answer in 5 s", 3: "x"}) == (
        "rank 1 on node1 (10.0.0.2) can't reach rank 2 on node2 at 127.0.0.1 port 402 (nor 1 more ranks): no answer in "
        "5 s; no other node reaches a loopback address: set $PLANARIA_HOST_IP there to the one that others know it by"
    )
