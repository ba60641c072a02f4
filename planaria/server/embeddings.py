"""POST /v1/embeddings, /pooling, /classify, /score, /rerank: texts to vectors and scores, no token drawn.

Each text is a sequence of its own, so that one engine's death costs a request nothing but time. What an answer may have
is bounded before anything runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planaria.errors import RequestError
from planaria.server import vectors
from planaria.server.chat import chat_prompt
from planaria.server.common import encode_json, read
from planaria.server.generation import AT_ONCE, Answer, Generation
from planaria.server.schema import TokenizeRequest
from planaria.server.schema_vectors import (
    ActivatedRequest,
    ClassificationRequest,
    EmbeddingRequest,
    InputRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    VectorRequest,
)
from planaria.server.service import Service
from planaria.server.stream import Choices, Piece, Stream
from planaria.types import PoolingParams
from planaria.wire import EngineFacts

MAX_INPUTS = 2048  # of a request; OpenAI's
MAX_NUMBERS = 1 << 23  # of all vectors of an answer
MAX_PAIRED = 1 << 24  # characters of all pairs of texts
LONG_ANSWER = 1 << 12  # numbers from which an answer is written in a thread

BodyOf = Callable[[list[Stream]], dict[str, Any]]


async def create_embedding(request: Request) -> Response:
    """Embed each input."""
    return await _vectors(request, await read(request, EmbeddingRequest), "embed", "embd", "embedding")


async def create_pooling(request: Request) -> Response:
    """What the model gives for each input: an embedding, or scores of labels."""
    body = await read(request, PoolingRequest)
    if body.task not in (None, "embed", "classify"):
        raise RequestError(
            f"task {body.task!r:.80} is not supported; there are embed and classify", param="task",
            code="unsupported_parameter",
        )  # fmt: skip
    return await _vectors(request, body, body.task or "pool", "pool", "data")


async def _vectors(request: Request, body: EmbeddingRequest, task: str, name: str, field: str) -> Response:
    service: Service = request.app.state.service
    facts = service.admit(body.model, task)
    config, wish = service.config.pooling, body.wish()
    vectors.check_wish(wish, config)
    prompts = await _prompts(service, request, body, facts, wish)
    kind = "embedding" if field == "embedding" else "pooling"

    def tell(streams: list[Stream]) -> dict[str, Any]:
        found = (vectors.vector_of(stream.pooled or b"", config, wish) for stream in streams)
        shown = (vectors.in_base64(v) if body.encoding_format == "base64" else v.tolist() for v in found)
        return {"data": [{"index": i, "object": kind, field: value} for i, value in enumerate(shown)]}

    return await _answer(service, request, body, facts, prompts, name, tell)


async def create_classification(request: Request) -> Response:
    """Of each input the likeliest label, and the probabilities of all."""
    service: Service = request.app.state.service
    body = await read(request, ClassificationRequest)
    facts = service.admit(body.model, "classify")
    config, wish = service.config.pooling, body.wish()
    vectors.check_wish(wish, config)
    prompts = await _prompts(service, request, body, facts, wish)

    def tell(streams: list[Stream]) -> dict[str, Any]:
        found = [vectors.probabilities(stream.pooled or b"", config, wish) for stream in streams]
        return {
            "data": [
                {
                    "index": i, "label": config.labels[int(probs.argmax())], "probs": probs.tolist(),
                    "num_classes": len(probs),
                }
                for i, probs in enumerate(found)
            ]
        }  # fmt: skip

    return await _answer(service, request, body, facts, prompts, "classify", tell)


async def create_score(request: Request) -> Response:
    """How alike two texts are, of each pair."""
    service: Service = request.app.state.service
    body = await read(request, ScoreRequest)
    facts = service.admit(body.model, "score")
    names = [pair for pair in _PAIRS if any(getattr(body, name) is not None for name in pair)]
    if len(names) != 1:
        raise RequestError(
            "give text_1 and text_2 (or data_1 and data_2, or queries and documents)", param="text_1",
            code="missing_required_parameter",
        )  # fmt: skip
    first, second = (getattr(body, name) for name in names[0])
    for name, given in zip(names[0], (first, second), strict=True):
        if given is None:
            raise RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    first, second = ([given] if isinstance(given, str) else given for given in (first, second))
    for name, given in zip(names[0], (first, second), strict=True):
        _check_count(len(given), name)
    prompts, score = await _pairs(service, request, body, facts, first, second, names[0])

    def tell(streams: list[Stream]) -> dict[str, Any]:
        return {"data": [{"index": i, "object": "score", "score": s} for i, s in enumerate(score(streams))]}

    return await _answer(service, request, body, facts, prompts, "score", tell)


_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))


async def rerank(request: Request) -> Response:
    """Documents in the order of how well they answer a query, the best first."""
    service: Service = request.app.state.service
    body = await read(request, RerankRequest)
    facts = service.admit(body.model, "score")
    _check_count(len(body.documents), "documents")
    texts = [_text_of(given, i) for i, given in enumerate(body.documents)]
    names = ("query", "documents")
    prompts, score = await _pairs(service, request, body, facts, [body.query], texts, names, body.max_tokens_per_doc)
    shows, most = body.return_documents is not False, body.top_n or len(texts)

    def tell(streams: list[Stream]) -> dict[str, Any]:
        scores = score(streams)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[:most]
        return {
            "results": [
                {"index": i, "document": {"text": texts[i]} if shows else None, "relevance_score": scores[i]}
                for i in order
            ]
        }

    return await _answer(service, request, body, facts, prompts, "rerank", tell)


# -- what comes in


def _text_of(document: Any, index: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise RequestError(
            f"documents[{index}] must be a string, or an object with a text", param="documents", code="invalid_type"
        )
    return text


def _check_count(count: int, param: str) -> None:
    if not count:
        raise RequestError(f"{param} is an empty list", param=param, code="invalid_value")
    if count > MAX_INPUTS:
        raise RequestError(
            f"{param} has {count} entries; at most {MAX_INPUTS} in one request", param=param, code="invalid_value"
        )


async def _prompts(
    service: Service, request: Request, body: InputRequest, facts: EngineFacts, wish: PoolingParams
) -> list[list[int]]:  # fmt: skip
    """Token ids of each input."""
    if (body.input is None) == (body.messages is None):
        raise RequestError("give either input or messages", param="input", code="missing_required_parameter")
    limit = vectors.kept_tokens(wish, facts)
    if body.messages is not None:
        rendered = TokenizeRequest.model_construct(
            messages=body.messages, add_generation_prompt=bool(body.add_generation_prompt),
            add_special_tokens=body.add_special_tokens, chat_template_kwargs=body.chat_template_kwargs,
        )  # fmt: skip
        ids = await chat_prompt(service, request, rendered, limit=facts.max_model_len if limit is None else None)
        return [ids[:limit]]
    given = [body.input] if isinstance(body.input, str) else body.input or []
    if given and isinstance(given[0], int):
        return [given[:limit]]
    _check_count(len(given), "input")
    width = len(service.config.pooling.labels) or service.config.pooling.width
    if len(given) * width > MAX_NUMBERS:
        raise RequestError(
            f"input has {len(given)} entries of {width} numbers each; at most {MAX_NUMBERS // width} in one request",
            param="input", code="invalid_value",
        )  # fmt: skip
    if isinstance(given[0], list):
        return [ids[:limit] for ids in given]
    texts, special = given, body.add_special_tokens is not False
    tokenizer = service.need_tokenizer("input")
    spell = partial(tokenizer.encode, add_special_tokens=special)
    if limit is not None:
        spell = partial(tokenizer.encode_first, second=None, limit=limit, add_special_tokens=special)
    longest = facts.max_model_len if limit is None else None
    return await service.spell(texts, lambda i: spell(texts[i]), request.receive, limit=longest, param="input")


async def _pairs(
    service: Service, request: Request, body: ActivatedRequest, facts: EngineFacts, first: list[str],
    second: list[str], names: tuple[str, str], most_of_second: int | None = None,
) -> tuple[list[list[int]], Callable[[list[Stream]], list[float]]]:  # fmt: skip
    """What is asked for pairs of texts, and what makes a score of each of what came. most_of_second: tokens."""
    config, wish = service.config.pooling, body.wish()
    vectors.check_wish(wish, config)
    pairs = vectors.pairs_of(first, second, names)
    tokenizer = service.need_tokenizer(names[0])
    limit = vectors.kept_tokens(wish, facts)
    longest = facts.max_model_len if limit is None and not most_of_second else None

    def short(text: str) -> str:
        return tokenizer.first_text(text, most_of_second) if most_of_second else text

    if not config.labels:
        texts = first + second

        def one(i: int) -> list[int]:
            return tokenizer.encode_first(texts[i] if i < len(first) else short(texts[i]), None, limit)

        prompts = await service.spell(texts, one, request.receive, limit=longest, param=names[1])
        return prompts, partial(_cosines, len(first))
    if (length := sum(len(a) + len(b) for a, b in pairs)) > MAX_PAIRED:
        raise RequestError(
            f"all pairs have {length} characters, each with its {names[0]}; at most {MAX_PAIRED}", param=names[1],
            code="invalid_value",
        )  # fmt: skip

    def both(i: int) -> list[int]:
        return tokenizer.encode_first(pairs[i][0], short(pairs[i][1]), limit)

    longer = [a if len(a) > len(b) else b for a, b in pairs]
    prompts = await service.spell(longer, both, request.receive, limit=longest, param=names[1])
    return prompts, lambda streams: [
        float(vectors.probabilities(stream.pooled or b"", config, wish)[0]) for stream in streams
    ]


def _cosines(first: int, streams: list[Stream]) -> list[float]:
    """Of the vectors of the first texts with those of the others."""
    queries, others = streams[:first], streams[first:]
    return [vectors.cosine(queries[i % first].pooled or b"", other.pooled or b"") for i, other in enumerate(others)]


# -- what goes out


async def _answer(
    service: Service, request: Request, body: VectorRequest, facts: EngineFacts, prompts: Sequence[list[int]],
    name: str, tell: BodyOf,
) -> Response:  # fmt: skip
    info, config, adapter = request.scope["planaria"], service.config.pooling, service.adapter(body.model)
    param = {"score": "text_2", "rerank": "documents"}.get(name, "input")
    streams = []
    for index, ids in enumerate(prompts):
        if index % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        submit = vectors.pooling_submit(
            f"{name}-{info.uid}-{index}", ids, config, facts, param=param, priority=body.priority or 0,
            cache_salt=body.cache_salt or "", adapter=adapter,
        )  # fmt: skip
        streams.append(Choices(ids, [submit], None, index))
    generation = Generation(service, info, streams, stream=False)
    generation.writer = VectorWriter(service, f"{name}-{body.request_id or info.uid}", body.model, streams, tell)
    return Answer(generation)


class VectorWriter:
    """The answer, which always comes whole."""

    def __init__(self, service: Service, id: str, model: str | None, streams: list[Choices], tell: BodyOf) -> None:
        self.streams, self.tell = streams, tell
        self.head = {"id": id, "object": "list", "created": int(time.time()), "model": model or service.model_names[0]}
        if id.startswith("rerank"):
            self.head = {"id": id, "model": self.head["model"]}
        self.heavy = len(streams) * service.config.pooling.width > LONG_ANSWER

    def whole(self) -> bytes:
        tokens = sum(stream.prompt_tokens for stream in self.streams)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        found = self.tell([stream.sequences[0] for stream in self.streams])
        return encode_json({**self.head, **found, "usage": usage})

    def event(self, piece: Piece) -> bytes:
        return b""

    def tail(self) -> bytes:
        return b""

    def failed(self, message: str, status: int, code: str) -> bytes:
        return b""
