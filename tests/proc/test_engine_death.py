"""The engine's process is killed or stopped while 16 requests stream: each pauses, goes on with the same tokens and
ends as it would have. The worker's tokens depend on the whole history, and it is never far ahead of the clients; one
test has the real model."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.proc import custom
from tests.proc.servers import PATIENCE, PATIENT, TLS, Server, alive, needs_smollm2, wait_until

pytestmark = needs_smollm2

STREAMS, TOKENS = 8, 60
HASH = ["--worker-cls", f"{custom.__name__}.HashRank", "--max-model-len", "512"]
REAL = ["--kv-cache-memory", "256MiB", "--max-model-len", "512", "--batch-invariant"]

Outcome = tuple[list[int], str, str]  # tokens, text, finish reason

SEEN = Path(tempfile.gettempdir()) / f"planaria-test-seen-{os.getpid()}"
os.environ[custom.SEEN] = str(SEEN)  # for every server that is started from here


@pytest.fixture(scope="module")
def mistake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make this file, and the engine runs into an exception of its own."""
    return tmp_path_factory.mktemp("engine") / "mistake"


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, no engine that starts gets ready."""
    return tmp_path_factory.mktemp("engine") / "late"


@pytest.fixture(scope="module")
def server(mistake: Path, late: Path) -> Iterator[Server]:
    with Server("smollm2", *HASH, env={"TEST_MISTAKE": str(mistake), custom.LATE: str(late)}) as server:
        yield server


@contextlib.contextmanager
def counting() -> Iterator[Callable[[int], None]]:
    """Tell workers how many tokens clients have got, so that they wait for them."""
    file = os.open(SEEN, os.O_CREAT | os.O_WRONLY)
    try:
        yield lambda count: os.pwrite(file, count.to_bytes(8, "little"), 0) and None
    finally:
        os.close(file)
        SEEN.unlink()


def client_of(server: Server) -> openai.OpenAI:
    client = openai.DefaultHttpxClient(verify=TLS)
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", timeout=120, max_retries=0, http_client=client
    )  # fmt: skip


def ask(client: openai.OpenAI, i: int, on_tokens: Callable[[int], None]) -> Outcome:
    """Half of them greedy, half not; some may end by themselves."""
    options: dict[str, Any] = {"temperature": 0 if i % 2 else 0.9, "seed": i}
    extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": i % 3 != 0}
    stream = client.completions.create(
        model="smollm2", prompt=f"Story number {i}: Once upon a time", max_tokens=TOKENS - i % 5, stream=True,
        stop=["."] if i % 4 == 3 else None, extra_body=extra, **options,
    )  # fmt: skip
    tokens: list[int] = []
    text, finish = "", ""
    for chunk in stream:
        choice = chunk.choices[0]
        tokens += choice.token_ids  # type: ignore[attr-defined]
        text += choice.text
        finish = choice.finish_reason or finish
        on_tokens(len(choice.token_ids))  # type: ignore[attr-defined]
    return tokens, text, finish


def run(
    server: Server,
    harm: Callable[[int], None] = lambda tokens: None,
    streams: int = STREAMS,
    enter: Callable[[], None] = lambda: None,
    begun: Callable[[], None] | None = None,
) -> list[Outcome]:
    """All streams at once; `harm` is called for each token with the number so far, from one thread at a time, `begun`
    when each has had its first. enter: what each client's thread does first."""
    client = client_of(server)
    lock, count = threading.Lock(), 0
    all_begun = threading.Barrier(streams, begun)

    def stream(i: int) -> Outcome:
        first = begun is not None

        def on_tokens(more: int) -> None:
            nonlocal count, first
            if first:
                first = False
                all_begun.wait(120)
            with lock:
                for _ in range(more):
                    count += 1
                    harm(count)
                told(count)

        return ask(client, i, on_tokens)

    with counting() as told, concurrent.futures.ThreadPoolExecutor(streams, initializer=enter) as pool:
        futures = [pool.submit(stream, i) for i in range(streams)]
        return [future.result(180) for future in futures]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Outcome]:
    outcomes = run(server)
    assert all(finish for _, _, finish in outcomes) and sum(len(tokens) for tokens, _, _ in outcomes) > 250
    return outcomes


def health(server: Server) -> dict[str, Any]:
    body: dict[str, Any] = httpx2.get(server.url + "/health").json()
    return body


