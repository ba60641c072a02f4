"""What families with experts read alike from config.json. No torch.

Rule: a number of experts, groups or chosen experts that can't be is refused here, naming the field.
"""

from __future__ import annotations

from typing import Any

from planaria.models.config import MoEConfig
from planaria.models.fields import HF, MOST_LAYERS, refuse, size


def mixture(hf: HF, *, count: str, width: str, default_k: int, **rest: Any) -> MoEConfig:
    """`count`, `width`: fields with the number of experts and one expert's size. default_k: experts a token chooses
    where config.json doesn't say; the rest are fields of MoEConfig."""
    # Transformers 5 writes some families' number of experts under another name than their own checkpoints have
    named = count if hf.get(count) is not None or hf.get("num_local_experts") is None else "num_local_experts"
    experts = size(hf, named)
    chosen = size(hf, "num_experts_per_tok", default_k)
    if chosen > experts:
        raise refuse("num_experts_per_tok", chosen, f"there are only {experts} experts ({named})")
    moe = MoEConfig(num_experts=experts, top_k=chosen, intermediate_size=size(hf, width), **rest)
    if moe.num_groups > 1:
        _check_groups(moe)
    return moe


def _check_groups(moe: MoEConfig) -> None:
    if moe.num_experts % moe.num_groups:
        raise refuse("n_group", moe.num_groups, f"does not divide {moe.num_experts} experts")
    if moe.top_groups > moe.num_groups:
        raise refuse("topk_group", moe.top_groups, f"there are only {moe.num_groups} groups (n_group)")
    members = moe.num_experts // moe.num_groups
    if moe.group_score == "sum2" and members < 2:
        raise refuse("n_group", moe.num_groups, "a group needs two experts: it is worth the sum of its best two")
    if moe.top_groups * members < moe.top_k:
        rule = f"{moe.top_groups} groups of {members} hold fewer experts than a token chooses ({moe.top_k})"
        raise refuse("topk_group", moe.top_groups, rule)


def dense_layers(hf: HF) -> tuple[int, ...]:
    """Qwen's layers with a plain MLP: `mlp_only_layers`, and those that `decoder_sparse_step` passes over."""
    layers = size(hf, "num_hidden_layers", most=MOST_LAYERS)
    step, named = size(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in named):
        raise refuse("mlp_only_layers", named, "must be a list of layer numbers")
    return tuple(i for i in range(layers) if i in named or (i + 1) % step)
