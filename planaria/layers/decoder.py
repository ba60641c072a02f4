"""The decoder that all families share, written in `Operations`. What a family changes is in its ModelConfig.

Rule: forward code calls operations and looks at no value. Constructors load: each block asks the loader for
its own rows and columns, given by a `Shard`. The residual `h` is float32 and updated in place by the two
projections that end a block. On a rank that holds a part, those two and the embedding give partial sums, which the
operations reduce over the tensor ranks; a pipeline stage has only its layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planaria.kernels.ops import Act, AttentionKind, Columns, KVLayer, Operations, Ops, RopeTable, Weight
from planaria.layers.mla import LatentAttention
from planaria.layers.mlp import MLP
from planaria.layers.moe import MoE
from planaria.layers.norms import RMSNorm, WideNorm, into, norm_of
from planaria.layers.weights import TensorPart, WeightLoader
from planaria.models.config import ModelConfig
from planaria.models.shard import ContextGroup, Shard, scaled


class Attention:
    """Fused q, k, v; rotary position; paged cache; output projection into the residual, by `after` where that is a
    norm."""

    kv: KVLayer

    def __init__(
        self, c: ModelConfig, layer: int, load: WeightLoader, shard: Shard, rope: RopeTable, after: RMSNorm | None
    ) -> None:
        name, dim = f"model.layers.{layer}.self_attn", c.head_dim
        queries, keys = scaled(shard.heads, dim), scaled(shard.kv_heads, dim)
        self.head_dim = dim
        self.rope, self.eps, self.window, self.after = rope, c.norm_eps, c.window(layer), after
        self.scale, self.cap, self.clip = c.attention_scale or dim**-0.5, c.score_cap, c.qkv_clip
        self.qkv: Weight = load.linear(
            [
                TensorPart(f"{name}.q_proj", c.num_heads * dim, queries),
                TensorPart(f"{name}.k_proj", c.num_kv_heads * dim, keys),
                TensorPart(f"{name}.v_proj", c.num_kv_heads * dim, keys),
            ],
            range(c.hidden_size), c.hidden_size, bias=c.attention_bias,
        )  # fmt: skip
        self.output: Weight = load.linear(
            [TensorPart(f"{name}.o_proj", c.hidden_size, range(c.hidden_size))],
            queries, c.num_heads * dim, bias=c.output_bias and shard.leads,
        )  # fmt: skip
        self.q_norm, self.k_norm = (
            load.vector(f"{name}.{part}_norm.weight", dim, plus=c.norm_offset) if c.qk_norm else None for part in "qk"
        )
        self.sinks = load.vector(f"{name}.sinks", c.num_heads, shard.heads) if c.sinks else None
        self.wide = WideNorm(c, name, load, shard, queries, keys) if c.wide_qk_norm else None
        self.share_tokens(shard)

    def share_tokens(self, shard: Shard) -> None:
        """With its context group, from the next `make_kv` on."""
        self.context, attends = shard.context, shard.context or shard
        self.num_heads, self.num_kv_heads = len(attends.heads), len(attends.kv_heads)
        if self.context is not None:
            self.own = Columns.of_heads(self.context, shard, self.head_dim)

    def __call__(self, ops: Operations, x: Act, h: Act, *, ends: bool = False) -> Act:
        """ends: of the rows that are wanted alone."""
        qkv = ops.linear(x, self.qkv)
        if self.wide is not None:
            qkv = self.wide(ops, qkv)
        if self.clip:
            qkv = ops.clip(qkv, self.clip)
        if self.context is not None:
            qkv = ops.gather(qkv, self.context, self.own)
        q = ops.rope_store(
            qkv, self.kv, self.rope, self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm, self.k_norm, self.eps,
        )  # fmt: skip
        heads = q, self.kv, self.num_heads, self.num_kv_heads, self.head_dim, self.scale
        if self.context is None:
            x = ops.attend(*heads, self.window, self.cap, self.sinks)
        else:
            parts = ops.attend_part(*heads, self.context, self.window, self.cap)
            x = ops.merge(parts, self.context, self.own.heads, self.head_dim, self.sinks)
        if ends:
            x, h = ops.take(x), ops.take(h)
        return into(ops, x, self.output, h, self.after)

    def make_kv(self, ops: Ops, num_blocks: int, block_size: int) -> None:
        self.kv = self.cache(ops, num_blocks, block_size, self.num_kv_heads)

    @property
    def kind(self) -> AttentionKind:
        part = self.context is not None  # whose sinks come in when parts are merged
        sunk = self.sinks is not None and not part
        return AttentionKind(self.num_heads, self.num_kv_heads, self.head_dim, 0, self.cap, self.window, sunk, part)

    def kv_block_bytes(self, ops: Ops, block_size: int) -> int:
        return self.cache_bytes(ops, block_size, self.num_kv_heads)

    def cache(self, ops: Ops, num_blocks: int, block_size: int, heads: int) -> KVLayer:
        """Of a rank with so many heads of keys."""
        return ops.kv_layer(num_blocks, block_size, heads, self.head_dim)

    def cache_bytes(self, ops: Ops, block_size: int, heads: int) -> int:
        """Of one block of it."""
        return ops.kv_block_bytes(block_size, heads, self.head_dim)


class DecoderLayer:
    def __init__(self, c: ModelConfig, layer: int, load: WeightLoader, shard: Shard, rope: RopeTable) -> None:
        name = f"model.layers.{layer}"
        self.input_norm = norm_of(c, load, f"{name}.input_layernorm")
        # with four norms, two are of what a block adds
        names = ("post_attention_layernorm", "post_feedforward_layernorm") if c.branch_norms else ()
        after = [RMSNorm(load, f"{name}.{each}", c.hidden_size, c.norm_eps, c.norm_offset) for each in names]
        attention_norm, mlp_norm = after or (None, None)
        self.attention = (
            Attention(c, layer, load, shard, rope, attention_norm) if c.mla is None
            else LatentAttention(c, layer, load, shard, rope)
        )  # fmt: skip
        before = "pre_feedforward_layernorm" if c.branch_norms else "post_attention_layernorm"
        self.mlp_norm = norm_of(c, load, f"{name}.{before}")
        self.mlp = MoE(c, layer, load, shard) if c.is_moe(layer) else MLP(
            load, f"{name}.mlp", c.hidden_size, c.intermediate_size, shard.mlp_columns, bias=c.mlp_bias,
            leads=shard.leads, kind=c.activation, names=c.mlp_names, after=mlp_norm,
        )  # fmt: skip

    def __call__(self, ops: Operations, h: Act) -> Act:
        h = self.attention(ops, self.input_norm(ops, h), h)
        return self.mlp(ops, self.mlp_norm(ops, h), h)

    def wanted(self, ops: Operations, h: Act) -> Act:
        """Rows of the batch's sample_index alone, [S, H]: from attention on no others are computed, where that can be
        said beforehand."""
        if not (ops.early and isinstance(self.attention, Attention) and isinstance(self.mlp, MLP)):
            return ops.take(self(ops, h))
        h = self.attention(ops, self.input_norm(ops, h), h, ends=True)
        return self.mlp(ops, self.mlp_norm(ops, h), h)


class Model:
    """A decoder, or a stage of one, with its weights. `layers` is in order; call `make_kv` before the first step.
    ropes: of layers without a window, of those with one, and of those without positions."""

    def __init__(
        self, c: ModelConfig, load: WeightLoader, shard: Shard, ropes: tuple[RopeTable, ...], ops: Ops | None
    ) -> None:
        self.config, self.shard, self._ops = c, shard, ops
        self.first, self.last = shard.first(), shard.last(c)  # does it embed tokens, does it end in logits
        tied, table = c.tie_word_embeddings and c.has_logits, (shard.vocab, c.vocab_size, c.hidden_size)
        self.embedding = load.table("model.embed_tokens", *table) if self.first or (tied and self.last) else None
        self.layers = [DecoderLayer(c, layer, load, shard, ropes[c.rope_of(layer)]) for layer in shard.layers]
        self.norm = norm_of(c, load, "model.norm", c.logit_scale if c.has_logits else 1.0) if self.last else None
        self.head = self.embedding if tied else load.table("lm_head", *table) if self.last and c.has_logits else None
        labelled = self.last and c.head == "labels"
        self.labels = load.plain("score", c.num_labels, c.hidden_size) if labelled else None
        self.blocks = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]
        self.linears = load.linears
        self._dense_bytes = load.num_bytes - self._expert_bytes()

    def forward(self, ops: Operations) -> Act:
        """Logits [S, vocabulary] of the positions the batch wants them for, or what the model has in their place:
        scores [S, labels], else hidden states [S, H] in the activation dtype; of a stage that isn't the last, the
        residual [T, H]."""
        if self.norm is None:
            return self._residual(ops, self.layers)
        x = self.norm(ops, self._wanted(ops))
        if self.labels is not None:
            return ops.scores(x, self.labels)
        return x if self.head is None else self._logits(ops, x)

    def forward_both(self, ops: Operations) -> tuple[Act, Act]:
        """Of the last stage of a model that has logits: these, and the hidden states they are made of, [S, H]."""
        assert self.norm is not None
        x = self.norm(ops, self._wanted(ops))
        return self._logits(ops, x), x

    def forward_all(self, ops: Operations) -> tuple[Act, Act]:
        """As `forward_both`, with the hidden states of all tokens of the step, [T, H]."""
        assert self.norm is not None
        h, context = self._residual(ops, self.layers), self.shard.context
        x = self.norm(ops, h)
        if context is not None and context.shares:
            everyones = Columns.of_all(self.shard, self.config.hidden_size, "hidden states")
            x = ops.gather(x, dataclasses.replace(context, number=0, count=1), everyones)
        return self._logits(ops, self.norm(ops, ops.take(h))), x

    def _residual(self, ops: Operations, layers: Sequence[DecoderLayer]) -> Act:
        """[T, H], after these, which begin with the first."""
        h = self._begin(ops)
        for layer in layers:
            h = layer(ops, h)
        return h

    def _wanted(self, ops: Operations) -> Act:
        """The residual of the positions that the batch wants, [S, H]."""
        *others, last = self.layers
        return last.wanted(ops, self._residual(ops, others))

    def _begin(self, ops: Operations) -> Act:
        """What the first layer takes."""
        if not self.first:
            return ops.hidden(self.config.hidden_size)
        return ops.embed(self.embedding, self.shard.vocab, self.config.embedding_scale)

    def _logits(self, ops: Operations, x: Act) -> Act:
        return ops.logits(x, self.head, self.shard.vocab, self.config.vocab_size, self.config.logit_cap)

    def _expert_bytes(self) -> int:
        ops = self._ops
        if ops is None:
            return 0
        pairs = [pair for block in self.blocks for pair in block.held.values()]
        return sum(ops.memory(weight).nbytes for pair in pairs for weight in pair)

    @property
    def weight_bytes(self) -> int:
        """As packed, a tied table counted once, with the experts that are held now."""
        return self._dense_bytes + self._expert_bytes()

    def share_tokens(self, context: ContextGroup | None) -> None:
        """This rank has the keys and values of some tokens from now on; None: of all. Weights are the same either way.
        Call it before `make_kv` and `Ops.compile`."""
        self.shard = dataclasses.replace(self.shard, context=context)
        for layer in self.layers:
            layer.attention.share_tokens(self.shard)

    def make_kv(self, num_blocks: int, block_size: int) -> None:
        """Give every layer a cache of `num_blocks` blocks of `block_size` tokens; an earlier one goes."""
        assert self._ops is not None
        for layer in self.layers:
            layer.attention.make_kv(self._ops, num_blocks, block_size)

    def kv_blocks(self) -> list[npt.NDArray[np.uint8]]:
        """The caches' memory on a CPU: of each one [blocks, bytes]."""
        return [cache for layer in self.layers for cache in layer.attention.kv.blocks()]

    def drop_kv(self) -> None:
        """Let the caches' memory go; there is no step until `make_kv`."""
        for layer in self.layers:
            layer.attention.kv = None

    def count_experts(self) -> npt.NDArray[np.int64]:
        """Zeros [layers with experts, experts], to which every later step adds the tokens that chose each expert. Call
        it before `Ops.compile`; a model without experts has no rows."""
        blocks = self.blocks
        load = np.zeros((len(blocks), blocks[0].rule.num_experts if blocks else 0), np.int64)
        for block, counts in zip(blocks, load, strict=True):
            block.slots.load = counts
        return load

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        assert self._ops is not None
        return sum(layer.attention.kv_block_bytes(self._ops, block_size) for layer in self.layers)
