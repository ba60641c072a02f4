"""POST /v1/chat/completions, and the prompt of a conversation (also for /tokenize)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planaria.errors import RequestError
from planaria.parsers.reading import Reading
from planaria.server.common import (
    Envelope,
    by_length,
    encode_json,
    event_of,
    finite,
    output_form,
    prompt_logprobs_json,
    read,
    sampling_params,
    spelled,
    token_text,
    truncated,
    versions_of,
)
from planaria.server.generation import Answer, Generation
from planaria.server.inputs import check_logprobs, room, submissions
from planaria.server.messages import check_messages
from planaria.server.schema import MAX_FIELDS, ChatCompletionRequest, TokenizeRequest
from planaria.server.service import Service
from planaria.server.stream import Choices, Piece
from planaria.server.tokenise import LONG_TEXT, Tokenizer, check_variables
from planaria.server.tools import (
    Tools,
    call_form,
    check_tools,
    has_form,
    reading_of,
    shown_marks,
    thinking_first,
    tool_forms,
    with_calls,
)
from planaria.structured.check import TOO_MUCH
from planaria.types import SamplingParams, TokenLogprobs
from planaria.wire import EngineFacts

NAMED = 64  # tools among which the one is looked for whose schema is wrong


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read(request, ChatCompletionRequest)
    facts = service.admit(body.model, "generate")
    stream, reading = await open_chat(service, request, body, facts)
    info = request.scope["planaria"]
    generation = Generation(service, info, [stream], stream=bool(body.stream))
    if reading is None:
        generation.writer = ChatWriter(service, info.uid, body, stream)
    else:
        from planaria.server.chat_calls import ReadChatWriter

        generation.writer = ReadChatWriter(service, info.uid, body, stream, reading)
    return Answer(generation)


async def open_chat(
    service: Service, request: Request, body: ChatCompletionRequest, facts: EngineFacts, *, kind: str = "chatcmpl",
    fits: bool = False,
) -> tuple[Choices, Reading | None]:  # fmt: skip
    """What an engine is asked for a conversation, and how the answer is read. kind: of the request's id; fits: where
    there is no room for max_tokens, they are as many as there is room for. Raises RequestError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, service.config.sampling_defaults, max_tokens=max_tokens, logprobs=logprobs)
    tokenizer = service.need_tokenizer("messages")
    params = await spelled(service, params, request, *output_form(body))
    tools = await tools_of(service, request, body)
    variables = _variables(body, trusted=service.config.trust_request_chat_template)
    if tools is not None and tools.shown is not None:
        variables["tools"] = tools.shown
    ids = await chat_prompt(
        service,
        request,
        body,
        variables=variables,
        limit=facts.max_model_len if body.truncate_prompt_tokens is None else None,
    )
    template = body.chat_template or tokenizer.chat_template
    reading = reading_of(tools, service.config.parsers, template, tokenizer, ids)
    params = await held_form(service, request, params, tools, reading, template)
    ids = truncated(ids, body, max_tokens, facts.max_model_len)
    check_logprobs([len(ids)], params)
    if fits and len(ids) + (max_tokens or 0) > room(facts):
        params = msgspec.structs.replace(params, max_tokens=None)
    submits = submissions(
        f"{kind}-{request.scope['planaria'].uid}", ids, params, facts,
        eos_ids=tokenizer.eos_ids, tokenizer=tokenizer, seed=service.next_seed(),
        priority=body.priority or 0, cache_salt=body.cache_salt or "", adapter=service.adapter(body.model),
        param="messages",
    )  # fmt: skip
    submits = service.transfers.asked(body, submits)
    return Choices(ids, submits, tokenizer if reading is None else tokenizer.showing(shown_marks(reading))), reading


