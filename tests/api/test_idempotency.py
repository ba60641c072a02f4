"""`Idempotency-Key`: over HTTP with the scripted engine, and the recorder alone with an application of the test's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from types import SimpleNamespace

import pytest

from planaria.errors import RequestError
from planaria.server import idempotency
from planaria.server.gate import RequestInfo
from planaria.server.idempotency import Idempotency
from planaria.server.service import Service

C, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "Hello", "max_tokens": 6, "ignore_eos": True}
KEY = {"Idempotency-Key": "k"}
REPLAYED = "idempotent-replayed"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_key_gets_the_same_answer(server, stream):
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6}
    async with server.http() as http:
        for runs, (path, body) in enumerate(((C, BODY), (CHAT, chat)), 1):
            headers = {"Idempotency-Key": path}
            first, second, third = [
                await http.post(path, json={**body, "stream": stream}, headers=headers) for _ in range(3)
            ]
            assert first.status_code == 200 and REPLAYED not in first.headers
            assert len(server.engine.submitted) == runs
            for other in (second, third):
                assert (other.status_code, other.content) == (200, first.content)
                assert other.headers[REPLAYED] == "true"
                assert other.headers["content-type"] == first.headers["content-type"]
                assert other.headers["x-request-id"] != first.headers["x-request-id"]
        fourth, fifth = [await http.post(C, json=BODY) for _ in range(2)]
        assert REPLAYED not in fourth.headers and fourth.json()["id"] != fifth.json()["id"]


async def test_another_body_or_path_is_refused(server):
    async with server.http() as http:
        await http.post(C, json=BODY, headers=KEY)
        for path, body in ((C, {**BODY, "max_tokens": 7}), (CHAT, BODY)):
            answer = await http.post(path, json=body, headers=KEY)
            error = answer.json()["error"]
            assert answer.status_code == 422 and REPLAYED not in answer.headers
            assert (error["type"], error["param"]) == ("invalid_request_error", "Idempotency-Key")
            assert "Idempotency-Key" in error["message"] and error["code"] == "idempotency_key_reused"
    assert len(server.engine.submitted) == 1


async def test_long_bodies_are_compared_too(server):
    long = {**BODY, "user": "x" * idempotency.LONG_BODY}
    async with server.http() as http:
        answers = [await http.post(C, json={**long, "max_tokens": n}, headers=KEY) for n in (6, 6, 7)]
    assert [a.status_code for a in answers] == [200, 200, 422] and answers[0].content == answers[1].content


async def test_a_key_belongs_to_an_api_key(start):
    async with start(api_keys=("one", "two")) as server, server.http() as http:
        one, two, again = [
            await http.post(C, json=body, headers={**KEY, "Authorization": header})
            for header, body in (("Bearer one", BODY), ("Bearer two", {**BODY, "max_tokens": 3}), ("bearer  one", BODY))
        ]
        assert one.status_code == two.status_code == 200 and len(server.engine.submitted) == 2
        assert again.content == one.content and REPLAYED in again.headers and REPLAYED not in two.headers


async def test_without_api_keys_all_clients_are_one(server):
    async with server.http() as http:
        for header in ("Bearer a", "Bearer b"):
            answer = await http.post(C, json=BODY, headers={**KEY, "Authorization": header})
    assert REPLAYED in answer.headers and len(server.engine.submitted) == 1


async def test_other_routes_know_no_keys(server):
    async with server.http() as http:
        for path in ("/tokenize", "/v1/models"):
            for _ in range(2):
                answer = await http.request("GET" if path == "/v1/models" else "POST", path, json={"prompt": "x"},
                                            headers=KEY)  # fmt: skip
                assert answer.status_code == 200 and REPLAYED not in answer.headers
        for _ in range(2):
            answer = await http.put(C, json=BODY, headers=KEY)
            assert answer.status_code == 405 and REPLAYED not in answer.headers


async def test_the_line_of_the_log_has_the_status(server, caplog):
    caplog.set_level(logging.INFO, "planaria.server")
    async with server.http() as http:
        await http.post(C, json=BODY, headers={**KEY, "X-Request-Id": "one"})
    assert [r.getMessage().partition(":")[0] for r in caplog.records if "one" in r.getMessage()] == [
        "one POST /v1/completions 200"
    ]


async def opened(server, http, body, **headers):
    """A stream whose headers came, and whose first token."""
    request = http.build_request("POST", C, json=body, headers={**KEY, **headers})
    task = asyncio.create_task(http.send(request, stream=True))
    if not server.engine.submitted:
        await server.engine.until(lambda: server.engine.open)
        server.engine.step()
    return await task


async def events_of(answer, count, into):
    """Read events of a stream until there are so many; the parts that were read stay in `into`."""
    async with asyncio.timeout(60):
        while b"".join(into).count(b"\n\n") < count:
            into.append(await anext(answer))


async def test_a_stream_that_runs_is_joined_from_its_beginning(server):
    engine = server.engine
    engine.gate.clear()
    body = {**BODY, "stream": True}
    mine: list[bytes] = []
    theirs: list[bytes] = []
    async with server.http() as http:
        first = await opened(server, http, body)
        one = first.aiter_raw()
        for count in (2, 3):
            engine.step()
            await events_of(one, count, mine)
        second = await opened(server, http, body)
        assert second.headers[REPLAYED] == "true" and REPLAYED not in first.headers
        two = second.aiter_raw()
        await events_of(two, 3, theirs)
        assert b"".join(theirs) == b"".join(mine)
        engine.step()  # and then live
        await events_of(two, 4, theirs)
        await events_of(one, 4, mine)
        engine.gate.set()
        mine += [part async for part in one]
        theirs += [part async for part in two]
    assert b"".join(theirs) == b"".join(mine) and mine[-1].endswith(b"data: [DONE]\n\n")
    assert len(engine.submitted) == 1


async def test_the_first_client_goes_away_and_it_runs_on(server, caplog):
    engine = server.engine
    engine.gate.clear()
    caplog.set_level(logging.INFO, "planaria.server")
    body = {**BODY, "stream": True}
    async with server.http() as http:
        first = await opened(server, http, body, **{"X-Request-Id": "one"})
        second = await opened(server, http, body, **{"X-Request-Id": "two"})
        mine: list[bytes] = []
        two = second.aiter_raw()
        await events_of(two, 1, mine)
        await first.aclose()
        # Whether its leaving cancels anything is known when requests that came later have been answered.
        for _ in range(3):
            await http.get("/health")
        engine.gate.set()
        mine += [part async for part in two]
        assert mine[-1].endswith(b"data: [DONE]\n\n") and not engine.cancelled
        again = await http.post(C, json=body, headers=KEY)
        assert again.content == b"".join(mine) and len(engine.submitted) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("one POST /v1/completions 200: 1 tokens in, 6 out") for line in lines) == 1
    assert sum(line.startswith("two POST /v1/completions 200: the answer of one,") for line in lines) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_its_only_client_has_left_is_cancelled_and_not_kept(server, stream):
    engine = server.engine
    engine.gate.clear()
    body = {**BODY, "stream": stream}
    async with server.http() as http:
        task = asyncio.create_task(http.post(C, json=body, headers=KEY))
        await engine.until(lambda: engine.open)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await engine.until(lambda: engine.cancelled)
        engine.gate.set()
        answer = await http.post(C, json=body, headers=KEY)
    assert answer.status_code == 200 and REPLAYED not in answer.headers and len(engine.submitted) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_server_is_not_kept(server, stream):
    engine = server.engine
    engine.gate.clear()
    body = {**BODY, "stream": stream}
    async with server.http() as http:
        task = asyncio.create_task(http.post(C, json=body, headers=KEY))
        await engine.until(lambda: engine.open)
        engine.step()
        await http.get("/health")  # the stream has begun
        engine.fail_with = "broken"
        engine.step()
        failed = await task
        assert failed.status_code == (200 if stream else 500) and b"broken" in failed.content
        engine.fail_with = None
        engine.gate.set()
        answer = await http.post(C, json=body, headers=KEY)
    assert answer.status_code == 200 and b"broken" not in answer.content and REPLAYED not in answer.headers


async def test_a_refusal_is_kept(server):
    async with server.http() as http:
        first, second = [await http.post(C, json={**BODY, "n": 1000}, headers=KEY) for _ in range(2)]
    assert first.status_code == second.status_code == 400 and first.content == second.content
    assert REPLAYED in second.headers


@pytest.mark.parametrize("status", [404, 408, 409, 429])
async def test_a_refusal_of_the_moment_is_not_kept(server, monkeypatch, status):
    """Clients send the same request again by themselves, with the same key: not to hear the same for an hour."""
    with monkeypatch.context() as patch:

        def not_now(*args):
            raise RequestError("not now", status=status)

        patch.setattr(Service, "admit", not_now)
        async with server.http() as http:
            refused = await http.post(C, json=BODY, headers=KEY)
    async with server.http() as http:
        answer = await http.post(C, json=BODY, headers=KEY)
    assert refused.status_code == status
    assert answer.status_code == 200 and REPLAYED not in answer.headers


async def test_an_internal_error_is_everybodys_and_not_kept(server, monkeypatch):
    with monkeypatch.context() as patch:

        def fails(*args):
            raise RuntimeError("oh")

        patch.setattr(Service, "admit", fails)
        async with server.http() as http:
            failed = await http.post(C, json=BODY, headers=KEY)
    async with server.http() as http:
        answer = await http.post(C, json=BODY, headers=KEY)
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
    assert answer.status_code == 200 and REPLAYED not in answer.headers


# -- the recorder alone


class Client:
    """One request of `once`; what it was sent is in `data`. With `reads` cleared it takes nothing."""

    def __init__(self, once, key, body=b"{}", owner=b""):
        self.data, self.status, self.headers, self.whole = b"", 0, {}, False
        self.parts: list[bytes] = []
        self.reads, self.gone = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.changed = asyncio.Event()
        self.given = False
        self.body = body
        headers = [(b"idempotency-key", key), (b"authorization", b"Bearer " + owner)]
        self.info = RequestInfo("id", "uid", "POST", C)
        scope = {"type": "http", "method": "POST", "path": C, "headers": headers, "planaria": self.info}
        self.task = asyncio.create_task(once(scope, self.receive, self.send))

    async def receive(self):
        if not self.given:
            self.given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.parts.append(message["body"])
            self.data += message["body"]
            self.whole = not message.get("more_body", False)
        self.changed.set()

    async def until(self, size):
        async with asyncio.timeout(60):
            while len(self.data) < size:
                self.changed.clear()
                await self.changed.wait()

    async def end(self):
        async with asyncio.timeout(60):
            await self.task
        return self


class Script:
    """An application that sends what a test tells it to, and `once` in front of it."""

    def __init__(self, api_keys=()):
        self.runs: list[asyncio.Queue] = []
        self.ended = 0
        service = SimpleNamespace(config=SimpleNamespace(api_keys=api_keys), neighbours=None)
        self.once = Idempotency(self, service)

    async def __call__(self, scope, receive, send):
        said: asyncio.Queue = asyncio.Queue()
        self.runs.append(said)
        assert (await receive())["type"] == "http.request"

        async def disconnect():
            await receive()
            said.put_nowait(None)

        watch = asyncio.create_task(disconnect())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (part := await said.get()) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": part != b""})
                if part == b"":
                    return
        finally:
            watch.cancel()
            self.ended += 1

    async def run(self, number):
        """What a run is told by, once there are so many."""
        async with asyncio.timeout(60):
            while len(self.runs) <= number:
                await asyncio.sleep(0)
        return self.runs[number]

    async def answered(self, key, size=0, owner=b"", body=b"{}"):
        """A request from its beginning to its end; an answer of `size` bytes if it runs."""
        before = len(self.runs)
        client = Client(self.once, key, body, owner)
        async with asyncio.timeout(60):
            while len(self.runs) == before and not client.task.done():
                await asyncio.sleep(0)
        if len(self.runs) > before:
            self.runs[-1].put_nowait(b"x" * (size or 1))
            self.runs[-1].put_nowait(b"")
        await client.end()
        return client

    def held(self):
        return [one for own in self.once.known.values() for one in own.values()]


def event(number, size=1000):
    return b"data: %d" % number + b"x" * size + b"\n\n"


@pytest.mark.parametrize("key", [b"", b"x" * 256, b"a\tb", b"a\x7f", b"a\nb", b"a\n"])
async def test_what_is_no_key_is_refused(key):
    script = Script()
    client = await script.answered(key)
    error = json.loads(client.data)["error"]
    assert client.status == 400 and not script.runs
    assert (error["param"], error["code"]) == ("Idempotency-Key", "invalid_value")
    assert (await script.answered(b"x" * 255)).status == 200


async def test_a_slow_reader_holds_nobody_up():
    script = Script()
    first, slow = Client(script.once, b"k"), Client(script.once, b"k")
    slow.reads.clear()
    run = await script.run(0)
    for number in range(200):
        run.put_nowait(event(number))
    run.put_nowait(b"")
    assert (await first.end()).whole
    assert not slow.data and not slow.task.done()
    slow.reads.set()
    assert (await slow.end()).data == first.data == b"".join(map(event, range(200)))
    assert slow.headers[b"idempotent-replayed"] == b"true"


async def test_an_answer_beyond_the_bound_is_not_kept_nor_held(monkeypatch):
    """Who reads gets all of it, who doesn't is told so; meanwhile no more is held than the bound."""
    monkeypatch.setattr(idempotency, "MAX_ANSWER", 50_000)
    script = Script()
    first, slow = Client(script.once, b"k"), Client(script.once, b"k")
    run = await script.run(0)
    (recording,) = script.held()
    run.put_nowait(event(0))
    await slow.until(1000)
    slow.reads.clear()
    size = len(event(0))
    for number in range(1, 200):
        run.put_nowait(event(number))
        size += len(event(number))
        await first.until(size)
        assert len(recording.data) <= 50_000
    assert not script.held() and script.once.size == 0
    assert len(recording.readers) == 1
    slow.reads.set()
    await slow.end()
    assert slow.whole and slow.info.error[0] == "client_too_slow"
    events = [json.loads(part) for part in slow.data.decode().split("data: ")[2:-1] if part.startswith("{")]
    assert events[-1]["error"]["code"] == "client_too_slow" and slow.data.endswith(b"data: [DONE]\n\n")
    run.put_nowait(b"")
    assert (await first.end()).whole and first.data == b"".join(map(event, range(200)))
    again = await script.answered(b"k")
    assert len(script.runs) == 2 and b"idempotent-replayed" not in again.headers


