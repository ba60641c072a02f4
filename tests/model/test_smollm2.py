"""The real model: SmolLM2-135M from its Q4_1 GGUF file, against Transformers' own loading of that file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.models import build, model_config
from tests.model.driver import Driver

TOLERANCE = 1e-4  # of log-probabilities


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    from planaria.checkpoint import resolve_checkpoint
    from planaria.errors import ModelError

    try:
        return resolve_checkpoint("smollm2")
    except ModelError as e:
        pytest.skip(f"the demo model is not installed: {e}")


@pytest.fixture(scope="module")
def prompts(checkpoint: Any) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(checkpoint.tokenizer_dir, "tokenizer.json"))
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
        "In 1969, 600 million people watched as a man first set foot on the Moon. " * 9,
    ]
    return [tokenizer.encode(text).ids for text in texts]


@pytest.fixture(scope="module")
def expected(checkpoint: Any, prompts: list[list[int]]) -> list[Tensor]:
    """Transformers' log-probabilities of every position."""
    from transformers import AutoModelForCausalLM

    path = Path(checkpoint.path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]


@pytest.mark.parametrize("quantization", ["none", "keep"])
def test_log_probabilities_equal_those_of_transformers(
    checkpoint: Any, prompts: list[list[int]], expected: list[Tensor], quantization: str, make_ops: Callable[..., Any]
) -> None:
    from planaria.loader import open_weights

    ops = make_ops()
    config = model_config(checkpoint.config, checkpoint.generation_config)
    with open_weights(checkpoint) as weights:
        model = build(config, weights, ops, quantization=quantization, max_positions=512)
    driver = Driver(model, ops, block_size=16, num_blocks=64)
    found: dict[int, list[Tensor]] = {i: [] for i in range(len(prompts))}
    left = dict(enumerate(prompts))
    while left:
        feed = {i: tokens[:96] for i, tokens in left.items()}
        for i, logits in driver.step(feed).items():
            found[i].append(logits.log_softmax(-1))
        left = {i: tokens[96:] for i, tokens in left.items() if len(tokens) > 96}
    for i, want in enumerate(expected):
        assert float((torch.cat(found[i]) - want).abs().max()) < TOLERANCE


def test_it_knows_the_capital_of_france(prompts: list[list[int]], expected: list[Tensor], checkpoint: Any) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(checkpoint.tokenizer_dir, "tokenizer.json"))
    assert tokenizer.decode([int(expected[0][-1].argmax())]).strip() == "Paris"
