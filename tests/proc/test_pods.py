"""A command for each lane of one engine, as pods behind an outer balancer have it: they meet at the address of the
first, and each has a front end. What is asked at any of them gets the tokens of one rank, whatever dies."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.faults.streams import enter_network, within
from tests.proc import networks
from tests.proc.asking import ask_all
from tests.proc.experts import ASKED
from tests.proc.servers import Server, wait_until
from tests.proc.sockets import free_port
from tests.proc.test_expert_nodes import OPTIONS
from tests.proc.test_nodes import SECRET, Command


class Pods:
    """Two of them, each in a network of its own. dealt: how experts are."""

    def __init__(self, made: networks.Networks, model: Path, secret: Path, dealt: list[str]) -> None:
        self.spaces, self.prefixes, self.model, self.port = made.spaces, made.prefixes, str(model), free_port()
        secret.write_bytes(SECRET)
        self.options = [
            self.model, *OPTIONS, *dealt, "-dp", "2", "--data-parallel-address", "10.93.0.1", "--host",
            "0.0.0.0", "--secret-file", str(secret), "--heartbeat-timeout", "5",
        ]  # fmt: skip
        self.second = self.start_second()
        self.first = Server(*self.options, "--data-parallel-rank", "0", port=self.port, prefix=self.prefixes[0])

    def start_second(self) -> Command:
        rank = ["--data-parallel-rank", "1", "--port", str(self.port)]
        return Command("serve", *self.options, *rank, prefix=self.prefixes[1])

    def ask(self, pod: int, at: int = 0, harm: object = None) -> list[list[int]]:
        """Clients are in that pod's network."""
        enter = functools.partial(enter_network, self.spaces[pod])
        url = f"http://10.93.0.{pod + 1}:{self.port}"
        return ask_all(url, self.model, ASKED, at=at, harm=harm, enter=enter)  # type: ignore[arg-type]

    def health(self, pod: int) -> int:
        """A status, or 0 where nobody answers."""
        try:
            url = f"http://10.93.0.{pod + 1}:{self.port}/health"
            return int(within(self.spaces[pod], lambda: httpx2.get(url, timeout=10).status_code))
        except httpx2.TransportError:
            return 0


DEALT = {"in slices": [], "whole": ["--enable-expert-parallel"]}


@pytest.fixture(scope="module", params=["in slices", pytest.param("whole", marks=pytest.mark.long)])
def pods(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Pods]:
    try:
        with networks.two_networks() as made:
            pods = Pods(made, folder, tmp_path_factory.mktemp("pods") / "secret", DEALT[request.param])
            with pods.second, pods.first:
                yield pods
                pods.first.close()
                assert pods.second.wait() == 0, pods.second.text()
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces can't be made here: {getattr(e, 'stderr', '') or e}")


@pytest.mark.row("P5")
def test_each_pod_has_a_front_end(pods: Pods, expected: list[list[int]]) -> None:
    assert len(pods.first.rank_pids()) == 1 and len(pods.second.ranks()) == 1
    assert [pods.ask(pod) for pod in (0, 1)] == [expected, expected]


def test_a_rank_of_one_pod_dies_while_the_other_streams(pods: Pods, expected: list[list[int]]) -> None:
    (victim,) = pods.second.ranks()
    assert pods.ask(1, at=20, harm=lambda: os.kill(victim, signal.SIGKILL)) == expected


def test_a_pod_dies_and_another_comes_in_its_place(pods: Pods, expected: list[list[int]]) -> None:
    def kill() -> None:
        pods.second.process.kill()

    assert pods.ask(0, at=20, harm=kill) == expected
    assert pods.health(1) == 0, "nobody is there any more"
    pods.second.__exit__(None, None, None)
    pods.second = pods.start_second()
    wait_until("its front end answers", lambda: pods.health(1) == 200)
    assert pods.ask(1) == expected
