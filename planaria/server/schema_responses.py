"""Requests and answers of /v1/responses, as pydantic models: see `schema.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from planaria.server.response_input import MAX_ITEMS, ROLES
from planaria.server.schema import ApiModel, JsonObject, Metadata, SampledRequest, Strict
from planaria.server.tools import MAX_TOOL_NAME, MAX_TOOLS

MAX_LABEL = 512  # characters of `user` and the like

Label = Annotated[str, Field(max_length=MAX_LABEL)]
Status = Literal["in_progress", "completed", "incomplete"]
# What may be asked to come with an answer; but for the first, of items that no answer here has.
INCLUDABLE = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip


class InputPart(ApiModel):
    """A part of a message: `input_text`, or in an assistant's message `output_text` or `refusal`."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": True})
    type: Literal["input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class ReasoningPart(Strict):
    type: Literal["reasoning_text"]
    text: str


class SummaryPart(Strict):
    type: Literal["summary_text"]
    text: str


# Items of an input are checked in `response_input.py`; the models are documentation.
class InputItem(Strict):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal[ROLES]  # type: ignore[valid-type]
    content: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(Strict):
    """A call that a model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Strict):
    """What came of a call before it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Strict):
    """A model's reasoning: its content, or else its summary, is told to the chat template."""

    type: Literal["reasoning"]
    summary: list[SummaryPart] | None = None
    content: list[ReasoningPart] | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: str | None = Field(None, description="Not read: there must be a text beside it.")


class ItemReference(Strict):
    """An item of a stored response that has ended."""

    type: Literal["item_reference"] | None = None
    id: str


_ITEMS = ("InputItem", "FunctionCallItem", "FunctionCallOutputItem", "ReasoningItem", "ItemReference")
Input = Annotated[
    Any,
    WithJsonSchema({"anyOf": [
        {"type": "string"},
        {
            "type": "array", "minItems": 1, "maxItems": MAX_ITEMS,
            "items": {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in _ITEMS]},
        },
    ]}),
]  # fmt: skip


# Checked in `response_request.py` and `tools.py`.
class DeclaredFunction(Strict):
    type: Literal["function"]
    name: str = Field(max_length=MAX_TOOL_NAME, pattern="^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = Field(None, description="No effect: a call that has to be made follows its schema.")


DeclaredFunctions = Annotated[
    Any,
    WithJsonSchema({"anyOf": [
        {"type": "array", "items": {"$ref": "#/components/schemas/DeclaredFunction"}, "maxItems": MAX_TOOLS},
        {"type": "null"},
    ]}),
]  # fmt: skip
ChosenFunction = Annotated[
    Any,
    WithJsonSchema({"anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object", "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
        },
        {
            "type": "object", "required": ["type", "mode", "tools"],
            "properties": {
                "type": {"const": "allowed_tools"}, "mode": {"enum": ["auto", "required"]}, "tools": {"type": "array"},
            },
        },
        {"type": "null"},
    ]}),
]  # fmt: skip


class ReasoningAsked(Strict):
    """Reasoning comes whole, as the content of an item of its own (with --reasoning-parser); nothing sums it up."""

    effort: str | None = Field(None, max_length=64, description="`reasoning_effort` of the chat template; `none`: "
                               "`enable_thinking` is false.")  # fmt: skip
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


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
        "context_management": ([],), "image": ({},), "top_logprobs": (0,),
        "background_options": ({}, {"completion_window": "soonest"}),
        **dict.fromkeys((
            "conversation", "prompt", "access_programs", "structured_outputs", "guided_json", "guided_regex",
            "guided_choice", "guided_grammar", "guided_whitespace_pattern",
        ), ()),
    }  # fmt: skip

    input: Input = Field(
        description="A text, or items: messages, `function_call`, `function_call_output`, `reasoning`, "
        "`item_reference`.",
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
    tools: DeclaredFunctions = Field(None, description="Functions that the model may call; no tools of other types.")
    tool_choice: ChosenFunction = Field(
        None, description="none, auto, required, one function or some (`allowed_tools`); auto if there are tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: the first call alone is told.")
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Comes back with it: it bounds calls of tools of the server's own, and there are none."
    )
    reasoning: ReasoningAsked | None = Field(
        None, description="`effort`: for the chat template (`none`: no thinking); `summary`: accepted, reasoning comes "
        "whole.",
    )  # fmt: skip
    include: Annotated[list[Literal[INCLUDABLE]], Field(max_length=64)] | None = Field(  # type: ignore[valid-type]
        None,
        description="Accepted, but for log-probabilities: reasoning is never encrypted, and nothing else is there.",
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
    status: Status
    content: list[OutputText]


class OutputCall(Strict):
    id: str
    type: Literal["function_call"]
    status: Status = Field(description="incomplete: it was cut off, its arguments are no JSON.")
    call_id: str
    name: str
    arguments: str


class OutputReasoning(Strict):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningPart]


class ResponseFailure(Strict):
    code: str
    message: str


class IncompleteDetails(Strict):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Strict):
    effort: str | None
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
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: ChosenFunction
    tools: list[DeclaredFunction]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseTokens | None
    user: str | None
    weights_version: int | None = None  # of the last token, where weights were changed
    weights_versions: list[tuple[int, int]] | None = None  # from which token on which version


class ResponseDeleted(Strict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Strict):
    object: Literal["list"]
    data: list[InputItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
