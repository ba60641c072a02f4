"""A real server: what a user sees, of the real model, and an operator, where any worker will do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import openai
import pytest

from planaria.logs import PIPE
from tests.proc.servers import (
    PATIENCE,
    PATIENT,
    SMALL,
    SOON,
    START_LIMIT,
    TINY,
    Server,
    alive,
    needs_smollm2,
    planaria,
    wait_until,
)
from tests.proc.sockets import free_port
from tests.proc.test_engine_death import HASH, counting

pytestmark = needs_smollm2


@pytest.fixture(scope="module")
def server():  # type: ignore[no-untyped-def]
    with Server("smollm2", *SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60)


def gauge(server: Server, name: str) -> float:
    for line in httpx2.get(server.url + "/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def test_paris(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=4)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_a_request_that_says_nothing_is_sampled_as_the_models_makers_would(client: openai.OpenAI) -> None:
    """By what generation_config.json has, and seeds make it the same."""

    def text(**said: float) -> str:
        answer = client.completions.create(
            model="smollm2", prompt="Once upon a time", seed=3, max_tokens=24, **said  # type: ignore[arg-type]
        )  # fmt: skip
        return answer.choices[0].text

    assert text() == text(temperature=0.2, top_p=0.9) != text(temperature=1.0, top_p=1.0)


def test_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    whole = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    parts = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=40, stream=True  # type: ignore[arg-type]
    )  # fmt: skip
    text = "".join(part.choices[0].delta.content or "" for part in parts)  # type: ignore[union-attr]
    assert text == whole.choices[0].message.content and text


def test_many_at_once_as_alone(client: openai.OpenAI) -> None:
    """Seeded sampling gives each request the same text in a crowd of 12 as by itself."""

    def ask(i: int) -> str:
        answer = client.completions.create(
            model="smollm2", prompt=f"Story number {i}: Once upon a time", seed=i, temperature=0.8, max_tokens=16
        )
        return answer.choices[0].text

    alone = [ask(i) for i in range(3)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(ask, range(12)))
    assert crowd[:3] == alone
    assert len(set(crowd)) > 10


def test_a_seed_and_no_tokenizer(small: Path) -> None:
    """--seed: what comes first gets the same seed in every run. --skip-tokenizer-init: ids in and out."""
    body = {"prompt": [50, 35, 28], "max_tokens": 6, "n": 2, "return_token_ids": True, "temperature": 1}
    runs = []
    for _ in range(2):
        with Server(str(small), *TINY, "--seed", "5") as server:
            answers = [httpx2.post(server.url + "/v1/completions", json=body, timeout=60).json() for _ in range(2)]
            refused = httpx2.post(server.url + "/v1/completions", json={"prompt": "text"})
            assert refused.status_code == 400 and "--skip-tokenizer-init" in refused.text
            runs.append([[choice["token_ids"] for choice in answer["choices"]] for answer in answers])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_disconnect_frees_blocks(server: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="smollm2", prompt="Count: 1 2 3", max_tokens=1900, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    assert gauge(server, "vllm:num_requests_running") == 1
    stream.close()
    wait_until("the request is gone", lambda: gauge(server, "vllm:num_requests_running") == 0)
    wait_until("its blocks are free", lambda: gauge(server, "vllm:kv_cache_usage_perc") == 0)


def test_bad_request_costs_nobody(client: openai.OpenAI) -> None:
    """A stream goes on while every kind of refused request comes in."""
    stream = client.completions.create(
        model="smollm2", prompt="Once", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    got = [next(chunks).choices[0].text]
    for bad in ({"temperature": -1}, {"n": 10**9}, {"logit_bias": {"999999": 1}}, {"max_tokens": 10**6}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="smollm2", prompt="x", extra_body=bad)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smollm2", prompt=[1, 2, 999_999])
    got += [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(got) == 60


def test_terminate_drains() -> None:
    """SIGTERM: what runs ends with its finish reason, what comes is refused, exit code 0."""
    with Server("smollm2", *HASH, *PATIENT) as server, counting() as told:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = iter(
            client.completions.create(
                model="smollm2",
                prompt="Once",
                max_tokens=200,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        )
        count, engine = 1, server.engine_pid()
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        wait_until("not ready", lambda: httpx2.get(server.url + "/health").status_code == 503)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="smollm2", prompt="x", max_tokens=1)
        for chunk in stream:
            count += 1
            told(count)
            last = chunk
        assert count == 200 and last.choices[0].finish_reason == "length"
        assert server.process.wait(PATIENCE) == 0
        assert not alive(engine)


def test_second_signal_aborts() -> None:
    with Server("smollm2", *HASH) as server, counting():
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = iter(
            client.completions.create(
                model="smollm2",
                prompt="Once",
                max_tokens=400,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        )
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        wait_until("draining", lambda: httpx2.get(server.url + "/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            list(stream)
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_engine_death_answers_everyone() -> None:
    """kill -9 of an engine that may not be replaced: each stream ends with an error that says so, the server exits
    with 1."""
    with Server("smollm2", *HASH, "--recovery-limit", "0") as server, counting():
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        started = threading.Barrier(5)

        def stream(i: int) -> str:
            chunks = iter(
                client.completions.create(
                    model="smollm2",
                    prompt=f"{i}",
                    max_tokens=400,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
            )
            next(chunks)
            started.wait(PATIENCE)
            try:
                for _ in chunks:
                    pass
            except openai.APIError as e:
                return str(e)
            return "ended without an error"

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = [pool.submit(stream, i) for i in range(4)]
            started.wait(PATIENCE)
            kill(server.engine_pid())
            for result in results:
                assert "engine" in result.result(PATIENCE)
        assert server.process.wait(PATIENCE) == 1


def test_server_death_ends_the_engine(tmp_path: Path) -> None:
    """kill -9 of the server: its engine goes with it, and nothing of theirs stays in the folder for temporary files."""
    with Server("smollm2", *HASH, env={"TMPDIR": str(tmp_path)}) as server:
        engine = server.engine_pid()
        kill(server.pid)
        server.process.wait(PATIENCE)
        wait_until("the engine ends", lambda: not alive(engine), limit=SOON)
        assert list(tmp_path.iterdir()) == []


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_every_line_of_the_log_is_for_machines() -> None:
    """Of the server, its engine and its ranks; what it needs to say before it starts, too."""
    with Server("smollm2", *HASH, "-tp", "2", "--log-format", "json") as server:
        answer = httpx2.post(server.url + "/v1/completions", json={"model": "smollm2", "prompt": "a", "n": 0})
        os.kill(server.rank_pids()[-1], signal.SIGKILL)
        server.wait_for("rank 1 failed")
    lines = [json.loads(line) for line in server.log]
    assert [line["address"] for line in lines if "address" in line] == [server.url]
    error = answer.json()["error"]
    assert [(line["param"], line["error"]) for line in lines if line.get("status") == 400] == [("n", error["message"])]
    refused = planaria("serve", "smollm2", "--port", "70000", env={"PLANARIA_LOG_FORMAT": "json"})
    assert refused.returncode == 2 and "--port 70000" in json.loads(refused.stderr)["message"]


def test_a_log_that_nobody_reads_stops_nobody(small: Path) -> None:
    """From before the first line on, of the server, its engine and its ranks."""
    hear, say = os.pipe()
    fcntl.fcntl(say, fcntl.F_SETPIPE_SZ, PIPE)
    os.set_blocking(say, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(say, bytes(1 << 12))
    os.set_blocking(say, True)
    port = free_port()
    command = [sys.executable, "-m", "planaria", "serve", str(small), *TINY, "-tp", "2", "-v", "--port", str(port)]
    server = subprocess.Popen(command, stdout=say, stderr=say)
    os.close(say)

    def answers() -> bool:
        assert server.poll() is None
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    try:
        wait_until("it serves", answers, START_LIMIT)
        asked = {"model": small.name, "prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
        for _ in range(3):
            answer = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=PATIENCE)
            assert answer.json()["usage"]["completion_tokens"] == 20
        server.terminate()
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait(PATIENCE)
        os.close(hear)
