"""Experts over lanes on two nodes without Ray, each with a network of its own: the exchange crosses it. Tokens are
those of one rank; a rank of the other node that dies is replaced there; lanes go and come, experts move while requests
run."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.faults.streams import enter_network, within
from tests.proc import networks
from tests.proc.asking import ask_all
from tests.proc.experts import ASKED
from tests.proc.servers import Server
from tests.proc.test_nodes import SECRET, Command

OPTIONS = [
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "32",
    "--kv-cache-memory", "8MiB", "--skip-tokenizer-init",
]  # fmt: skip


class Deployed(NamedTuple):
    server: Server
    other: Command
    space: str  # the server's network
    prefix: tuple[str, ...]  # of a command in it
    model: str
    expected: list[list[int]]
    whole: bool  # are experts dealt whole?

    def run(self, at: int = 0, harm: object = None) -> list[list[int]]:
        enter = functools.partial(enter_network, self.space)
        return ask_all(self.server.url, self.model, ASKED, at=at, harm=harm, enter=enter)  # type: ignore[arg-type]

    def ask(self, path: str) -> dict[str, Any]:
        return dict(within(self.space, lambda: httpx2.get(self.server.url + path, timeout=60).json()))

    def scale(self, lanes: int) -> None:
        command = ["-m", "planaria", "scale", "--dp", str(lanes), "--url", self.server.url]
        subprocess.run([*self.prefix, sys.executable, *command], check=True, timeout=240)


OFTEN = '{"window_size": 4, "step_interval": 4, "num_redundant_experts": 2, "use_async": true}'
SPLIT = ["--enable-dbo", "--dbo-decode-token-threshold", "1", "--dbo-prefill-token-threshold", "4"]
TWO, WHOLE = ["-dp", "2"], "--enable-expert-parallel"
LONG = [[WHOLE, *TWO, "-tp", "2"], [WHOLE, *TWO, "--enable-eplb", "--eplb-config", OFTEN, *SPLIT], TWO]


@pytest.fixture(scope="module", params=[[WHOLE, *TWO], *(pytest.param(args, marks=pytest.mark.long) for args in LONG)])
def deployed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, folder: Path, expected: list[list[int]]
) -> Iterator[Deployed]:
    model, secret = str(folder), tmp_path_factory.mktemp("nodes") / "secret"
    secret.write_bytes(SECRET)
    args = [model, *OPTIONS, *request.param, "--nnodes", "2", "--master-addr", "10.93.0.1"]
    args += ["--secret-file", str(secret), "--heartbeat-timeout", "5"]
    try:
        with networks.two_networks() as made:
            head, elsewhere = made.prefixes
            with (
                Command("serve", *args, "--node-rank", "1", prefix=elsewhere) as other,
                Server(*args, prefix=head) as server,
            ):
                yield Deployed(server, other, made.spaces[0], head, model, expected, WHOLE in request.param)
                server.close()
                assert other.wait() == 0, other.text()
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces can't be made here: {getattr(e, 'stderr', '') or e}")


def test_lanes_on_two_nodes_give_the_tokens_of_one_rank(deployed: Deployed) -> None:
    ours, theirs = deployed.server.rank_pids(), deployed.other.ranks()
    assert len(ours) == len(theirs) and not set(ours) & set(theirs)
    assert deployed.run() == deployed.expected


def test_a_rank_of_the_other_node_is_replaced_there(deployed: Deployed) -> None:
    ours, (victim, *rest) = deployed.server.rank_pids(), deployed.other.ranks()
    assert deployed.run(40, lambda: os.kill(victim, signal.SIGKILL)) == deployed.expected
    assert deployed.server.rank_pids() == ours and set(rest) < set(deployed.other.ranks()) - {victim}
    assert "dp=2" in deployed.ask("/health")["last_fault"]["layout"]


@pytest.mark.long
def test_lanes_go_and_come(deployed: Deployed) -> None:
    """With one there are no ranks elsewhere; what comes back there has its experts from here."""
    ours = deployed.server.rank_pids()
    for lanes in (1, 2):
        assert deployed.run(40, lambda lanes=lanes: deployed.scale(lanes)) == deployed.expected
        assert deployed.server.rank_pids() == ours and len(deployed.other.ranks()) == (lanes - 1) * len(ours)
        experts = deployed.ask("/health")["last_layout_change"]["experts"]
        assert not deployed.whole or experts["read"] == 0 < experts["needed"] <= experts["moved"]
    assert deployed.run() == deployed.expected
    for engine in deployed.ask("/admin/experts")["engines"]:
        assert engine["ranks"] == 2 and engine["rearrangements"] > 0 and engine["bytes_moved"] > 0
