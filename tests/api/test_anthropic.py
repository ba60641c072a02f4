"""/v1/messages by Anthropic's own client: texts, tools, thinking, streams, errors."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from planaria.errors import RequestError
from planaria.server.schema import parse
from planaria.server.schema_anthropic import CountTokensRequest, MessagesRequest
from tests.api.conftest import TLS
from tests.api.test_tools import TEMPLATE, Talk, marked, talk  # noqa: F401  (fixtures)
from tests.pure.test_parsers import ARGUMENTS, TOOLS, WRITTEN

if TYPE_CHECKING:
    import anthropic  # it takes two seconds: here only, not in every worker of a run that collects this file

USER: Any = [{"role": "user", "content": "What is it like?"}]
DECLARED: Any = [{"name": name, "input_schema": {"type": "object", **schema}} for name, schema in TOOLS.items()]
ASKED: dict[str, Any] = {"model": "smollm2", "max_tokens": 1000, "messages": USER}


def client_of(t: Talk, **more: Any) -> anthropic.AsyncAnthropic:
    import anthropic

    http = anthropic.DefaultAsyncHttpxClient(verify=TLS)
    return anthropic.AsyncAnthropic(
        base_url=t.server.url, http_client=http, **{"api_key": "none", "max_retries": 0, **more}
    )


def plain(message: Any) -> list[dict[str, Any]]:
    """Its blocks, but for their ids."""
    return [{k: v for k, v in block.to_dict().items() if v is not None and k != "id"} for block in message.content]


async def both(t: Talk, **fields: Any) -> tuple[Any, list[Any]]:
    """The whole answer, which is what the client puts together of a stream, and the stream's events."""
    client = client_of(t)
    whole = await client.messages.create(**ASKED | fields)
    async with client.messages.stream(**ASKED | fields) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_message()
    assert plain(streamed) == plain(whole) and streamed.stop_reason == whole.stop_reason
    assert streamed.stop_sequence == whole.stop_sequence
    sent = {"message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta",
            "content_block_stop"}  # fmt: skip
    return whole, [event for event in events if event.type in sent]


async def test_text(talk: Any) -> None:  # noqa: F811
    async with talk() as t:
        t.says("It is mild. ")
        whole, events = await both(t, system=[{"type": "text", "text": "Be brief."}], metadata={"user_id": "me"})
        assert plain(whole) == [{"type": "text", "text": "It is mild. "}]
        assert (whole.stop_reason, whole.stop_sequence, whole.role, whole.model) == (
            "end_turn",
            None,
            "assistant",
            "smollm2",
        )
        assert whole.id.startswith("msg_") and t.prompt.startswith("[system]Be brief.[user]What")
        count = await client_of(t).messages.count_tokens(model="smollm2", messages=USER, system="Be brief.")
        usage = whole.usage
        prompt = len(t.server.engine.submitted[-1].prompt)
        assert usage.input_tokens + usage.cache_read_input_tokens == prompt == count.input_tokens
        assert usage.output_tokens == len(t.server.engine.said) + 1
        kinds = [event.type for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert events[-2].usage.output_tokens == usage.output_tokens
        assert kinds.count("content_block_delta") >= 3


async def test_an_answer_whose_beginning_is_given(talk: Any) -> None:  # noqa: F811
    async with talk() as t:
        t.says(" and dry.")
        begun = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "It is mild"}]}]
        whole, _ = await both(t, messages=begun)
        assert t.prompt.endswith("It is mild") and plain(whole) == [{"type": "text", "text": " and dry."}]
        count = await client_of(t).messages.count_tokens(model="smollm2", messages=begun)
        assert count.input_tokens == len(t.server.engine.submitted[-1].prompt)


async def test_tools(talk: Any) -> None:  # noqa: F811
    async with talk() as t:
        for text, content in WRITTEN["hermes"]:
            t.says(text)
            whole, events = await both(t, tools=DECLARED)
            assert whole.stop_reason == "tool_use"
            texts = [block.text for block in whole.content if block.type == "text"]
            uses = [block for block in whole.content if block.type == "tool_use"]
            assert texts == ([content] if content else [])
            assert [(use.name, use.input) for use in uses] == [("get_weather", ARGUMENTS), ("now", {})]
            assert len({use.id for use in uses}) == 2 and all(use.id.startswith("toolu_") for use in uses)
            deltas = [e.delta for e in events if e.type == "content_block_delta"]
            assert json.loads("".join(d.partial_json for d in deltas if d.type == "input_json_delta")[:-2]) == ARGUMENTS
        t.says(WRITTEN["hermes"][0][0])
        one, _ = await both(t, tools=DECLARED, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in one.content] == ["text", "tool_use"]
        none, _ = await both(t, tools=DECLARED, tool_choice={"type": "none"})
        assert [block.text for block in none.content] == [WRITTEN["hermes"][0][0]]
        for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
            await client_of(t).messages.create(**ASKED, tools=DECLARED, tool_choice=choice)
            grammar = t.server.engine.submitted[-1].params.grammar
            assert grammar and ("get_weather" in grammar) == (choice["type"] == "any")


async def test_a_call_that_is_cut_off(talk: Any) -> None:  # noqa: F811
    async with talk() as t:
        t.says(WRITTEN["hermes"][0][0])
        whole = await client_of(t).messages.create(**ASKED | {"max_tokens": 40}, tools=DECLARED)
        assert whole.stop_reason == "max_tokens"
        assert whole.content[-1].type == "text" and whole.content[-1].text.startswith('get_weather: {"city": ')
        async with client_of(t).messages.stream(**ASKED | {"max_tokens": 40}, tools=DECLARED) as stream:
            said = [e.partial_json async for e in stream if e.type == "input_json"]
        assert whole.content[-1].text == "get_weather: " + "".join(said)


