"""Experts that move between real ranks while requests run: the same tokens, also when a rank dies in the middle."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from planaria.protocol import Command, PlaceExperts, SendExperts
from tests.model.engines import Engine
from tests.proc.experts import ASKED, EP
from tests.proc.servers import PATIENCE, Server, planaria

EPLB = {**EP, "enable_eplb": True}
OFTEN = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2}
TP, DP = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
RANKS: dict[str, dict[str, Any]] = {
    "tp": TP, "dp": DP, "stages": {**DP, "pipeline_parallel_size": 2},
    "naive": {**TP, **DP, "all2all_backend": "naive"},
    "messages": {**DP, "disable_custom_all_reduce": True, "kernels": "torch"},
}  # fmt: skip


KINDS = [
    pytest.param(("tp", False), id="tp", marks=pytest.mark.long), pytest.param(("tp", True), id="tp-async"),
    pytest.param(("dp", False), id="dp"), pytest.param(("dp", True), id="dp-async", marks=pytest.mark.long),
    *(pytest.param((axis, aside), id=f"{axis}-{aside}", marks=pytest.mark.long)
      for axis in ("stages", "naive", "messages") for aside in (False, True)),
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    axis, use_async = request.param
    with Engine(str(folder), **EPLB, **RANKS[axis], eplb_config={**OFTEN, "use_async": use_async}) as engine:
        engine.loop.balancing.state.step_bytes = 1  # an expert at a time, as far as that can be
        yield engine


def moved_by(engine: Engine) -> tuple[int, int]:
    stats = engine.loop.balancing.stats
    return stats.rearrangements, stats.bytes_moved


@pytest.mark.row("P7")
def test_the_same_tokens_while_experts_move(engine: Engine, expected: list[list[int]]) -> None:
    for _ in range(2):
        assert engine.run(ASKED) == expected
    rearrangements, moved = moved_by(engine)
    assert rearrangements >= 1 and moved > 0
    report = engine.loop.balancing.report()
    assert report.num_ranks == engine.config.parallel.expert_parallel_size
    assert [layer.layer for layer in report.layers] == [0, 1]
    for layer in report.layers:
        assert sum(layer.load) == pytest.approx(sum(layer.rank_loads)) and sum(layer.load) % 3 == 0
        assert len(layer.slots) == 8 and set(layer.slots) == set(range(6))
    assert report.stats.rearranged_at > 0 and not engine.recoveries


PCP, DCP = {"prefill_context_parallel_size": 2}, {**TP, "decode_context_parallel_size": 2}


@pytest.mark.parametrize(
    "layout", [PCP, *(pytest.param(each, marks=pytest.mark.long) for each in ({**DP, **PCP}, {**DP, **DCP}))], ids=str
)
def test_experts_of_context_ranks_move(folder: Path, expected: list[list[int]], layout: dict[str, Any]) -> None:
    """Who shares the tokens of a step, or of a sequence, and lanes of them: also when one dies meanwhile."""
    with Engine(str(folder), **EPLB, **layout, eplb_config={**OFTEN, "use_async": True}) as engine:
        assert engine.run(ASKED) == expected
        assert engine.run(ASKED, 20, lambda: engine.kill(1, signal.SIGKILL)) == expected
        assert engine.run(ASKED) == expected and moved_by(engine)[1] > 0
        assert [recovery.ranks for recovery in engine.recoveries] == [[1]]


class Killer:
    """Kills a rank when the first command of a kind has gone out to all, or just before."""

    def __init__(self, engine: Engine, kind: type[Command], victim: int, *, before: bool) -> None:
        self.engine, self.kind, self.victim, self.before = engine, kind, victim, before
        self.struck = False
        self._send, engine.loop.gang.send = engine.loop.gang.send, self.send  # type: ignore[method-assign]

    def send(self, command: Command) -> Any:
        coming_up = isinstance(command, SendExperts) and not command.version
        if not isinstance(command, self.kind) or self.struck or coming_up:
            return self._send(command)
        self.struck = True
        if self.before:
            self.engine.kill(self.victim, signal.SIGKILL)
        ticket = self._send(command)
        if not self.before:
            self.engine.kill(self.victim, signal.SIGKILL)
        return ticket

    def release(self) -> None:
        self.engine.loop.gang.send = self._send  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        pytest.param(SendExperts, True, id="unprepared", marks=pytest.mark.long),
        pytest.param(SendExperts, False, id="preparing"), pytest.param(PlaceExperts, True, id="prepared"),
        pytest.param(PlaceExperts, False, id="committing", marks=pytest.mark.long),
    ],
)  # fmt: skip
@pytest.mark.row("E5")
def test_a_rank_that_dies_in_the_middle_costs_a_pause(
    engine: Engine, expected: list[list[int]], kind: type[Command], before: bool
) -> None:
    killer = Killer(engine, kind, int(before), before=before)
    number = len(engine.recoveries)
    try:
        for _ in range(3):  # few tokens in a window: what is balanced for one is not for the next
            assert engine.run(ASKED) == expected
            if killer.struck:
                break
    finally:
        killer.release()
    assert killer.struck and [recovery.ranks for recovery in engine.recoveries[number:]] == [[int(before)]]
    done, _ = moved_by(engine)
    for _ in range(20):  # it goes on
        if moved_by(engine)[0] > done:
            break
        assert engine.run(ASKED[:2]) == expected[:2]
    assert moved_by(engine)[0] > done
    assert engine.loop.gang.maps == engine.loop.balancing.state.maps


OPTIONS = [
    "--enable-expert-parallel", "--enable-eplb", "-tp", "2", "--device", "cpu", "--dtype", "float32",
    "--kv-cache-memory", "8MiB", "--skip-tokenizer-init", "--eplb-config", msgspec.json.encode(OFTEN).decode(),
]  # fmt: skip


def test_generate_says_how_often_experts_were_rearranged(folder: Path) -> None:
    done = planaria(
        "generate", str(folder), *OPTIONS, "--prompt-token-ids", "5,6,7", "--max-tokens", "60", "--ignore-eos", "--json"
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["rearrangements"] >= 1 and len(line["token_ids"]) == 60


@pytest.mark.long
def test_a_server_tells_where_experts_are(folder: Path) -> None:
    with Server(str(folder), *OPTIONS) as server, httpx2.Client(base_url=server.url, timeout=PATIENCE) as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        (engine,) = http.get("/admin/experts").json()["engines"]
        assert engine["ranks"] == 2 and engine["rearrangements"] >= 1 and engine["bytes_moved"] > 0
        assert [layer["layer"] for layer in engine["layers"]] == [0, 1] and 0 < engine["balancedness"] <= 1
        text = http.get("/metrics").text
        assert "planaria:expert_rearrangements_total{" in text and "planaria:expert_rearrangement_age_seconds{" in text
