"""Which part of a model a rank holds. Layers take their heads and columns from it and load only those rows.

Rule: heads are dealt by KV group (a KV head with all query heads that read it; only where ranks outnumber KV heads
is a KV head held by several ranks, each with some of its query heads), MLP columns by blocks of 32, so that packed
weights can be cut along either side. `planaria.models.deal` makes shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.models.config import ModelConfig
from planaria.topology.experts import ExpertMap
from planaria.topology.stripes import Stripes


@dataclass(frozen=True)
class ContextGroup:
    """Neighbouring tensor ranks that attend with the heads of all of them, each to its own tokens (docs/adr/0041).

    stripes: this rank's tokens. heads, kv_heads: of all of them. leads_keys: no rank before it in the group has its KV
    heads. number, count: of this group, and how many the tensor ranks are. most_heads, most_kv_heads: of the largest.
    shares: are there others with the same heads, who compute other tokens of a step?
    """

    stripes: Stripes
    heads: range
    kv_heads: range
    leads_keys: bool = True
    number: int = 0
    count: int = 1
    most_heads: int = 0
    most_kv_heads: int = 0
    shares: bool = False


@dataclass(frozen=True)
class Shard:
    """Contiguous ranges of the whole model's.

    heads: query heads; they read only `kv_heads`. layers: of this pipeline stage; the stage with layer 0 has the
    embedding, the one with the last layer the norm and the output head. leads: this rank adds the biases of
    products that are summed over ranks. experts: where the experts of each layer are, over all ranks of the expert
    group (None: a model without); slots: this rank's; reads: of each layer with experts of the whole model those that
    are read from the checkpoint, to be placed by who knows where the others come from (None: those of its slots, which
    are placed there); expert_columns: of each expert; apart: in other lanes it is other columns, where all else is the
    same; shared_columns: of the experts that all tokens share. context: who has the
    other tokens' keys and values, where this rank hasn't those of all; weights are the same either way.
    """

    heads: range
    kv_heads: range
    mlp_columns: range
    vocab: range
    layers: range
    leads: bool = True
    experts: ExpertMap | None = None
    slots: range = range(0)
    reads: tuple[tuple[int, ...], ...] | None = None
    expert_columns: range = range(0)
    apart: bool = False
    shared_columns: range = range(0)
    context: ContextGroup | None = None

    @property
    def stripes(self) -> Stripes | None:
        """Tokens that this rank has keys and values of; None: all."""
        return None if self.context is None else self.context.stripes

    @property
    def held_experts(self) -> tuple[int, ...]:
        """Logical experts of this rank's slots, slot by slot."""
        return () if self.experts is None else self.experts.slots[self.slots.start : self.slots.stop]

    def leads_keys(self, config: ModelConfig) -> bool:
        """Is it this rank's part to count its KV heads, where others may hold them too?"""
        return self.kv_heads.start * (config.num_heads // config.num_kv_heads) == self.heads.start

    @staticmethod
    def full(config: ModelConfig) -> Shard:
        """The whole model on one rank."""
        moe = config.moe
        return Shard(
            range(config.num_heads), range(config.num_kv_heads), range(config.intermediate_size),
            range(config.vocab_size), range(config.num_layers),
            experts=ExpertMap.linear(moe.num_experts, 1) if moe else None,
            slots=range(moe.num_experts if moe else 0),
            expert_columns=range(moe.intermediate_size if moe else 0),
            shared_columns=range(moe.shared_intermediate_size if moe else 0),
        )  # fmt: skip

    def first(self) -> bool:
        """Does this stage embed tokens?"""
        return self.layers.start == 0

    def last(self, config: ModelConfig) -> bool:
        """Does this stage end in logits?"""
        return self.layers.stop == config.num_layers


def scaled(part: range, by: int) -> range:
    """Rows of a weight for units of `by` rows each: heads to rows of q, k, v."""
    return range(part.start * by, part.stop * by)
