"""A few of the faults that come from outside; `python -m benchmarks.outside` plays all of them."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.executor.link.faults import ConnectionLost
from planaria.executor.link.tcp import TcpLink
from planaria.protocol import Call, Done
from tests.faults import outside_disk, outside_machine, outside_network, outside_ray
from tests.faults.cable import CarriedNetworks, carried_networks
from tests.faults.outside import ALL, SKIPPED, Stage, play
from tests.faults.streams import within
from tests.proc.links import LIMIT, start_rank

PARTS = (outside_disk, outside_machine, outside_network, outside_ray)


@pytest.fixture
def cabled() -> Iterator[CarriedNetworks]:
    try:
        with carried_networks() as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces and TUN devices can't be made here: {getattr(e, 'stderr', '') or e}")


@pytest.fixture
def linked(cabled: CarriedNetworks) -> Iterator[TcpLink]:
    """A link over the cable; that a rank is silent is not noticed in the time that a test has."""
    link = within(cabled.spaces[0], lambda: TcpLink(1, host="10.93.0.1", heartbeat=2 * LIMIT))
    rank = start_rank(0, link.address_of(0), cabled.prefixes[1])
    try:
        link.send(1, Call("echo", ("up",)))
        assert link.receive(LIMIT) == (0, 1, Done(0, "up"))
        yield link
    finally:
        link.close()
        rank.kill()
        rank.wait(LIMIT)


def test_what_a_bad_cable_does_to_packets_is_done_to_no_message(cabled: CarriedNetworks, linked: TcpLink) -> None:
    cabled.cable.set(loss=0.05, twice=0.1, damage=0.05, spread=0.005)
    for number in range(2, 22):
        linked.send(number, Call("check", (bytes([number]) * 20_000,)))
        assert linked.receive(LIMIT) == (0, number, Done(0, [20_000, zlib.crc32(bytes([number]) * 20_000)]))
    assert cabled.cable.harmed > 10


def test_a_connection_that_somebody_resets_is_known_to_be_broken(cabled: CarriedNetworks, linked: TcpLink) -> None:
    cabled.cable.set(resets=1)
    linked.send(2, Call("echo", (2,)))
    with pytest.raises(ConnectionLost, match="rank 0 broke") as error:
        linked.receive(LIMIT)
    assert error.value.ranks == (0,) and not cabled.cable.resets


@pytest.mark.parametrize("name", ["log-full", "journal-full"])
def test_fault(name: str, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    try:
        came = play(ALL[name], stage)
    finally:
        stage.close()
    if came.outcome == SKIPPED:
        pytest.skip(came.note)
    assert came.right, came


def test_all_are_named_once_and_say_what_was_done() -> None:
    assert {fault.act.__module__ for fault in ALL.values()} == {part.__name__ for part in PARTS}
    assert len({fault.what for fault in ALL.values()}) == len(ALL) > 40
