"""Qwen2 and Qwen2.5: biases on q, k and v only; sliding windows in some layers if `use_sliding_window`."""

from __future__ import annotations

from planaria.models.common import common, windows
from planaria.models.config import ModelConfig
from planaria.models.fields import HF

ARCHITECTURE = "Qwen2ForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    return ModelConfig(
        architecture=ARCHITECTURE, **common(hf, generation),
        attention_bias=True, windows=windows(hf),
    )  # fmt: skip
