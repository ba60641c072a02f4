"""Lanes whose ranks have a slice of every expert each: data parallel without expert parallel. Tokens are those of one
rank, whatever the layout, and whatever happens to a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from planaria import LLM
from planaria.wire import ResizeEngine
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, ask_for
from tests.model.test_families import GPT_OSS
from tests.proc import experts
from tests.proc.asking import ask_all
from tests.proc.experts import ASKED
from tests.proc.servers import Server, planaria
from tests.proc.sockets import free_port
from tests.proc.test_cli import one_line
from tests.proc.test_context import answers

MODEL = {**experts.MODEL, "moe_intermediate_size": 128}
LANES: dict[str, Any] = {"data_parallel_size": 2, "worker_extension_cls": "tests.proc.extensions.Held"}


def held(engine: Engine) -> list[list[int]]:
    return list(engine.loop.call("expert_bytes").result(300))


@pytest.fixture(scope="module")
def lanes(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), **LANES, tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def all_bytes(folder: Path) -> list[int]:
    with Engine(str(folder), worker_extension_cls=LANES["worker_extension_cls"]) as one:
        (own,) = held(one)
    return own


def test_each_rank_has_a_slice_of_every_expert(lanes: Engine, expected: list[list[int]], all_bytes: list[int]) -> None:
    assert lanes.facts.layout == "dp=2 tp=2 pp=1" and len(set(lanes.pids)) == 4
    assert lanes.run(ASKED) == expected
    assert lanes.run(ASKED[:1]) == expected[:1]  # a lane with nothing to do computes its slices all the same
    assert held(lanes) == [[size // 4 for size in all_bytes]] * 4
    assert len(all_bytes) == 1 + MODEL["num_experts"]


@pytest.mark.parametrize("victim", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_dies_is_replaced(lanes: Engine, expected: list[list[int]], victim: int) -> None:
    before, slices = lanes.pids, held(lanes)
    assert lanes.run(ASKED, 40, lambda: lanes.kill(victim, signal.SIGKILL)) == expected
    assert lanes.recoveries[-1].ranks == [victim] and lanes.recoveries[-1].layout == "dp=2 tp=2 pp=1"
    assert [pid == old for pid, old in zip(lanes.pids, before, strict=True)] == [rank != victim for rank in range(4)]
    assert held(lanes) == slices


def test_lanes_come_and_go(folder: Path, expected: list[list[int]], all_bytes: list[int]) -> None:
    """Slices are cut anew, while requests run."""
    with Engine(str(folder), **LANES) as engine:
        for id, dp in (("fewer", 1), ("more", 2)):
            assert engine.run(ASKED, 30, lambda d=dp, i=id: ask_for(engine.loop, ResizeEngine(i, 1, 1, d))) == expected
            assert (engine.resized[-1].id, engine.resized[-1].error) == (id, "")
            assert held(engine) == [[size // dp for size in all_bytes]] * dp
        engine.loop.handle(ResizeEngine("too many", 1, 1, 5))
        assert "-tp 1 x -dp 5" in engine.resized[-1].error and "128 columns are 4 blocks" in engine.resized[-1].error


OTHERS: list[dict[str, Any]] = [
    {"enable_dbo": True, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 4},
    {"data_parallel_size": 3, "all2all_backend": "naive"},
    {"tensor_parallel_size": 2, "kernels": "torch", "disable_custom_all_reduce": True},
    {"pipeline_parallel_size": 2},
    {"prefill_context_parallel_size": 2},
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"quantization": "q8_0"},
    {"spare_workers": 1},
]


@pytest.mark.long
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_other_layouts(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    if "quantization" in options:
        with Engine(str(folder), distributed_executor_backend="uni", **options) as one:
            expected = one.run(ASKED)
    with Engine(str(folder), **{**LANES, **options}) as engine:
        assert engine.run(ASKED) == expected
        assert engine.run(ASKED, 40, lambda: engine.kill(1, signal.SIGKILL)) == expected
        assert engine.recoveries[-1].ranks == [1]


def test_to_the_last_bit(folder: Path) -> None:
    """Alone, beside others, in either lane, and when a rank is killed meanwhile."""
    options = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory": "8MiB"}
    with LLM(str(folder), skip_tokenizer_init=True, batch_invariant=True, data_parallel_size=2, **options) as llm:
        together, count, killed = answers(llm, range(6)), 0, list[int]()
        assert answers(llm, range(4, 5)) + answers(llm, range(1, 2)) == [together[4], together[1]]

        def harm(done: int, tokens: int) -> None:
            nonlocal count
            count += tokens
            if count > 100 and not killed:
                killed.append(llm._loop.gang.members[1].pid)
                os.kill(killed[0], signal.SIGKILL)

        assert answers(llm, range(6), harm) == together
        assert killed and llm._loop.gang.epoch == 1


def test_biases_are_added_once(tmp_path: Path) -> None:
    """GPT-OSS' experts have some, of sums that are over all ranks."""
    model = str(write_checkpoint(tmp_path / "biased", "gpt_oss", **{**GPT_OSS, "intermediate_size": 64}))
    with Engine(model, distributed_executor_backend="uni") as one:
        expected = one.run(ASKED[:3])
    with Engine(model, **LANES) as engine:
        assert engine.run(ASKED[:3]) == expected


