"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planaria.errors import RequestError
from planaria.server.common import (
    Envelope,
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
from planaria.server.detokenise import text_offsets
from planaria.server.generation import AT_ONCE, Answer, Generation
from planaria.server.inputs import MAX_REPEATED, check_logprobs, submissions
from planaria.server.schema import CompletionRequest
from planaria.server.service import Service
from planaria.server.stream import Choices, Piece
from planaria.server.tokenise import LONG_TEXT, Tokenizer
from planaria.types import TokenLogprobs


async def create_completion(request: Request) -> Response:
    """Continue each prompt. Choice p x n + i is the i-th of prompt p."""
    service: Service = request.app.state.service
    body = await read(request, CompletionRequest)
    facts = service.admit(body.model, "generate")
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"best_of ({body.best_of}) other than n ({n}) is not supported",
            param="best_of", code="unsupported_parameter",
        )  # fmt: skip
    scoring = body.max_tokens == 0
    if scoring and not (body.echo or body.prompt_logprobs is not None):
        raise RequestError(
            "max_tokens must be at least 1 (0 only with echo or prompt_logprobs)",
            param="max_tokens", code="invalid_value",
        )  # fmt: skip
    max_tokens = 16 if body.max_tokens is None else max(body.max_tokens, 1)
    params = sampling_params(body, service.config.sampling_defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    params = await spelled(service, params, request, *output_form(body))
    prompts = await _prompts(service, request, body, facts.max_model_len)
    if body.truncate_prompt_tokens is not None:
        kept = [truncated(own, body, max_tokens, facts.max_model_len) for own, _ in prompts]
        prompts = [(cut, text if cut == own else None) for cut, (own, text) in zip(kept, prompts, strict=True)]
    sizes = [len(ids) for ids, _ in prompts]
    check_logprobs(sizes, params)
    if (body.echo or body.return_token_ids) and sum(sizes) * n > MAX_REPEATED:
        raise RequestError(
            f"echo and return_token_ids repeat prompts for each choice: {sum(sizes)} tokens x n {n}; at most "
            f"{MAX_REPEATED}", param="n", code="invalid_value",
        )  # fmt: skip
    if len(prompts) * n > service.config.max_sequences:
        raise RequestError(
            f"{len(prompts)} prompts x n {n} are {len(prompts) * n} sequences; "
            f"at most {service.config.max_sequences} in one request",
            param="n" if n > len(prompts) else "prompt", code="invalid_value",
        )  # fmt: skip
    info = request.scope["planaria"]
    tokenizer = service.tokenizer
    eos = tokenizer.eos_ids if tokenizer is not None else service.config.eos_ids
    streams = []
    for index, (ids, _) in enumerate(prompts):
        if index % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        submits = submissions(
            f"cmpl-{info.uid}-{index}", ids, params, facts,
            eos_ids=eos, tokenizer=tokenizer, seed=service.next_seed(), priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            adapter=service.adapter(body.model),
        )  # fmt: skip
        submits = service.transfers.asked(body, submits, len(prompts))
        streams.append(Choices(ids, submits, tokenizer, index * n))
    generation = Generation(service, info, streams, stream=bool(body.stream))
    echoes = [_echo_text(ids, text, tokenizer) for ids, text in prompts] if body.echo else None
    generation.writer = CompletionWriter(service, info.uid, body, streams, echoes, scoring)
    return Answer(generation)


async def _prompts(
    service: Service, request: Request, body: CompletionRequest, limit: int
) -> list[tuple[list[int], str | None]]:
    """Token ids of each prompt, and its text where that was given."""
    prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not prompt:
        raise RequestError("prompt is an empty list", param="prompt", code="invalid_value")
    if len(prompt) > service.config.max_sequences and not isinstance(prompt[0], int):
        raise RequestError(
            f"prompt has {len(prompt)} entries; at most {service.config.max_sequences} in one request",
            param="prompt", code="invalid_value",
        )  # fmt: skip
    first = prompt[0]
    if isinstance(first, int):
        return [(cast("list[int]", prompt), None)]
    if isinstance(first, list):
        return [(ids, None) for ids in cast("list[list[int]]", prompt)]
    texts = cast("list[str]", prompt)
    longest = limit if body.truncate_prompt_tokens is None else None
    batch = await service.encode(texts, body.add_special_tokens is not False, request.receive, limit=longest)
    return list(zip(batch, texts, strict=True))


class CompletionWriter:
    """text_completion objects. `echoes`: the prompts' texts, if they are to come first. `scoring`: show no output."""

    def __init__(
        self,
        service: Service,
        uid: str,
        body: CompletionRequest,
        streams: list[Choices],
        echoes: list[str] | None,
        scoring: bool,
    ) -> None:
        self.tokenizer, self.streams, self.echoes, self.scoring = service.tokenizer, streams, echoes, scoring
        self.names = None if body.return_tokens_as_token_ids else service.tokenizer  # what tokens are called by
        self.logprobs, self.prompt_logprobs = body.logprobs, body.prompt_logprobs
        uid = body.request_id or uid
        self.envelope = envelope = Envelope(service, f"cmpl-{uid}", "text_completion", body, streams, hidden=scoring)
        self.token_ids, self.started, self.failed = envelope.token_ids, envelope.started, envelope.failed
        self.n = body.n or 1
        self.sequences = [sequence for stream in streams for sequence in stream.sequences]
        self.openings = [envelope.opening(i, b'"text":') for i in range(len(self.started))]
        repeated = sum(stream.prompt_tokens for stream in streams) * self.n if echoes or self.token_ids else 0
        self.heavy = self.logprobs is not None or self.prompt_logprobs is not None or repeated > LONG_TEXT
        # Of each prompt, pieces of other choices that came before its log-probabilities, which the first choice brings.
        scored = self.prompt_logprobs is not None or (echoes is not None and self.logprobs is not None)
        self.held: dict[int, list[Piece]] | None = {} if scored else None
        self.plain, self.closing = envelope.plain and not scored and self.logprobs is None, envelope.closing
        self.written: dict[int, msgspec.Raw] = {}  # by stream

    def event(self, piece: Piece) -> bytes | Callable[[], bytes]:
        index = piece.choice
        if self.plain and piece.finish is None and self.started[index] and not self.sequences[index].versions:
            return self.openings[index] + encode_json(piece.text) + self.closing
        if self.held is None:
            event = self._event(piece)
            return event if isinstance(event, bytes) else event()
        prompt = index // self.n
        first = self.streams[prompt].sequences[0]
        if first.prompt_logprobs is None and first.finish is None:
            self.held.setdefault(prompt, []).append(piece)
            return b""
        events = [self._event(p) for p in (*self.held.pop(prompt, ()), piece)]
        return lambda: b"".join([event if isinstance(event, bytes) else event() for event in events])

    def _event(self, piece: Piece) -> bytes | Callable[[], bytes]:
        """The event of a piece, or what writes it; asked for in order."""
        index = piece.choice
        sequence = self.sequences[index]
        choice: dict[str, Any] = {"index": index, "text": piece.text, "logprobs": None}
        if self.scoring:
            choice["text"] = ""
        elif piece.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.logprobs, piece.offsets or [], self._base(index))
        if self.token_ids:
            choice["token_ids"] = [] if self.scoring else piece.tokens
        begins = not self.started[index]
        self.started[index] = True
        choice["finish_reason"] = piece.finish
        if piece.finish is not None:
            choice["stop_reason"] = piece.stop_reason
            if self.scoring:
                choice["finish_reason"], choice["stop_reason"] = "length", None
        choice |= versions_of(sequence, piece)
        value = self.envelope.value([choice])

        def write() -> bytes:
            if begins:
                self._begin(choice, self.streams[index // self.n])
            return event_of(value)

        return write

    def tail(self) -> bytes:
        return self.envelope.tail(self.envelope.continuous)

    def whole(self) -> bytes:
        choices = []
        for stream in self.streams:
            for sequence in stream.sequences:
                choice: dict[str, Any] = {
                    "index": sequence.choice,
                    "text": "" if self.scoring else sequence.text,
                    "logprobs": None,
                    "finish_reason": "length" if self.scoring else sequence.finish,
                    "stop_reason": None if self.scoring else sequence.stop_reason,
                }
                if self.logprobs is not None and sequence.logprobs is not None and not self.scoring:
                    base = self._base(sequence.choice)
                    choice["logprobs"] = self._logprobs(sequence.logprobs, sequence.offsets, base)
                if self.token_ids:
                    choice["token_ids"] = [] if self.scoring else sequence.tokens
                self._begin(choice, stream)
                choices.append(choice | versions_of(sequence))
        return encode_json(self.envelope.whole(choices))

    def _base(self, index: int) -> int:
        return len(self.echoes[index // self.n]) if self.echoes is not None else 0

    def _begin(self, choice: dict[str, Any], stream: Choices) -> None:
        """What comes before the output: the prompt's text, log-probabilities and ids, as far as asked for."""
        positions = stream.sequences[0].prompt_logprobs
        if self.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_json(stream)
        if self.token_ids:
            choice["prompt_token_ids"] = stream.prompt
        if self.echoes is None:
            return
        text = self.echoes[choice["index"] // self.n]
        choice["text"] = text + choice["text"]
        if self.logprobs is None or positions is None:
            return
        prompt, rest = self._prompt_part(stream, text), choice["logprobs"]
        choice["logprobs"] = {k: v + rest[k] for k, v in prompt.items()} if rest is not None else prompt

    def _prompt_json(self, stream: Choices) -> msgspec.Raw:
        """Its `prompt_logprobs`, written once for all choices."""
        known = self.written.get(id(stream))
        if known is not None:
            return known
        positions = _cut(stream.sequences[0].prompt_logprobs, self.prompt_logprobs or 0)
        json = self.written[id(stream)] = msgspec.Raw(encode_json(prompt_logprobs_json(positions, self.tokenizer)))
        return json

    def _prompt_part(self, stream: Choices, text: str) -> dict[str, list[Any]]:
        """Its `logprobs` as of an output, for echo."""
        positions = _cut(stream.sequences[0].prompt_logprobs, self.logprobs or 0) or []
        texts = [token_text(token, self.names) for token in stream.prompt]
        offsets = text_offsets(self.tokenizer, stream.prompt, text) if self.tokenizer is not None else [0] * len(texts)
        return self._logprobs(positions, offsets, 0, texts)

    def _logprobs(
        self,
        positions: list[TokenLogprobs] | list[TokenLogprobs | None],
        offsets: list[int],
        base: int,
        texts: list[str] | None = None,
    ) -> dict[str, list[Any]]:
        tokens: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for i, position in enumerate(positions):
            if position is None:
                tokens.append(texts[i] if texts is not None else "")
                own.append(None)
                top.append(None)
                continue
            text = token_text(position.token, self.names)
            tokens.append(text)
            own.append(finite(position.logprob))
            likeliest: dict[str, float] = {}
            # Two tokens may look the same (parts of characters): the likelier one stands.
            for token, logprob in position.top[: self.logprobs]:
                likeliest.setdefault(token_text(token, self.names), finite(logprob))
            likeliest.setdefault(text, finite(position.logprob))
            top.append(likeliest)
        return {
            "tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": [base + o for o in offsets],
        }  # fmt: skip


def _cut(positions: list[TokenLogprobs | None] | None, top: int) -> list[TokenLogprobs | None] | None:
    """No more alternatives than asked for: echo may have needed more of them than prompt_logprobs, or the reverse."""
    if positions is None:
        return None
    return [p if p is None else TokenLogprobs(p.token, p.logprob, p.rank, p.top[:top]) for p in positions]


def _echo_text(ids: list[int], text: str | None, tokenizer: Tokenizer | None) -> str:
    """A prompt as text: what was given, or what its tokens say."""
    if text is not None:
        return text
    return tokenizer.decode(ids, skip_special_tokens=False) if tokenizer is not None else ""
