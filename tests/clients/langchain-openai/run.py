"""langchain-openai: ChatOpenAI and OpenAI called, streamed, in batches, by asyncio, with tools and objects."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from steps import KEY, MODEL, URL, client, needs, step

client("langchain-openai")
WAY = {"base_url": URL, "api_key": KEY, "model": MODEL, "temperature": 0, "max_retries": 0}
chat_model = ChatOpenAI(**WAY, max_tokens=24)
long_model = ChatOpenAI(**WAY, max_tokens=200)
QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str = Field(description="Its name", max_length=12)
    inhabitants: int = Field(ge=0, le=9_999_999)


@tool
def look_up(city: str) -> str:
    """How many people live in a city."""
    return f"{city}: two million"


@step
def invoke() -> None:
    answer = chat_model.invoke(QUESTION)
    assert "Paris" in answer.content and answer.usage_metadata["output_tokens"] > 0


@step
def stream() -> None:
    chunks = list(chat_model.stream(QUESTION, stream_usage=True))
    assert "".join(c.content for c in chunks) == chat_model.invoke(QUESTION).content
    assert sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) > 0


@step
def batch() -> None:
    answers = chat_model.batch([QUESTION, "Count to three."])
    assert len(answers) == 2 and all(a.content for a in answers)


@step
async def asyncio() -> None:
    assert "Paris" in (await chat_model.ainvoke(QUESTION)).content
    assert "Paris" in "".join([c.content async for c in chat_model.astream(QUESTION)])


@step
def completions() -> None:
    assert "three" in OpenAI(**WAY, max_tokens=8).invoke("One, two,")


@step
def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(long_model.with_structured_output(City, method=method).invoke(QUESTION), City), method


@step
def tools() -> None:
    asked = [HumanMessage(QUESTION)]
    answer = long_model.bind_tools([look_up], tool_choice="any", parallel_tool_calls=False).invoke(asked)
    (call,) = answer.tool_calls
    told = look_up.invoke(call)
    assert isinstance(told, ToolMessage)
    assert chat_model.bind_tools([look_up], tool_choice="none").invoke([*asked, answer, told]).content
    gathered = None
    for chunk in long_model.bind_tools([look_up], tool_choice="look_up").stream(asked):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["name"] == "look_up" and isinstance(gathered.tool_calls[0]["args"]["city"], str)


@step
def responses() -> None:
    needs("/v1/responses")
    answer = ChatOpenAI(**WAY, max_tokens=24, use_responses_api=True).invoke(QUESTION)
    assert "Paris" in answer.text


@step
def embeddings() -> None:
    needs("/v1/embeddings")
    made = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    assert len(made.embed_documents(["one", "two"])) == 2
