"""Ranks and a fleet on Ray nodes with addresses of their own, in network namespaces: a pipeline across them; one is cut
off, one is killed, one joins.

Each node but the head finds its own address: its default route goes elsewhere. Requests stream all the time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.faults.streams import enter_network, within
from tests.proc.networks import Networks, several_networks
from tests.proc.servers import PATIENT, TINY, Server, alive, needs_smollm2, planaria, wait_until
from tests.proc.test_engine_death import HASH, STREAMS, Outcome
from tests.proc.test_engine_death import run as run_streams
from tests.ray.clusters import RayNodes
from tests.ray.test_networks import tokens
from tests.tiers import representatives

pytestmark = needs_smollm2

FEW = 5  # streams, where a model is computed
PATIENCE = 240.0  # seconds for Ray to notice a loss, and for an engine to come up


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    try:
        with several_networks(3, elsewhere=True) as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces can't be made here: {getattr(e, 'stderr', '') or e}")


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.long)], ids="apis={}".format)
def apis(request: pytest.FixtureRequest) -> str:
    """How many API processes."""
    count: str = request.param
    return count


@pytest.fixture(scope="module")
def nodes(networks: Networks, apis: str) -> Iterator[RayNodes]:
    nodes = RayNodes(networks)
    try:
        nodes.start(0, 1)
        yield nodes
    finally:
        nodes.close()


class Deployment:
    """A server on the head's network, and clients there."""

    def __init__(self, server: Server, networks: Networks) -> None:
        self.server, self.space = server, networks.spaces[0]

    def get(self, path: str) -> dict[str, Any]:
        body: dict[str, Any] = within(self.space, lambda: httpx2.get(self.server.url + path, timeout=30).json())
        return body

    def run(self, harm: Callable[[], None] | None = None, streams: int = STREAMS) -> list[Outcome]:
        """Streams, of more than 200 tokens together; `harm` in the middle of them."""

        def at(tokens: int) -> None:
            if tokens == 150 and harm is not None:
                harm()

        return run_streams(self.server, at, streams, functools.partial(enter_network, self.space))

    @property
    def engines(self) -> list[dict[str, Any]]:
        engines: list[dict[str, Any]] = self.get("/admin/fleet")["engines"]
        return engines

    @property
    def states(self) -> list[str]:
        return [engine["state"] for engine in self.engines]

    def all_ready(self, count: int = 2) -> None:
        wait_until(f"{count} engines", lambda: self.states == ["ready"] * count, PATIENCE)


