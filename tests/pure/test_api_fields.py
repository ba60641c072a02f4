"""Every field of a request is honoured, accepted without effect, or refused, and docs/api-fields.md says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import RequestError
from planaria.server.schema import (
    NEUTRAL,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    parse,
)
from planaria.server.schema_anthropic import CountTokensRequest, MessagesRequest
from planaria.server.schema_responses import ResponsesRequest, ResponseStreamOptions
from planaria.server.schema_vectors import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

PAGE = Path(__file__).parents[2] / "docs" / "api-fields.md"
WRITE = "write it with `python -m tests.pure.test_api_fields`"
MODELS: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest, "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest, "/v1/score": ScoreRequest, "/v1/rerank": RerankRequest,
    "/classify": ClassificationRequest, "/pooling": PoolingRequest,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
NEEDED: dict[Any, dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "x"}]}, CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
}  # fmt: skip
TRIES: tuple[Any, ...] = (
    "x",
    1,
    2,
    {"include_usage": True},
    True,
    ["x"],
    [5],
    {"5": 1},
    {"type": "text"},
    {"regex": "x"},
    "auto",
    {"a": "b"},
    {"format": {"type": "text"}},
    {"include_obfuscation": True},
    {"effort": "low"},
    ["reasoning.encrypted_content"],
    [{"role": "user", "content": "x"}],
)
OPTIONS: dict[Any, Any] = {ResponsesRequest: ResponseStreamOptions}  # of its streams, where not those of the others
NOTES = {"response_format": "`text`, `json_object`, `json_schema`, vLLM's `structural_tag`, or Hugging Face's `value`."}


def about(model: Any, name: str) -> str:
    return (model.model_fields[name].description or "") + NOTES.get(name, "")


def page() -> str:
    lines = [
        "# API fields", "",
        "What a server does with each field of a request; where nothing is said, what OpenAI's or vLLM's does. Made",
        "from its own schema, and tests send each one",
        "(`pytest tests/pure/test_api_fields.py tests/api/test_fields.py`). `null` is never refused: it is as good as",
        "nothing. What is refused has status 400, and `param` names it; a name nobody knows is refused, too",
        "([ADR 6](adr/0006-unknown-fields.md)).", "",
        "A POST to `/v1/...` may carry the header `Idempotency-Key`: sent again, it gets the same answer and runs no",
        "second time ([operate](operate.md#requests-that-are-sent-again)).", "",
    ]  # fmt: skip
    for path, model in MODELS.items():
        lines += [f"## {path}", "", "| honoured | |", "|---|---|"]
        lines += [f"| `{name}` | {about(model, name)} |" for name in sorted(model.model_fields)]
        options = OPTIONS.get(model, StreamOptions)
        if "stream_options" in model.model_fields:
            lines += [f"| `stream_options.{name}` | {about(options, name)} |" for name in options.model_fields]
        if model in NEEDED or model.neutral:
            neutral = {**NEUTRAL, **model.neutral} if model in NEEDED else model.neutral
            others = [name for name in sorted(neutral) if name not in model.model_fields]
            free = [f"`{name}`" for name in others if neutral[name] == (...,)]
            lines += ["", f"Accepted without effect: {', '.join(free)}.", "", "| refused | unless it is |", "|---|---|"]
            lines += [
                f"| `{name}` | {', '.join(f'`{json.dumps(value)}`' for value in neutral[name])} |"
                for name in others if neutral[name] != (...,)
            ]  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def parsed(model: Any, /, **fields: Any) -> Any:
    return parse(model, json.dumps({**NEEDED.get(model, {}), **fields}).encode())


def test_the_page_is_that_of_the_schema() -> None:
    assert PAGE.read_text() == page(), WRITE


@pytest.mark.parametrize("model", list(NEEDED))
def test_every_field_is_what_the_page_says(model: Any) -> None:
    for name in model.model_fields:
        if name not in NEEDED[model]:
            parsed(model, **{name: None})
            assert any(honours(model, name, value) for value in TRIES), name
    neutral = {**NEUTRAL, **model.neutral}
    for name in neutral.keys() - model.model_fields.keys():
        parsed(model, **{name: None})
        if neutral[name] == (...,):
            assert not hasattr(parsed(model, **{name: {"any": "value"}}), name)
            continue
        for off in neutral[name]:
            parsed(model, **{name: off})
        with pytest.raises(RequestError, match=f"{name} is not supported by this server") as error:
            parsed(model, **{name: {"any": "value"}})
        assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


def honours(model: Any, name: str, value: Any) -> bool:
    """It is taken, and kept."""
    try:
        return getattr(parsed(model, **{name: value}), name) is not None
    except RequestError:
        return False


def test_stream_options() -> None:
    options = parsed(CompletionRequest, stream_options={"include_usage": True, "include_obfuscation": False, "x": None})
    assert options.stream_options.include_usage is True


def test_null_asks_for_nothing_whatever_its_name_is() -> None:
    assert parsed(CompletionRequest, frobnicate=None, tools=None).prompt == "x"
    with pytest.raises(RequestError, match="unknown field"):
        parsed(CompletionRequest, frobnicate=0)


def test_the_first_cause_is_named() -> None:
    with pytest.raises(RequestError) as error:
        parsed(CompletionRequest, tool_choice="required", parallel_tool_calls=True, tools=[{}])
    assert error.value.param == "tools"


if __name__ == "__main__":
    PAGE.write_text(page())
