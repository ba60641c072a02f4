"""Experts on the ranks of several lanes: tokens are those of one rank, whatever the layout, placement and exchange."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from planaria.wire import ResizeEngine
from tests.model.engines import Engine, ask_for
from tests.proc.experts import ASKED, EP
from tests.proc.servers import Server, planaria
from tests.proc.sockets import free_port


@pytest.fixture(scope="module")
def lanes(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), **EP, data_parallel_size=2) as engine:
        yield engine


def test_two_lanes_share_the_experts(lanes: Engine, expected: list[list[int]]) -> None:
    assert lanes.facts.layout == "dp=2 tp=1 pp=1" and len(set(lanes.pids)) == 2
    assert lanes.run(ASKED) == expected
    assert lanes.run(ASKED[:1]) == expected[:1]  # a lane with nothing to do computes its experts all the same


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_lane_that_dies_is_replaced(lanes: Engine, expected: list[list[int]], victim: int) -> None:
    before = lanes.pids
    assert lanes.run(ASKED, 40, lambda: lanes.kill(victim, signal.SIGKILL)) == expected
    assert lanes.recoveries[-1].ranks == [victim] and lanes.recoveries[-1].layout == "dp=2 tp=1 pp=1"
    assert lanes.pids[1 - victim] == before[1 - victim]


def test_lanes_come_and_go_while_requests_run(lanes: Engine, expected: list[list[int]]) -> None:
    for id, dp in (("fewer", 1), ("more", 2)):
        before = lanes.pids
        assert lanes.run(ASKED, 30, lambda dp=dp, id=id: ask_for(lanes.loop, ResizeEngine(id, 1, 1, dp))) == expected
        lanes.finish()  # experts may still be on their way
        assert (lanes.resized[-1].id, lanes.resized[-1].error) == (id, "")
        assert len(lanes.pids) == dp and lanes.pids[: len(before)] == before[:dp]
    lanes.loop.handle(ResizeEngine("too many", 1, 1, 7))
    assert "6 experts can't be on 7 ranks" in lanes.resized[-1].error and len(lanes.pids) == 2


OTHERS: list[dict[str, Any]] = [
    {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_placement_strategy": "round_robin"},
    {"data_parallel_size": 3, "all2all_backend": "naive"},
    {"data_parallel_size": 2, "disable_custom_all_reduce": True, "kernels": "torch"},
    {"data_parallel_size": 2, "pipeline_parallel_size": 2, "disable_custom_all_reduce": True},
    {"data_parallel_size": 2, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("options", OTHERS[:1] + [pytest.param(o, marks=pytest.mark.long) for o in OTHERS[1:]], ids=str)
def test_other_layouts_and_exchanges(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    if "dtype" in options:
        with Engine(str(folder), distributed_executor_backend="uni", dtype=options["dtype"]) as one:
            expected = one.run(ASKED)
    with Engine(str(folder), **EP, **options) as engine:
        assert engine.run(ASKED) == expected


SERVED = [
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "32",
    "--kv-cache-memory", "8MiB", "--skip-tokenizer-init", "--enable-expert-parallel", "-dp", "2",
]  # fmt: skip


@pytest.mark.long
def test_a_server_scales_its_lanes_while_requests_run(folder: Path, expected: list[list[int]]) -> None:
    """`planaria scale --dp` on one engine with two lanes, and a rank of it that dies."""
    with Server(str(folder), *SERVED) as server, ThreadPoolExecutor(len(ASKED)) as pool:
        url, (engine,) = server.url, server.engine_pids()

        def complete(asked: tuple[list[int], int]) -> list[int]:
            body = {
                "model": str(folder), "prompt": asked[0], "max_tokens": asked[1], "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"][0]["token_ids"])

        for harm in (["1"], ["2"], None):
            answers = [pool.submit(complete, asked) for asked in ASKED for _ in range(3)]
            if harm is not None:
                done = planaria("scale", "--dp", *harm, "--url", url)
                assert done.returncode == 0, done.stderr
                assert f"-> {harm[0]} lanes, committed" in done.stdout
                assert len(server.rank_pids()) == int(harm[0])
            else:
                os.kill(server.rank_pids()[1], signal.SIGKILL)
            assert [answer.result() for answer in answers] == [tokens for tokens in expected for _ in range(3)]
        assert server.engine_pids() == [engine]
        health = httpx2.get(f"{url}/health").json()
        assert health["last_layout_change"]["layout"] == health["last_fault"]["layout"] == "dp=2 tp=1 pp=1"
        refused = planaria("scale", "--dp", "7", "--url", url)
        assert refused.returncode and "6 experts can't be on 7 ranks" in refused.stderr


PROGRAM = """
import json, sys
from tests.model.engines import Engine
from tests.proc.experts import ASKED, EP

EP.update(json.loads(sys.argv[2]))
with Engine(sys.argv[1], **EP, data_parallel_size=2, distributed_executor_backend="external_launcher") as engine:
    tokens, stats = engine.run(ASKED), engine.loop.balancing.stats
    print(json.dumps([engine.facts.layout, tokens, stats.rearrangements if stats else None]))
"""
OFTEN = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2}
BALANCED = [{"enable_eplb": True, "eplb_config": {**OFTEN, "use_async": aside}} for aside in (False, True)]


OWN_PROMPTS = """
import json, os, sys
from planaria import LLM, SamplingParams
asked = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory="8MiB", skip_tokenizer_init=True,
          enable_expert_parallel=True)
found = []
for batch in asked:
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for _, most in batch]
    found.append([o.outputs[0].token_ids for o in llm.generate([prompt for prompt, _ in batch], params)])
print(json.dumps([llm.facts.layout, found]))
llm.close()
"""


@pytest.mark.row("P22", "P25")
def test_programs_with_own_prompts_share_experts(folder: Path, expected: list[list[int]]) -> None:
    """Each gets the tokens of one rank to its own, however many the other has, none as well."""
    own = {"PLANARIA_DP_SIZE": "2", "PLANARIA_DP_MASTER_PORT": str(free_port())}
    shares = ([ASKED[:3], []], [ASKED[3:], ASKED[:2]])
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", OWN_PROMPTS, str(folder), json.dumps(share)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **own, "PLANARIA_DP_RANK": str(rank)},
        )
        for rank, share in enumerate(shares)
    ]  # fmt: skip
    said = [json.loads(program.communicate(timeout=300)[0]) for program in programs]
    layout = "dp=2 tp=1 pp=1"
    assert said == [[layout, [expected[:3], []]], [layout, [expected[3:], expected[:2]]]]


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, *BALANCED], ids=["", "balanced", "balanced aside"])
@pytest.mark.row("P26")
def test_an_outer_launcher_starts_the_ranks_of_all_lanes(
    folder: Path, expected: list[list[int]], more: dict[str, Any]
) -> None:
    """As torchrun does. Each process has one rank, and all tokens, and the same idea of where experts are."""
    port = str(free_port())
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), json.dumps(more)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    for program in programs:
        said, _ = program.communicate(timeout=300)
        assert program.returncode == 0
        *same, rearrangements = json.loads(said)
        assert same == ["dp=2 tp=1 pp=1", expected]
        found.append(rearrangements)
    assert found[0] == found[1] and (found[0] or not more)
