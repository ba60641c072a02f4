"""OpenAI's own library: models, chats, streams, completions, asyncio, tools, structured outputs, responses."""

from __future__ import annotations

import json

from openai import AsyncOpenAI, AuthenticationError, NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field
from steps import KEY, MODEL, URL, client, needs, step

client("openai")
api = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    name: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=9_999_999)


@step
def models() -> None:
    assert [m.id for m in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL
    try:
        api.models.retrieve("gpt-5")
        raise AssertionError("there is no such model")
    except NotFoundError as e:
        assert e.code == "model_not_found"
    try:
        api.with_options(api_key="wrong").models.list()
        raise AssertionError("the key is wrong")
    except AuthenticationError:
        pass


@step
def chat() -> None:
    answer = api.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=24, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@step
def stream() -> None:
    whole = api.chat.completions.create(model=MODEL, messages=ASK, max_tokens=24, temperature=0)
    options = {"include_usage": True}
    chunks = list(api.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=24, temperature=0, stream=True, stream_options=options))  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage


@step
def completions() -> None:
    answer = api.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=8, temperature=0, logprobs=2
    )
    assert len(answer.choices) == 2 and "three" in answer.choices[0].text
    assert len(answer.choices[0].logprobs.token_logprobs) == 8


@step
async def asyncio() -> None:
    async with AsyncOpenAI(base_url=URL, api_key=KEY) as there:
        stream = await there.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=24, temperature=0, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert "Paris" in text


@step
def structured_outputs() -> None:
    answer = api.chat.completions.parse(model=MODEL, messages=ASK, response_format=City, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, City)


@step
def tools() -> None:
    """One call, streamed and parsed; then what it gave."""
    tool = pydantic_function_tool(City, name="look_up")
    asked = {"model": MODEL, "messages": ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "seed": 1,
             "parallel_tool_calls": False}  # fmt: skip
    with api.chat.completions.stream(**asked) as events:
        names = {event.type for event in events}
        answer = events.get_final_completion().choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "look_up" and isinstance(call.function.parsed_arguments, City)
    assert answer.finish_reason == "tool_calls" and "tool_calls.function.arguments.done" in names
    told = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"inhabitants": 2_000_000})}
    after = api.chat.completions.create(
        model=MODEL, messages=[*ASK, answer.message.to_dict(), told], tools=[tool], tool_choice="none", max_tokens=8,
    )  # fmt: skip
    assert after.choices[0].message.content


@step
def responses() -> None:
    needs("/v1/responses")
    answer = api.responses.create(
        model=MODEL, input="What is the capital of France?", max_output_tokens=24, temperature=0
    )
    assert "Paris" in answer.output_text and answer.usage.output_tokens > 0
    with api.responses.stream(
        model=MODEL, input="What is the capital of France?", max_output_tokens=24, temperature=0
    ) as events:
        types = [event.type for event in events]
        assert events.get_final_response().output_text == answer.output_text
    assert types[0] == "response.created" and "response.output_text.delta" in types


@step
def structured_responses() -> None:
    needs("/v1/responses")
    answer = api.responses.parse(model=MODEL, input="Paris?", text_format=City, max_output_tokens=100)
    assert isinstance(answer.output_parsed, City)


@step
def responses_with_tools() -> None:
    """A call that has to be made, and a turn that goes on from what came of it."""
    needs("/v1/responses")
    tool = {"type": "function", "name": "count", "strict": True, "parameters": City.model_json_schema()}
    asked = {"model": MODEL, "temperature": 0, "tools": [tool]}
    with api.responses.stream(
        **asked, input="Count Paris.", tool_choice="required", parallel_tool_calls=False, max_output_tokens=100
    ) as events:
        types = [event.type for event in events]
        first = events.get_final_response()
    (call,) = first.output
    City.model_validate_json(call.arguments)
    assert "response.function_call_arguments.delta" in types and call.name == "count"
    came = {"type": "function_call_output", "call_id": call.call_id, "output": "two million"}
    second = api.responses.create(**asked, input=[came], previous_response_id=first.id, max_output_tokens=24)
    assert second.output_text


@step
def embeddings() -> None:
    needs("/v1/embeddings")
    answer = api.embeddings.create(model=MODEL, input=["one", "two"])
    assert len(answer.data) == 2 and len(answer.data[0].embedding) > 1
