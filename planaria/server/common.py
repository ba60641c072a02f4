"""What the two generating endpoints share: parameters out of a request, counts and log-probabilities into an answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request

from planaria.errors import RequestError
from planaria.server.detokenise import stop_strings
from planaria.server.failure import DONE, error_body
from planaria.server.inputs import spell_bad_words
from planaria.server.records import version_runs
from planaria.server.schema import GenerationRequest, ResponseFormat, SampledRequest, clip, parse
from planaria.server.service import Service
from planaria.server.stream import Choices, Piece, Stream
from planaria.server.tokenise import Tokenizer
from planaria.types import SamplingParams, StructuredOutputsParams, TokenLogprobs

LONG_WORDS = 200  # characters of stop strings and bad words from which they are worked on in a thread
LONG_BODY = 1 << 14  # bytes from which a body is read, and what its tools ask for is made, in a thread
LOWEST = -9999.0  # said for log-probabilities JSON has no number for

_LISTS = ("bad_words", "stop_token_ids", "allowed_token_ids")
# in a form of the API's own
_OWN = {"truncate_prompt_tokens", "max_tokens", "logprobs", "stop", "logit_bias", "structured_outputs", *_LISTS}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag", "json", "regex")  # of response_format
_SAME = tuple(name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.model_fields.keys() - _OWN)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode


async def read(request: Request, model: type[M]) -> M:
    """The request's body, checked. Raises RequestError.

    Any content type is taken for JSON, except from a browser: there it must be declared, because a page of
    another site can send every other type without the browser asking this server first.
    """
    headers = request.headers
    if "origin" in headers or "sec-fetch-site" in headers:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                f"content type {clip(kind)!r}: from a browser, send application/json",
                code="unsupported_media_type", status=415,
            )  # fmt: skip
    body = await request.body()
    return await by_length(request.app.state.service, request, lambda: parse(model, body))


async def by_length(service: Service, request: Request, work: Callable[[], T]) -> T:
    """`work` that takes the longer the longer a request's body is: in a thread from `LONG_BODY` on."""
    if len(await request.body()) <= LONG_BODY:
        return work()
    return await service.in_thread(work, request.receive)


def sampling_params(
    request: SampledRequest, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """SamplingParams of a request; fields left out or null are those of `defaults`. Raises RequestError."""
    values: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
    for name in _SAME:
        value = getattr(request, name, None)
        if value is not None:
            values[name] = value
    for name in _LISTS:
        value = getattr(request, name)
        if value is not None:
            values[name] = tuple(value)
    stop = request.stop
    if stop is not None:
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    if getattr(request, "stream_options", None) is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options", code="invalid_value")
    return msgspec.structs.replace(defaults, **values)


def output_form(request: GenerationRequest) -> tuple[StructuredOutputsParams | None, str]:
    """What a request wants its answers to be, and the field that says so. Raises RequestError."""
    found: dict[str, StructuredOutputsParams] = {}
    pattern = request.guided_whitespace_pattern
    for name in ("json", "regex", "choice", "grammar"):
        given: Any = getattr(request, f"guided_{name}")
        if given is not None:
            found[f"guided_{name}"] = StructuredOutputsParams(**{name: given}, whitespace_pattern=pattern)
    if pattern is not None and "guided_json" not in found:
        raise RequestError(
            "guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern", code="invalid_value"
        )
    if (own := request.structured_outputs) is not None:
        values = {field.alias or name: getattr(own, name) for name, field in type(own).model_fields.items()}
        given = {name: value for name, value in values.items() if value is not None}
        found["structured_outputs"] = StructuredOutputsParams(**given)
    asked = _response_format(getattr(request, "response_format", None))
    if asked is not None:
        found["response_format"] = asked
    if len(found) > 1:
        names = " and ".join(found)
        raise RequestError(f"{names} exclude each other", param=list(found)[-1], code="invalid_value")
    return next(((form, place) for place, form in found.items()), (None, ""))


def _response_format(given: ResponseFormat | None) -> StructuredOutputsParams | None:
    if given is None or given.type == "text":
        return None
    if given.type in ("json", "regex") or (given.type in _FORMATS and given.value is not None):
        return _hub_format(given)
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if given.type == "structural_tag":
        tag = {"structures": given.structures, "triggers": given.triggers}
        return StructuredOutputsParams(structural_tag=tag)
    if given.type != "json_schema":
        known = ", ".join(_FORMATS)
        raise RequestError(
            f"response_format.type {clip(given.type)!r} is none of {known}", param="response_format",
            code="invalid_value",
        )  # fmt: skip
    schema = given.json_schema.json_schema if given.json_schema is not None else None
    if schema is None:
        raise RequestError(
            "response_format.json_schema.schema is required", param="response_format",
            code="missing_required_parameter",
        )  # fmt: skip
    return StructuredOutputsParams(json=schema)


def _hub_format(given: ResponseFormat) -> StructuredOutputsParams:
    """As Hugging Face's client says it: `value` is what the answer must be."""
    if given.type == "regex" and isinstance(given.value, str):
        return StructuredOutputsParams(regex=given.value)
    if given.type in ("json", "json_object") and isinstance(given.value, dict):
        return StructuredOutputsParams(json=given.value)
    raise RequestError(
        "response_format.value is a schema for type 'json_object' or 'json', and an expression for 'regex'",
        param="response_format", code="missing_required_parameter" if given.value is None else "invalid_value",
    )  # fmt: skip


async def spelled(
    service: Service, params: SamplingParams, request: Request, form: StructuredOutputsParams | None, place: str
) -> SamplingParams:
    """`params` ready for every prompt and choice of the request: what is dear about them is done once, and beside the
    event loop if it is long. form: of its answers, which the field `place` asks for. Raises RequestError."""
    if form is not None:
        params = msgspec.structs.replace(params, structured_outputs=form)
    facts = service.client.facts
    params.verify(facts.vocab_size if facts is not None else None)
    if form is not None:
        params = await service.constrained(params, place, request)

    def work() -> SamplingParams:
        if params.stop:
            stop_strings(params.stop)
        return spell_bad_words(params, service.tokenizer)

    if sum(map(len, params.stop)) + sum(map(len, params.bad_words)) <= LONG_WORDS:
        return work()
    return await service.in_thread(work, request.receive)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, bias in given.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 12):
            raise RequestError(f"logit_bias: {clip(key)!r} is not a token id", param="logit_bias", code="invalid_value")
        found[int(key)] = bias
    return found


