"""Requests and answers of the HTTP API, as pydantic models: they check what comes in and are the OpenAPI document.

The rule for fields: one that would change the answer and isn't supported is refused by name, unless it carries
the value that means "off" (`NEUTRAL`); a name nobody knows is refused too, with the nearest known one, because
a mistyped `max_token` that is silently dropped costs its user more than an error does. Answers are not built from these
models at run time; `completions.py` and `chat.py` write JSON directly.
"""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema, create_model

from planaria.errors import RequestError
from planaria.server.body import PIECE, all_are, decode
from planaria.server.messages import MAX_MESSAGES, ROLES
from planaria.server.tools import MAX_TOOL_NAME, MAX_TOOLS
from planaria.structured.spec import MAX_CHOICES
from planaria.types import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N, MAX_STOP, SamplingParams, bounds_of

INT63 = 2**63
MAX_LIST = 1024  # entries of stop_token_ids, logit_bias
MAX_PROMPTS = 16_384
MAX_ALLOWED = 1 << 17  # entries of allowed_token_ids
MAX_FIELDS = 256
MAX_SALT = 256  # characters
MAX_BLOCKS = 1 << 16  # of a history
MAX_BRACKETS = 1 << 18  # [ and { of a body


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# The last word about token ids is the vocabulary's (inputs.py); a list of them is only checked for its shape here.
Size = Annotated[int, Field(ge=0, lt=2**31)]
JsonObject = dict[str, Any]


def _token_ids(value: Any) -> Any:
    if type(value) is list and all_are(int, value):
        return value
    raise ValueError(_RULES["tokens"])


def _prompts(value: Any) -> Any:
    if type(value) is str or (type(value) is list and (all_are(str, value) or all_are(int, value))):
        return value
    if type(value) is list and all_are(list, value) and all(all_are(int, one) for one in value):
        return value
    raise ValueError(_RULES["prompt"])


# The last word about token ids is the vocabulary's (inputs.py). Pydantic would look at all of a list in one call.
TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]
Prompt = str | list[str] | list[int] | list[list[int]]
Prompts = Annotated[Prompt, PlainValidator(_prompts, json_schema_input_type=Prompt)]


class ApiModel(BaseModel):
    """pydantic makes what checks it when the first comes: of most kinds none ever does, and a start has no time."""

    model_config = ConfigDict(defer_build=True)


class Strict(ApiModel):
    """Nothing is converted, nothing unknown is accepted, numbers are finite. neutral: as `NEUTRAL`, of this kind."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), regex_engine="rust-regex"
    )


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="Send token counts in a last event with no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send token counts with every event.")
    include_obfuscation: bool | None = Field(None, description="Accepted: events are not padded.")


class KVTransferParams(ApiModel):
    """As another server's answer has them, and vLLM's proxies pass them on; what is unknown has no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_decode: bool = Field(False, description="Another server goes on: hold this prompt's KV for it.")
    do_remote_prefill: bool = Field(False, description="Another server has computed the prompt: fetch its KV there.")
    remote_engine_id: str | None = Field(None, max_length=256)
    remote_block_ids: list[int] | None = Field(None, max_length=MAX_BLOCKS)
    remote_host: str | None = Field(None, max_length=64)
    remote_port: int | None = Field(None, ge=1, le=65535)
    remote_request_id: str | None = Field(None, max_length=256)
    remote_signature: str | None = Field(None, max_length=128)
    remote_layers: list[int] | None = Field(None, max_length=1024)
    remote_block_size: int | None = Field(None, ge=16, le=1 << 16)
    remote_dcp_size: int = Field(1, ge=1, le=256)
    remote_pcp_size: int = Field(1, ge=1, le=256)
    remote_interleave: int = Field(1, ge=1, le=256)
    tp_size: int | None = Field(None, ge=1, le=1024)


class JsonSchema(Strict):
    """`strict` has no effect: an answer always follows its schema."""

    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: str = Field(
        json_schema_extra={"enum": ["text", "json_object", "json_schema", "structural_tag", "json", "regex"]}
    )
    json_schema: JsonSchema | None = None
    value: JsonObject | str | None = Field(
        None, description="Of a json_object (or json), its schema; of a regex, the expression: as Hugging Face has it."
    )
    structures: list[JsonObject] | None = Field(None, description="Of a structural_tag: `begin`, `schema`, `end`.")
    triggers: list[str] | None = Field(None, description="Of a structural_tag: what its structures begin with.")


