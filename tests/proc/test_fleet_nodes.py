"""A fleet over several nodes without Ray: one server, and an agent on each other node that has engines. Two nodes with
networks of their own; several on this machine. The worker's tokens depend on the whole history."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.faults.streams import enter_network
from tests.proc import networks
from tests.proc.networks import Networks
from tests.proc.servers import Server, alive, needs_smollm2, titled, wait_until
from tests.proc.sockets import free_port
from tests.proc.test_engine_death import HASH, Outcome
from tests.proc.test_engine_death import run as run_streams
from tests.proc.test_nodes import SECRET, Command

pytestmark = needs_smollm2

STREAMS = 8
BACK = 300.0  # seconds for what takes a few, where many share the cores


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    """With one engine."""
    with Server("smollm2", *HASH) as server:
        return run_streams(server, streams=STREAMS)


class Deployment:
    """A server, agents of other nodes, and who asks from the server's network. `args`: of all of them."""

    def __init__(
        self, args: list[str], prefixes: list[tuple[str, ...]], enter: Callable[[], None] = lambda: None
    ) -> None:
        self.args, self.prefixes, self.enter = ["smollm2", *HASH, *args], prefixes, enter
        self.agents: list[Command] = []
        self.asking = concurrent.futures.ThreadPoolExecutor(1, initializer=enter)
        self.server: Server

    def agent(self, *more: str, rank: int = 1) -> Command:
        where = [] if "--headless" in more else ["--node-rank", str(rank)]
        command = Command("serve", *self.args, *where, *more, prefix=self.prefixes[rank], env=None)
        self.agents.append(command)
        return command

    def start(self, *more: str) -> None:
        self.server = Server(*self.args, *more, prefix=self.prefixes[0])
        try:
            self.server.__enter__()
        except BaseException:
            for agent in self.agents:
                agent.__exit__()
            raise

    def run(self, harm: Callable[[int], None] = lambda tokens: None) -> list[Outcome]:
        return run_streams(self.server, harm, STREAMS, self.enter)

    def ask(self, path: str) -> httpx2.Response:
        return self.asking.submit(lambda: httpx2.get(self.server.url + path, timeout=60)).result()

    def engines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("/admin/fleet").json()["engines"]
        return found

    def wait_all_ready(self, *layouts: str) -> None:
        def ready() -> bool:
            assert self.agents[-1].process.poll() is None, self.agents[-1].text()
            engines = self.engines()
            wrong = [engine for engine, layout in zip(engines, layouts, strict=False) if engine["layout"] != layout]
            return not wrong and all(engine["state"] == "ready" for engine in engines)

        wait_until("all engines are ready", ready, BACK)

    def taken(self) -> list[float]:
        """Prompt tokens of requests that each engine has had."""
        lines = [line for line in self.ask("/metrics").text.splitlines() if "prefix_cache_queries_total{" in line]
        return [float(line.split()[-1]) for line in lines]

    def run_on_both(self, expected: list[Outcome]) -> None:
        """Until each engine has had some of the requests. Where clients are slow, one engine may do for all."""
        before = self.taken()

        def had() -> bool:
            assert self.run() == expected
            return all(now > then for now, then in zip(self.taken(), before, strict=True))

        wait_until("both engines have had requests", had, BACK)

    def apis(self) -> list[int]:
        """Places of the API processes that serve."""
        listed = self.ask("/admin/processes").json()["processes"]
        return [row["coordinates"]["api"] for row in listed if row["role"] == "api" and row["state"] == "ready"]

    def close(self) -> list[int]:
        """Ends the server; exit codes of it and of the agents that are still there."""
        living = [agent for agent in self.agents if agent.process.poll() is None]
        self.server.process.terminate()
        codes = [self.server.process.wait(BACK), *(agent.wait(BACK) for agent in living)]
        for agent in self.agents:
            agent.__exit__()
        self.asking.shutdown()
        return codes

    @property
    def log(self) -> str:
        return "".join(self.server.log)


# -- two networks


@pytest.fixture(scope="module")
def two_networks() -> Iterator[Networks]:
    try:
        with networks.two_networks() as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces can't be made here: {getattr(e, 'stderr', '') or e}")


