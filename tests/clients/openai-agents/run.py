"""OpenAI's Agents SDK: an agent by chats and by responses, streams, a tool that is run, an object as the answer."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, Field
from steps import KEY, MODEL, URL, client, needs, step

client("openai-agents")
set_tracing_disabled(True)  # traces go to OpenAI
QUESTION = "What is the capital of France?"
called: list[str] = []


class City(BaseModel):
    name: str = Field(max_length=12)


@function_tool
def look_up(city: str) -> str:
    """How many people live in a city."""
    called.append(city)
    return "two million"


def agent(kind: type = OpenAIChatCompletionsModel, max_tokens: int = 24, settings: dict | None = None, **more) -> Agent:
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    chosen = ModelSettings(temperature=0.0, max_tokens=max_tokens, **settings or {})
    return Agent(name="Guide", instructions="Be brief.", model=model, model_settings=chosen, **more)


@step
def run() -> None:
    assert "Paris" in Runner.run_sync(agent(), QUESTION).final_output


@step
async def stream() -> None:
    answer = Runner.run_streamed(agent(settings={"include_usage": True}), QUESTION)
    parts = [e.data.delta async for e in answer.stream_events()
             if e.type == "raw_response_event" and isinstance(e.data, ResponseTextDeltaEvent)]  # fmt: skip
    assert "".join(parts) == answer.final_output and "Paris" in answer.final_output
    assert answer.context_wrapper.usage.output_tokens > 0


@step
def tools() -> None:
    """The first turn has to call, its tool is run, the second one answers."""
    called.clear()
    wants = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = Runner.run_sync(agent(max_tokens=120, settings=wants, tools=[look_up]), QUESTION, max_turns=4)
    assert called and answer.final_output
    turns = [item.type for item in answer.new_items]
    assert turns[:2] == ["tool_call_item", "tool_call_output_item"], turns


@step
def output_type() -> None:
    assert isinstance(Runner.run_sync(agent(max_tokens=100, output_type=City), QUESTION).final_output, City)


@step
def responses() -> None:
    needs("/v1/responses")
    assert "Paris" in Runner.run_sync(agent(OpenAIResponsesModel), QUESTION).final_output


@step
def responses_with_tools() -> None:
    needs("/v1/responses")
    called.clear()
    wants = {"tool_choice": "required", "parallel_tool_calls": False}
    guide = agent(OpenAIResponsesModel, max_tokens=120, settings=wants, tools=[look_up])
    answer = Runner.run_sync(guide, QUESTION, max_turns=4)
    assert called and answer.final_output
