"""/v1/responses, driven by the official client; the engine is scripted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from planaria.server import response_store, responses

R = "/v1/responses"
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0}
EVENT = TypeAdapter[Any](ResponseStreamEvent)
ALL = [
    "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
    "content_part.done", "output_item.done",
]  # fmt: skip
BACKGROUND = ["created", "queued", *ALL[1:]]


def strict(value: Any) -> dict[str, Any]:
    """As plain values, which are exactly of the client's types."""
    given: dict[str, Any] = value if isinstance(value, dict) else value.model_dump(exclude_unset=True)
    if given.get("object") == "response":
        Response.model_validate(given)
    else:
        EVENT.validate_python(given)
        if "response" in given:
            strict(given["response"])
    return given


def numbered(events: list[dict[str, Any]], start: int = 0) -> list[str]:
    """Their types, a run of deltas as one; their numbers have no gap."""
    assert [event["sequence_number"] for event in events] == list(range(start, start + len(events)))
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(found) if not i or kind != found[i - 1]]


def said(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def follow(client: Any, id: str, after: int | None = None) -> list[dict[str, Any]]:
    more = {} if after is None else {"starting_after": after}
    return [strict(event) async for event in await client.responses.retrieve(id, stream=True, **more)]


async def test_text_in_and_out(server, tokenizer):
    client = server.client()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answer = await client.responses.create(
        **GREEDY, input="Hello", instructions="Be brief.", max_output_tokens=8, metadata={"a": "b"}, user="u",
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    (sent,) = server.engine.submitted
    assert tokenizer.decode(sent.prompt, skip_special_tokens=False) == tokenizer.apply_chat_template(messages)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 8 and answer.usage.input_tokens == len(sent.prompt)
    assert answer.usage.input_tokens_details.cache_write_tokens == len(sent.prompt) // 16 * 16
    assert (answer.metadata, answer.user, answer.instructions) == ({"a": "b"}, "u", "Be brief.")
    chat = await client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert answer.output_text == chat.choices[0].message.content != ""
    assert strict(await client.responses.retrieve(answer.id)) == strict(answer)


async def test_a_stream_has_openais_events(server, tokenizer):
    client = server.client()
    server.engine.script[tuple(tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])))] = [
        *tokenizer.encode(" one 日本 two"), *tokenizer.eos_ids,
    ]  # fmt: skip
    async with client.responses.stream(**GREEDY, input="x") as helper:
        final = await helper.get_final_response()
    assert final.output_text == " one 日本 two" and final.status == "completed" and final.completed_at
    stream = await client.responses.create(**GREEDY, input="x", stream=True)
    events = [strict(event) async for event in stream]
    assert numbered(events) == [*ALL, "completed"]
    assert said(events) == events[-1]["response"]["output"][0]["content"][0]["text"] == final.output_text
    ids = {event.get("item_id") or event.get("item", {}).get("id") for event in events[2:-1]}
    assert ids == {events[-1]["response"]["output"][0]["id"]}
    assert await follow(client, events[-1]["response"]["id"]) == events  # stored, as it was
    async with server.http() as http, http.stream("POST", R, json={"input": "x", "stream": True}) as raw:
        lines = [line async for line in raw.aiter_lines() if line]
    assert lines[0] == "event: response.created" and json.loads(lines[1][6:])["type"] == "response.created"
    assert not any("[DONE]" in line for line in lines)


async def test_in_the_background(server):
    client, engine = server.client(), server.engine
    engine.gate.clear()
    answer = await client.responses.create(**GREEDY, input="Hello", background=True, max_output_tokens=30,
                                           extra_body={"ignore_eos": True})  # fmt: skip
    assert strict(answer)["status"] == "queued" and answer.output == []
    await engine.until(lambda: engine.open)
    engine.step()
    assert strict(await client.responses.retrieve(answer.id))["status"] == "in_progress"
    whole = asyncio.create_task(follow(client, answer.id))
    engine.gate.set()
    events = await whole
    assert numbered(events) == [*BACKGROUND, "incomplete"]
    final = strict(await client.responses.retrieve(answer.id))
    assert events[-1]["response"] == final and said(events) == final["output"][0]["content"][0]["text"]
    for after in range(len(events)):
        assert await follow(client, answer.id, after) == events[after + 1 :]
    assert await follow(client, answer.id, 1000) == []


async def test_a_stream_in_the_background_outlives_its_client(server):
    client, engine = server.client(), server.engine
    engine.gate.clear()
    stream = await client.responses.create(**GREEDY, input="Hello", background=True, stream=True, max_output_tokens=20,
                                           extra_body={"ignore_eos": True})  # fmt: skip
    events = [strict(await anext(stream)) for _ in range(3)]
    await engine.until(lambda: engine.open)
    for _ in range(4):
        engine.step()
    events += [strict(await anext(stream)) for _ in range(3)]
    await stream.close()
    for _ in range(3):  # when later requests were answered, it is known that its leaving ends nothing
        await client.models.list()
    engine.gate.set()
    events += await follow(client, events[0]["response"]["id"], events[-1]["sequence_number"])
    assert numbered(events) == [*BACKGROUND, "incomplete"] and not engine.cancelled


