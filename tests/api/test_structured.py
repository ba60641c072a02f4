"""Forms of answers in the words of each API: what reaches the engine, and what is refused, and where."""

from __future__ import annotations

import asyncio
import json
import threading

import openai
import pytest

from planaria.structured.check import GrammarProcess

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
WRONG = {"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}
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
        (C, {"prompt": "Hi", "guided_json": WRONG}, "guided_json.properties.a.items"),
        (C, {"prompt": "Hi", "structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ]
    async with server.http() as http:
        for path, body, place in refused:
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["message"].startswith(f"{place}: ") and place.startswith(error["param"])
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
