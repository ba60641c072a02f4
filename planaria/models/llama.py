"""Llama (also SmolLM2, TinyLlama and others that call themselves LlamaForCausalLM): optional biases everywhere."""

from __future__ import annotations

from planaria.config import ModelConfig
from planaria.models.fields import HF, common, flag

ARCHITECTURE = "LlamaForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        architecture=ARCHITECTURE, family="llama", **common(hf, generation),
        attention_bias=bias, output_bias=bias, mlp_bias=flag(hf, "mlp_bias"),
    )  # fmt: skip
