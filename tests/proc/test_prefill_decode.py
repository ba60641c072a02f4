"""Engines of two kinds behind one server: whatever becomes of either, each request ends with the tokens that one engine
alone gives, and nothing stays lent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.proc.asking import Asked, ask_all
from tests.proc.servers import SMALL, SOON, TINY, Server, needs_smollm2, planaria, wait_until
from tests.tiers import representatives

OPTIONS = [*TINY, "--batch-invariant", "--max-num-seqs", "32", "--max-num-batched-tokens", "64"]
# Of these most are handed over, the last ones are too short; two begin alike.
ASKED: list[Asked] = [([(7 * i + j) % 97 + 1 for j in range(40 + 37 * (i % 7))], 24 + i) for i in range(12)]
ASKED += [(ASKED[6][0] + [5, 6, 7], 30), ([3] * 10, 20), ([4, 5], 20)]


@pytest.fixture(scope="module")
def plain(small: Path) -> Iterator[Server]:
    with Server(str(small), *OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def expected(plain: Server, small: Path) -> list[list[int]]:
    return ask_all(plain.url, str(small), ASKED)


@pytest.fixture(scope="module")
def server(small: Path) -> Iterator[Server]:
    with Server(str(small), *OPTIONS, "--prefill-engines", "1", "--decode-engines", "1") as server:
        yield server


def engines(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx2.get(server.url + "/admin/fleet", timeout=30).json()["engines"]
    return found


def of_kind(server: Server, kind: str) -> list[int]:
    """Pids."""
    return [engine["pid"] for engine in engines(server) if engine["kind"] == kind]


def metric(server: Server, name: str) -> float:
    lines = httpx2.get(server.url + "/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def nothing_is_left(server: Server, size: int = 2) -> None:
    wait_until("all engines", lambda: [engine["state"] for engine in engines(server)] == ["ready"] * size)
    wait_until("nothing is lent", lambda: metric(server, "planaria:kv_transfer_held_blocks") == 0, SOON)
    wait_until("KV is free", lambda: metric(server, "vllm:kv_cache_usage_perc") == 0, SOON)


def test_prompts_are_computed_by_one_kind_and_go_on_in_the_other(
    server: Server, small: Path, expected: list[list[int]]
) -> None:
    before, lent = (
        metric(server, "planaria:kv_transfer_blocks_total"),
        metric(server, "planaria:kv_transfer_lent_total"),
    )
    assert ask_all(server.url, str(small), ASKED[6:7]) == expected[6:7]
    assert metric(server, "planaria:kv_transfer_lent_total") - lent == 1
    assert metric(server, "planaria:kv_transfer_blocks_total") - before > 10
    assert ask_all(server.url, str(small), ASKED) == expected  # wherever first tokens are sooner
    assert metric(server, "planaria:kv_transfer_failed_total") == 0
    nothing_is_left(server)
    rows = {row["engine"]: row for row in httpx2.get(server.url + "/admin/processes").json()["processes"]}
    assert (rows[0]["kind"], rows[1]["kind"]) == ("prefill", "decode")
    shown = planaria("ps", "--url", server.url, "--json").stdout
    assert '"prefill"' in shown and '"decode"' in shown
    health = httpx2.get(server.url + "/health").json()
    assert [engine["kv_transfer"] for engine in health["engines"]] == ["ok", "ok"] and health["prefill_threshold"] >= 32


FIELDS: list[dict[str, Any]] = [
    {"n": 3, "temperature": 0.8, "seed": 5}, {"logprobs": 3, "temperature": 0},
    {"prompt_logprobs": 1, "temperature": 0},
    {"temperature": 1.0, "seed": 9, "top_p": 0.9, "repetition_penalty": 1.2, "priority": 3}, {"max_tokens": 1},
    {"stop_token_ids": [11, 12, 13], "temperature": 0.9, "seed": 1}, {"stream": False, "cache_salt": "mine", "seed": 2},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_every_kind_of_request_is_answered_alike(
    plain: Server, server: Server, small: Path, fields: dict[str, Any]
) -> None:
    body = {"model": str(small), "prompt": [(3 * j) % 89 + 1 for j in range(150)], "max_tokens": 12, "seed": 3,
            "return_token_ids": True, **fields}  # fmt: skip

    def answer(of: Server) -> Any:
        found = httpx2.post(f"{of.url}/v1/completions", json=body, timeout=120)
        assert found.status_code == 200, found.text
        return [{**choice} for choice in found.json()["choices"]]

    assert answer(server) == answer(plain)


def kill(*kinds: str, number: int = signal.SIGKILL) -> Callable[[Server], None]:
    def harm(server: Server) -> None:
        for pid in [pid for kind in kinds for pid in of_kind(server, kind)]:
            os.kill(pid, number)

    return harm


def stop(kind: str) -> Callable[[Server], None]:
    """For a second, as one that is swapped out."""

    def harm(server: Server) -> None:
        pids = of_kind(server, kind)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    return harm


HARMS: dict[str, tuple[int, Callable[[Server], None]]] = {
    "prefill, while prompts are computed": (0, kill("prefill")),
    "prefill, when some have been handed over": (40, kill("prefill")),
    "prefill, after all were": (200, kill("prefill")),
    "decode, while blocks come": (6, kill("decode")),
    "decode, later": (100, kill("decode")),
    "both": (20, kill("prefill", "decode")),
    "prefill is told to end": (20, kill("prefill", number=signal.SIGTERM)),
    "decode is told to end": (20, kill("decode", number=signal.SIGTERM)),
    "prefill is stopped": (10, stop("prefill")),
    "decode is stopped": (10, stop("decode")),
}


@pytest.mark.parametrize(
    "name", representatives(HARMS, "prefill, when some have been handed over", "decode, while blocks come", "both")
)
def test_no_end_of_an_engine_costs_a_token(server: Server, small: Path, expected: list[list[int]], name: str) -> None:
    at, harm = HARMS[name]
    before = {engine["pid"] for engine in engines(server)}
    assert ask_all(server.url, str(small), ASKED, at=at, harm=lambda: harm(server)) == expected
    if "stopped" not in name:
        wait_until("another process", lambda: {engine["pid"] for engine in engines(server)} != before)
    nothing_is_left(server)


def test_clients_that_leave_in_the_midst_leave_nothing_behind(server: Server, small: Path) -> None:
    def leave(i: int) -> None:
        body = {"model": str(small), "prompt": [i + 1] * 300, "max_tokens": 500, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for count, _ in enumerate(answer.iter_lines()):
                if count >= i % 4:
                    return

    threads = [threading.Thread(target=leave, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    nothing_is_left(server)


def test_sizes_and_kinds_change_while_requests_run(server: Server, small: Path, expected: list[list[int]]) -> None:
    def scale(*words: str) -> str:
        done = planaria("scale", *words, "--url", server.url, "--drain-timeout", "0")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kinds() -> list[str]:
        return [engine["kind"] for engine in engines(server)]

    assert ask_all(
        server.url, str(small), ASKED, at=10, harm=lambda: scale("--prefill", "2", "--decode", "1")
    ) == expected  # fmt: skip
    assert kinds() == ["prefill", "decode", "prefill"]
    assert ask_all(
        server.url, str(small), ASKED, at=10, harm=lambda: scale("--prefill", "1", "--decode", "2")
    ) == expected  # fmt: skip
    assert kinds() == ["prefill", "decode", "decode"]
    assert ask_all(
        server.url, str(small), ASKED, at=10, harm=lambda: scale("--prefill", "1", "--decode", "1")
    ) == expected  # fmt: skip
    assert kinds() == ["prefill", "decode"]
    nothing_is_left(server)
    refused = planaria("scale", "--dp", "3", "--url", server.url)
    assert refused.returncode == 2 and "two kinds" in refused.stderr


@needs_smollm2
def test_grammars_and_drafts_go_on_where_they_were() -> None:
    """With a tokenizer: the grammar's state, and what is drafted, begin again from the tokens."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 4}'
    options = ("smollm2", *SMALL, "--batch-invariant", "--threads", "1")
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    text = "The planarian is a flatworm that regrows from any piece. " * 7
    fields: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "who", "schema": schema}}, "n": 2},
        {"logprobs": True, "top_logprobs": 2}, {"temperature": 0.8, "stop": ["piece"]},
    ]  # fmt: skip

    def answers(server: Server) -> list[Any]:
        found = []
        for number, more in enumerate(fields):
            said = [{"role": "user", "content": f"{number}. {text}"}]
            body = {"model": "smollm2", "messages": said, "max_tokens": 16, "seed": 4, **more}
            answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=240)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["choices"])
        return found

    with Server(*options) as plain:
        expected = answers(plain)
    with Server(*options, "--prefill-engines", "1", "--decode-engines", "1", "--speculative-config", drafts) as apart:
        assert answers(apart) == expected
        assert metric(apart, "planaria:kv_transfer_blocks_total") > 0  # which of them is as measured times say
        assert metric(apart, "planaria:kv_transfer_failed_total") == 0


def test_tensor_ranks_and_several_api_processes_hand_over_too(small: Path, expected: list[list[int]]) -> None:
    words = ("--prefill-engines", "1", "--decode-engines", "1", "-tp", "2", "--api-server-count", "2", "--threads", "1")
    with Server(str(small), *OPTIONS, *words) as server:
        assert ask_all(server.url, str(small), ASKED) == expected
        assert metric(server, "planaria:kv_transfer_blocks_total") > 0
        assert ask_all(server.url, str(small), ASKED, at=30, harm=lambda: kill("prefill")(server)) == expected
        nothing_is_left(server)
