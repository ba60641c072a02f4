"""What a rank needs of its device: an estimate from a model's shape, before anything is loaded. Pure."""

from __future__ import annotations

from typing import NamedTuple

from planaria.models.config import ModelConfig
from planaria.models.shard import Shard


class RankMemory(NamedTuple):
    """Bytes. kv: of one request of the longest length at least, as an engine asks for to start."""

    weights: int
    kv: int
    activations: int

    def shared_by(self, engines: int) -> RankMemory:
        """With the part of the weights that falls to each."""
        return self._replace(weights=-(-self.weights // engines))

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('kv', 'KV')} {mib(value)}" for name, value in self._asdict().items())
        return f"{mib(self.total)} ({parts})"


def mib(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def rank_memory(
    config: ModelConfig, shard: Shard, *, parameter: float, element: int, kv: int | None, max_model_len: int,
    step_tokens: int, logit_rows: int,
) -> RankMemory:  # fmt: skip
    """parameter: bytes of a weight as it is kept, packed or not; element: of a number in KV and activations. kv: bytes
    that were asked for, None: those of a request of `max_model_len` tokens."""
    context = shard.context
    kv_heads = shard.kv_heads if context is None else context.kv_heads
    width = config.mla.width if config.mla is not None else 2 * len(kv_heads) * config.head_dim
    if kv is None:
        kv = max_model_len * len(shard.layers) * width * element // (1 if context is None else context.stripes.size)
    heads = len(shard.heads) * config.head_dim
    hidden, columns = config.hidden_size, max(len(shard.mlp_columns), len(shard.shared_columns))
    if config.moe is not None:
        columns = max(columns, config.moe.top_k * len(shard.expert_columns))
    step = step_tokens * (3 * hidden + 2 * heads + width + 2 * columns) * element
    width = config.vocab_size if config.has_logits else hidden
    logits = min(step_tokens, logit_rows) * width * 4 if shard.last(config) else 0
    return RankMemory(int(num_parameters(config, shard) * parameter), kv, step + logits)


def num_parameters(config: ModelConfig, shard: Shard) -> int:
    """Weights of a rank; biases are left out."""
    if config.foreign is not None:
        return config.foreign.parameters * len(shard.heads) // config.num_heads
    first, last, hidden = shard.first(), shard.last(config), config.hidden_size
    tables = first + (last and config.has_logits and not (first and config.tie_word_embeddings))
    return (tables * len(shard.vocab) + last) * hidden + sum(_of_layer(config, shard, layer) for layer in shard.layers)


def _of_layer(config: ModelConfig, shard: Shard, layer: int) -> int:
    hidden, moe = config.hidden_size, config.moe
    if config.mla is not None:
        attention = config.mla.num_parameters(hidden, len(shard.heads))
    else:
        attention = 2 * hidden * (len(shard.heads) + len(shard.kv_heads)) * config.head_dim
    if moe is None or not config.is_moe(layer):
        return attention + 2 * hidden + len(config.mlp_names) * hidden * len(shard.mlp_columns)
    experts = len(shard.slots) * len(shard.expert_columns) + len(shard.shared_columns)
    return attention + 2 * hidden + 3 * hidden * experts + moe.num_experts * hidden
