"""Which part of a model a rank holds. Layers take their heads and columns from it and load only those rows.

Rule: heads are dealt by KV group (a KV head with all query heads that read it), MLP columns by blocks of 32,
so that packed weights can be cut along either side.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.config import ModelConfig


@dataclass(frozen=True)
class Shard:
    """kv_heads, mlp_columns, vocab: contiguous ranges of the whole model's."""

    kv_heads: range
    mlp_columns: range
    vocab: range

    @staticmethod
    def full(config: ModelConfig) -> Shard:
        """The whole model on one rank."""
        return Shard(range(config.num_kv_heads), range(config.intermediate_size), range(config.vocab_size))


def scaled(part: range, by: int) -> range:
    """Rows of a weight for units of `by` rows each: KV heads to rows of k, KV groups to rows of q."""
    return range(part.start * by, part.stop * by)