async def held_form(
    service: Service, request: Request, params: SamplingParams, tools: Tools | None, reading: Reading | None,
    template: str | None,
) -> SamplingParams:  # fmt: skip
    """`params` with what an answer is held to that has to make a call, or may in place of another form, or may begin
    with reasoning. Raises RequestError."""
    tokenizer = service.need_tokenizer("messages")
    if has_form(tools, reading, params):
        assert tools is not None and reading is not None
        form = await by_length(service, request, lambda: call_form(tools, reading, template, tokenizer))
        held = msgspec.structs.replace(params, structured_outputs=form)
        params = with_calls(params, (await _constrained(service, held, tools, request)).grammar)
    return thinking_first(params, reading, tokenizer)


async def _constrained(service: Service, params: SamplingParams, tools: Tools, request: Request) -> SamplingParams:
    """`params` with the grammar of the calls that must be made. Raises RequestError: of the tool whose schema is wrong,
    if it is one of the first."""
    try:
        return await service.constrained(params, "tools", request)
    except RequestError as e:
        if e.status == 400 and TOO_MUCH not in e.message:
            for place, form in islice(tool_forms(tools), NAMED):
                await service.constrained(msgspec.structs.replace(params, structured_outputs=form), place, request)
        raise


async def tools_of(service: Service, request: Request, body: ChatCompletionRequest) -> Tools | None:
    """What a request says of tools, checked; None: nothing. Raises RequestError."""
    if body.tools is None and body.tool_choice is None:
        return None
    return await by_length(
        service, request, lambda: check_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    )


