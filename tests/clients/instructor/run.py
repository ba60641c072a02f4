"""instructor: an answer is an object, by tools and by schemas, whole, in parts and by asyncio."""

from __future__ import annotations

import instructor
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field
from steps import KEY, MODEL, URL, client, needs, step

client("instructor")
ASK = {
    "model": MODEL,
    "max_tokens": 250,
    "max_retries": 0,
    "messages": [{"role": "user", "content": "Describe Paris."}],
}


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a schema allows any other, and a small model writes them
    name: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=9_999_999)


def made(mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)


@step
def tools() -> None:
    assert isinstance(made(Mode.TOOLS).chat.completions.create(response_model=City, **ASK), City)


@step
def json_schema() -> None:
    city, answer = made(Mode.JSON_SCHEMA).chat.completions.create_with_completion(response_model=City, **ASK)
    assert isinstance(city, City) and answer.usage.completion_tokens > 0


@step
def json() -> None:
    """A schema within the prompt, and any JSON object by response_format: a small model doesn't follow it."""
    try:
        made(Mode.JSON).chat.completions.create(response_model=City, **{**ASK, "max_tokens": 50})
    except (IncompleteOutputException, InstructorRetryException) as e:
        assert "validation error" in str(e) or "incomplete" in str(e), e


@step
def stream_in_parts() -> None:
    *parts, last = made(Mode.TOOLS).chat.completions.create_partial(response_model=City, **ASK)
    assert parts and isinstance(last.name, str) and isinstance(last.inhabitants, int)


@step
async def asyncio() -> None:
    there = instructor.from_openai(AsyncOpenAI(base_url=URL, api_key=KEY), mode=Mode.TOOLS)
    assert isinstance(await there.chat.completions.create(response_model=City, **ASK), City)


@step
def responses() -> None:
    needs("/v1/responses")
    asked = {**ASK, "input": "Describe Paris.", "messages": None, "max_output_tokens": 250}
    fields = {k: v for k, v in asked.items() if k not in ("messages", "max_tokens")}
    city = made(Mode.RESPONSES_TOOLS).responses.create(response_model=City, **fields)
    assert isinstance(city, City)
