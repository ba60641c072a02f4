"""The engine's process ends while its ranks are on Ray, then Ray itself: streams go on with the same tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.proc.servers import Server, alive, needs_smollm2, titled, wait_until
from tests.proc.test_engine_death import HASH, Outcome, health, run
from tests.ray.clusters import several_nodes

pytestmark = needs_smollm2

RAY = ["--distributed-executor-backend", "ray", "-pp", "2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """As many slots as ranks: an engine that comes up has those of the one before."""
    with several_nodes(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: Any) -> Iterator[Server]:
    env = {"PLANARIA_RAY_ADDRESS": cluster.address, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with Server("smollm2", *HASH, *RAY, env=env) as server:
        yield server
        log = "".join(server.log)
    assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Outcome]:
    return run(server)


def ranks() -> list[int]:
    """Below this process are the cluster and the server."""
    return titled(os.getpid(), "worker")


def gcs(cluster: Any) -> int:
    """Pid of the head's own process."""
    (info,) = cluster.head_node.all_processes["gcs_server"]
    return int(info.process.pid)


def at(count: int, harm: Callable[[], None]) -> Callable[[int], None]:
    """`harm`, when so many events have come."""
    return lambda tokens: harm() if tokens == count else None


def test_an_engine_that_dies_leaves_no_rank_and_no_bundle(server: Server, expected: list[Outcome]) -> None:
    before, engine = ranks(), server.engine_pid()
    plan = "Ray at 127.0.0.1, free devices"
    wait_until("it has said its plan", lambda: len("".join(server.log).partition(plan)[2].splitlines()) >= 4)
    (first,) = [n for n, line in enumerate(server.log) if line.startswith(plan)]
    assert server.log[first].endswith("pp=2: 2 ranks on 1 node\n") and server.log[first + 1].startswith("RANK")
    assert [line.split()[:4] for line in server.log[first + 2 : first + 4]] == [list("0000"), list("1010")]
    assert run(server, at(150, lambda: os.kill(engine, signal.SIGKILL))) == expected
    assert len(before) == len(ranks()) == 2 and not any(map(alive, before))
    assert server.engine_pid() != engine and health(server)["engine_restarts"] == 1
    assert not [line for line in server.log if "was planned" in line]


@pytest.mark.long
def test_a_head_that_is_stopped_is_done_without(cluster: Any, server: Server, expected: list[Outcome]) -> None:
    """Nothing happens, until a rank is lost. The next engine is on Ray again."""
    before = ranks()
    head = gcs(cluster)
    os.kill(head, signal.SIGSTOP)
    try:
        assert run(server) == expected and ranks() == before
        assert run(server, at(150, lambda: os.kill(before[0], signal.SIGKILL))) == expected
        assert not any(map(alive, before)) and len(titled(server.pid, "worker")) == 2
    finally:
        os.kill(head, signal.SIGCONT)
    assert run(server, at(150, lambda: os.kill(server.engine_pid(), signal.SIGKILL))) == expected
    assert len(ranks()) == 2 and not titled(server.pid, "worker")


def test_when_ray_is_gone_ranks_are_processes(cluster: Any, server: Server, expected: list[Outcome]) -> None:
    """Without its head they go on as they are; with the next loss nothing of Ray is needed."""
    before = ranks()
    os.kill(gcs(cluster), signal.SIGKILL)
    assert run(server) == expected and ranks() == before
    assert run(server, at(150, lambda: os.kill(before[0], signal.SIGKILL))) == expected
    assert not any(map(alive, before)) and len(titled(server.pid, "worker")) == 2
    server.wait_for("ranks go on as processes of this node")
    after = titled(server.pid, "worker")
    os.kill(after[1], signal.SIGKILL)
    assert run(server) == expected
    assert titled(server.pid, "worker")[0] == after[0], "survivors keep their processes again"
    wait_until("all is well", lambda: health(server)["ready"])
