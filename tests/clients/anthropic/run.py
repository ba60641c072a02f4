"""Anthropic's own library: messages, streams, counts of tokens, tools, asyncio."""

from __future__ import annotations

from anthropic import Anthropic, AsyncAnthropic, BadRequestError
from steps import HOST, KEY, MODEL, client, needs, step

client("anthropic")
api = Anthropic(base_url=HOST, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0.0}}  # which it has no word for
TOOL = {"name": "look_up", "description": "Facts of a city.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}}  # fmt: skip


@step
def messages() -> None:
    needs("/v1/messages")
    answer = api.messages.create(messages=ASK, system="Be brief.", **GREEDY)
    assert answer.role == "assistant" and "Paris" in answer.content[0].text
    assert answer.usage.input_tokens > 0 and answer.stop_reason in ("end_turn", "max_tokens")
    try:
        api.messages.create(messages=[{"role": "wizard", "content": "x"}], **GREEDY)
        raise AssertionError("there is no such role")
    except BadRequestError as e:
        assert e.body["error"]["type"] == "invalid_request_error"


@step
def stream() -> None:
    needs("/v1/messages")
    whole = api.messages.create(messages=ASK, **GREEDY)
    with api.messages.stream(messages=ASK, **GREEDY) as events:
        text = "".join(events.text_stream)
        assert text == whole.content[0].text == events.get_final_message().content[0].text


@step
def tokens() -> None:
    needs("/v1/messages/count_tokens")
    counted = api.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    used = api.messages.create(messages=ASK, **GREEDY).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens


@step
def tools() -> None:
    needs("/v1/messages")
    asked = {**GREEDY, "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "look_up"}}
    answer = api.messages.create(messages=ASK, **asked)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.name == "look_up" and isinstance(call.input["city"], str)
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "2 million people"}]}
    turns = [*ASK, {"role": "assistant", "content": answer.content}, told]
    after = api.messages.create(messages=turns, **GREEDY, tools=[TOOL], tool_choice={"type": "none"})
    assert after.content[0].text


@step
async def asyncio() -> None:
    needs("/v1/messages")
    there = AsyncAnthropic(base_url=HOST, api_key=KEY)
    async with there.messages.stream(messages=ASK, **GREEDY) as events:
        assert "Paris" in "".join([text async for text in events.text_stream])