async def test_thinking(talk: Any) -> None:  # noqa: F811
    async with talk(TEMPLATE + "{{ enable_thinking }}", reasoning_parser="qwen3") as t:
        t.says('<think>\nHm.\n</think>\n\nSo.\n<tool_call>{"name": "now"}</tool_call>')
        whole, _ = await both(t, tools=DECLARED, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"] and t.prompt.endswith("True")
        assert (whole.content[0].thinking, whole.content[1].text) == ("Hm.", "So.")
        again = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
        ]}]  # fmt: skip
        t.says("It is noon.")
        await client_of(t).messages.create(**ASKED | {"messages": again}, thinking={"type": "disabled"})
        call = f"({whole.content[2].id} now )"
        assert t.prompt == f"[user]What is it like?[assistant]Hm.So.{call}[tool]noon[user]And?[assistant]False"


async def test_what_ends_an_answer(talk: Any) -> None:  # noqa: F811
    async with talk() as t:
        t.says("one two three four")
        whole, _ = await both(t, stop_sequences=[" three"])
        assert (whole.stop_reason, whole.stop_sequence, whole.content[0].text) == ("stop_sequence", " three", "one two")
        t.server.engine.said = t.server.engine.said[:1] * 200
        t.server.engine.facts = msgspec.structs.replace(t.server.engine.facts, max_model_len=100)
        whole = await client_of(t).messages.create(**ASKED, timeout=60)
        assert whole.stop_reason == "model_context_window_exceeded"
        assert whole.usage.output_tokens == 100 - len(t.server.engine.submitted[-1].prompt)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"), ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0 must be"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
        "messages.0.content.0.input",
    ),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
    ({"tools": [*DECLARED, DECLARED[0]]}, f"tools.{len(DECLARED)}.name {DECLARED[0]['name']!r} is declared twice"),
    ({"tools": DECLARED, "tool_choice": {"type": "tool", "name": "nobody"}}, "'nobody'"),
    ({"tools": DECLARED, "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking can't be enabled"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences must"), ({"temperature": -1}, "temperature"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"), ({"max_token": 3}, "did you mean max_tokens"),
    (
        {"tools": [{"name": "f", "input_schema": {"properties": {"a": {"type": "x"}}}}],
         "tool_choice": {"type": "any"}},
        "tools.0.input_schema.properties.a: ",
    ),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
]  # fmt: skip


async def test_errors(talk: Any) -> None:  # noqa: F811
    import anthropic

    async with talk() as t:
        client = client_of(t)
        for fields, says in BAD:
            with pytest.raises(anthropic.BadRequestError) as e:
                await client.messages.create(**{**ASKED, "extra_body": fields})
            body: Any = e.value.body
            assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error", fields
            assert says in body["error"]["message"] and body["request_id"] == e.value.request_id, body
        with pytest.raises(anthropic.NotFoundError, match="model 'other' is not served"):
            await client.messages.create(**ASKED | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="anthropic-version 'new'"):
            await client.messages.create(**ASKED, extra_headers={"anthropic-version": "new"})
        assert not t.server.engine.submitted
        t.says("a b c")
        t.server.engine.fail_with = "the engine is gone"
        with pytest.raises(anthropic.InternalServerError, match="the engine is gone"):
            await client.messages.create(**ASKED)


async def test_a_stream_that_fails(talk: Any) -> None:  # noqa: F811
    async with talk() as t:
        t.says("a b c d e f")
        t.server.engine.gate.clear()
        async with t.server.http() as http:
            asking = asyncio.create_task(http.post("/v1/messages", json={**ASKED, "stream": True}))
            await t.server.engine.until(lambda: t.server.engine.open)
            t.server.engine.step()
            t.server.engine.fail_with = "the engine is gone"
            t.server.engine.step()
            rest = (await asking).text.split("\n")
        assert rest[0] == "event: message_start"
        assert rest[-4] == "event: error" and "[DONE]" not in "".join(rest)
        error = json.loads(rest[-3].removeprefix("data: "))
        assert error["error"] == {"type": "api_error", "message": "the engine is gone"}


async def test_keys(start: Any) -> None:
    async with start(api_keys=("secret",)) as server:
        for key, status in (("secret", 200), ("wrong", 401)):
            async with server.http(headers={"x-api-key": key}) as http:
                answer = await http.post("/v1/messages", json={**ASKED, "max_tokens": 2})
                assert answer.status_code == status
                assert status == 200 or answer.json()["error"]["type"] == "authentication_error"


def test_every_field_of_anthropics_is_known() -> None:
    from anthropic.types import message_count_tokens_params, message_create_params

    asked: dict[str, Any] = {"model": "m", "max_tokens": 1, "messages": []}
    for model, params in (
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    ):
        given = {name: value for name, value in asked.items() if name in model.model_fields}
        assert not params.__annotations__.keys() - {*model.model_fields, *model.neutral}
        for name, values in model.neutral.items():
            for value in [None, *("x" if value is ... else value for value in values)]:
                parse(model, json.dumps({**given, name: value}).encode())
            if values != (...,):
                with pytest.raises(RequestError, match=f"{name} is not supported"):
                    parse(model, json.dumps({**given, name: {"a": 1}}).encode())