def test_killed_then_stopped_while_streams_run(server: Server, expected: list[Outcome]) -> None:
    """Twice in one run."""
    victims: list[int] = []

    def harm(tokens: int) -> None:
        if tokens in (150, 300):
            victims.append(server.engine_pid())
            os.kill(victims[-1], signal.SIGKILL if tokens == 150 else signal.SIGSTOP)

    assert run(server, harm) == expected
    assert len(set(victims)) == 2 and not any(alive(pid) for pid in victims)
    body = health(server)
    assert body["live"] and body["ready"] and not body["recovering"] and body["engine_restarts"] == 2
    fault = body["last_fault"]
    assert fault["part"] == "engine" and fault["phase"] == "step" and "was stopped" in fault["cause"]
    assert fault["recovered"] and fault["requests"] > 0 and fault["replayed_tokens"] > 0
    assert fault["seconds"]["total"] >= 2.0  # what it takes to tell stopped from slow
    metrics = httpx2.get(server.url + "/metrics").text
    assert 'planaria:faults_total{model_name="smollm2",part="engine"} 2.0' in metrics
    server.wait_for("another engine goes on after")


def test_killed_while_idle_and_asked_meanwhile(server: Server, expected: list[Outcome]) -> None:
    """Requests that come while no engine is up wait for one."""
    before = health(server)["engine_restarts"]
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_until("it is noticed", lambda: (health(server)["last_fault"] or {}).get("phase") == "idle")
    assert run(server) == expected
    assert health(server)["engine_restarts"] == before + 1


def test_killed_again_while_it_comes_back(server: Server, expected: list[Outcome], late: Path) -> None:
    victims: list[int] = []

    def harm(tokens: int) -> None:
        if tokens == 200:
            victims.append(server.engine_pid())
            late.touch()
            os.kill(victims[0], signal.SIGKILL)
            wait_until("another is started", lambda: set(server.engine_pids()) - set(victims))
            victims.append(next(pid for pid in server.engine_pids() if pid not in victims))
            os.kill(victims[1], signal.SIGKILL)
            late.unlink()

    assert run(server, harm) == expected
    assert health(server)["last_fault"]["phase"] == "start-up"


def test_an_exception_of_the_engine_itself(server: Server, expected: list[Outcome], mistake: Path) -> None:
    """It ends with a traceback, and answers nobody: another goes on with all of them."""
    before = health(server)["engine_restarts"]
    assert run(server, lambda tokens: mistake.touch() if tokens == 200 else None) == expected
    body = health(server)
    assert body["engine_restarts"] == before + 1 and not mistake.exists()
    assert re.search(r"exit code 1: AssertionError: step \d+ committed after", body["last_fault"]["cause"])
    server.wait_for("Traceback")


def test_a_request_that_kills_its_engine_is_found(server: Server) -> None:
    """It dies twice with others and twice alone; then it is answered, and the others never notice."""
    client = client_of(server)

    def stream(prompt: list[int]) -> Outcome:
        chunks = client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=200, seed=1, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        outcome: Outcome = ([], "", "")
        for chunk in chunks:
            tokens, text, _ = outcome
            choice = chunk.choices[0]
            outcome = (tokens + choice.token_ids, text + choice.text, choice.finish_reason or "")  # type: ignore[attr-defined]
        return outcome

    prompts = [[20 + i, 30, 40] for i in range(3)]
    alone = [stream(prompt) for prompt in prompts]
    before = health(server)["engine_restarts"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        others = [pool.submit(stream, prompt) for prompt in prompts]
        bad = pool.submit(stream, [custom.POISON, 30, 40])
        with pytest.raises(openai.APIError, match="and nothing else"):
            bad.result(180)
        assert [other.result(180) for other in others] == alone
    assert health(server)["engine_restarts"] - before == 4


def test_the_real_model_goes_on_with_the_same_tokens() -> None:
    with Server("smollm2", *REAL) as server:
        expected = run(server, streams=8)
        assert {finish for _, _, finish in expected} == {"stop", "length"}

        def harm(tokens: int) -> None:
            if tokens == 100:
                os.kill(server.engine_pid(), signal.SIGKILL)

        assert run(server, harm, streams=8) == expected
        fault = health(server)["last_fault"]
        assert fault["recovered"] and fault["seconds"]["load"] > 0
        assert fault["requests"] > 0 and fault["replayed_tokens"] == 0  # its KV outlived it


def test_a_server_that_drains_still_recovers() -> None:
    """SIGTERM, then the engine dies: what is open ends with its finish reason, then the server with 0."""
    with Server("smollm2", *HASH, *PATIENT) as server:
        stream = iter(
            client_of(server).completions.create(
                model="smollm2",
                prompt="Once",
                max_tokens=400,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        )
        next(stream)
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        wait_until("draining", lambda: not health(server)["ready"])
        os.kill(engine, signal.SIGKILL)
        chunks = list(stream)
        assert len(chunks) == 399 and chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(PATIENCE) == 0
