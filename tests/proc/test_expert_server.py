"""Commands of a user's over experts: one server with everything at once, scaled and harmed while it streams; `planaria
generate` in any layout. Tokens are those of one rank."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.proc.asking import ask_all
from tests.proc.experts import ASKED, MODEL
from tests.proc.servers import Server, planaria
from tests.proc.test_expert_parallel import SERVED

pytestmark = pytest.mark.long

SPLIT = ["--enable-dbo", "--dbo-decode-token-threshold", "1", "--dbo-prefill-token-threshold", "4"]
OFTEN = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2}


def balanced(**config: Any) -> list[str]:
    return ["--enable-eplb", "--eplb-config", json.dumps({**OFTEN, **config})]


EVERYTHING = {
    "steps wait": [*balanced(), *SPLIT],
    "aside, two servers": [*balanced(use_async=True), *SPLIT, "--api-server-count", "2"],
    "of two tensor ranks each": [*balanced(use_async=True), *SPLIT, "-tp", "2"],
    "naive, of two tensor ranks each": [*balanced(), "--all2all-backend", "naive", "-tp", "2"],
}


@pytest.fixture(scope="module", params=EVERYTHING)
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(str(folder), *SERVED, *EVERYTHING[request.param]) as server:
        yield server


def health(server: Server) -> dict[str, Any]:
    return dict(httpx2.get(server.url + "/health", timeout=60).json())


def test_lanes_go_and_come_and_die_while_requests_stream(
    server: Server, folder: Path, expected: list[list[int]]
) -> None:
    def scale(lanes: int) -> None:
        done = planaria("scale", "--dp", str(lanes), "--url", server.url)
        assert done.returncode == 0, done.stderr

    stays = server.rank_pids()[0]
    for lanes in (1, 2):
        assert ask_all(server.url, str(folder), ASKED, at=30, harm=lambda lanes=lanes: scale(lanes)) == expected
        experts = health(server)["last_layout_change"]["experts"]
        assert experts["read"] == 0 < experts["needed"] <= experts["moved"]
    victim = server.rank_pids()[-1]
    assert ask_all(server.url, str(folder), ASKED, at=40, harm=lambda: os.kill(victim, signal.SIGKILL)) == expected
    assert health(server)["last_fault"]["recovered"] and server.rank_pids()[0] == stays
    assert ask_all(server.url, str(folder), ASKED) == expected


def test_what_it_says_of_experts(server: Server) -> None:
    said = planaria("experts", "--json", "--url", server.url)
    (engine,) = json.loads(said.stdout)["engines"]
    assert engine["rearrangements"] > 0 and engine["bytes_moved"] > 0 and engine["seconds_since"] >= 0
    assert [layer["layer"] for layer in engine["layers"]] == [0, 1]
    lines = httpx2.get(server.url + "/metrics", timeout=60).text.splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "expert" in line and line[0] != "#"}
    assert 0 < values["planaria:expert_balancedness"] <= 1
    for name in ("expert_rearrangements_total", "expert_moved_bytes_total", "expert_rearrangement_age_seconds"):
        assert values[f"planaria:{name}"] > 0
    assert values["planaria:recovery_expert_moved_bytes_total"] > 0


def test_a_lost_rank_is_loaded_from_replicas(folder: Path, expected: list[list[int]]) -> None:
    """All that it had others have: no file is read for experts."""
    often = balanced(num_redundant_experts=MODEL["num_experts"], step_interval=100_000, window_size=100)
    with Server(str(folder), *SERVED, *often) as server:
        victim = server.rank_pids()[1]
        assert ask_all(server.url, str(folder), ASKED, at=40, harm=lambda: os.kill(victim, signal.SIGKILL)) == expected
        lines = httpx2.get(server.url + "/metrics", timeout=60).text.splitlines()
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("planaria:recovery")}
        assert values["planaria:recovery_experts_read_total"] == 0
        moved, needed = (values[f"planaria:recovery_expert_{what}_bytes_total"] for what in ("moved", "needed"))
        assert moved == needed > 0
        assert health(server)["last_fault"]["experts"] == {"moved": moved, "needed": needed, "read": 0}


WAYS = {
    "sliced": ["-tp", "2"],
    "tensor ranks, round robin": ["-tp", "2", "--enable-expert-parallel", "--expert-placement-strategy", "round_robin"],
    "lanes, in micro-batches, balanced": ["-dp", "2", "--enable-expert-parallel", *SPLIT, *balanced(use_async=True)],
    "lanes of stages, naive, balanced": [
        "-dp", "2", "-pp", "2", "--enable-expert-parallel", "--all2all-backend", "naive", *balanced(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_generate(folder: Path, expected: list[list[int]], way: str) -> None:
    prompts = [word for prompt, _ in ASKED for word in ("--prompt-token-ids", ",".join(map(str, prompt)))]
    done = planaria(
        "generate", str(folder), *WAYS[way], *prompts, "--dtype", "float32", "--kv-cache-memory", "8MiB",
        "--max-model-len", "256", "--skip-tokenizer-init", "--temperature", "0", "--max-tokens", "60", "--ignore-eos",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["token_ids"][:count] for line, (_, count) in zip(lines, ASKED, strict=True)] == expected
    assert (lines[0]["rearrangements"] > 0) == ("--enable-eplb" in WAYS[way])
