"""Multi-head latent attention (DeepSeek-V2): what is cached is one latent vector a token, not keys and values.

Rule: keys and values are never made. A head's key is W_k c (c the latent), so q . W_k c = (W_k^T q) . c: the query is
taken into the latent's space instead, and what attention sums up there is brought back by W_v at the end. So all heads
attend to the same rows, the latent and after it the rotated part of the key, whose first columns are the values too.
W_k and W_v are products of their own and not multiplied into the projections beside them, which would be several times
as large. A bfloat16 model rounds W_k^T q and the sum of latents where one that makes keys and values rounds those.

Tensor ranks have some of the heads each, and all of the latent; context ranks those of some tokens.
"""

from __future__ import annotations

import dataclasses

from planaria.kernels.ops import Act, AttentionKind, Columns, KVLayer, Operations, Ops, RopeTable, Weight
from planaria.layers.rope import softmax_factor
from planaria.layers.weights import TensorPart, WeightLoader
from planaria.models.config import ModelConfig
from planaria.models.shard import Shard, scaled

NORM_EPS = 1e-6  # of the latents; no configuration says another


def halves(lead: int, rotated: int) -> tuple[int, ...]:
    """Places of `lead` columns, then of `rotated` ones whose pairs are neighbours: first all firsts, then all seconds,
    as the operations rotate them. The scores are sums over them, so any order does that is the same in both."""
    pairs = range(lead, lead + rotated)
    return (*range(lead), *pairs[::2], *pairs[1::2])


class LatentAttention:
    """Down to the latents, queries into the latent's space, paged cache, back to heads, into the residual."""

    kv: KVLayer

    def __init__(self, c: ModelConfig, layer: int, load: WeightLoader, shard: Shard, rope: RopeTable) -> None:
        assert c.mla is not None
        m, name = c.mla, f"model.layers.{layer}.self_attn"
        self.rope, self.num_heads = rope, len(shard.heads)
        self.rank, self.width = m.kv_lora_rank, m.width
        self.share_tokens(shard)
        self.scale = (m.qk_nope_head_dim + m.qk_rope_head_dim) ** -0.5 * softmax_factor(c.rope)

        def order(lead: int, heads: int = 1) -> tuple[int, ...] | None:
            if not m.interleaved:
                return None
            one = halves(lead, m.qk_rope_head_dim)
            return tuple(head * len(one) + place for head in range(heads) for place in one)

        head = m.qk_nope_head_dim + m.qk_rope_head_dim
        queries = (c.num_heads * head, scaled(shard.heads, head), order(m.qk_nope_head_dim, len(shard.heads)))
        hidden, q_rank = (range(c.hidden_size), c.hidden_size), m.q_lora_rank
        self.q_down: Weight = None
        if q_rank is None:
            self.q: Weight = load.linear([TensorPart(f"{name}.q_proj", *queries)], *hidden)
        else:
            down = TensorPart(f"{name}.q_a_proj", q_rank, range(q_rank))
            self.q_down = load.linear([down], *hidden, bias=c.attention_bias)
            self.q_norm = load.vector(f"{name}.q_a_layernorm.weight", q_rank)
            self.q = load.linear([TensorPart(f"{name}.q_b_proj", *queries)], range(q_rank), q_rank)
        latent = TensorPart(f"{name}.kv_a_proj_with_mqa", m.width, range(m.width), order(m.kv_lora_rank))
        self.latent: Weight = load.linear([latent], *hidden, bias=c.attention_bias)
        self.norm = load.vector(f"{name}.kv_a_layernorm.weight", m.kv_lora_rank)
        self.keys, self.values = load.keys_and_values(
            f"{name}.kv_b_proj", shard.heads, c.num_heads, m.qk_nope_head_dim, m.v_head_dim, m.kv_lora_rank
        )
        self.output: Weight = load.linear(
            [TensorPart(f"{name}.o_proj", c.hidden_size, hidden[0])],
            scaled(shard.heads, m.v_head_dim), c.num_heads * m.v_head_dim, bias=c.output_bias and shard.leads,
        )  # fmt: skip

    def share_tokens(self, shard: Shard) -> None:
        """With its context group, from the next `make_kv` on."""
        self.context, self.latents = shard.context, Columns.of_all(shard, self.width)
        if self.context is not None:
            self.own = Columns.of_queries(self.context, shard, self.width)

    def __call__(self, ops: Operations, x: Act, h: Act) -> Act:
        latent = ops.linear(x, self.latent)
        if self.context is not None and self.context.shares:
            latent = ops.gather(latent, dataclasses.replace(self.context, number=0, count=1), self.latents)
        ops.mla_store(latent, self.kv, self.norm, NORM_EPS, self.rope)
        if self.q_down is not None:
            x = ops.rms_norm(ops.linear(x, self.q_down), self.q_norm, NORM_EPS)
        q = ops.by_head(ops.linear(x, self.q), self.keys, self.num_heads, self.rope)
        if self.context is None:
            latents = ops.mla_attend(q, self.kv, self.num_heads, self.rank, self.scale)
        else:
            q = ops.gather(q, self.context, self.own)
            parts = ops.mla_attend_part(q, self.kv, len(self.context.heads), self.rank, self.scale, self.context)
            latents = ops.merge(parts, self.context, self.own.heads, self.rank)
        return ops.linear(ops.by_head(latents, self.values, self.num_heads), self.output, h, reduce=True)

    def make_kv(self, ops: Ops, num_blocks: int, block_size: int) -> None:
        self.kv = self.cache(ops, num_blocks, block_size)

    @property
    def kind(self) -> AttentionKind:
        heads = self.num_heads if self.context is None else len(self.context.heads)
        return AttentionKind(heads, 1, self.width, self.rank, part=self.context is not None)

    def kv_block_bytes(self, ops: Ops, block_size: int) -> int:
        return self.cache_bytes(ops, block_size)

    def cache(self, ops: Ops, num_blocks: int, block_size: int, heads: int = 1) -> KVLayer:
        """Of any rank."""
        return ops.mla_layer(num_blocks, block_size, self.width)

    def cache_bytes(self, ops: Ops, block_size: int, heads: int = 1) -> int:
        """Of one block of it."""
        return ops.mla_block_bytes(block_size, self.width)
