"""OLMoE: experts in every layer; q and k are RMS-normalised over all heads together."""

from __future__ import annotations

from planaria.models.common import common
from planaria.models.config import ModelConfig
from planaria.models.experts import mixture
from planaria.models.fields import HF, flag, refuse

ARCHITECTURE = "OlmoeForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    if hf.get("clip_qkv") is not None:
        raise refuse("clip_qkv", hf["clip_qkv"], "clipping q, k and v is not supported")
    bias = flag(hf, "attention_bias")
    return ModelConfig(
        architecture=ARCHITECTURE, **common(hf, generation),
        attention_bias=bias, output_bias=bias, wide_qk_norm=True,
        moe=mixture(
            hf, count="num_experts", width="intermediate_size", default_k=8, renormalize=flag(hf, "norm_topk_prob"),
        ),
    )  # fmt: skip