class StructuredOutputs(Strict):
    """Exactly one of the first six."""

    schema_: str | JsonObject | bool | None = Field(None, alias="json", description="A JSON Schema.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="Lark, or EBNF as GBNF has it.")
    json_object: bool | None = None
    structural_tag: str | JsonObject | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = Field(
        None, description="Objects have no properties but those that are listed."
    )
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None


def sampled(name: str, **more: Any) -> Any:
    """A parameter of sampling, as SamplingParams declares it; left out, its default."""
    bounds = bounds_of(SamplingParams)[name]
    if bounds.asked:
        more["description"] = bounds.asked
    for word in ("ge", "gt", "le", "lt"):
        if (limit := getattr(bounds, word)) is not None:
            more[word] = int(limit)
    return Field(None, **more)


if TYPE_CHECKING:
    Parameters = Strict
else:  # a field of each that says what is asked with it
    _types = get_type_hints(SamplingParams)
    Parameters = create_model(
        "Parameters", __base__=Strict,
        **{name: (_types[name] | None, sampled(name)) for name, bounds in bounds_of(SamplingParams).items()
           if bounds.asked is not None},
    )  # fmt: skip


class SampledRequest(Parameters):
    """What all that generate have in common. `null` always means the default."""

    model: str | None = Field(None, description="One of /v1/models; left out: the first of them.", examples=["smollm2"])
    min_tokens: Size | None = Field(None, description="Nothing ends a choice before it has so many tokens.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="From token ids (as strings) to a number added to the logit.", examples=[{"50": -100}]
    )
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS)
    stop: str | list[str] | None = Field(None, description=f"Up to {MAX_STOP} strings that end a choice.")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_LIST)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out; true if left out.")
    seed: int | None = Field(
        None, ge=-INT63, lt=INT63,
        description="Makes sampling repeatable. Choice i > 0 uses a seed derived from it and i; drawn if left out.",
    )  # fmt: skip
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower runs first under the priority policy; 0 if left out."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=MAX_SALT,
        description="What is in the KV cache of this request's prompt is used by requests with the same one alone.",
    )  # fmt: skip
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED, description="No other token is drawn."
    )
    stream: bool | None = None


