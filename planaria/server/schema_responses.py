"""Requests and answers of /v1/responses, as pydantic models: see `schema.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from planaria.server.response_input import MAX_ITEMS, ROLES
from planaria.server.schema import JsonObject, Metadata, SampledRequest, Strict

MAX_LABEL = 512  # characters of `user` and the like

Label = Annotated[str, Field(max_length=MAX_LABEL)]


class InputPart(BaseModel):
    """A part of a message: `input_text`, or in an assistant's message `output_text` or `refusal`."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": True})
    type: Literal["input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class InputItem(Strict):
    """A message; checked in `response_input.py`."""

    type: Literal["message"] | None = None
    role: Literal[ROLES]  # type: ignore[valid-type]
    content: str | list[InputPart]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


Input = Annotated[
    Any,
    WithJsonSchema({"anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"$ref": "#/components/schemas/InputItem"}, "minItems": 1, "maxItems": MAX_ITEMS},
    ]}),
]  # fmt: skip


class ResponseTextFormat(Strict):
    """`strict` has no effect: an answer always follows its schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(None, alias="schema", description="Of a json_schema, which needs it.")
    strict: bool | None = None


class ResponseText(Strict):
    format: ResponseTextFormat | None = None
    verbosity: str | None = Field(None, description="A variable of the chat template, for those that read it.")


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = Field(None, description="Accepted: events are not padded.")


class ResponsesRequest(SampledRequest):
    """What is not of OpenAI's is of completions, and means the same."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "reasoning": ({},), "include": ([],), "context_management": ([],), "image": ({},), "top_logprobs": (0,),
        "background_options": ({}, {"completion_window": "soonest"}), "max_tool_calls": (...,),
        **dict.fromkeys((
            "conversation", "prompt", "access_programs", "structured_outputs", "guided_json", "guided_regex",
            "guided_choice", "guided_grammar", "guided_whitespace_pattern",
        ), ()),
    }  # fmt: skip

    input: Input = Field(
        description="A text, or messages with parts of type `input_text`, `output_text` or `refusal`.",
        examples=["The capital of France is"],
    )
    instructions: str | None = Field(None, description="A system message before all; not of responses that go on.")
    previous_response_id: str | None = Field(None, description="The conversation goes on from a stored response.")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="At most so many; left out: as many as there is room for."
    )
    text: ResponseText | None = Field(
        None, description="`format`: the form of the answer; `verbosity`: for the chat template."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto`: leave the oldest turns out where the model has no room for all."
    )
    store: bool | None = Field(None, description="Keep it, to be asked for by its id; true if left out.")
    background: bool | None = Field(None, description="Answer at once, and run on without a client; needs `store`.")
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = Field(None, description="Comes back with it.")
    user: Label | None = Field(None, description="Comes back with it.")
    safety_identifier: Label | None = Field(None, description="Comes back with it.")
    prompt_cache_key: Label | None = Field(None, description="Comes back with it; prefixes are found without.")


# Answers.


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Strict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ResponseFailure(Strict):
    code: str
    message: str


class IncompleteDetails(Strict):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Strict):
    effort: None
    summary: None


class InputTokensDetails(Strict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Strict):
    reasoning_tokens: int


class ResponseTokens(Strict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(Strict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Literal["auto"]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseTokens | None
    user: str | None


class ResponseDeleted(Strict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Strict):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