async def test_a_client_that_leaves_ends_what_runs_for_it(server):
    client, engine = server.client(), server.engine
    engine.gate.clear()
    stream = await client.responses.create(**GREEDY, input="Hello", stream=True)
    id = strict(await anext(stream))["response"]["id"]
    await engine.until(lambda: engine.open)
    engine.step()
    await stream.close()
    await engine.until(lambda: engine.cancelled)
    assert strict(await client.responses.retrieve(id))["status"] == "cancelled"


async def test_cancel_and_delete(server):
    client, engine = server.client(), server.engine
    engine.gate.clear()
    first, second = [
        await client.responses.create(**GREEDY, input=text, background=True) for text in ("Hello", "World")
    ]
    await engine.until(lambda: len(engine.open) == 2)
    following = asyncio.create_task(follow(client, first.id))
    engine.step()
    answer = await client.responses.cancel(first.id)
    assert strict(answer)["status"] == "cancelled" and len(engine.open) == 1
    assert numbered(await following) in (BACKGROUND[:6], BACKGROUND[:3])
    assert strict(await client.responses.cancel(first.id)) == strict(answer)
    await client.responses.delete(second.id)
    assert not engine.open
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(second.id)
    engine.gate.set()
    plain = await client.responses.create(**GREEDY, input="x", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(plain.id)


async def test_a_conversation_goes_on(server, tokenizer):
    client = server.client()
    parts = [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "two"}]
    first = await client.responses.create(
        **GREEDY, instructions="Not again.", input=[{"role": "user", "content": parts}], max_output_tokens=5
    )
    second = await client.responses.create(
        **GREEDY, previous_response_id=first.id, input="Three", max_output_tokens=5, instructions="Now."
    )
    assert second.previous_response_id == first.id
    expected = tokenizer.apply_chat_template([
        {"role": "system", "content": "Now."}, {"role": "user", "content": "One\ntwo"},
        {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Three"},
    ])  # fmt: skip
    assert tokenizer.decode(server.engine.submitted[-1].prompt, skip_special_tokens=False) == expected
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.role for item in items] == ["user", "assistant", "user"] and len({item.id for item in items}) == 3
    async with server.http() as http:
        page = (await http.get(f"{R}/{second.id}/input_items?limit=2")).json()
        ResponseItemList.model_validate(page)
        assert [one["id"] for one in page["data"]] == [item.id for item in items[:0:-1]] and page["has_more"]
        for query in ("limit=0", "limit=x", "order=up", "after=nobody"):
            assert (await http.get(f"{R}/{second.id}/input_items?{query}")).status_code == 400, query
    with pytest.raises(openai.BadRequestError) as e:
        await client.responses.create(**GREEDY, previous_response_id="resp_x", input="Three")
    assert e.value.code == "previous_response_not_found"


async def test_the_oldest_turns_are_left_out_where_that_is_asked_for(server, tokenizer):
    client = server.client()
    turns = [{"role": "user" if i % 2 else "assistant", "content": f"{i} " + "word " * 40} for i in range(21)]
    items = [{"role": "developer", "content": "Rules."}, *turns, {"role": "user", "content": "last"}]
    with pytest.raises(openai.BadRequestError) as e:
        await client.responses.create(**GREEDY, input=items)
    assert e.value.code == "context_length_exceeded"
    await client.responses.create(**GREEDY, input=items, truncation="auto", max_output_tokens=100)
    ids = server.engine.submitted[-1].prompt
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert "Rules." in text and "last" in text and text.split("<|im_start|>")[2].startswith("user\n")
    assert len(ids) <= 512 - 100 < len(ids) + 2 * 50
    with pytest.raises(openai.BadRequestError, match="the last turn alone"):
        await client.responses.create(**GREEDY, input="word " * 600, truncation="auto")