def finite(logprob: float) -> float:
    """A log-probability JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST


def truncated(ids: list[int], body: GenerationRequest, max_tokens: int | None, limit: int) -> list[int]:
    """The last tokens of a prompt, as many as the request wants of it. limit: of prompt and output. Raises
    RequestError."""
    count = body.truncate_prompt_tokens
    if count == 0:
        raise RequestError(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens", code="invalid_value"
        )
    if count == -1:
        count = max(1, limit - (max_tokens or 1))
    return ids if count is None else ids[-count:]


class Envelope:
    """What the events and the whole answer of a request have in common: its head, and its token counts as far as asked
    for. hidden: what was generated is not shown and not counted. `plain`: an event of a piece of text alone needs
    nothing but `opening`, the text as JSON and `closing`."""

    def __init__(
        self, service: Service, id: str, kind: str, body: GenerationRequest, prompts: list[Choices], *,
        hidden: bool = False,
    ) -> None:  # fmt: skip
        self.prompts, self.hidden = prompts, hidden
        options = body.stream_options
        self.usage = options is not None and bool(options.include_usage)
        self.continuous = options is not None and bool(options.continuous_usage_stats)
        self.token_ids = bool(body.return_token_ids)
        self.plain = not (self.token_ids or self.continuous or hidden)
        model = body.model or service.model_names[0]
        self.head: dict[str, Any] = {
            "id": id, "object": kind, "created": int(time.time()), "model": model,
            "system_fingerprint": service.fingerprint,
        }  # fmt: skip
        asked = body.kv_transfer_params
        self.transfers = service.transfers if asked is not None and asked.do_remote_decode else None
        self.block_size = service.client.facts.block_size if service.client.facts is not None else 1
        self.started = [False] * sum(len(prompt.sequences) for prompt in prompts)
        self.closing = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null' if self.usage else b"") + b"}\n\n"

    def opening(self, index: int, field: bytes) -> bytes:
        """Of an event of a choice, up to its text. field: what comes before that."""
        return b"data: " + encode_json(self.head)[:-1] + b',"choices":[{"index":%d,' % index + field

    def value(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Of an event."""
        value = {**self.head, "choices": choices}
        if self.continuous:
            value["usage"] = self.counts()
        elif self.usage:
            value["usage"] = None
        return value

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        value = {**self.head, "choices": choices, "usage": self.counts()}
        if self.transfers is not None:
            value["kv_transfer_params"] = self.transfers.answer(self.prompts[0])
        return value

    def tail(self, counted: bool = False) -> bytes:
        """Events after the last piece of all choices. counted: token counts are among them unasked."""
        return event_of(self.whole([])) + DONE if self.usage or counted else DONE

    def failed(self, message: str, status: int, code: str) -> bytes:
        """The last events of a stream that ends with an error."""
        return event_of(error_body(message, status, None, code)) + DONE

    def counts(self) -> dict[str, Any]:
        return usage_of(self.prompts, hidden=self.hidden)


def versions_of(stream: Stream, piece: Piece | None = None) -> dict[str, Any]:
    """Fields of a choice whose tokens are of weights that were changed while the server ran; none where none were.
    piece: of its event; what ends a stream says all."""
    if not stream.versions:
        return {}
    if piece is None or piece.finish is not None:
        runs = version_runs(stream.versions)
        return {"weights_version": runs[-1][1], "weights_versions": runs}
    if not piece.tokens:
        return {}
    runs = [run for run in version_runs(stream.versions, piece.first) if run[0] < piece.first + len(piece.tokens)]
    return {"weights_version": piece.weights, **({"weights_versions": runs} if len(runs) > 1 else {})}


def event_of(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


def usage_of(streams: list[Choices], *, hidden: bool = False) -> dict[str, Any]:
    """Token counts of a request. `hidden`: what was generated is not shown and not counted."""
    prompt = sum(s.prompt_tokens for s in streams)
    completion = 0 if hidden else sum(s.completion_tokens for s in streams)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in streams)},
    }


def prompt_logprobs_json(
    positions: list[TokenLogprobs | None] | None, tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None] | None:
    """Of each prompt position: from token ids, as strings, to logprob, rank (from 1) and text. The first is null."""
    if positions is None:
        return None
    return [None if p is None else _position(p, tokenizer) for p in positions]


def _position(position: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(token, tokenizer)}
        for token, logprob, rank in position.entries()
    }


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A token by itself; without a tokenizer its id stands for it."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)
