"""Hugging Face's client: chats, streams, tools, structured outputs, asyncio, by address and by OpenAI's names."""

from __future__ import annotations

import json

from huggingface_hub import AsyncInferenceClient, InferenceClient
from steps import KEY, MODEL, URL, client, step

client("huggingface_hub")
api = InferenceClient(base_url=URL, api_key=KEY)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Facts of a city.", "parameters": SCHEMA}}


@step
def chat() -> None:
    answer = api.chat_completion(ASK, model=MODEL, max_tokens=24, temperature=0, logprobs=True, top_logprobs=2)
    assert "Paris" in answer.choices[0].message.content and answer.usage.completion_tokens > 0
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@step
def stream() -> None:
    chunks = api.chat.completions.create(ASK, model=MODEL, max_tokens=24, temperature=0, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == api.chat_completion(ASK, model=MODEL, max_tokens=24, temperature=0).choices[0].message.content


@step
def structured_outputs() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = api.chat_completion(ASK, model=MODEL, max_tokens=200, response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content)["name"], str)


@step
def tools() -> None:
    answer = api.chat_completion(ASK, model=MODEL, max_tokens=200, tools=[TOOL], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "look_up" and isinstance(json.loads(call.arguments)["name"], str)


@step
async def asyncio() -> None:
    async with AsyncInferenceClient(base_url=URL, api_key=KEY) as there:
        stream = await there.chat_completion(ASK, model=MODEL, max_tokens=24, temperature=0, stream=True)
        assert "Paris" in "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
