"""LiteLLM: chats and completions by its OpenAI-like providers, streams, asyncio, tools, structured output, batches."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks for one by the network

import litellm
from pydantic import BaseModel, ConfigDict, Field
from steps import KEY, MODEL, URL, client, needs, step

client("litellm")
litellm.drop_params = False
litellm.enable_json_schema_validation = True
WAY = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
ASK = {**WAY, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Facts of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False}}}  # fmt: skip


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)


@step
def models() -> None:
    asked = {"check_provider_endpoint": True, "api_base": URL, "api_key": KEY}
    assert MODEL in litellm.get_valid_models(custom_llm_provider="openai", **asked)


@step
def chat() -> None:
    for provider in ("hosted_vllm", "openai"):
        answer = litellm.completion(**{**ASK, "model": f"{provider}/{MODEL}"}, max_tokens=24)
        assert "Paris" in answer.choices[0].message.content and answer.usage.completion_tokens > 0


@step
def stream() -> None:
    chunks = list(litellm.completion(**ASK, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert "Paris" in whole.choices[0].message.content and whole.usage.completion_tokens > 0


@step
def completions() -> None:
    answer = litellm.text_completion(
        **{**WAY, "model": f"text-completion-openai/{MODEL}"}, prompt="One, two,", max_tokens=8, temperature=0,
    )  # fmt: skip
    assert "three" in answer.choices[0].text


@step
async def asyncio() -> None:
    assert "Paris" in (await litellm.acompletion(**ASK, max_tokens=24)).choices[0].message.content
    stream = await litellm.acompletion(**ASK, max_tokens=24, stream=True)
    assert "Paris" in "".join([c.choices[0].delta.content or "" async for c in stream])


@step
def batch() -> None:
    asked = [[{"role": "user", "content": text}] for text in ("Hello!", "Count to three.")]
    answers = litellm.batch_completion(**WAY, messages=asked, max_tokens=8)
    assert all(answer.choices[0].message.content for answer in answers)


@step
def structured_output() -> None:
    answer = litellm.completion(**ASK, max_tokens=100, response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


@step
def tools() -> None:
    answer = litellm.completion(**ASK, max_tokens=100, tools=[TOOL], tool_choice="required").choices[0]
    (call, *_) = answer.message.tool_calls
    assert call.function.name == "look_up" and isinstance(json.loads(call.function.arguments)["city"], str)
    told = {"role": "tool", "tool_call_id": call.id, "content": "2 million people"}
    turns = [*ASK["messages"], answer.message, told]
    after = litellm.completion(**{**ASK, "messages": turns}, max_tokens=8, tools=[TOOL], tool_choice="none")
    assert after.choices[0].message.content


@step
def responses() -> None:
    needs("/v1/responses")
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=URL, api_key=KEY, input="What is the capital of France?",
        max_output_tokens=24, temperature=0,
    )  # fmt: skip
    assert "Paris" in answer.output[0].content[0].text


@step
def messages() -> None:
    """Anthropic's form, which it translates to a chat."""
    answer = litellm.anthropic.messages.create(**ASK, max_tokens=24)
    assert "Paris" in answer["content"][0]["text"]


@step
def embeddings() -> None:
    needs("/v1/embeddings")
    assert len(litellm.embedding(**WAY, input=["one", "two"]).data) == 2
