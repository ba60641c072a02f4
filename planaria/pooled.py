"""For llm.py: texts to vectors and scores, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from planaria.config.options import EngineConfig, PoolingConfig
from planaria.errors import RequestError
from planaria.prompts import LoRARequest, Prompt, content_of, salt_of
from planaria.server import vectors
from planaria.server.stream import Choices, Stream
from planaria.server.tokenise import Tokenizer
from planaria.types import PoolingParams, check_types
from planaria.wire import EngineFacts, Submit

T = TypeVar("T")
Bar = bool | Callable[..., Any]
Adapted = LoRARequest | Sequence[LoRARequest | None] | None
Prompted = tuple[list[int], str, str]  # token ids, salt, adapter
OpenedStreams = list[tuple[str, Choices, list[Submit]]]


class VectorEngine(Protocol):
    """What is needed here of an `LLM`."""

    config: EngineConfig
    facts: EngineFacts
    tokenizer: Tokenizer | None

    def _next_id(self) -> str: ...

    def _adapters(self, given: Adapted, count: int) -> list[str]: ...

    def _encode(self, prompt: Prompt) -> list[int]: ...

    def _run(self, opened: OpenedStreams, use_tqdm: Bar) -> None: ...


@dataclass
class PoolingOutput:
    """data: a NumPy array of float32."""

    data: Any


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """In the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class PoolingRequestOutput(Generic[T]):
    """One text (of `score`: a pair), and what came of it."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def wish_of(params: PoolingParams | None, truncate_prompt_tokens: int | None) -> PoolingParams:
    """As it was asked for. Raises RequestError."""
    wish = msgspec.structs.replace(params or PoolingParams())
    if truncate_prompt_tokens is not None:
        wish.truncate_prompt_tokens = truncate_prompt_tokens
    check_types(wish)
    return wish


def run(
    llm: VectorEngine, task: str, prompts: Sequence[Prompt], wish: PoolingParams, use_tqdm: Bar, adapted: Adapted
) -> list[Stream]:  # fmt: skip
    """Each prompt's vector, as it comes from the engine. Raises RequestError, EngineDead."""
    config, facts, tokenizer = llm.config.pooling, llm.facts, llm.tokenizer
    vectors.need_task(config, task)
    vectors.check_wish(wish, config)
    limit = vectors.kept_tokens(wish, facts)
    opened: list[Prompted] = []
    for prompt, adapter in zip(prompts, llm._adapters(adapted, len(prompts)), strict=True):
        content = content_of(prompt)
        if limit is not None and isinstance(content, str) and tokenizer is not None:
            ids = tokenizer.encode_first(content, None, limit)
        else:
            ids = llm._encode(prompt)[:limit]
        opened.append((ids, salt_of(prompt), adapter))
    return _answered(llm, opened, use_tqdm)


def embedded(stream: Stream, config: PoolingConfig, wish: PoolingParams) -> EmbeddingRequestOutput:
    return _output(stream, EmbeddingOutput(vectors.embedding(stream.pooled or b"", config, wish).tolist()))


def classified(stream: Stream, config: PoolingConfig, wish: PoolingParams) -> ClassificationRequestOutput:
    return _output(stream, ClassificationOutput(vectors.probabilities(stream.pooled or b"", config, wish).tolist()))


def encoded(stream: Stream, config: PoolingConfig, wish: PoolingParams) -> PoolingRequestOutput[PoolingOutput]:
    return _output(stream, PoolingOutput(vectors.vector_of(stream.pooled or b"", config, wish)))


def _output(stream: Stream, outputs: T) -> PoolingRequestOutput[T]:
    return PoolingRequestOutput(stream.id, outputs, stream.submit.prompt, stream.num_cached)


def score(
    llm: VectorEngine, first: Sequence[Any], second: Sequence[Any], wish: PoolingParams, use_tqdm: Bar,
    adapted: LoRARequest | None,
) -> list[ScoringRequestOutput]:  # fmt: skip
    """Raises RequestError, EngineDead."""
    config, names = llm.config.pooling, ("data_1", "data_2")
    vectors.need_task(config, "score")
    pairs = vectors.pairs_of(list(first), list(second), names)
    if not config.labels:
        queries = run(llm, "score", first, wish, use_tqdm, adapted)
        found = run(llm, "score", second, wish, use_tqdm, adapted)
        both = list(zip(queries * (len(found) if len(queries) == 1 else 1), found, strict=True))
        return [
            PoolingRequestOutput(
                b.id, ScoringOutput(vectors.cosine(a.pooled or b"", b.pooled or b"")),
                [*a.submit.prompt, *b.submit.prompt], a.num_cached + b.num_cached,
            )
            for a, b in both
        ]  # fmt: skip
    vectors.check_wish(wish, config)
    tokenizer = vectors.pair_tokenizer(llm.tokenizer, "data_1")
    limit = vectors.kept_tokens(wish, llm.facts)
    adapters = llm._adapters(adapted, len(pairs))
    asked = [(tokenizer.encode_first(a, b, limit), "", own) for (a, b), own in zip(pairs, adapters, strict=True)]
    return [
        _output(stream, ScoringOutput(float(vectors.probabilities(stream.pooled or b"", config, wish)[0])))
        for stream in _answered(llm, asked, use_tqdm)
    ]


def _answered(llm: VectorEngine, asked: list[Prompted], use_tqdm: Bar) -> list[Stream]:
    opened = []
    for ids, salt, adapter in asked:
        id = llm._next_id()
        submit = vectors.pooling_submit(
            f"{id}-0", ids, llm.config.pooling, llm.facts, param="prompt", cache_salt=salt, adapter=adapter
        )
        opened.append((id, Choices(ids, [submit], None), [submit]))
    llm._run(opened, use_tqdm)
    streams = [choices.sequences[0] for _, choices, _ in opened]
    for stream in streams:
        if stream.pooled is None:
            raise RequestError(stream.error or "the engine gave no vector", code="engine_error", status=500)
    return streams
