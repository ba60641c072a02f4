"""Forms of answers in the words of each API: what reaches the engine, and what is refused, and where."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import Future

import msgspec
import openai
import pytest

from planaria.server import service
from planaria.server.fair_queue import FairQueue, NoRoom
from planaria.structured.check import LEVELS, TOO_MUCH, Asked, GrammarProcess, Verdict

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
WRONG = {"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}
TOOL = {"type": "function", "name": "f"}
USER = [{"role": "user", "content": "Hi"}]
C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def flat(schema):
    return {"type": "json_schema", "name": "it", "schema": schema, "strict": True}


async def test_the_engine_gets_a_grammar_from_whatever_asks_for_one(server):
    """One for all ways to say the same, found again by its content."""
    client, grammars = server.client(), []
    await client.chat.completions.create(model="smollm2", messages=USER, response_format=named(SCHEMA), max_tokens=4)
    await client.responses.create(model="smollm2", input="Hi", text={"format": flat(SCHEMA)}, max_output_tokens=4)
    for name, value in (("guided_json", SCHEMA), ("structured_outputs", {"json": json.dumps(SCHEMA)})):
        await client.completions.create(model="smollm2", prompt="Hi", max_tokens=4, extra_body={name: value})
    grammars = [submit.params.grammar for submit in server.engine.submitted]
    assert len(grammars) == 4 and len(set(grammars)) == 1 and '"enum"' in grammars[0]
    assert all(submit.params.structured_outputs is None for submit in server.engine.submitted)
    stream = await client.chat.completions.create(
        model="smollm2", messages=USER, response_format={"type": "json_object"}, max_tokens=4, stream=True
    )
    assert [chunk async for chunk in stream] and server.engine.submitted[-1].params.grammar != grammars[0]


async def test_a_refusal_names_the_place(server):
    refused = [
        (
            H,
            {"messages": USER, "response_format": named(WRONG)},
            "response_format.json_schema.schema.properties.a.items",
        ),
        (R, {"input": "Hi", "text": {"format": flat(WRONG)}}, "text.format.schema.properties.a.items"),
        (R, {"input": "Hi", "text": {"format": flat({"maximum": 2**70})}}, "text.format"),
        (R, {"input": "Hi", "tools": [{**TOOL, "parameters": {"properties": {"a": {"const": 2**70}}}}]}, "tools"),
        (R, {"input": "Hi", "tools": [TOOL], "tool_choice": {**TOOL, "more": 2**70}}, "tool_choice"),
        (C, {"prompt": "Hi", "guided_json": WRONG}, "guided_json.properties.a.items"),
        (C, {"prompt": "Hi", "structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ]
    async with server.http() as http:
        for path, body, place in refused:
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["message"].startswith((f"{place}: ", f"{place} has a number of more than 64 bits"))
            assert place.startswith(error["param"])
    assert not server.engine.submitted


async def test_one_that_takes_too_much_is_refused_and_others_go_on(server, monkeypatch):
    """While it is being tried somebody else is answered, also with a grammar that was there before; afterwards grammars
    are taken again."""
    client, known = server.client(), {"guided_choice": ["known"]}
    await client.completions.create(model="smollm2", prompt="Hi", max_tokens=2, extra_body=known)
    tried, ask = threading.Event(), GrammarProcess.ask

    def told(self, line):
        tried.set()
        return ask(self, line)

    monkeypatch.setattr(GrammarProcess, "ask", told)
    hostile = asyncio.ensure_future(
        client.completions.create(
            model="smollm2", prompt="Hi", extra_body={"guided_json": {"type": "integer", "multipleOf": 9999991}}
        )
    )
    await asyncio.to_thread(tried.wait, 60)
    await client.completions.create(model="smollm2", prompt="Hi", max_tokens=2)
    await client.completions.create(model="smollm2", prompt="Hi", max_tokens=2, extra_body=known)
    assert not hostile.done()
    with pytest.raises(openai.BadRequestError, match=r"takes more than 1 s"):
        await hostile
    await client.completions.create(model="smollm2", prompt="Hi", max_tokens=2, extra_body={"guided_choice": ["a"]})
    assert len(server.engine.submitted) == 4


async def test_a_usual_one_waits_behind_none_that_takes_long(server, monkeypatch):
    """Though these came before it, from the same address, and are as long. Each level compiles those that took more
    than the one before gives."""
    compiled, last, go = [], asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def compile(self, line):
        what, level = msgspec.json.decode(line, type=Asked).source.body[0], LEVELS.index(self._cpu)
        compiled.append((what, level))
        if what.startswith("hostile") and self._cpu < LEVELS[-1]:
            return Verdict(error=TOO_MUCH)
        if what.startswith("hostile"):
            loop.call_soon_threadsafe(last.set)
            assert go.wait(60)
            return Verdict(error=TOO_MUCH)
        return Verdict(error=TOO_MUCH) if what == "large" and not level else Verdict(grammar="start: /a/")

    monkeypatch.setattr(GrammarProcess, "ask", compile)
    async with server.http() as http:

        def send(what):
            return asyncio.ensure_future(http.post(C, json={"prompt": "Hi", "max_tokens": 2, "guided_choice": [what]}))

        hostile = [send(f"hostile {number}") for number in range(4)]
        await asyncio.wait_for(last.wait(), 60)
        for what in ("usual", "large"):
            assert (await asyncio.wait_for(send(what), 60)).status_code == 200
        assert not any(waiting.done() for waiting in hostile)
        go.set()
        refused = await asyncio.gather(*hostile)
    assert all(answer.status_code == 400 and "takes more than 1 s" in answer.text for answer in refused)
    assert [level for what, level in compiled if what == "usual"] == [0]
    assert [level for what, level in compiled if what == "large"] == [0, 1]
    assert Counter(level for what, level in compiled if what.startswith("hostile")) == {0: 4, 1: 4, 2: 4}


async def test_who_waits_for_a_grammar_is_told_so_in_time(start, monkeypatch):
    """One line for each API key; whoever is in it has an answer, and where it is full, whose most of it is."""
    owners, go, of = [], threading.Event(), FairQueue.of
    monkeypatch.setattr(service, "CHECKING", 0.05)
    monkeypatch.setattr(GrammarProcess, "ask", lambda self, line: go.wait(60) and Verdict(grammar="start: /a/"))
    monkeypatch.setattr(FairQueue, "of", lambda self, owner: owners.append(owner) or of(self, owner))

    def body(what):
        return {"prompt": "Hi", "max_tokens": 2, "guided_choice": [what]}

    def key(name):
        return {"Authorization": f"Bearer {name}"}

    async with start(api_keys=("one", "two")) as server, server.http() as http:
        for name, what in (("one", "a"), ("one", "b"), ("two", "c")):
            answer = await http.post(C, json=body(what), headers=key(name))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (503, "overloaded", "guided_choice")
            assert "waited for 0.05 s; send the request again later" in error["message"]
            assert int(answer.headers["Retry-After"]) > 0
        assert owners[0] == owners[1] != owners[2]
        monkeypatch.setattr(service, "CHECKING", 60)
        monkeypatch.setattr(FairQueue, "add", lambda self, owner, work: failed(NoRoom()))
        answer = await http.post(C, json=body("d"), headers=key("one"))
        assert answer.status_code == 503 and "256 wait" in answer.json()["error"]["message"]
        monkeypatch.undo()
        go.set()
        assert not server.engine.submitted


async def test_without_api_keys_each_address_has_a_line(server, monkeypatch):
    owners, of = [], FairQueue.of
    monkeypatch.setattr(FairQueue, "of", lambda self, owner: owners.append(owner) or of(self, owner))
    async with server.http() as http:
        answer = await http.post(C, json={"prompt": "Hi", "max_tokens": 2, "guided_choice": ["of an address"]})
    assert answer.status_code == 200 and set(owners) == {"127.0.0.1"}


def failed(error):
    future = Future()
    future.set_exception(error)
    return future
