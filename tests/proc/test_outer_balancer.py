"""Servers of an engine, or of a node's engines, behind a balancer that others wrote: engines that die are a pause
behind their own server; a server that dies with all it has costs its own streams, and no request that has had no answer
yet."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from tests.proc.asking import ask_all
from tests.proc.balancers import KINDS, Balancer
from tests.proc.servers import TINY, Server, wait_until
from tests.proc.sockets import free_port

ASKED = [([7, 3, 9, i], 48) for i in range(1, 9)]


class Pods(NamedTuple):
    balancer: Balancer
    servers: list[Server]
    ports: list[int]
    model: str
    nodes: bool  # the first server has two engines of three

    def start(self, number: int) -> Server:
        which = ["-dp", "2", "--data-parallel-rank", str(number)]
        if self.nodes:
            first, count = ("0", "2") if number == 0 else ("2", "1")
            which = ["-dp", "3", "--data-parallel-start-rank", first, "--data-parallel-size-local", count]
        return Server(self.model, *TINY, *which, port=self.ports[number])


@pytest.fixture(
    params=[(KINDS[0], True), *(pytest.param((kind, False), marks=pytest.mark.long) for kind in KINDS)], ids=str
)
def pods(request: pytest.FixtureRequest, small: Path, tmp_path: Path) -> Iterator[Pods]:
    ports = [free_port(), free_port()]
    kind, nodes = request.param
    balancer = Balancer(kind, ports, tmp_path)
    made = Pods(balancer, [], ports, str(small), nodes)
    made.servers.extend(made.start(number) for number in (0, 1))
    try:
        for server in made.servers:
            server.wait_ready()
        with balancer:
            yield made
    finally:
        for server in made.servers:
            server.close()


def _served(server: Server) -> float:
    """Requests that one server has answered."""
    lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


@pytest.mark.row("P2", "P5")
def test_servers_behind_a_balancer(pods: Pods) -> None:
    expected = ask_all(pods.balancer.url, pods.model, ASKED)
    served = [_served(server) for server in pods.servers]
    assert all(served), served
    assert [len(server.engine_pids()) for server in pods.servers] == [2 if pods.nodes else 1, 1]

    # an engine's end is a pause behind its own server, which balancers don't hear of
    harmed = pods.servers[1].engine_pid()
    kill = lambda: os.kill(harmed, signal.SIGKILL)  # noqa: E731
    assert ask_all(pods.balancer.url, pods.model, ASKED, at=40, harm=kill) == expected

    # a server's end with all it has: whoever has had no answer yet gets the other's
    with ThreadPoolExecutor(len(ASKED)) as clients:
        answers = [clients.submit(_whole, pods, *one) for one in ASKED]
        wait_until("it has some of them", lambda: _running(pods.servers[0]))
        pods.servers[0].process.kill()
        assert [answer.result() for answer in answers] == expected

    # and in its place comes another
    pods.servers[0].close()
    pods.servers[0] = pods.start(0)
    pods.servers[0].wait_ready()

    def has_come() -> bool:
        _whole(pods, *ASKED[0])
        return bool(_served(pods.servers[0]))

    wait_until("requests go to it again", has_come)


def _running(server: Server) -> bool:
    return any(engine["running"] for engine in httpx2.get(f"{server.url}/health").json()["engines"])


def _whole(pods: Pods, prompt: list[int], tokens: int) -> list[int]:
    body = {
        "model": pods.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = httpx2.post(f"{pods.balancer.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])