@pytest.fixture(scope="module")
def deployed(two_networks: Networks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """An engine on each of two nodes."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_bytes(SECRET)
    args = ["-dp", "2", "--nnodes", "2", "--master-addr", "10.93.0.1", "--heartbeat-timeout", "5"]
    args += ["--secret-file", str(secret), "--log-level", "info"]
    made = Deployment(args, two_networks.prefixes, functools.partial(enter_network, two_networks.spaces[0]))
    made.agent()
    made.start()
    yield made
    assert made.close() == [0, 0]


@pytest.fixture
def two(deployed: Deployment) -> Deployment:
    """Both engines are up."""
    if deployed.agents[-1].process.poll() is not None:
        deployed.agent()
    deployed.wait_all_ready()
    return deployed


def far_engine(two: Deployment) -> int:
    (engine,) = titled(two.agents[-1].process.pid, "engine")
    return engine


def test_requests_stream_through_both(two: Deployment, expected: list[Outcome]) -> None:
    two.run_on_both(expected)
    assert [engine["pid"] for engine in two.engines()] == [*two.server.engine_pids(), far_engine(two)]
    assert not any(engine["misplaced"] for engine in two.engines())
    two.server.wait_for("10.93.0.2) is here")


def test_a_node_that_is_lost_costs_nothing_and_its_engine_comes_back(two: Deployment, expected: list[Outcome]) -> None:
    lost = far_engine(two)

    def harm(tokens: int) -> None:
        if tokens == 150:
            two.agents[-1].process.kill()

    assert two.run(harm) == expected
    wait_until("its engine has ended", lambda: not alive(lost), BACK)
    states = [engine["state"] for engine in two.engines()]
    body = two.ask("/health").json()
    assert states == ["ready", "loading"] and body["ready"]
    assert (body["last_fault"]["part"], body["last_fault"]["engine"]) == ("engine", 1)
    assert two.run() == expected
    two.agent()
    two.wait_all_ready()
    two.run_on_both(expected)


def test_a_node_that_is_told_to_end_is_emptied_first(two: Deployment, expected: list[Outcome]) -> None:
    """No fault is counted."""
    before, engine = two.ask("/health").json()["engine_restarts"], far_engine(two)

    def harm(tokens: int) -> None:
        if tokens == 150:
            two.agents[-1].process.terminate()

    assert two.run(harm) == expected
    assert two.agents[-1].wait(BACK) == 0, two.agents[-1].text()
    assert not alive(engine)
    two.server.wait_for("its engines are taken off it")
    two.agent()
    two.wait_all_ready()
    assert two.ask("/health").json()["engine_restarts"] == before


@pytest.mark.long  # tests/proc/test_node_loss.py pulls one in the default run
def test_a_cable_is_pulled_and_put_in_again(two: Deployment, two_networks: Networks, expected: list[Outcome]) -> None:
    """Nobody hears of it: heartbeats do. The agent is the same one."""
    lost, agents = far_engine(two), len(two.agents)

    def harm(tokens: int) -> None:
        if tokens == 150:
            two_networks.cut()

    try:
        assert two.run(harm) == expected
        wait_until("its engine has ended", lambda: not alive(lost), BACK)
    finally:
        two_networks.mend()
    two.wait_all_ready()
    assert len(two.agents) == agents and far_engine(two) != lost
    assert two.run() == expected


@pytest.mark.long
def test_a_stopped_agent_is_a_lost_node_and_joins_again_when_it_goes_on(
    two: Deployment, expected: list[Outcome]
) -> None:
    lost = far_engine(two)
    os.kill(two.agents[-1].process.pid, signal.SIGSTOP)
    try:
        wait_until("it is noticed", lambda: two.engines()[1]["state"] != "ready", BACK)
        assert two.run() == expected
    finally:
        os.kill(two.agents[-1].process.pid, signal.SIGCONT)
    two.wait_all_ready()
    assert not alive(lost) and two.run() == expected


@pytest.mark.long
def test_the_server_is_killed_and_the_next_one_gets_the_node(two: Deployment, expected: list[Outcome]) -> None:
    lost = far_engine(two)
    two.server.process.kill()
    two.server.process.wait(30)
    wait_until("its engine has ended", lambda: not alive(lost), BACK)
    two.start()
    assert two.run() == expected and far_engine(two) != lost


# -- other ways to share nodes, on this machine


def test_a_server_without_engines_in_the_words_of_vllm(expected: list[Outcome], tmp_path: Path) -> None:
    """Several API processes know where the engines are, too."""
    made = Deployment(["-dp", "2", "-dpa", "127.0.0.1", "-dpp", str(free_port())], [(), ()])
    made.agent("--headless", "-dpl", "2", "-dpr", "0")
    try:
        made.start("-dpl", "0", "--api-server-count", "2")
        assert titled(made.server.pid, "engine") == []
        engines = titled(made.agents[0].process.pid, "engine")
        assert len(engines) == 2 and made.apis() == [0, 1]

        def harm(tokens: int) -> None:
            if tokens == 150:
                os.kill(engines[1], signal.SIGKILL)

        assert made.run(harm) == expected
        made.wait_all_ready()
        assert engines[0] in [engine["pid"] for engine in made.engines()] and not alive(engines[1])
        victim = titled(made.server.pid, "api")[0]
        os.kill(victim, signal.SIGKILL)
        wait_until("it has ended", lambda: not alive(victim), BACK)
        wait_until("another has its place", lambda: made.apis() == [0, 1], BACK)
        assert made.run() == expected
    finally:
        codes = made.close()
    assert codes == [0, 0]


@pytest.fixture
def four() -> Iterator[Deployment]:
    """Two engines of two nodes each."""
    args = ["-dp", "2", "-pp", "2", "--nnodes", "4", "--master-port", str(free_port()), "--heartbeat-timeout", "5"]
    made = Deployment(args, [()] * 4)
    for rank in (1, 2, 3):
        made.agent(rank=rank)
    made.start()
    yield made
    assert set(made.close()) == {0}, [agent.text() for agent in made.agents]


def lose(four: Deployment, agent: Command, expected: list[Outcome]) -> None:
    def harm(tokens: int) -> None:
        if tokens == 150:
            agent.process.kill()

    assert four.run(harm) == expected


def test_a_node_with_ranks_of_an_engine_is_lost(four: Deployment, expected: list[Outcome]) -> None:
    """The engine goes on with less."""
    assert [len(agent.ranks()) for agent in four.agents] == [1, 1, 1]
    lose(four, four.agents[2], expected)
    wait_until("it has less", lambda: four.engines()[1]["layout"] == "tp=1 pp=1", BACK)
    assert four.engines()[0]["layout"] == "tp=1 pp=2"


@pytest.mark.long
def test_nodes_of_an_engine_come_back(four: Deployment, expected: list[Outcome]) -> None:
    """The one with ranks only, then the one that has the engine itself."""
    for rank in (3, 2):
        lose(four, four.agents[rank - 1], expected)
        four.agents[rank - 1] = four.agent(rank=rank)
        four.agents.pop()
        four.wait_all_ready("tp=1 pp=2", "tp=1 pp=2")
        assert four.run() == expected
