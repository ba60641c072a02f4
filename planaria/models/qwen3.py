"""Qwen3 (dense): q and k RMS-normalised per head; its own head_dim (128 if missing); optional biases."""

from __future__ import annotations

from planaria.models.common import common, windows
from planaria.models.config import ModelConfig
from planaria.models.fields import HF, flag

ARCHITECTURE = "Qwen3ForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        architecture=ARCHITECTURE, **common(hf, generation, head_dim=128),
        attention_bias=bias, output_bias=bias, qk_norm=True, windows=windows(hf),
    )  # fmt: skip