SERVED = [
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "32",
    "--kv-cache-memory", "8MiB", "--skip-tokenizer-init", "-dp", "2",
]  # fmt: skip


def test_a_server_has_one_engine_with_lanes(folder: Path, expected: list[list[int]]) -> None:
    """Which lose a rank, and come and go, as with whole experts."""
    with Server(str(folder), *SERVED) as server:
        (engine,) = server.engine_pids()
        assert any("each of 2 ranks has a slice of every expert" in line for line in server.log)

        def scale(dp: str) -> None:
            done = planaria("scale", "--dp", dp, "--url", server.url)
            assert done.returncode == 0 and f"-> {dp} lanes, committed" in done.stdout, done.stderr

        for harm in (lambda: os.kill(server.rank_pids()[1], signal.SIGKILL), lambda: scale("1"), lambda: scale("2")):
            assert ask_all(server.url, str(folder), ASKED, at=30, harm=harm) == expected
        assert server.engine_pids() == [engine] and len(server.rank_pids()) == 2
        assert httpx2.get(f"{server.url}/health").json()["last_layout_change"]["layout"] == "dp=2 tp=1 pp=1"


PROGRAM = """
import json, sys
from planaria import LLM, SamplingParams
from tests.proc.experts import ASKED

llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory="8MiB", skip_tokenizer_init=True)
params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for _, most in ASKED]
found = [o.outputs[0].token_ids for o in llm.generate([prompt for prompt, _ in ASKED], params)]
print(json.dumps([llm.facts.layout, found]))
llm.close()
"""


@pytest.mark.long
@pytest.mark.row("P22")
def test_programs_with_own_prompts_share_slices(folder: Path, expected: list[list[int]]) -> None:
    own = {"PLANARIA_DP_SIZE": "2", "PLANARIA_DP_MASTER_PORT": str(free_port())}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **own, "PLANARIA_DP_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [json.loads(program.communicate(timeout=300)[0]) for program in programs]
    assert said == [["dp=2 tp=1 pp=1", expected]] * 2


def test_what_users_are_told(folder: Path) -> None:
    asked = ["generate", str(folder), "--prompt-token-ids", "1,2,3", "--max-tokens", "2", "--skip-tokenizer-init"]
    for wrong, says in (
        (["-tp", "2", "-dp", "3"], ("--data-parallel-size 3", "-tp 2 x -dp 3", "128 columns are 4 blocks of 32")),
        (["-dp", "2", "--all2all-backend", "pplx"], ("--all2all-backend pplx", "each of 2 has a slice")),
    ):
        result = planaria(*asked, *wrong)
        assert result.returncode == 2
        assert all(part in one_line(result.stderr) for part in says), result.stderr
    said = planaria("plan", str(folder), "-tp", "2", "-dp", "3", "--distributed-executor-backend", "mp")
    assert said.returncode == 2 and "128 columns are 4 blocks of 32" in one_line(said.stderr), said.stderr
