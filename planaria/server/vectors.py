"""From what an engine says of a text, a vector of float32, to what was asked for: embeddings, probabilities, scores.
Used by `LLM` and the server. NumPy is imported when the first is made."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from planaria.config.options import PoolingConfig
from planaria.errors import RequestError
from planaria.server.inputs import check_prompt, room
from planaria.types import PoolingParams, SamplingParams
from planaria.wire import EngineFacts, Submit

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from planaria.server.tokenise import Tokenizer

    Vector = npt.NDArray[np.float32]

TASKS = {
    "generate": "draw tokens", "embed": "give embeddings", "classify": "classify", "score": "score pairs of texts",
    "pool": "give vectors",
}  # fmt: skip


def need_task(config: PoolingConfig, task: str) -> None:
    """Raise RequestError for what the model, as it is used here, doesn't do. pool: one of embed and classify."""
    if task in config.tasks or (task == "pool" and {"embed", "classify"}.intersection(config.tasks)):
        return
    can = ", ".join(TASKS[known] for known in config.tasks)
    raise RequestError(
        f"this model doesn't {TASKS[task]} here; it can: {can} (see --runner)", param="model",
        code="unsupported_task",
    )  # fmt: skip


def check_wish(wish: PoolingParams, config: PoolingConfig) -> None:
    """Raise RequestError."""
    count = wish.truncate_prompt_tokens
    if count is not None and count != -1 and count < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or at least 1, got {count}", param="truncate_prompt_tokens",
            code="invalid_value",
        )  # fmt: skip
    if wish.dimensions is not None and (problem := config.dimensions_problem(wish.dimensions)):
        raise RequestError(
            f"dimensions {wish.dimensions}: {problem}", param="dimensions",
            code="unsupported_parameter" if config.sizes is None else "invalid_value",
        )  # fmt: skip
    if wish.dimensions is not None and config.labels:
        raise RequestError(
            "dimensions are of embeddings; this model gives scores of labels", param="dimensions",
            code="unsupported_parameter",
        )  # fmt: skip


def kept_tokens(wish: PoolingParams, facts: EngineFacts) -> int | None:
    """How many first tokens of a text are taken at most; None: all, or none if there are too many."""
    count = wish.truncate_prompt_tokens
    return room(facts) if count == -1 else count


def pair_tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    """Raise RequestError without one."""
    if tokenizer is None:
        raise RequestError(
            "pairs of texts need a tokenizer, and this engine runs without one", param=param,
            code="unsupported_parameter",
        )  # fmt: skip
    return tokenizer


def pooling_submit(
    id: str, prompt: list[int], config: PoolingConfig, facts: EngineFacts, *, param: str = "input", priority: int = 0,
    cache_salt: str = "", adapter: str = "",
) -> Submit:  # fmt: skip
    """What an engine is asked for a text's vector. Raises RequestError."""
    check_prompt(prompt, facts, param, generates=False)
    params = SamplingParams(max_tokens=1, detokenize=False, pooling=config.kind)
    return Submit(id, prompt, params, 0, 1, priority=priority, cache_salt=cache_salt, adapter=adapter)


def embedding(pooled: bytes, config: PoolingConfig, wish: PoolingParams) -> Vector:
    """Cut to the dimensions asked for, and then normalised."""
    import numpy as np

    vector = np.frombuffer(pooled, np.float32)[: wish.dimensions or config.dimensions]
    if wish.normalize if wish.normalize is not None else config.normalize:
        length = float(np.linalg.norm(vector))
        vector = vector / np.float32(max(length, 1e-12))
    return vector


def probabilities(pooled: bytes, config: PoolingConfig, wish: PoolingParams) -> Vector:
    """Of each label; its score, where no probabilities are asked for."""
    import numpy as np

    scores = np.frombuffer(pooled, np.float32).astype(np.float64)
    if wish.activates and config.activation == "softmax":
        scores = np.exp(scores - scores.max())
        scores /= scores.sum()
    elif wish.activates and config.activation == "sigmoid":
        scores = 0.5 * (1 + np.tanh(0.5 * scores))
    return scores.astype(np.float32)


def vector_of(pooled: bytes, config: PoolingConfig, wish: PoolingParams) -> Vector:
    """Whichever of both the model gives."""
    return (probabilities if config.labels else embedding)(pooled, config, wish)


def cosine(first: bytes, second: bytes) -> float:
    """Of two vectors as they come."""
    import numpy as np

    a, b = (np.frombuffer(pooled, np.float32).astype(np.float64) for pooled in (first, second))
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def in_base64(vector: Vector) -> str:
    """Its float32, little-endian, as OpenAI has them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def pairs_of(first: list[Any], second: list[Any], names: tuple[str, str]) -> list[tuple[Any, Any]]:
    """Each of the first with its own of the second, or the only one with all. Raises RequestError."""
    for given, name in zip((first, second), names, strict=True):
        if not given:
            raise RequestError(f"{name} is empty", param=name, code="invalid_value")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: as many, or one in {names[0]}",
            param=names[1], code="invalid_value",
        )  # fmt: skip
    return list(zip(first, second, strict=True))