def test_a_pipeline_across_two_networks(networks: Networks, nodes: RayNodes, small: Path) -> None:
    """Before there is a fleet. Steps go through the graph, the rest over an encrypted link."""
    args = ["generate", str(small), *TINY, "--max-model-len", "256", "--prompt-token-ids", "5,6,7", "--json"]
    args += ["--max-tokens", "12", "--ignore-eos"]
    expected = tokens(planaria(*args).stdout)
    run = subprocess.run(
        [*networks.prefixes[0], sys.executable, "-m", "planaria", *args, "-pp", "2",
         "--distributed-executor-backend", "ray", "--ray-link", "compiled-graph"],
        capture_output=True, text=True, env=nodes.env | {"RAY_ADDRESS": nodes.address}, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert tokens(run.stdout) == expected
    first = json.loads(run.stdout.splitlines()[0])
    assert first["executor"] == "ray" and first["link"] == "ray-graph+shm+tcp"


ON_RAY = {
    "rank": ("-pp", "2", "--distributed-executor-backend", "ray"),
    "engine": ("-dp", "2", "--data-parallel-backend", "ray"),
}


def memory_files(pid: int) -> set[tuple[str, str]]:
    """Names and inodes of those for KV and weights that a process has mapped."""
    fields = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    names = ("/memfd:planaria-kv", "/memfd:planaria-weights")
    return {(each[5].split()[0], each[4]) for each in fields if len(each) > 5 and each[5].startswith(names)}


@pytest.mark.parametrize("role", representatives(ON_RAY, "rank"))
def test_kv_outlives_who_computes_in_it_on_another_machine(networks: Networks, nodes: RayNodes, role: str) -> None:
    """Its owner there is the reaper: whoever comes next goes on with it, and maps the weights."""
    env = nodes.env | {"RAY_ADDRESS": nodes.address}
    words = ["--kv-cache-memory", "64MiB", "--max-model-len", "512", "--dtype", "float32", *ON_RAY[role]]
    words += ["--heartbeat-timeout", "5"]
    with Server("smollm2", *words, env=env, prefix=networks.prefixes[0]) as server:
        deployment = Deployment(server, networks)
        deployment.all_ready(len(deployment.engines))
        expected = deployment.run(streams=FEW)
        engine = deployment.engines[-1]
        far = engine["ranks"][-1]
        before = memory_files(far)
        assert far in nodes.pids(1) and len(before) == 2
        killed = far if role == "rank" else engine["pid"]
        assert deployment.run(lambda: os.kill(killed, signal.SIGKILL), FEW) == expected
        wait_until("another", lambda: deployment.engines[-1]["ranks"][-1:] not in ([], [far]), PATIENCE)
        deployment.all_ready(len(deployment.engines))
        assert memory_files(deployment.engines[-1]["ranks"][-1]) == before
        fault = deployment.get("/health")["last_fault"]
        assert fault["recovered"]
        if role == "rank":  # what an engine had the other one goes on with
            assert fault["requests"] > 0 and fault["replayed_tokens"] == 0


@pytest.fixture(scope="module")
def fleet(networks: Networks, nodes: RayNodes, apis: str) -> Iterator[Deployment]:
    args = [*HASH, "-dp", "2", "--data-parallel-backend", "ray", "--heartbeat-timeout", "5", "--api-server-count", apis]
    args += PATIENT
    env = nodes.env | {"RAY_ADDRESS": nodes.address}
    with Server("smollm2", *args, env=env, prefix=networks.prefixes[0]) as server:
        yield Deployment(server, networks)


@pytest.fixture(scope="module")
def expected(fleet: Deployment) -> list[Outcome]:
    outcomes = fleet.run()
    assert all(finish for _, _, finish in outcomes)
    return outcomes


def home_of(nodes: RayNodes, pid: int) -> int:
    """Number of the node that a process is on."""
    (found,) = [which for which in range(3) if pid in nodes.pids(which)]
    return found


def home_of_engine_1(fleet: Deployment, nodes: RayNodes, *, other: bool) -> int:
    """Number of its node. The other node is there and empty, or isn't there; a third engine keeps it."""
    home = home_of(nodes, fleet.engines[1]["pid"])
    if len(fleet.engines) == 2:
        nodes.end(3 - home)  # what is left of it, too
        if other:
            nodes.start(3 - home)
    return home


def test_a_node_is_cut_off_and_another_joins(
    fleet: Deployment, networks: Networks, nodes: RayNodes, expected: list[Outcome]
) -> None:
    """There is no room: the fleet goes on smaller, and says so, until there is."""
    ghost = fleet.engines[1]["pid"]
    assert home_of(nodes, ghost) == 1
    fleet.server.wait_for(f"(10.93.0.2), process {ghost}")
    assert "10.94." not in "".join(fleet.server.log)  # where its default route goes
    assert fleet.run(networks.cut) == expected
    wait_until("it is given up", lambda: fleet.states == ["ready", "ended"], PATIENCE)
    body = fleet.get("/health")
    assert body["ready"] and [engine["state"] for engine in body["engines"]] == ["ready", "ended"]
    assert fleet.run(lambda: nodes.start(2)) == expected
    fleet.all_ready()
    assert home_of(nodes, fleet.engines[1]["pid"]) == 2
    assert fleet.run(networks.mend) == expected
    wait_until("the old one has ended", lambda: not alive(ghost), PATIENCE)
    assert fleet.run() == expected


@pytest.mark.long
def test_an_engine_is_told_to_end(fleet: Deployment, nodes: RayNodes, expected: list[Outcome]) -> None:
    """SIGTERM to its process."""
    first, before = fleet.engines[1]["pid"], fleet.get("/health")["engine_restarts"]
    home = home_of(nodes, first)
    assert fleet.run(lambda: os.kill(first, signal.SIGTERM)) == expected
    wait_until("another", lambda: fleet.engines[1]["pid"] in nodes.pids(home) and not alive(first), PATIENCE)
    fleet.all_ready()
    assert fleet.get("/health")["engine_restarts"] == before  # nothing has failed


@pytest.mark.long
def test_a_node_is_killed_and_its_engine_comes_up_on_another(
    fleet: Deployment, nodes: RayNodes, expected: list[Outcome]
) -> None:
    home = home_of_engine_1(fleet, nodes, other=True)
    assert fleet.run(lambda: nodes.kill(home)) == expected
    wait_until("another engine", lambda: fleet.engines[1]["pid"] in nodes.pids(3 - home), PATIENCE)
    fleet.all_ready()
    assert fleet.run() == expected


@pytest.mark.long
def test_a_raylet_is_killed_and_its_engine_lives_on_until_there_is_another_place(
    fleet: Deployment, nodes: RayNodes, expected: list[Outcome]
) -> None:
    home = home_of_engine_1(fleet, nodes, other=False)
    nodes.processes[home].send_signal(signal.SIGSTOP)  # `ray start --block` would end the whole node
    before = fleet.engines[1]["pid"]
    (raylet,) = [pid for pid in nodes.pids(home) if psutil.Process(pid).name() == "raylet"]
    assert fleet.run(lambda: os.kill(raylet, signal.SIGKILL)) == expected
    fleet.server.wait_for("which lives on")
    assert fleet.run() == expected and fleet.engines[1]["pid"] == before and alive(before)
    assert fleet.run(lambda: nodes.start(3 - home)) == expected
    wait_until("it has moved", lambda: fleet.engines[1]["pid"] in nodes.pids(3 - home), PATIENCE)
    fleet.all_ready()
    assert fleet.run() == expected
    wait_until("the old one has ended", lambda: not alive(before), PATIENCE)


@pytest.mark.long
def test_a_node_joins_and_is_used(fleet: Deployment, nodes: RayNodes, expected: list[Outcome]) -> None:
    new = 3 - home_of_engine_1(fleet, nodes, other=False)

    def scale() -> subprocess.CompletedProcess[str]:
        asked = ["-m", "planaria", "scale", "--dp", "3", "--url", fleet.server.url]
        command = [*nodes.networks.prefixes[0], sys.executable, *asked]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    refused = scale()
    assert refused.returncode != 0 and "1 of 3 engines have no place" in refused.stderr, refused.stderr
    nodes.start(new)
    done: list[int] = []
    assert fleet.run(lambda: done.append(scale().returncode)) == expected
    assert done == [0] and home_of(nodes, fleet.engines[2]["pid"]) == new


@pytest.mark.long
def test_a_whole_node_is_told_to_end(fleet: Deployment, nodes: RayNodes, expected: list[Outcome]) -> None:
    """SIGTERM to all of its processes; no other has room, until it is back."""
    home, count = home_of_engine_1(fleet, nodes, other=False), len(fleet.engines)

    def leave() -> None:
        for pid in nodes.pids(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    assert fleet.run(leave) == expected
    wait_until("the node has nobody", lambda: not nodes.pids(home), PATIENCE)
    wait_until("it is given up", lambda: fleet.states == ["ready", "ended", "ready"][:count], PATIENCE)
    assert fleet.run() == expected
    nodes.end(home)
    assert fleet.run(lambda: nodes.start(home)) == expected
    fleet.all_ready(count)


@pytest.mark.long
def test_a_node_is_killed_and_no_other_has_room(fleet: Deployment, nodes: RayNodes, expected: list[Outcome]) -> None:
    home_of_engine_1(fleet, nodes, other=False)
    last = fleet.engines[-1]["pid"]
    assert fleet.run(lambda: nodes.kill(home_of(nodes, last))) == expected
    wait_until("it is given up", lambda: fleet.states[-1] == "ended", PATIENCE)
    assert fleet.run() == expected and fleet.get("/health")["ready"]


def test_the_server_is_told_to_end(fleet: Deployment, expected: list[Outcome]) -> None:
    """What is open ends as it would have, then everything ends."""
    engines = fleet.engines
    pids = [engine["pid"] for engine in engines] + [pid for engine in engines for pid in engine["ranks"]]
    enter = functools.partial(enter_network, fleet.space)
    tell = functools.partial(fleet.server.process.send_signal, signal.SIGTERM)
    assert run_streams(fleet.server, enter=enter, begun=tell) == expected
    assert fleet.server.process.wait(60) == 0
    wait_until("processes are gone", lambda: not any(alive(pid) for pid in pids if pid), PATIENCE)