async def test_refusals_name_what_is_refused(server):
    part = {"type": "input_image", "image_url": "x"}
    refused: dict[str, tuple[dict[str, Any], str]] = {
        "input": ({"input": []}, "empty"), "input[0].type": ({"input": [{"type": "mcp_call"}]}, "mcp_call"),
        "input[0].role": ({"input": [{"role": "tool", "content": "x"}]}, "tool"),
        "input[0].content[0].type": ({"input": [{"role": "user", "content": [part]}]}, "input_image"),
        "input[0].colour": ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "colour"),
        "input[0].status": ({"input": [{"role": "user", "content": "x", "status": "odd"}]}, "in_progress"),
        "input[0].id": ({"input": [{"role": "user", "content": "x", "id": 5}]}, "string"),
        "tools[0].type": ({"tools": [{"type": "web_search"}]}, "web_search"),
        "conversation": ({"conversation": "c"}, ""),
        "include[0]": ({"include": ["message.output_text.logprobs"]}, "include"),
        "reasoning.summary": ({"reasoning": {"summary": "low"}}, "auto"),
        "text.format": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema is required"),
        "background": ({"background": True, "store": False}, "store"), "metadata": ({"metadata": {"x": 1}}, "metadata"),
        "stream_options": ({"stream_options": {"include_obfuscation": True}}, "stream: true"),
    }  # fmt: skip
    async with server.http() as http:
        for param, (more, words) in refused.items():
            answer = await http.post(R, json={"input": "x", **more})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"].partition(".x")[0]) == (400, param), error
            assert words in error["message"]
        id = (await http.post(R, json={"input": "x", "max_output_tokens": 1})).json()["id"]
        for query in ("starting_after=1", "stream=true&starting_after=-1", "stream=maybe", "include[]=x"):
            assert (await http.get(f"{R}/{id}?{query}")).status_code == 400, query
        assert (await http.get(f"{R}/nobody")).status_code == 404
    assert len(server.engine.submitted) == 1


async def test_not_stored(server):
    answer = await server.client().responses.create(**GREEDY, input="x", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        await server.client().responses.retrieve(answer.id)
    assert not server.engine.open


async def test_an_id_is_of_the_api_key_that_made_it(start):
    async with start(api_keys=("one", "two")) as server:
        one, two = (server.client(api_key=key) for key in ("one", "two"))
        answer = await one.responses.create(**GREEDY, input="x", max_output_tokens=1)
        assert (await one.responses.retrieve(answer.id)).id == answer.id
        for ask in (two.responses.retrieve, two.responses.cancel, two.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(answer.id)
        with pytest.raises(openai.BadRequestError):
            await two.responses.create(**GREEDY, input="x", previous_response_id=answer.id)


async def test_failures(server):
    client, engine = server.client(), server.engine
    engine.fail_with = "no luck"
    with pytest.raises(openai.InternalServerError, match="no luck"):
        await client.responses.create(**GREEDY, input="x")
    events = [strict(event) async for event in await client.responses.create(**GREEDY, input="x", stream=True)]
    assert numbered(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "no luck"}
    answer = await client.responses.create(**GREEDY, input="x", background=True)
    assert numbered(await follow(client, answer.id)) == ["created", "queued", "in_progress", "failed"]


async def test_what_is_kept_is_bounded(server, monkeypatch):
    client = server.client()
    monkeypatch.setattr(response_store, "MAX_STORED", 3)
    monkeypatch.setattr(response_store, "MAX_BACKGROUND", 2)
    ids = [(await client.responses.create(**GREEDY, input="x", max_output_tokens=1)).id for _ in range(4)]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(ids[0])
    await client.responses.retrieve(ids[1])
    server.engine.gate.clear()
    for _ in range(2):
        await client.responses.create(**GREEDY, input="x", background=True)
    with pytest.raises(openai.InternalServerError) as e:
        await client.responses.create(**GREEDY, input="x", background=True)
    assert e.value.code == "overloaded"
    await client.responses.retrieve(ids[3])
    server.engine.gate.set()
    monkeypatch.setattr(response_store, "AGE", 0.0)
    for id in ids[3:]:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(id)


async def test_what_is_too_large_to_be_kept(server, monkeypatch):
    client = server.client()
    monkeypatch.setattr(response_store, "MAX_RESPONSE", 1500)
    labels = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x" * 500)
    with pytest.raises(openai.APIStatusError) as e:
        await client.responses.create(**GREEDY, input="x", max_output_tokens=1, **labels)
    assert e.value.status_code == 413 and not server.engine.submitted
    await client.responses.create(**GREEDY, input="x", max_output_tokens=1, **labels, store=False)
    monkeypatch.setattr(responses, "MAX_CONVERSATION", 3)
    first = await client.responses.create(**GREEDY, input="Hello", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="begin another"):
        await client.responses.create(**GREEDY, input="x", previous_response_id=first.id)


async def test_a_key_has_a_share_of_the_places_in_the_background(start, monkeypatch):
    monkeypatch.setattr(response_store, "MAX_BACKGROUND", 8)
    async with start(api_keys=("one", "two")) as server:
        server.engine.gate.clear()
        one, two = (server.client(api_key=key) for key in ("one", "two"))
        for _ in range(6):
            await one.responses.create(**GREEDY, input="x", background=True)
        with pytest.raises(openai.RateLimitError) as e:
            await one.responses.create(**GREEDY, input="x", background=True)
        assert e.value.code == "too_many_background"
        for _ in range(2):
            await two.responses.create(**GREEDY, input="x", background=True)
        for client in (one, two):
            with pytest.raises(openai.InternalServerError) as full:
                await client.responses.create(**GREEDY, input="x", background=True)
            assert full.value.code == "overloaded"
        server.engine.gate.set()  # else its end waits for them
