"""The engine's process is killed or stopped while 16 requests stream: each pauses, goes on with the same tokens and ends
as it would have."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.proc.servers import Server, alive, needs_smollm2, wait_until

pytestmark = needs_smollm2

STREAMS, TOKENS = 16, 80
SMALL = ["--kv-cache-memory", "256MiB", "--max-model-len", "512", "--dtype", "float32"]

Outcome = tuple[list[int], str, str]  # tokens, text, finish reason


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("smollm2", *SMALL) as server:
        yield server


def ask(client: openai.OpenAI, i: int, on_token: Callable[[], None]) -> Outcome:
    """Half of them greedy, half with a seed; three ways to end."""
    options: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i}
    extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": i % 3 != 0}
    stop = ["."] if i % 4 == 3 else None
    stream = client.completions.create(
        model="smollm2", prompt=f"Story number {i}: Once upon a time", max_tokens=TOKENS, stream=True, stop=stop,
        extra_body=extra, **options,
    )  # fmt: skip
    tokens: list[int] = []
    text, finish = "", ""
    for chunk in stream:
        choice = chunk.choices[0]
        tokens += choice.token_ids  # type: ignore[attr-defined]
        text += choice.text
        finish = choice.finish_reason or finish
        on_token()
    return tokens, text, finish


def run(server: Server, harm: Callable[[int], None] = lambda tokens: None) -> list[Outcome]:
    """All streams at once; `harm` is called after each token with the number so far, from one thread at a time."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120, max_retries=0)
    lock, count = threading.Lock(), 0

    def on_token() -> None:
        nonlocal count
        with lock:
            count += 1
            harm(count)

    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        futures = [pool.submit(ask, client, i, on_token) for i in range(STREAMS)]
        return [future.result(180) for future in futures]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Outcome]:
    outcomes = run(server)
    assert {finish for _, _, finish in outcomes} == {"stop", "length"}
    return outcomes


def health(server: Server) -> dict[str, Any]:
    body: dict[str, Any] = httpx2.get(server.url + "/health").json()
    return body


def test_killed_then_stopped_while_streams_run(server: Server, expected: list[Outcome]) -> None:
    """Twice in one run: the second time before everybody has caught up."""
    victims: list[int] = []

    def harm(tokens: int) -> None:
        if tokens == 200 or tokens == 300:
            victims.append(server.engine_pid())
            os.kill(victims[-1], signal.SIGKILL if tokens == 200 else signal.SIGSTOP)

    assert run(server, harm) == expected
    assert len(set(victims)) == 2 and not any(alive(pid) for pid in victims)
    body = health(server)
    assert body["live"] and body["ready"] and not body["recovering"] and body["engine_restarts"] == 2
    fault = body["last_fault"]
    assert fault["part"] == "engine" and fault["phase"] == "step" and "was stopped" in fault["cause"]
    assert fault["recovered"] and fault["seconds"]["total"] >= fault["seconds"]["load"] > 0
    metrics = httpx2.get(server.url + "/metrics").text
    assert 'planaria:faults_total{model_name="smollm2",part="engine"} 2.0' in metrics
    assert "another engine goes on after" in "".join(server.log)


def test_killed_while_idle_and_asked_meanwhile(server: Server, expected: list[Outcome]) -> None:
    """Requests that come while no engine is up wait for one."""
    before = health(server)["engine_restarts"]
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_until("it is noticed", lambda: health(server)["recovering"])
    assert run(server) == expected
    body = health(server)
    assert body["engine_restarts"] == before + 1 and body["last_fault"]["phase"] == "idle"


def test_a_server_that_drains_still_recovers() -> None:
    """SIGTERM, then the engine dies: what is open ends with its finish reason, then the server with 0."""
    with Server("smollm2", *SMALL) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = iter(
            client.completions.create(
                model="smollm2", prompt="Once", max_tokens=100, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        )
        next(stream)
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        wait_until("draining", lambda: not health(server)["ready"])
        os.kill(engine, signal.SIGKILL)
        chunks = list(stream)
        assert len(chunks) == 99 and chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(20) == 0
