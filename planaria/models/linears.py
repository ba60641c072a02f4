"""The matrices of a model that an adapter may change: those that each token goes through in every layer. Pure."""

from __future__ import annotations

from planaria.models.config import ModelConfig


def linears(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """By the name of its tensor without `.weight`: rows and columns. Not the embedding, the head, routers or experts;
    of latent attention not what makes keys and values of a latent."""
    found: dict[str, tuple[int, int]] = {}
    hidden = c.hidden_size
    for layer in range(c.num_layers):
        name = f"model.layers.{layer}"
        found |= {f"{name}.self_attn.{part}": shape for part, shape in _attention(c).items()}
        block, size, names = f"{name}.mlp", c.intermediate_size, c.mlp_names
        if c.moe is not None and c.is_moe(layer):
            block, size = f"{name}.{c.moe.block}.{c.moe.shared_name}", c.moe.shared_intermediate_size
            names = ("gate_proj", "up_proj", "down_proj")
        if size:
            found |= {f"{block}.{part}": (size, hidden) for part in names[:-1]}
            found[f"{block}.{names[-1]}"] = hidden, size
    return found


def _attention(c: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    if c.mla is None:
        return {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    m = c.mla
    q = c.num_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    found = {"kv_a_proj_with_mqa": (m.width, hidden), "o_proj": (hidden, c.num_heads * m.v_head_dim)}
    if m.q_lora_rank is None:
        return found | {"q_proj": (q, hidden)}
    return found | {"q_a_proj": (m.q_lora_rank, hidden), "q_b_proj": (q, m.q_lora_rank)}
