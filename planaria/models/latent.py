"""What DeepSeek's families read alike from config.json: latent attention; after the first layers, which are dense,
routed experts beside shared ones. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.errors import ModelError
from planaria.models.common import common
from planaria.models.config import MLAConfig, MoEConfig
from planaria.models.experts import mixture
from planaria.models.fields import HF, flag, number, refuse, size


def latent(hf: HF, generation: HF, *, interleaved: bool = True) -> HF:
    """Arguments of ModelConfig with latent attention: those of `common`, whose rotary embedding is of the rotated
    columns alone."""
    rotated = size(hf, "qk_rope_head_dim")
    if "q_lora_rank" not in hf:
        raise ModelError("config.json: q_lora_rank is missing (null: queries without a latent)")
    fields = common({**hf, "head_dim": rotated}, generation)
    if fields["num_kv_heads"] != fields["num_heads"]:
        rule = f"latent attention has as many as num_attention_heads, {fields['num_heads']}"
        raise refuse("num_key_value_heads", fields["num_kv_heads"], rule)
    mla = MLAConfig(
        kv_lora_rank=size(hf, "kv_lora_rank"), qk_nope_head_dim=size(hf, "qk_nope_head_dim"),
        qk_rope_head_dim=rotated, v_head_dim=size(hf, "v_head_dim"),
        q_lora_rank=None if hf["q_lora_rank"] is None else size(hf, "q_lora_rank"), interleaved=interleaved,
    )  # fmt: skip
    rope = msgspec.structs.replace(fields["rope"], dim=fields["rope"].dim or rotated)
    bias = flag(hf, "attention_bias")
    return {
        **fields, "head_dim": mla.qk_nope_head_dim + rotated, "rope": rope, "mla": mla,
        "attention_bias": bias, "output_bias": bias,
    }  # fmt: skip


def shared_and_routed(hf: HF, *, scaling: float, **rest: Any) -> MoEConfig | None:
    """The mixture, None where all layers are dense. scaling: where config.json has no `routed_scaling_factor`."""
    dense, layers = size(hf, "first_k_dense_replace", 0, least=0), size(hf, "num_hidden_layers")
    if hf.get("moe_layer_freq", 1) != 1:
        raise refuse("moe_layer_freq", hf["moe_layer_freq"], "must be 1: all layers after the dense ones have experts")
    if dense >= layers or hf.get("n_routed_experts", 0) is None:
        return None
    # The chosen experts and the shared ones are added up, so several shared ones are one of their size together
    return mixture(
        hf, count="n_routed_experts", width="moe_intermediate_size", default_k=8,
        shared_intermediate_size=size(hf, "n_shared_experts") * size(hf, "moe_intermediate_size"),
        shared_name="shared_experts", dense_layers=tuple(range(dense)),
        scaling=number(hf, "routed_scaling_factor", scaling), **rest,
    )  # fmt: skip
