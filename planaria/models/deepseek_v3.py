"""DeepSeek-V3: V2's attention; experts chosen by the sigmoid of their scores and a learned bias. Layers that draft
further tokens, which checkpoints have after the others, are not used."""

from __future__ import annotations

from planaria.models.config import ModelConfig
from planaria.models.deepseek_v2 import experts, latent
from planaria.models.fields import HF, flag, size

ARCHITECTURE = "DeepseekV3ForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    return ModelConfig(
        architecture=ARCHITECTURE,
        **latent(hf, generation, interleaved=flag(hf, "rope_interleave", True)),
        moe=experts(
            hf, scaling=2.5, scoring="sigmoid", renormalize=flag(hf, "norm_topk_prob", True), correction_bias=True,
            num_groups=size(hf, "n_group", 8), top_groups=size(hf, "topk_group", 4), group_score="sum2",
        ),
    )  # fmt: skip
