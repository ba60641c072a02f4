"""Answers that are JSON of a schema, while their rank and their engine are killed: the same bytes, all valid."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from planaria import LLM, SamplingParams, StructuredOutputsParams
from tests.proc.servers import TLS, Server, alive, wait_until

POINTS = {"type": "array", "items": {"type": "integer", "minimum": -999, "maximum": 999}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "points": {**POINTS, "minItems": 40, "maxItems": 50},
        "kind": {"enum": ["cat", "dog", None]},
    },
    "required": ["name", "points", "kind"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {"json": SCHEMA, "disable_any_whitespace": True}
STREAMS = 6
EVERY = 10
FIFTY = 50
TINY = {"max_model_len": 512, "kv_cache_memory": "16MiB", "max_num_seqs": 64}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.model.checkpoints import write_talker

    return write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def server(talker: Path) -> Iterator[Server]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    with Server(str(talker), *options, "--dtype", "float32", "-tp", "2") as server:
        yield server


def ask(server: Server, i: int, on_event: Callable[[int, int], None], form: dict[str, Any] = FORM) -> tuple[str, str]:
    """A streamed answer, and why it ended. Some are greedy. on_event: called with i and its tokens so far."""
    body = {
        "prompt": f"Number {i}:", "max_tokens": 400, "temperature": 0 if i == 0 else 1, "seed": i, "stream": True,
        "structured_outputs": form, "return_token_ids": True,
    }  # fmt: skip
    text, finish, tokens = "", "", 0
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=120, verify=TLS) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                finish = event["choices"][0]["finish_reason"] or finish
                tokens += len(event["choices"][0]["token_ids"])
                on_event(i, tokens)
    return text, finish


def run(server: Server, harm: Callable[[int], None] = lambda events: None) -> list[tuple[str, str]]:
    """All at once. harm: called with the number of events so far, from one thread at a time."""
    lock, count = threading.Lock(), 0

    def on_event(stream: int, tokens: int) -> None:
        nonlocal count
        with lock:
            count += 1
            harm(count)

    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda i: ask(server, i, on_event), range(STREAMS)))


def hold(answers: list[tuple[str, str]], schema: dict[str, Any] = SCHEMA) -> None:
    for text, finish in answers:
        assert finish == "stop"
        jsonschema.validate(json.loads(text), schema)
    assert len({text for text, _ in answers}) == len(answers)


def test_a_rank_and_the_engine_killed_while_json_streams(server: Server) -> None:
    expected = run(server)
    hold(expected)
    victims: list[int] = []

    def harm(events: int) -> None:
        if events == 25:
            victims.append(server.rank_pids()[0])  # the one that draws
            os.kill(victims[0], signal.SIGKILL)
        if events == 200:
            victims.append(server.engine_pid())
            os.kill(victims[1], signal.SIGKILL)

    assert run(server, harm) == expected
    assert len(victims) == 2 and not any(alive(pid) for pid in victims)
    wait_until("it is ready again", lambda: httpx2.get(server.url + "/health", verify=TLS).json()["ready"])
    fault = httpx2.get(server.url + "/health", verify=TLS).json()["last_fault"]
    assert fault["part"] == "engine" and fault["requests"] > 0
    assert run(server) == expected


@pytest.mark.long
def test_a_rank_killed_at_every_token_of_fifty_answers(talker: Path) -> None:
    """The ranks are two; each is killed at half of the tokens, and one of them every ten tokens of a run."""
    form = StructuredOutputsParams(**FORM)
    asked = [SamplingParams(max_tokens=400, seed=i, structured_outputs=form) for i in range(50)]
    prompts = [f"Number {i}:" for i in range(50)]
    with LLM(str(talker), distributed_executor_backend="mp", tensor_parallel_size=2, dtype="float32", **TINY) as llm:
        steps: list[int] = []

        def answers(at: int) -> list[str]:
            steps.clear()

            def on_tokens(done: int, tokens: int) -> None:
                if not tokens:  # a turn without any; who dies with one request alone, again and again, convicts it
                    return
                steps.append(tokens)
                if at and len(steps) % EVERY == at % EVERY:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(llm._loop.gang.members[len(steps) % 2].pid, signal.SIGKILL)

            found = [o.outputs[0] for o in llm.generate(prompts, asked, on_tokens=on_tokens)]
            hold([(answer.text, str(answer.finish_reason)) for answer in found])
            return [answer.text for answer in found]

        expected = answers(0)
        assert len(steps) > 100
        for at in range(1, EVERY + 1):
            assert answers(at) == expected, f"killed after steps {at}, {at + EVERY}, ..."


@pytest.mark.long
def test_the_engine_killed_at_every_token_of_fifty_answers(talker: Path) -> None:
    """All of them are at about the same token when it dies, every ten tokens of a run."""
    small = {**SCHEMA, "properties": {**SCHEMA["properties"], "points": {**POINTS, "minItems": 4, "maxItems": 6}}}
    form = {"json": small, "disable_any_whitespace": True}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    with Server(str(talker), *options, "--dtype", "float32", "--recovery-limit", "1000") as server:
        tokens, lock, kills = [0] * FIFTY, threading.Lock(), 0

        def answers(at: int) -> list[tuple[str, str]]:
            """at: of the tokens of whoever has most."""
            nonlocal kills
            tokens[:], due = [0] * FIFTY, at

            def on_event(i: int, count: int) -> None:
                nonlocal due, kills
                with lock:
                    tokens[i] = count
                    if at and max(tokens) >= due and (engines := server.engine_pids()):  # not while the next one starts
                        due += EVERY
                        kills += 1
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(engines[0], signal.SIGKILL)

            with concurrent.futures.ThreadPoolExecutor(FIFTY) as pool:
                return list(pool.map(lambda i: ask(server, i, on_event, form), range(FIFTY)))

        expected = answers(0)
        hold(expected, small)
        longest = max(tokens)
        for at in range(1, EVERY + 1):
            wanted = len(range(at, longest + 1, EVERY))
            for _ in range(5):  # the last tokens may come while the next one starts: then once more
                before = kills
                assert answers(at) == expected, f"killed at tokens {at}, {at + EVERY}, ..."
                if kills - before >= wanted:
                    break
            assert kills - before >= wanted
