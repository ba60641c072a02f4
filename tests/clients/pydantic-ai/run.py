"""Pydantic AI: an agent by chats and by responses, streams, tools, output by tools and by schema."""

from __future__ import annotations

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import KEY, MODEL, URL, client, needs, step

client("pydantic-ai-slim")
provider = OpenAIProvider(base_url=URL, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
QUESTION = "What is the capital of France?"
SHORT = {"temperature": 0.0, "max_tokens": 24}
LONG = {"temperature": 0.0, "max_tokens": 200}


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=9_999_999)


@step
def agent() -> None:
    talk = Agent(model, instructions="Be brief.", model_settings=SHORT)
    first = talk.run_sync(QUESTION)
    assert "Paris" in first.output and first.usage.output_tokens > 0
    assert talk.run_sync("And of Italy?", message_history=first.all_messages()).output


@step
async def stream() -> None:
    async with Agent(model, model_settings=SHORT).run_stream(QUESTION) as answer:
        parts = [text async for text in answer.stream_text(delta=True, debounce_by=None)]
        assert len(parts) > 1 and "Paris" in "".join(parts)


@step
def output_by_tool() -> None:
    answer = Agent(model, output_type=ToolOutput(City), model_settings=LONG).run_sync(QUESTION)
    assert isinstance(answer.output, City)


@step
def output_by_schema() -> None:
    answer = Agent(model, output_type=NativeOutput(City), model_settings=LONG).run_sync(QUESTION)
    assert isinstance(answer.output, City)


class LookFirst(AbstractCapability):
    """The first turn calls the tool, the second one answers: a small model would do either for ever."""

    def get_model_settings(self):
        return lambda run: {"tool_choice": ["look_up"] if run.run_step == 1 else "none"}


@step
def tools() -> None:
    """A call is asked for, carried out, told."""
    called: list[str] = []

    def look_up(city: str) -> str:
        """How many people live in a city."""
        called.append(city)
        return "two million"

    answer = Agent(model, tools=[look_up], capabilities=[LookFirst()], model_settings=LONG).run_sync("Look up Paris.")
    assert called and answer.output
    assert answer.usage.requests == 2


@step
def responses() -> None:
    needs("/v1/responses")
    answer = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=SHORT).run_sync(QUESTION)
    assert "Paris" in answer.output
