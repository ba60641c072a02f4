"""Llama, and what else calls itself LlamaForCausalLM (SmolLM2, TinyLlama): optional biases everywhere."""

from __future__ import annotations

from planaria.models.common import common
from planaria.models.config import ModelConfig
from planaria.models.fields import HF, flag

ARCHITECTURE = "LlamaForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        architecture=ARCHITECTURE, **common(hf, generation),
        attention_bias=bias, output_bias=bias, mlp_bias=flag(hf, "mlp_bias"),
    )  # fmt: skip