async def test_the_only_reader_too_slow_ends_the_run(monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_ANSWER", 50_000)
    script = Script()
    client = Client(script.once, b"k")
    run = await script.run(0)
    run.put_nowait(event(0))
    await client.until(1000)
    client.reads.clear()
    for number in range(100):
        run.put_nowait(event(number))
    async with asyncio.timeout(60):
        while not script.ended:
            await asyncio.sleep(0)
    client.reads.set()
    assert b"client_too_slow" in (await client.end()).data


async def test_a_reader_is_given_whole_events_and_little_at_a_time():
    script = Script()
    client = Client(script.once, b"k")
    run = await script.run(0)
    run.put_nowait(b"".join(map(event, range(500))))
    run.put_nowait(b"")
    await client.end()
    assert len(client.parts) > 5 and max(map(len, client.parts)) <= idempotency.CHUNK
    assert all(part.endswith(b"\n\n") for part in client.parts if part)


async def test_what_is_kept_ends_with_its_age(monkeypatch):
    monkeypatch.setattr(idempotency, "AGE", 0.0)
    script = Script()
    await script.answered(b"k")
    async with asyncio.timeout(60):
        while script.held():
            await asyncio.sleep(0)
    assert script.once.size == 0 and not script.once.sizes
    await script.answered(b"k")
    assert len(script.runs) == 2


async def test_a_client_with_many_keys_is_bounded(monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_BYTES", 40 * idempotency.LEAST)
    script = Script()
    for number in range(100):
        await script.answered(b"%d" % number)
    assert len(script.held()) == 40 and script.once.size == 40 * idempotency.LEAST
    assert {one.key for one in script.held()} == {b"%d" % number for number in range(60, 100)}  # the oldest went
    large = await script.answered(b"large", 10 * idempotency.LEAST)
    assert len(script.held()) == 31 and large.status == 200
    loop = asyncio.get_running_loop()
    assert sum(not handle.cancelled() for handle in loop._scheduled) <= 40  # nothing is left of what went
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_who_has_most_makes_room(monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_BYTES", 40 * idempotency.LEAST)
    script = Script(api_keys=("a", "b"))
    for number in range(10):
        await script.answered(b"%d" % number, owner=b"good")
    for number in range(200):
        await script.answered(b"%d" % number, owner=b"bad")
    runs = len(script.runs)
    for number in range(10):
        assert (await script.answered(b"%d" % number, owner=b"good")).headers[b"idempotent-replayed"] == b"true"
    assert len(script.runs) == runs


async def test_what_runs_stays_longest(monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_BYTES", 10 * idempotency.LEAST)
    script = Script()
    first = Client(script.once, b"runs")
    run = await script.run(0)
    for number in range(30):
        await script.answered(b"%d" % number)
    second = Client(script.once, b"runs")
    run.put_nowait(b"answer")
    run.put_nowait(b"")
    assert (await first.end()).data == (await second.end()).data == b"answer"
    assert second.headers[b"idempotent-replayed"] == b"true"


async def test_what_was_forgotten_while_it_ran_is_answered_all_the_same(monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_BYTES", 2 * idempotency.LEAST)
    script = Script()
    clients = [Client(script.once, b"%d" % number) for number in range(4)]
    for number in range(4):
        run = await script.run(number)
        run.put_nowait(b"answer")
        run.put_nowait(b"")
    for client in clients:
        assert (await client.end()).data == b"answer" and client.whole
    assert len(script.held()) == 2


@pytest.mark.parametrize("how", ["raises", "ends"])
async def test_a_run_that_fails_fails_for_who_joined(how):
    script = Script()
    first, second = Client(script.once, b"k"), Client(script.once, b"k")
    run = await script.run(0)
    run.put_nowait(b"begun")
    await second.until(1)
    run.put_nowait(None if how == "ends" else 7)
    for client in (first, second):
        with pytest.raises((RuntimeError, TypeError)):
            await client.end()
        assert client.data == b"begun" and not client.whole
    assert not script.held()


async def test_who_comes_after_the_last_has_left_joins_nothing():
    script = Script()
    first = Client(script.once, b"k")
    await script.run(0)
    (recording,) = script.held()
    first.gone.set()
    async with asyncio.timeout(60):
        while not recording.left.is_set():
            await asyncio.sleep(0)
    assert not script.ended  # it is being cancelled
    second = Client(script.once, b"k")
    run = await script.run(1)
    run.put_nowait(b"answer")
    run.put_nowait(b"")
    assert (await second.end()).data == b"answer" and b"idempotent-replayed" not in second.headers
    await first.end()


async def test_the_request_that_runs_is_open_while_it_does():
    """What is counted and said of a request (its body's bytes, its line, its span) is until its run's end."""
    script = Script()
    first, second = Client(script.once, b"k"), Client(script.once, b"k")
    run = await script.run(0)
    run.put_nowait(b"begun")
    await second.until(1)
    (recording,) = script.held()
    first.gone.set()
    async with asyncio.timeout(60):
        while len(recording.readers) > 1:
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not first.task.done()
    run.put_nowait(b"")
    await first.end()
    assert (await second.end()).whole


async def test_who_joins_and_leaves_before_the_answer_is_in_the_log_as_gone():
    script = Script()
    runs = asyncio.Event()

    async def silent(scope, receive, send):
        await runs.wait()
        await script(scope, receive, send)

    script.once.app = silent
    first, second = Client(script.once, b"k"), Client(script.once, b"k")
    second.gone.set()
    await second.end()
    assert second.info.status == 499 and not first.task.done()
    runs.set()
    run = await script.run(0)
    run.put_nowait(b"")
    assert (await first.end()).status == 200