def _variables(body: ChatCompletionRequest, *, trusted: bool) -> dict[str, Any]:
    """What of the request is for the chat template, but `chat_template_kwargs`. Raises RequestError."""
    if body.chat_template is not None and not trusted:
        raise RequestError(
            "chat_template is taken by servers with --trust-request-chat-template; this one has its model's",
            param="chat_template", code="unsupported_parameter",
        )  # fmt: skip
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message",
            code="invalid_value",
        )  # fmt: skip
    given = {
        "chat_template": body.chat_template, "continue_final_message": body.continue_final_message,
        "reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


async def chat_prompt(
    service: Service,
    request: Request,
    body: ChatCompletionRequest | TokenizeRequest,
    *,
    variables: dict[str, Any] | None = None,
    limit: int | None = None,
) -> list[int]:
    """Token ids of a conversation in the model's chat format. variables: of the template, after those of
    `chat_template_kwargs`.

    Raises RequestError where the template refuses it, or where it can't fit in `limit` tokens.
    """
    tokenizer = service.need_tokenizer("messages")
    kwargs = body.chat_template_kwargs or {}
    if len(kwargs) > MAX_FIELDS:
        raise RequestError(
            f"chat_template_kwargs has {len(kwargs)} entries; at most {MAX_FIELDS}",
            param="chat_template_kwargs", code="invalid_value",
        )  # fmt: skip
    check_variables(kwargs)

    def render() -> list[int]:
        begins = body.add_generation_prompt is not False
        text = tokenizer.apply_chat_template(body.messages, begins, **{**(variables or {}), **kwargs})
        if len(text) > LONG_TEXT:
            service.check_length(text, limit, "messages")
        return tokenizer.encode(text, bool(body.add_special_tokens))

    if len(await request.body()) <= LONG_TEXT:
        return render()
    return await service.in_thread(render, request.receive)


class ChatWriter:
    """chat.completion and chat.completion.chunk objects."""

    def __init__(self, service: Service, uid: str, body: ChatCompletionRequest, stream: Choices) -> None:
        self.tokenizer, self.stream = service.tokenizer, stream
        self.names = None if body.return_tokens_as_token_ids else service.tokenizer  # what tokens are called by
        self.echo = ""
        if body.echo and (last := check_messages(body.messages[-1:])[0])["role"] == "assistant":
            self.echo = last["content"]
        self.logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self.prompt_logprobs = body.prompt_logprobs
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        uid = body.request_id or uid
        self.envelope = envelope = Envelope(service, f"chatcmpl-{uid}", kind, body, [stream])
        self.tail, self.failed = envelope.tail, envelope.failed
        self.openings = [envelope.opening(i, b'"delta":{"content":') for i in range(len(stream.sequences))]
        self.closing, self.plain = b"}" + envelope.closing, envelope.plain

    @property
    def heavy(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None

    def event(self, piece: Piece) -> bytes | Callable[[], bytes]:
        if self.is_long(piece):
            self.envelope.started[0] = True
            return lambda: self._role(0) + self._event(piece, b"")
        return self.event_now(piece)

    def is_long(self, piece: Piece) -> bool:
        """It brings the prompt's log-probabilities."""
        return piece.choice == 0 and self.prompt_logprobs is not None and not self.envelope.started[0]

    def event_now(self, piece: Piece) -> bytes:
        index = piece.choice
        opening = b""
        if not self.envelope.started[index]:
            self.envelope.started[index] = True
            opening = self._role(index)
        return self._event(piece, opening)

    def _event(self, piece: Piece, opening: bytes) -> bytes:
        index = piece.choice
        changed = self.stream.sequences[index].versions
        if self.plain and piece.finish is None and piece.logprobs is None and not changed:
            return opening + self.openings[index] + encode_json(piece.text) + self.closing
        return opening + event_of(self.envelope.value([self._choice(piece, {"content": piece.text})]))

    def _choice(self, piece: Piece, delta: dict[str, Any]) -> dict[str, Any]:
        """Of an event, with all that a piece has besides its text."""
        choice: dict[str, Any] = {"index": piece.choice, "delta": delta, "logprobs": None}
        if piece.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.logprobs)
        choice["finish_reason"] = piece.finish
        if piece.finish is not None:
            choice["stop_reason"] = piece.stop_reason
        choice |= versions_of(self.stream.sequences[piece.choice], piece)
        if self.envelope.token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _role(self, index: int) -> bytes:
        choice = {
            "index": index, "delta": {"role": "assistant", "content": self.echo}, "logprobs": None,
            "finish_reason": None,
        }  # fmt: skip
        value = self.envelope.value([choice])
        if index == 0:
            self._prompt_part(value)
        return event_of(value)

    def _prompt_part(self, value: dict[str, Any]) -> None:
        """What is said of the prompt: once, by the first choice."""
        if self.envelope.token_ids:
            value["prompt_token_ids"] = self.stream.prompt
        if self.prompt_logprobs is not None:
            positions = self.stream.sequences[0].prompt_logprobs
            value["prompt_logprobs"] = prompt_logprobs_json(positions, self.tokenizer)

    def whole(self) -> bytes:
        choices = []
        for sequence in self.stream.sequences:
            message, finish = self.message(sequence.choice, sequence.text)
            choice: dict[str, Any] = {
                "index": sequence.choice,
                "message": message,
                "logprobs": self._logprobs(sequence.logprobs) if sequence.logprobs is not None else None,
                "finish_reason": finish,
                "stop_reason": sequence.stop_reason,
            }
            if self.envelope.token_ids:
                choice["token_ids"] = sequence.tokens
            choices.append(choice | versions_of(sequence))
        value = self.envelope.whole(choices)
        self._prompt_part(value)
        return encode_json(value)

    def message(self, index: int, text: str) -> tuple[dict[str, Any], str | None]:
        """A choice's message, and why it ended."""
        said = {"role": "assistant", "content": self.echo + text, "refusal": None}
        return said, self.stream.sequences[index].finish

    def _logprobs(self, positions: list[TokenLogprobs]) -> dict[str, Any]:
        tokenizer, names = self.tokenizer, self.names

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {
                "token": token_text(token, names), "logprob": finite(logprob), "bytes": _bytes(token, tokenizer),
            }  # fmt: skip

        return {
            "content": [
                entry(p.token, p.logprob) | {"top_logprobs": [entry(t, v) for t, v in p.top[: self.logprobs]]}
                for p in positions
            ]
        }


def _bytes(token: int, tokenizer: Tokenizer | None) -> list[int] | None:
    return list(tokenizer.token_bytes(token)) if tokenizer is not None else None
