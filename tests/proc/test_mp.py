"""Ranks in processes of their own (`mp`): the same answers, and what a rank's death looks like."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from planaria import LLM, SamplingParams
from planaria.errors import ConfigError, EngineDead
from tests.proc import custom
from tests.proc.servers import (
    PATIENCE,
    SMALL,
    SOON,
    TINY,
    Server,
    alive,
    needs_smollm2,
    planaria,
    segments,
    titled,
    wait_until,
)
from tests.proc.test_engine_death import HASH, counting

pytestmark = needs_smollm2

MP = ["--distributed-executor-backend", "mp"]
OPTIONS = {"distributed_executor_backend": "mp", **custom.HASHED}
LAST = ["--recovery-limit", "0"]  # the first loss is the engine's end: what everybody is told then


def ranks_of(pid: int) -> list[int]:
    """Pids of the ranks below a process."""
    return titled(pid, "worker")


@pytest.mark.row("X2")
def test_the_same_answers_as_uni(small: Path) -> None:
    args = ["generate", str(small), *TINY, "--prompt-token-ids", "5,6,7", "--max-tokens", "24", "--json"]
    lines = [json.loads(planaria(*args, *more).stdout) for more in ([], MP)]
    assert lines[0]["token_ids"] == lines[1]["token_ids"]
    assert (lines[1]["executor"], lines[1]["link"]) == ("mp", "shm") and len(lines[1]["ranks"]) == 1


@pytest.mark.long  # the default run has test_every_prompt.py
@pytest.mark.parametrize("layout", [["-tp", "2", "-pp", "2"]], ids=" ".join)
def test_layouts_give_the_same_tokens(layout: list[str]) -> None:
    """In float32, unpacked: uneven heads (3 KV heads on 2 ranks), stages, and both."""
    args = ["generate", "smollm2", *SMALL, "--dtype", "float32", "--max-tokens", "24", "--ignore-eos", "--json"]
    for prompt in ("The capital of France is", "def fibonacci(n):", "1 2 3 4 5 6"):
        args += ["--prompt", prompt]
    one, many = planaria(*args), planaria(*args, *layout)
    assert many.returncode == 0, many.stderr
    lines = [[json.loads(line) for line in run.stdout.splitlines()] for run in (one, many)]
    assert [line["token_ids"] for line in lines[0]] == [line["token_ids"] for line in lines[1]]
    ranks = int(layout[1]) * (int(layout[3]) if len(layout) > 2 else 1)
    assert lines[1][0]["executor"] == "mp" and len(set(lines[1][0]["ranks"])) == ranks


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_either_rank_of_two_is_named(small: Path, victim: int) -> None:
    """And not the one whose sums with it have failed."""
    tiny = {"skip_tokenizer_init": True, "kv_cache_memory": "8MiB", "max_model_len": 1024}
    llm = LLM(str(small), tensor_parallel_size=2, **tiny, recovery_limit=0)
    pids, killed = llm.facts.ranks, 0.0

    def kill(done: int, tokens: int) -> None:
        nonlocal killed
        if tokens and not killed:
            killed = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)

    params = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
    with pytest.raises(EngineDead, match=rf"rank {victim}"):
        llm.generate([[5, 6, 7]], params, on_tokens=kill)
    assert time.monotonic() - killed < SOON
    llm.close()
    assert not any(alive(pid) for pid in pids)


def test_uni_refuses_two_ranks() -> None:
    with pytest.raises(ConfigError, match="use mp"):
        LLM("smollm2", tensor_parallel_size=2, distributed_executor_backend="uni")


@pytest.mark.row("X10")
def test_a_killed_rank_is_named_at_once() -> None:
    """In the middle of a step: one error that names rank and phase, soon; nothing is left."""
    llm = LLM("smollm2", **OPTIONS, recovery_limit=0)
    (rank,) = llm.facts.ranks
    killed = 0.0

    def kill(done: int, tokens: int) -> None:
        nonlocal killed
        if tokens and not killed:
            killed = time.monotonic()
            os.kill(rank, signal.SIGKILL)

    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    with pytest.raises(EngineDead, match=r"rank 0 failed in step: its process was killed by signal 9"):
        llm.generate(["Once upon a time"], params, on_tokens=kill)
    assert time.monotonic() - killed < SOON
    llm.close()
    assert not alive(rank)


@pytest.mark.row("X3")
def test_close_ends_the_rank() -> None:
    """Whose link has chunks of the size that was asked for."""
    with LLM("smollm2", **OPTIONS, link_chunk_bytes=1 << 13) as llm:
        (rank,) = llm.facts.ranks
        link: Any = llm._loop.gang.link
        assert alive(rank) and link.segment.ring()[2] == 1 << 13
    assert not alive(rank)


def test_a_rank_killed_while_idle() -> None:
    """The server learns of it without a request, says why and ends with 1."""
    with Server("smollm2", *HASH, *MP, *LAST) as server:
        (rank,) = ranks_of(server.pid)
        os.kill(rank, signal.SIGKILL)
        assert server.ended() == 1 and "killed by signal 9" in "".join(server.log)


def test_a_rank_killed_under_load_answers_every_stream() -> None:
    with Server("smollm2", *HASH, *MP, *LAST) as server, counting():  # no client says that it has any
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        streams = [
            iter(
                client.completions.create(
                    model="smollm2",
                    prompt=f"{i}",
                    max_tokens=400,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
            )
            for i in range(4)
        ]
        for stream in streams:
            next(stream)
        os.kill(ranks_of(server.pid)[0], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError, match="rank 0"):
                for _ in stream:
                    pass
        assert server.process.wait(PATIENCE) == 1


@pytest.mark.parametrize("victim", ["server", "engine"])
@pytest.mark.row("X11")
def test_nothing_is_left_behind(victim: str) -> None:
    """SIGKILL of the server or of the engine: engine and rank end soon, no shared memory stays."""
    before = segments()
    with Server("smollm2", *HASH, *MP, *LAST) as server:
        assert httpx2.get(server.url + "/health").status_code == 200
        (rank,) = ranks_of(server.pid)
        engine = server.engine_pid()
        os.kill(server.pid if victim == "server" else engine, signal.SIGKILL)
        wait_until("the rank ends", lambda: not alive(rank), limit=SOON)
        wait_until("the engine ends", lambda: not alive(engine), limit=SOON)
        assert server.process.wait(PATIENCE) != 0
    assert segments() <= before


def test_a_rank_that_cannot_start_says_so() -> None:
    """The reason reaches the user's terminal in one line, from another process."""
    result = planaria("serve", "smollm2", "--port", "0", "--kv-cache-memory", "1MiB", *MP)
    assert result.returncode == 1
    assert "--max-model-len" in result.stderr and "Traceback" not in result.stderr
