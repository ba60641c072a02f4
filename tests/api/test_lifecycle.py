"""Starting, clients that leave, draining, aborting, the engine's death, health."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from planaria.errors import ConfigError, EngineDead
from planaria.server import generation, serve
from planaria.server.config import ServerConfig
from planaria.server.schema import ChatCompletionRequest, CompletionRequest, build_likely
from planaria.server.serve import bind, url_of
from planaria.wire import EngineStats
from tests.api.conftest import running
from tests.api.fake_engine import FakeEngine

C = "/v1/completions"
LONG = {"model": "smollm2", "prompt": "Hello", "max_tokens": 300, "ignore_eos": True}


async def test_not_ready_until_the_engine_is(tokenizer):
    engine = FakeEngine(tokenizer, is_ready=False)
    async with running(engine, tokenizer) as server, server.http() as http:
        for path in ("/v1/models", "/v1/models/smollm2"):
            answer = await http.get(path)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"
            assert int(answer.headers["retry-after"]) > 0
        assert (await http.post(C, json=LONG)).status_code == 503
        health = await http.get("/health")
        assert health.status_code == 503
        assert health.json() == {
            "live": True, "ready": False, "progressing": True, "why": "the model is still being loaded",
            "recovering": False, "epoch": 0, "engine_restarts": 0, "last_fault": None, "last_layout_change": None,
            "drafts": None, "prefill_threshold": None,
            "engines": [{
                "engine": 0, "state": "loading", "epoch": 0, "running": 0, "waiting": 0, "kv_tier": None,
                "kind": "", "kv_transfer": None,
            }],
        }  # fmt: skip
        assert (await http.get("/version")).status_code == 200
        assert not server.line.done()
        engine.become_ready()
        line = await asyncio.wait_for(server.line, 60)
        assert re.fullmatch(rf"Planaria serving smollm2 at {re.escape(server.url)} \(ready in \d+\.\d s\)", line)
        health = (await http.get("/health")).json()
        assert (health["live"], health["ready"], health["progressing"], health["why"]) == (True, True, True, "ok")
        assert (await http.get("/v1/models")).status_code == 200


async def test_what_checks_requests_is_made_while_the_engine_loads(tokenizer, monkeypatch):
    """The first request made it, on the event loop."""
    made = threading.Event()
    monkeypatch.setattr(serve, "build_likely", lambda: (build_likely(), made.set()))
    async with running(FakeEngine(tokenizer, is_ready=False), tokenizer) as server:
        assert await asyncio.to_thread(made.wait, 60)
        assert not server.line.done()
    assert ChatCompletionRequest.__pydantic_complete__ and CompletionRequest.__pydantic_complete__


async def test_an_engine_that_cant_start(tokenizer):
    engine = FakeEngine(tokenizer, is_ready=False)
    async with running(engine, tokenizer) as server:
        engine.die("no memory")
        with pytest.raises(EngineDead, match="no memory"):
            await server.exit_code()


async def test_stopping_while_the_model_loads(tokenizer):
    async with running(FakeEngine(tokenizer, is_ready=False), tokenizer) as server:
        async with server.http() as http:
            assert (await http.get("/health")).status_code == 503
        server.stop.set()
        assert await server.exit_code() == 0 and not server.line.done()


async def test_half_a_request_doesnt_hold_up_the_end(start):
    async with start(shutdown_timeout=60) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sock.getsockname()[1])
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        async with server.http() as http:
            assert (await http.get("/health")).status_code == 200
        started = time.monotonic()
        server.stop.set()
        assert await server.exit_code() == 0
        assert time.monotonic() - started < 30
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()


async def test_half_a_request_is_given_up(start):
    async with start(body_timeout=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sock.getsockname()[1])
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            answer = await reader.read()  # to the connection's end
        assert answer.startswith(b"HTTP/1.1 408 ") and b"did not come within 0.05 s" in answer
        writer.close()


async def test_a_client_that_leaves_frees_its_sequences(server):
    engine = server.engine
    engine.gate.clear()
    for stream in (False, True):
        for steps in (0, 3):
            engine.cancelled.clear()
            async with server.http() as http:
                body = {**LONG, "stream": stream, "n": 3}
                task = asyncio.create_task(_post(http, body))
                await engine.until(lambda: len(engine.open) == 3)
                for _ in range(steps):
                    engine.step()
                await asyncio.sleep(0)
                assert not engine.cancelled
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await engine.until(lambda: len(engine.cancelled) == 3)
            assert not engine.open


async def _post(http, body):
    if not body["stream"]:
        return await http.post(C, json=body)
    async with http.stream("POST", C, json=body) as answer:
        return [line async for line in answer.aiter_lines()]


async def test_a_slow_reader_holds_up_nobody(server):
    """A client that doesn't read keeps its own stream only; others and the engine go on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sock.getsockname()[1], limit=64)
    body = json.dumps({**LONG, "stream": True, "n": 100, "logprobs": 20}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await server.engine.until(lambda: len(server.engine.open) == 100)
    async with server.http() as http:
        answer = await http.post(C, json={**LONG, "max_tokens": 20})
    assert answer.status_code == 200
    writer.transport.abort()
    await server.engine.until(lambda: not server.engine.open)
    del reader


async def _unread(server, **fields):
    """A connection whose answer of 10 MB nobody reads, and what the engine has to do for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sock.getsockname()[1])
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    options = {"prompt": [5], "max_tokens": 400, "n": 64, "ignore_eos": True, "stream": True, "temperature": 0}
    body = json.dumps({**options, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await server.engine.until(lambda: len(server.engine.submitted) == 64)
    return reader, writer


async def test_what_a_client_leaves_unread_comes_as_fewer_events(server):
    reader, writer = await _unread(server, logprobs=5)
    await server.engine.until(lambda: not server.engine.open)
    said = (await reader.read(-1)).decode()
    events = [json.loads(event) for event in re.findall(r"data: (\{.*\})\n\n", said)]
    choices = [choice for event in events for choice in event["choices"]]
    assert len(choices) < 64 * 400 * 0.8 and "data: [DONE]" in said
    async with server.http() as http:
        whole = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 400, "ignore_eos": True,
                                                         "temperature": 0, "logprobs": 5, "seed": 1})  # fmt: skip
    expected = whole.json()["choices"][0]
    for index in range(64):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        parts = [choice["logprobs"] for choice in mine if choice["logprobs"] is not None]
        assert {key: [x for part in parts for x in part[key]] for key in parts[0]} == expected["logprobs"]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
    writer.close()


async def test_a_client_that_leaves_too_much_unread_is_told_so(server, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD", 100_000)
    reader, writer = await _unread(server, logprobs=5)
    await server.engine.until(lambda: len(server.engine.cancelled) == 64)
    said = await reader.read(-1)
    assert b"client_too_slow" in said and b"data: [DONE]" in said
    writer.close()


async def test_a_client_that_takes_nothing_is_hung_up_on(start, monkeypatch):
    monkeypatch.setattr(serve, "STUCK", 0.5)
    async with start() as server:
        server.engine.gate.clear()
        _, writer = await _unread(server, max_tokens=500)
        for _ in range(499):  # which is more than connections hold
            server.engine.step()
            await asyncio.sleep(0)
        await server.engine.until(lambda: len(server.engine.cancelled) == 64)
        writer.close()


async def test_draining(server):
    engine = server.engine
    engine.gate.clear()
    async with server.http() as http, server.http() as other:
        open_request = asyncio.create_task(_post(http, {**LONG, "stream": True}))
        await engine.until(lambda: engine.open)
        server.stop.set()
        async with asyncio.timeout(60):
            while (await other.get("/health")).json()["ready"]:
                pass
        health = await other.get("/health")
        assert health.status_code == 503 and health.json()["why"] == "the server is shutting down"
        assert health.json()["live"] and health.json()["progressing"]
        refused = await other.post(C, json=LONG)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert (await other.get("/metrics")).status_code == 200
        assert not server.task.done()
        engine.gate.set()
        lines = await open_request
        assert lines.count("") == 301 and lines[-2] == "data: [DONE]"
    assert await server.exit_code() == 0 and not engine.cancelled


async def test_shutdown_timeout_aborts_what_is_left(start):
    async with start(shutdown_timeout=0.2) as server, server.http() as http:
        server.engine.gate.clear()
        whole = asyncio.create_task(http.post(C, json=LONG))
        streamed = asyncio.create_task(_post(http, {**LONG, "stream": True}))
        await server.engine.until(lambda: len(server.engine.open) == 2)
        server.engine.step()
        server.stop.set()
        answer = await whole
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted"
        error = [line for line in await streamed if '"error"' in line]
        assert len(error) == 1 and json.loads(error[0][6:])["error"]["code"] == "aborted"
        assert await server.exit_code() == 0
        assert len(server.engine.cancelled) == 2


async def test_engine_death_answers_everyone(server):
    engine = server.engine
    engine.gate.clear()
    async with server.http() as http:
        whole = asyncio.create_task(http.post(C, json=LONG))
        streamed = asyncio.create_task(_post(http, {**LONG, "stream": True, "n": 2}))
        await engine.until(lambda: len(engine.open) == 3)
        engine.step()
        engine.die("rank 0 was killed")
        answer = await whole
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "rank 0 was killed"
        lines = [line for line in await streamed if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["error"]["type"] == "server_error"
        assert sum('"error"' in line for line in lines) == 1
    assert await server.exit_code() == 1


async def test_engine_death_that_says_nothing(server):
    """Also where the client never tells its sinks."""
    server.engine.gate.clear()
    client = server.client()
    request = asyncio.create_task(client.completions.create(model="smollm2", prompt="x"))
    await server.engine.until(lambda: server.engine.open)
    server.engine.die("gone", silently=True)
    with pytest.raises(openai.InternalServerError, match="gone"):
        await request
    assert await server.exit_code() == 1


async def test_one_failing_sequence_ends_only_its_request(server):
    engine = server.engine
    engine.gate.clear()
    async with server.http() as http:
        other = asyncio.create_task(http.post(C, json={**LONG, "max_tokens": 5}))
        await engine.until(lambda: len(engine.open) == 1)
        victim = next(iter(engine.open.values()))
        streamed = asyncio.create_task(_post(http, {**LONG, "prompt": "Other", "stream": True, "n": 3}))
        await engine.until(lambda: len(engine.open) == 4)
        bystander = engine.open.pop(victim.message.id)
        engine.step()
        engine.fail_with = "the row failed"
        engine.step()
        engine.fail_with = None
        engine.open[victim.message.id] = bystander
        lines = [line for line in await streamed if line]
        assert "the row failed" in lines[-2] and sum('"error"' in line for line in lines) == 1
        engine.gate.set()
        assert (await other).json()["usage"]["completion_tokens"] == 5
    assert not engine.open


async def test_health_means_progress(start):
    async with start(stall_timeout=0.05) as server, server.http() as http:
        engine = server.engine
        engine.last_progress = time.monotonic() - 100  # idle for long: nothing to progress with
        assert (await http.get("/health")).status_code == 200
        engine.gate.clear()
        task = asyncio.create_task(_post(http, {**LONG, "stream": True}))
        await engine.until(lambda: engine.open)
        async with asyncio.timeout(60):
            while (health := await http.get("/health")).status_code == 200:
                pass
        body = health.json()
        assert (body["live"], body["ready"], body["progressing"]) == (True, True, False)
        assert "no step for" in body["why"]
        assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 200
        engine.step()
        async with asyncio.timeout(60):
            while (await http.get("/health")).status_code != 200:  # on a busy machine that took longer than 0.05 s
                engine.step()
        engine.gate.set()
        await task
        engine.stats = EngineStats(waiting=1)  # queued by another front end
        async with asyncio.timeout(60):
            while (await http.get("/health")).status_code == 200:
                pass


def test_sockets():
    config = ServerConfig(port=0)
    a = bind(config)
    assert a.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's algorithm on
    port = a.getsockname()[1]
    a.listen()
    with pytest.raises(ConfigError, match=f"--port {port}: can't listen on 127.0.0.1: Address already in use"):
        bind(ServerConfig(port=port))
    a.close()
    bind(ServerConfig(port=port)).close()
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        bind(ServerConfig(host="no.such.host.invalid"))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6(start):
    try:
        bind(ServerConfig(host="::1", port=0)).close()
    except ConfigError as e:
        pytest.skip(f"no IPv6 here: {e}")
    async with start(host="::1") as server:
        assert server.url.startswith("http://[::1]:") and server.url == url_of(server.sock, server.config)
        async with server.http() as http:
            assert (await http.get("/health")).status_code == 200


def test_options_are_verified():
    for options, words in (
        ({"port": 70000}, "--port 70000"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"api_keys": ("with space",)}, "--api-key"),
        ({"cors_origins": ("*",), "cors_credentials": True}, "--cors-credentials"),
        ({"ssl_keyfile": "/x"}, "give --ssl-certfile"),
        ({"ssl_certfile": "/no/such"}, "--ssl-certfile /no/such: no such file"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout"),
        ({"max_body_bytes": 0}, "--max-body-bytes"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            ServerConfig(**options).verify()


# In a process of its own, with real signals.


class Process:
    def __init__(self, **options) -> None:
        here = Path(__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.serve_fake", json.dumps(options)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=here.parent.parent,
        )  # fmt: skip
        self.line = self.process.stdout.readline()
        match = re.search(r"at (\S+) \(ready", self.line)
        assert match, self.line + self.process.stderr.read()
        self.url = match[1]

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)

    def signal(self, number) -> None:
        self.process.send_signal(number)

    def wait_stderr(self, words: str) -> str:
        for line in self.process.stderr:
            if words in line:
                return line
        raise AssertionError(f"ended without saying {words!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_finishes_what_runs(tokenizer, number):
    with Process(delay=0.005) as p, httpx.Client(base_url=p.url, timeout=60) as http:
        with http.stream("POST", C, json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            p.signal(number)
            p.wait_stderr("no new requests; 1 open")
            refused = httpx.post(p.url + C, json=LONG)
            assert refused.status_code == 503
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]" and len(rest) == 300
        assert p.process.wait(60) == 0
        assert p.process.stdout.read() == ""  # one line on stdout, the one that says it is ready


def test_idle_server_ends_at_once(tokenizer):
    with Process() as p, httpx.Client(base_url=p.url) as http:
        assert http.get("/health").status_code == 200  # the connection stays open
        started = time.monotonic()
        p.signal(signal.SIGTERM)
        assert p.process.wait(60) == 0
        assert time.monotonic() - started < 30


def test_second_signal_aborts(tokenizer):
    with Process(delay=0.05) as p, httpx.Client(base_url=p.url, timeout=60) as http:
        with http.stream("POST", C, json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            p.signal(signal.SIGTERM)
            p.wait_stderr("no new requests")
            started = time.monotonic()
            p.signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]" and "shutting down" in json.loads(rest[-2][6:])["error"]["message"]
        assert p.process.wait(60) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 30


def test_engine_death_exits_with_1(tokenizer):
    with Process(delay=0.01, die_at=20) as p:
        answer = httpx.post(p.url + C, json=LONG, timeout=60)
        assert answer.status_code == 500 and "killed" in answer.json()["error"]["message"]
        assert p.process.wait(60) == 1
