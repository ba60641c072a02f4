"""Mixtral: Mistral with experts in every layer; a token's weights are a softmax over those it chose."""

from __future__ import annotations

from planaria.models.common import common
from planaria.models.config import ModelConfig
from planaria.models.experts import mixture
from planaria.models.fields import HF, size

ARCHITECTURE = "MixtralForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    fields = common(hf, generation)
    window = None if hf.get("sliding_window") is None else size(hf, "sliding_window")
    return ModelConfig(
        architecture=ARCHITECTURE, **fields,
        windows=(window,) * fields["num_layers"] if window else (),
        moe=mixture(
            hf, count="num_local_experts", width="intermediate_size", default_k=2, renormalize=True,
            block="block_sparse_moe", names=("w1", "w3", "w2"),
        ),
    )  # fmt: skip
