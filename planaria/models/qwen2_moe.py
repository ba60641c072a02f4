"""Qwen2-MoE: Qwen2's attention; experts, and a gated expert that all tokens share; some layers may be dense."""

from __future__ import annotations

from planaria.models.common import common, windows
from planaria.models.config import ModelConfig
from planaria.models.experts import dense_layers, mixture
from planaria.models.fields import HF, flag, size

ARCHITECTURE = "Qwen2MoeForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    return ModelConfig(
        architecture=ARCHITECTURE, **common(hf, generation),
        attention_bias=flag(hf, "qkv_bias", True), windows=windows(hf),
        moe=mixture(
            hf, count="num_experts", width="moe_intermediate_size", default_k=4,
            renormalize=flag(hf, "norm_topk_prob"), dense_layers=dense_layers(hf), shared_gate=True,
            shared_intermediate_size=size(hf, "shared_expert_intermediate_size"),
        ),
    )  # fmt: skip