class GenerationRequest(SampledRequest):
    """What completions and chat completions have in common."""

    n: int | None = sampled("n", description="Choices for each prompt; 1 if left out.")
    max_tokens: Size | None = None
    prompt_logprobs: int | None = sampled("prompt_logprobs")
    return_token_ids: bool | None = Field(None, description="Add `token_ids` to choices and `prompt_token_ids`.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="In log-probabilities, tokens are `token_id:` and their number."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=2**31,
        description="Only so many last tokens of a prompt; -1: as many as leave room for max_tokens, or for one.",
    )  # fmt: skip
    structured_outputs: StructuredOutputs | None = Field(None, description="What an answer must be.")
    guided_json: str | JsonObject | bool | None = Field(None, description="As `json` of structured_outputs.")
    guided_regex: str | None = Field(None, description="As `regex` of structured_outputs.")
    guided_choice: list[str] | None = Field(None, description="As `choice` of structured_outputs.")
    guided_grammar: str | None = Field(None, description="As `grammar` of structured_outputs.")
    guided_whitespace_pattern: str | None = Field(None, description="As `whitespace_pattern` of structured_outputs.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="Part of the answer's id.")
    stream_options: StreamOptions | None = None
    kv_transfer_params: KVTransferParams | None = Field(
        None, description="Prompts and what follows on two servers (docs/kv-transfer.md): as vLLM's proxies say it."
    )


class CompletionRequest(GenerationRequest):
    prompt: Prompts = Field(
        description="Text, token ids, or a list of either.",
        examples=["The capital of France is"],
    )  # fmt: skip
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Only as many as `n`.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own (BOS); true if left out.")


# Checked where they are rendered (messages.py), for the server and for `LLM.chat` alike; the models are documentation.
class ContentPart(ApiModel):
    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": True})
    type: str = Field(description="A refusal is text, too.", json_schema_extra={"enum": ["text", "refusal"]})
    text: str | None = None
    refusal: str | None = None


class Message(ApiModel):
    """One message. Fields not named here are given to the model's chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": True})
    role: Literal[ROLES]  # type: ignore[valid-type]
    content: str | list[ContentPart] | None = None
    name: str | None = None


Messages = Annotated[
    Any,
    WithJsonSchema({
        "type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1, "maxItems": MAX_MESSAGES,
    }),
]  # fmt: skip


# Checked in tools.py, for the server and for `LLM.chat` alike.
class FunctionTool(ApiModel):
    class Declaration(ApiModel):
        model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": True})
        name: str = Field(max_length=MAX_TOOL_NAME, pattern="^[a-zA-Z0-9_.-]+$")
        description: str | None = None
        parameters: JsonObject | None = Field(None, description="A JSON schema of an object.")
        strict: bool | None = None

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": True})
    type: Literal["function"]
    function: Declaration


DeclaredTools = Annotated[
    Any,
    WithJsonSchema({
        "anyOf": [
            {"type": "array", "items": {"$ref": "#/components/schemas/FunctionTool"}, "maxItems": MAX_TOOLS},
            {"type": "null"},
        ]
    }),
]  # fmt: skip
Chosen = Annotated[
    Any,
    WithJsonSchema({
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {
                "type": "object", "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object", "required": ["name"], "properties": {"name": {"type": "string"}},
                    },
                },
            },
            {
                "type": "object", "required": ["type", "allowed_tools"],
                "properties": {
                    "type": {"const": "allowed_tools"},
                    "allowed_tools": {
                        "type": "object", "required": ["mode", "tools"],
                        "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array"}},
                    },
                },
            },
            {"type": "null"},
        ]
    }),
]  # fmt: skip
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ChatCompletionRequest(GenerationRequest):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="The newer name of max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs `logprobs`.")
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; true if left out.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message, not with another.")
    echo: bool | None = Field(None, description="Begin with the last message, where that is the assistant's.")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's own (BOS) to the template's text.")
    chat_template: str | None = Field(
        None, description="In place of the model's; needs a server with --trust-request-chat-template."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="Further variables of the chat template.")
    tools: DeclaredTools = Field(None, description="Functions that the model may call.")
    tool_choice: Chosen = Field(None, description="none, auto, required, or one function; auto if there are tools.")
    parallel_tool_calls: bool | None = Field(None, description="false: the first call alone is told.")
    include_reasoning: bool | None = Field(None, description="false: reasoning that is told apart is left out.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="Accepted: there is one tier."
    )
    store: bool | None = Field(None, description="Accepted: nothing is stored.")
    metadata: Metadata | None = Field(None, description="Accepted: up to 16 texts, not stored.")
    reasoning_effort: str | None = Field(None, description="A variable of the chat template, for those that read it.")
    verbosity: str | None = Field(None, description="As reasoning_effort.")


class TokenizeRequest(Strict):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = Field(None, description="Left out: true for a prompt, false for messages.")
    add_generation_prompt: bool | None = Field(None, description="For messages; true if left out.")
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds = Field(examples=[[504, 3575, 282]])


# Answers. Documentation, and what the tests hold answers against.


class ErrorDetail(Strict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Strict):
    error: ErrorDetail


class PromptTokensDetails(Strict):
    cached_tokens: int


class TokenUsage(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(Strict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Strict):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Strict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    weights_version: int | None = None  # of the last token, where weights were changed
    weights_versions: list[tuple[int, int]] | None = None  # from which token on which version
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(Strict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None
    kv_transfer_params: dict[str, Any] | None = None


class TopLogprob(Strict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Strict):
    content: list[TokenLogprob]


class CalledFunction(Strict):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it; cut off where its answer was.")


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | None = Field(None, description="With --reasoning-parser.")
    reasoning_content: str | None = Field(None, description="The older name of reasoning.")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Strict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    weights_version: int | None = None  # of the last token, where weights were changed
    weights_versions: list[tuple[int, int]] | None = None  # from which token on which version
    token_ids: list[int] | None = None


class ChatCompletionResponse(Strict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(Strict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the model's own name; an adapter's folder is told to nobody
    max_model_len: int
    parent: str | None = None  # of an adapter: the model it is over
    adapter: str | None = None  # its digest


class ModelList(Strict):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Strict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Strict):
    prompt: str


class TokenizerInfo(Strict):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None
    special_tokens: dict[str, str]  # by what they are: bos_token, eos_token, ...


class ExpertTravel(Strict):
    moved: int  # bytes from the memory of other ranks
    needed: int  # bytes that had to move, wherever experts go
    read: int  # experts that were read from the checkpoint


class Fault(Strict):
    """The last one, and what came of it."""

    when: str
    part: str  # rank, or engine: its process
    engine: int  # its number in the fleet
    ranks: list[int]
    phase: str
    cause: str
    recovered: bool
    epoch: int  # that began with it
    layout: str
    seconds: dict[str, float]  # by part; empty while it is being dealt with
    experts: ExpertTravel | None  # where they are dealt to ranks whole
    requests: int  # that were open
    replayed_tokens: int


class EngineHealth(Strict):
    engine: int  # its number in the fleet
    state: str  # loading, ready, recovering, leaving or ended
    epoch: int
    running: int
    waiting: int
    kv_tier: dict[str, str] | None  # of each store "ok", or why no KV blocks are written to it now; null: there is none
    kind: str  # prefill or decode, where there are engines of two kinds
    kv_transfer: str | None  # "ok", or how often KV from another engine did not come, by reason; null: one kind


class LayoutChange(Strict):
    when: str  # UTC
    engine: int
    cause: str
    layout: str
    epoch: int
    seconds: dict[str, float]  # by part
    experts: ExpertTravel | None  # where they are dealt to ranks whole


class HealthReport(Strict):
    live: bool
    ready: bool
    progressing: bool
    why: str
    recovering: bool
    epoch: int  # of the engine of now
    engine_restarts: int
    last_fault: Fault | None
    last_layout_change: LayoutChange | None  # that no fault asked for
    prefill_threshold: int | None  # tokens from which on a prompt is a prefill engine's; null: none of both kinds is up
    drafts: str | None  # who drafts
    engines: list[EngineHealth]


class Version(Strict):
    version: str


class ProcessEntry(Strict):
    role: str  # server, engine, worker or spare
    rank: int | None
    coordinates: dict[str, int]
    pid: int
    node: str
    epoch: int | None
    state: str
    resident: int  # bytes
    uptime: float | None  # seconds; null: of another node
    engine: int | None  # its number in the fleet; ranks count in each
    kind: str  # of an engine, where there are two: prefill or decode
    model: str  # whose it is, of a server of several


class ProcessList(Strict):
    model: str
    kind: str  # how ranks are started, and on what they compute; empty until they are
    processes: list[ProcessEntry]


# Reading a request.

# Fields that exist elsewhere in the OpenAI API or in servers like it, and their values that ask for nothing.
# A single `...` accepts every value: the field never changes an answer.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],),  # before those that choose among them: the first cause is named
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "modalities": (["text"],),
    "response_format": ({"type": "text"},), "include_reasoning": (True,), "suffix": ("",), "best_of": (1,),
    "guided_decoding_backend": ("auto", "guidance"), "length_penalty": (1, 1.0), "logits_processors": ([],),
    "documents": ([],),
    **dict.fromkeys((
        "parallel_tool_calls", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "prediction", "spaces_between_special_tokens",
    ), (...,)),
    **dict.fromkeys((
        "echo", "use_beam_search", "early_stopping", "continue_final_message", "add_special_tokens",
    ), (False,)),
    **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs"), ({},)),
    **dict.fromkeys((
        "audio", "moderation", "web_search_options", "reasoning_effort", "verbosity", "thinking_token_budget",
        "chat_template", "structural_tag", "prompt_embeds",
    ), ()),
}  # fmt: skip

# Where a request belongs that brings these.
_ELSEWHERE = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}

_ORDER = {name: place for place, name in enumerate(NEUTRAL)}

# What a field takes, where pydantic's own words about a union would be about its branches.
_RULES = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "input": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    **dict.fromkeys(("stop", "text_1", "text_2", "data_1", "data_2", "queries"), "a string or a list of strings"),
    "logit_bias": "a map from token ids, as strings, to numbers between -100 and 100",
    "tokens": "a list of token ids",
}

M = TypeVar("M", bound=BaseModel)


def object_of(body: bytes) -> dict[str, Any]:
    """`body` as JSON, whose fields aren't checked yet; raises RequestError."""
    if not body.strip():
        raise RequestError("the request has no body; it must be a JSON object", code="invalid_json")
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MAX_BRACKETS:  # each list is an object that all others wait for
        raise RequestError(f"the request's body has {brackets} brackets; at most {MAX_BRACKETS}", code="invalid_value")
    try:
        value = decode(body)
    except UnicodeDecodeError as e:
        at = f" (byte {e.start})" if len(body) <= PIECE else ""
        raise RequestError(f"the request's body is not UTF-8{at}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the request's body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as e:
        if len(body) > PIECE or (b"NaN" not in body and b"Infinity" not in body):
            said = str(e) if len(body) <= PIECE else str(e).partition(" (byte")[0]  # of a piece
            raise RequestError(f"the request's body is not valid JSON: {said}", code="invalid_json") from None
        value = _with_nan(body, e)
    if type(value) is not dict:
        raise RequestError("the request's body must be a JSON object", code="invalid_type")
    return value


def build_likely() -> None:
    """What checks the requests that most likely come first: some 20 ms, for which the event loop would do nothing
    else."""
    for model in (ChatCompletionRequest, CompletionRequest):
        model.model_rebuild()


def parse(model: type[M], body: bytes) -> M:
    """`body` as JSON, checked; raises RequestError naming the field."""
    value = object_of(body)
    _check_sizes(value)
    known = model.model_fields
    options = value.get("stream_options")
    if isinstance(options, dict):
        value["stream_options"] = {name: given for name, given in options.items() if given is not None}
    unknown = [name for name in value if name not in known]
    neutral = {**NEUTRAL, **getattr(model, "neutral", {})} if unknown else {}
    for name in sorted(unknown, key=lambda name: _ORDER.get(name, len(_ORDER))):
        _take_out(value, name, list(known), neutral)
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise _explain(e) from None


def _with_nan(body: bytes, error: Exception) -> Any:
    """JSON has no NaN or Infinity, but some clients write them: read, so that the refusal names the field."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(f"the request's body is not valid JSON: {error}", code="invalid_json") from None


_TEXTS = ("prompt", "input", "text_1", "text_2", "data_1", "data_2", "queries", "documents")
_LONGEST = dict.fromkeys(_TEXTS, MAX_PROMPTS) | {
    "logit_bias": MAX_LIST, "stop": MAX_LIST, "stop_token_ids": MAX_LIST, "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED, "guided_choice": MAX_CHOICES,
}  # fmt: skip


def _check_sizes(value: JsonObject) -> None:
    """Refuse by its length what would take long to look at more closely: the event loop is everyone's."""
    if len(value) > MAX_FIELDS:
        raise RequestError(f"{len(value)} fields; at most {MAX_FIELDS}", code="invalid_value")

    for name, given in value.items():
        limit = _LONGEST.get(name)
        if limit is None or not isinstance(given, (list, dict)) or len(given) <= limit:
            continue
        if name in ("prompt", "input") and (isinstance(given, dict) or type(given[0]) is int):
            continue  # one, as token ids, is bound by the model's length
        raise RequestError(f"{name} has {len(given)} entries; at most {limit}", param=name, code="invalid_value")


def _take_out(value: JsonObject, name: str, known: list[str], neutral: dict[str, tuple[Any, ...]]) -> None:
    """Drop a field that asks for nothing; raise for any other that `known` lacks."""
    given = value.pop(name)
    if given is None:
        return
    if name in neutral:
        if neutral[name] == (...,) or any(_same(given, off) for off in neutral[name]):
            return
        raise RequestError(
            f"{clip(name)} is not supported by this server; leave it out", param=name, code="unsupported_parameter"
        )
    if name in _ELSEWHERE:
        raise RequestError(
            f"unknown field {name!r}: it is one of {_ELSEWHERE[name]}", param=name, code="unknown_parameter"
        )
    near = difflib.get_close_matches(name[:64], known, 1, 0.85)  # less alike would lead elsewhere
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RequestError(f"unknown field {clip(name)!r}{hint}", param=clip(name), code="unknown_parameter")


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _explain(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    field = str(place[0]) if place else ""
    # Names of union branches look like types ("list[str]", "str"); they are no part of the path.
    names = (p for p in place if isinstance(p, int) or (p.isidentifier() and p not in ("str", "int", "float", "bool")))
    path = clip("".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in names).lstrip("."))
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {path!r}", param=path, code="unknown_parameter")
    if first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return RequestError(f"{path} must be an object", param=path, code="invalid_type")
    if field in _RULES:
        return RequestError(f"{field} must be {_RULES[field]}", param=field, code="invalid_type")
    return RequestError(f"{path}: {first['msg']}", param=path or None, code="invalid_value")


def clip(text: str, limit: int = 80) -> str:
    """Text from a request, short enough to be said back."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
