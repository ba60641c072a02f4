"""Rotary tables against Transformers' own, up to positions where one rounding of a frequency would show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from planaria.layers.rope import _turns, inverse_frequencies, rope_tables
from planaria.models.common import rotary
from planaria.models.config import RopeConfig

FACTORS = {"short_factor": [1 + 0.03 * i for i in range(32)], "long_factor": [1 + 0.7 * i for i in range(32)]}
KINDS: list[tuple[str, dict[str, Any], int]] = [
    ("default", {}, 70_000),
    ("linear", {"factor": 4.0}, 70_000),
    ("dynamic", {"factor": 2.0}, 4096),
    ("dynamic", {"factor": 2.0}, 7001),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 1024}, 70_000),
    ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 20, "beta_slow": 2}, 9000),
    ("yarn", {"factor": 4.0, "attention_factor": 0.9, "truncate": False}, 9000),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        70_000,
    ),
    ("longrope", {"original_max_position_embeddings": 1024, **FACTORS}, 1024),
    ("longrope", {"original_max_position_embeddings": 1024, **FACTORS}, 1025),
    ("longrope", {"original_max_position_embeddings": 1024, "factor": 16.0, **FACTORS}, 8000),
    ("longrope", {"attention_factor": 1.3, **FACTORS}, 4000),
]


@pytest.mark.parametrize(("kind", "params", "length"), KINDS, ids=lambda v: v if isinstance(v, str) else None)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_tables_equal_those_of_transformers(kind: str, params: dict[str, Any], length: int, theta: float) -> None:
    parameters = {"rope_type": kind, "rope_theta": theta, **params}
    hf = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": parameters,
    }
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{**hf, "rope_parameters": dict(parameters)}))
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    rope = rotary(hf, 64)[0]
    ours, frequencies = rope_tables(rope, 64, length), theirs.inv_freq.numpy()
    apart = inverse_frequencies(rope, 64, length)[0] != frequencies
    np.testing.assert_array_max_ulp(inverse_frequencies(rope, 64, length)[0], frequencies, 2)
    assert apart.sum() <= 4, "torch's powers are the exact ones but for a few"
    reach = np.where(apart, 2 * length * frequencies, 1)  # what two units in a last place become
    for found, wanted in zip(ours, (cos, sin), strict=True):
        assert (np.abs(found - wanted[0, :, :32].numpy()) <= 2**-23 * np.maximum(reach, found.max())).all()


def test_turns_are_exact() -> None:
    """Rounded once, from all quarters, far out."""
    angles = np.concatenate([np.linspace(0, 8, 5000), np.logspace(-6, 6, 5000)]).astype(np.float32)
    for found, wanted in zip(_turns(angles), (np.cos, np.sin), strict=True):
        assert np.array_equal(found, wanted(angles.astype(np.float64)).astype(np.float32))


def test_only_the_first_dimensions_may_be_rotated() -> None:
    config, _ = rotary({"max_position_embeddings": 64, "partial_rotary_factor": 0.25}, 64)
    assert config.dim == 16
    part, whole = rope_tables(config, 64, 10), rope_tables(RopeConfig(), 16, 10)
    assert part[0].shape == (10, 8)
    assert np.array_equal(part[0], whole[0]) and np.array_equal(part[1], whole[1])


@pytest.mark.parametrize(
    ("kind", "params", "reach"),
    [
        ("default", {}, 4096),
        ("linear", {"factor": 4.0}, 16384),
        ("dynamic", {"factor": 2.0}, 8192),
        ("yarn", {"factor": 4.0}, 16384),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 512,
            },
            4096,
        ),
        ("longrope", {"original_max_position_embeddings": 1024, **FACTORS}, 4096),
    ],
)
def test_a_scaling_says_how_far_it_reaches(kind: str, params: dict[str, Any], reach: int) -> None:
    hf = {"max_position_embeddings": 4096, "rope_theta": 5e5, "rope_scaling": {"type": kind, **params}}
    config, found = rotary(hf, 64)
    assert (config.kind, config.theta, found) == (kind, 5e5, reach)
