"""Qwen3-MoE: Qwen3's attention; experts without a shared one; one sliding window for all layers if there is any."""

from __future__ import annotations

from planaria.models.common import common
from planaria.models.config import ModelConfig
from planaria.models.experts import dense_layers, mixture
from planaria.models.fields import HF, flag, size

ARCHITECTURE = "Qwen3MoeForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    fields = common(hf, generation)
    on = flag(hf, "use_sliding_window") and hf.get("sliding_window", 0) is not None
    return ModelConfig(
        architecture=ARCHITECTURE, **fields, attention_bias=bias, output_bias=bias, qk_norm=True,
        windows=(size(hf, "sliding_window", 4096),) * fields["num_layers"] if on else (),
        moe=mixture(
            hf, count="num_experts", width="moe_intermediate_size", default_k=8,
            renormalize=flag(hf, "norm_topk_prob"), dense_layers=dense_layers(hf),
        ),
    )  # fmt: skip
