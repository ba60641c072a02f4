"""Requests and answers of embeddings, classification, scores and reranking, as pydantic models: OpenAI's, and vLLM's
where OpenAI has none. The rules for fields are those of `schema`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from planaria.server.schema import MAX_SALT, JsonObject, Messages, Prompts, Strict
from planaria.types import PoolingParams

OFF: dict[str, tuple[Any, ...]] = {"mm_processor_kwargs": ({},), "user": (...,)}
Texts = Annotated[str | list[str], Field(description="A text, or a list of them.")]


class VectorRequest(Strict):
    """What all of these have in common. `null` always means the default."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = OFF

    model: str | None = Field(None, description="One of /v1/models; left out: the first of them.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=2**31, description="Only so many first tokens of a text; -1: as many as the model takes."
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower runs first under that policy.")
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT, description="As of a completion.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="Part of the answer's id.")

    def wish(self) -> PoolingParams:
        names = [name for name in PoolingParams.__struct_fields__ if name in type(self).model_fields]
        return PoolingParams(**{name: getattr(self, name) for name in names})


class InputRequest(VectorRequest):
    """Either `input` or `messages`."""

    input: Prompts | None = Field(None, description="Text, token ids, or a list of either.", examples=["A text"])
    messages: Messages = None
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its own; left out: true for an input, false for messages."
    )
    add_generation_prompt: bool | None = Field(None, description="For messages; false if left out.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further variables of the chat template.")


class EmbeddingRequest(InputRequest):
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: of float32, little-endian.")
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="Only so many first numbers, of models that were trained for it."
    )
    normalize: bool | None = Field(None, description="To length 1; left out: as the model has it.")


class ActivatedRequest(VectorRequest):
    activation: bool | None = Field(None, description="false: scores as they are, not as probabilities.")
    use_activation: bool | None = Field(None, description="Another name of activation.")
    softmax: bool | None = Field(None, description="Another name of activation.")


class PoolingRequest(EmbeddingRequest, ActivatedRequest):
    task: str | None = Field(
        None, description="embed or classify; left out: what the model does.",
        json_schema_extra={"enum": ["embed", "classify", None]},
    )  # fmt: skip


class ClassificationRequest(InputRequest, ActivatedRequest):
    pass


class ScoreRequest(ActivatedRequest):
    """One text with each of the others, or each with its own. `data_1`, `data_2` and `queries`, `documents` are other
    names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


Documents = Annotated[
    list[Any],
    WithJsonSchema({
        "type": "array", "minItems": 1,
        "items": {"anyOf": [
            {"type": "string"},
            {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
        ]},
    }),
]  # fmt: skip


class RerankRequest(ActivatedRequest):
    query: str
    documents: Documents = Field(description="Texts, or objects with a `text`.")
    top_n: int | None = Field(None, ge=0, lt=2**31, description="Only so many of the best; 0: all.")
    return_documents: bool | None = Field(None, description="Say each document's text; true if left out.")
    max_tokens_per_doc: int | None = Field(
        None, ge=0, lt=2**31, description="Only so many first tokens of a document; 0: all."
    )


# Answers. Documentation, and what the tests hold answers against.


class VectorUsage(Strict):
    prompt_tokens: int
    total_tokens: int


class VectorResponse(Strict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: VectorUsage


class EmbeddingResponse(VectorResponse):
    class Embedding(Strict):
        index: int
        object: Literal["embedding"]
        embedding: list[float] | str

    data: list[Embedding]


class PoolingResponse(VectorResponse):
    class Pooled(Strict):
        index: int
        object: Literal["pooling"]
        data: list[float] | str

    data: list[Pooled]


class ClassificationResponse(VectorResponse):
    class Classified(Strict):
        index: int
        label: str
        probs: list[float]
        num_classes: int

    data: list[Classified]


class ScoreResponse(VectorResponse):
    class Score(Strict):
        index: int
        object: Literal["score"]
        score: float

    data: list[Score]


class RerankResponse(Strict):
    class Reranked(Strict):
        class Document(Strict):
            text: str

        index: int
        document: Document | None
        relevance_score: float

    id: str
    model: str
    usage: VectorUsage
    results: list[Reranked]
