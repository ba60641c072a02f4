"""Engines of two kinds on two nodes, which have no memory in common: what a prompt's engine has computed goes to the
other over the network, encrypted, whoever dies meanwhile."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proc.asking import ask_all
from tests.proc.servers import Server, titled, wait_until
from tests.proc.sockets import free_port
from tests.proc.test_nodes import Command
from tests.proc.test_prefill_decode import ASKED, OPTIONS, engines, expected, metric, plain

__all__ = ["expected", "plain"]  # fixtures


@pytest.fixture(scope="module", params=["-pcp 2", pytest.param("", marks=pytest.mark.long)], ids=["pcp", "one rank"])
def nodes(request: pytest.FixtureRequest, small: Path) -> Iterator[tuple[Server, Command]]:
    """The server's node computes prompts, the agent's goes on with them. Each rank has what ranks send that have its
    tokens."""
    words = [str(small), *OPTIONS, *request.param.split(), "--prefill-engines", "1", "--decode-engines", "1"]
    words += ["--nnodes", "2", "--master-port", str(free_port()), "--threads", "1"]
    agent = Command("serve", *words, "--node-rank", "1")
    try:
        with Server(*words) as server:
            yield server, agent
    finally:
        agent.process.terminate()
        agent.wait()


def all_ready(server: Server) -> None:
    wait_until("both engines", lambda: [engine["state"] for engine in engines(server)] == ["ready"] * 2)


def test_blocks_go_from_one_node_to_the_other(
    nodes: tuple[Server, Command], plain: Server, small: Path, expected: list[list[int]]
) -> None:
    server, agent = nodes
    assert [engine["kind"] for engine in engines(server)] == ["prefill", "decode"]
    assert len(titled(agent.process.pid, "engine")) == 1
    assert ask_all(server.url, str(small), ASKED) == expected
    fresh = itertools.count(100)

    def came() -> bool:
        """Of a model as small as this computing takes less time than a busy machine may need to connect."""
        others = [([*divmod(next(fresh), 100), *prompt], 4) for prompt, _ in ASKED[3:7]]  # of which nobody has anything
        assert ask_all(server.url, str(small), others) == ask_all(plain.url, str(small), others)
        return metric(server, "planaria:kv_transfer_blocks_total") > 5

    wait_until("blocks have come", came)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_either_may_die_meanwhile(
    nodes: tuple[Server, Command], plain: Server, small: Path, expected: list[list[int]], kind: str
) -> None:
    server, _ = nodes
    all_ready(server)
    (pid,) = [engine["pid"] for engine in engines(server) if engine["kind"] == kind]
    assert ask_all(server.url, str(small), ASKED, at=60, harm=lambda: os.kill(pid, signal.SIGKILL)) == expected
    all_ready(server)
    others = [([ord(kind[0]), *prompt], 20) for prompt, _ in ASKED[3:7]]  # of which nobody has anything
    assert ask_all(server.url, str(small), others) == ask_all(plain.url, str(small), others)
