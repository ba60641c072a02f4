"""How a layout deals a model to ranks: KV groups, MLP columns and vocabulary to tensor ranks, layers to stages. Pure.

Rule: every query head, MLP column, token id and layer is held exactly once (a KV head by several ranks only where
there are more ranks than KV heads), every rank has some of each, and each kind is even within one unit. MLP blocks
don't make up for uneven heads: ranks wait for one another after attention and again after the MLP, so a rank with less
of one and more of the other makes everybody wait twice (docs/adr/0008-dealing.md).
"""

from __future__ import annotations

from itertools import pairwise

from planaria.config import ModelConfig
from planaria.errors import ConfigError
from planaria.layers.shard import Shard

MLP_BLOCK = 32  # columns; packed weights are cut at multiples of it
VOCAB_BLOCK = 16  # rows; what a kernel writes at a time


def parts(total: int, count: int) -> list[range]:
    """[0, total) in `count` contiguous parts, the longer ones first."""
    size, longer = divmod(total, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def deal_heads(num_heads: int, num_kv_heads: int, ranks: int) -> list[tuple[range, range]]:
    """(query heads, KV heads) of each rank. `ranks` is at most `num_heads`."""
    group = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv) for kv in parts(num_kv_heads, ranks)]
    dealt = []
    for kv, holders in enumerate(parts(ranks, num_kv_heads)):
        for heads in parts(group, len(holders)):
            dealt.append((range(kv * group + heads.start, kv * group + heads.stop), range(kv, kv + 1)))
    return dealt


def deal_blocks(total: int, block: int, ranks: int) -> list[range]:
    """[0, total) cut at multiples of `block`. The last parts are the longer ones, where heads have it the other way."""
    blocks = -(-total // block)
    starts = [min(blocks * rank // ranks * block, total) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def deal_tensor(config: ModelConfig, ranks: int) -> list[Shard]:
    """The shards of `ranks` tensor ranks, all layers each. Raises ConfigError where a rank would be left empty."""
    if ranks == 1:
        return [Shard.full(config)]
    limits = {
        "query heads": config.num_heads,
        f"blocks of {MLP_BLOCK} MLP columns": -(-config.intermediate_size // MLP_BLOCK),
        f"blocks of {VOCAB_BLOCK} tokens": -(-config.vocab_size // VOCAB_BLOCK),
    }
    for what, most in limits.items():
        if ranks > most:
            raise ConfigError(
                "--tensor-parallel-size", ranks, f"{config.architecture} of this size has only {most} {what}",
                f"use at most {min(limits.values())}",
            )  # fmt: skip
    heads = deal_heads(config.num_heads, config.num_kv_heads, ranks)
    columns = deal_blocks(config.intermediate_size, MLP_BLOCK, ranks)
    vocab = deal_blocks(config.vocab_size, VOCAB_BLOCK, ranks)
    layers = range(config.num_layers)
    return [
        Shard(*held, mlp_columns=mlp, vocab=ids, layers=layers, leads=rank == 0)
        for rank, (held, mlp, ids) in enumerate(zip(heads, columns, vocab, strict=True))
    ]


def deal_layers(num_layers: int, stages: int, partition: tuple[int, ...] | None = None) -> list[range]:
    """The layers of each stage: as `partition` says, else evenly. Raises ConfigError for a split that can't be."""
    if partition is not None:
        if len(partition) != stages or min(partition) < 1 or sum(partition) != num_layers:
            raise ConfigError(
                "--pp-layer-partition", ",".join(map(str, partition)),
                f"must be {stages} positive numbers that sum to {num_layers}",
            )  # fmt: skip
        starts = [sum(partition[:i]) for i in range(stages + 1)]
        return [range(a, b) for a, b in pairwise(starts)]
    if stages > num_layers:
        raise ConfigError(
            "--pipeline-parallel-size", stages, f"the model has {num_layers} layers", f"use at most {num_layers}"
        )
    return parts(num_layers, stages)


def deal(config: ModelConfig, tp: int, pp: int, partition: tuple[int, ...] | None = None) -> list[Shard]:
    """The shard of every rank; rank = stage * tp + tensor rank."""
    return [
        Shard(s.heads, s.kv_heads, s.mlp_columns, s.vocab, layers, s.leads)
        for layers in deal_layers(config.num_layers, pp, partition)
        for s in deal_tensor(config, tp)
    ]
