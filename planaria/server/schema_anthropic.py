"""Requests and answers of /v1/messages, in Anthropic's shapes; the rules for fields are those of `schema.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from planaria.server.messages import MAX_MESSAGES
from planaria.server.schema import ApiModel, JsonObject, Strict, sampled
from planaria.server.tools import MAX_TOOLS
from planaria.types import MAX_STOP


def _listed(name: str, most: int, *others: dict[str, Any]) -> WithJsonSchema:
    items = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}, "maxItems": most}
    return WithJsonSchema({"anyOf": [items, *others]} if others else {**items, "minItems": 1})


class Opened(ApiModel):
    """Further fields are taken."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": True})


# Checked where they are translated (anthropic_input.py); the models are documentation.
class AskedBlock(Opened):
    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]


class AskedMessage(Opened):
    role: Literal["user", "assistant", "system"]
    content: str | list[AskedBlock]


class AskedTool(Opened):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: JsonObject = Field(description="A JSON schema of an object.")


class InputToolChoice(Opened):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Opened):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Not held.")


class OutputFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    effort: str | None = Field(None, description="A variable of the chat template, reasoning_effort.")
    format: OutputFormat | None = Field(None, description="What the answer must be.")


class RequestMetadata(Strict):
    user_id: str | None = None


InputMessages = Annotated[Any, _listed("AskedMessage", MAX_MESSAGES)]
InputTools = Annotated[Any, _listed("AskedTool", MAX_TOOLS, {"type": "null"})]


class CountTokensRequest(Strict):
    """What of a request makes its prompt."""

    # They change no answer here, or ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("cache_control", "inference_geo", "diagnostics", "user_profile_id", "workspace_id"), (...,)),
        "speed": ("standard",), "container": (), "context_management": (), "mcp_servers": ([],), "betas": ([],),
    }  # fmt: skip

    model: str
    messages: InputMessages
    system: Annotated[Any, _listed("AskedBlock", 16_384, {"type": "string"}, {"type": "null"})] = None
    tools: InputTools = Field(None, description="Those that the client runs; Anthropic's own are refused.")
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = Field(None, description="enabled needs a server with --reasoning-parser.")
    output_config: OutputConfig | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Further variables of the chat template.")


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(
        ge=1, lt=2**31, description="Where there is no room for so many, as many as there is room for."
    )
    temperature: float | None = sampled("temperature")
    top_p: float | None = sampled("top_p")
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    stop_sequences: list[str] | None = Field(None, description=f"Up to {MAX_STOP} strings that end an answer.")
    stream: bool | None = None
    metadata: RequestMetadata | None = Field(None, description="Accepted: not stored.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Accepted: there is one tier.")


# Answers. Documentation, and what the tests hold answers against.


class CountTokensResponse(Strict):
    input_tokens: int


class AnthropicErrorDetail(Strict):
    type: str
    message: str


class AnthropicErrorResponse(Strict):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class AnthropicUsage(Strict):
    input_tokens: int = Field(description="Without those of the prefix cache.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class MessagesResponse(Strict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: AnthropicUsage
    weights_version: int | None = None  # of the last token, where weights were changed
    weights_versions: list[tuple[int, int]] | None = None  # from which token on which version
