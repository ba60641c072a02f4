"""How a layout deals a model to ranks: KV groups, MLP columns and vocabulary to tensor ranks, layers to stages, experts
by columns to tensor ranks or whole to the ranks of an expert group. Pure.

Rule: every query head, MLP column, token id and layer is held exactly once (a KV head by several ranks only where
there are more ranks than KV heads), every rank has some of each, and each kind is even within one unit. MLP blocks
don't make up for uneven heads: ranks wait for one another after attention and again after the MLP, so a rank with less
of one and more of the other makes everybody wait twice (docs/adr/0008-dealing.md).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from planaria.errors import ConfigError
from planaria.models.config import ModelConfig
from planaria.models.shard import ContextGroup, Shard
from planaria.topology.experts import ExpertMap
from planaria.topology.kv_parts import KVRect
from planaria.topology.layout import Layout
from planaria.topology.stripes import Context, Stripes
from planaria.types import KVLayout

MLP_BLOCK = 32  # columns; packed weights are cut at multiples of it
ALONE = Context()
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


def deal_context(heads: list[tuple[range, range]], context: Context) -> list[ContextGroup | None]:
    """Of each tensor rank its context group of neighbours, None where each has all tokens; heads: see `deal_heads`."""
    if context.size == 1:
        return [None] * len(heads)
    found, size = list[ContextGroup | None](), context.dcp
    groups = [heads[first : first + size] for first in range(0, len(heads), size)]
    spans = [tuple(range(group[0][kind].start, group[-1][kind].stop) for kind in (0, 1)) for group in groups]
    most, most_kv = (max(len(span[kind]) for span in spans) for kind in (0, 1))
    for number, (group, (queries, keys)) in enumerate(zip(groups, spans, strict=True)):
        for rank, (_, kv) in enumerate(group):
            leads, stripes = rank == 0 or group[rank - 1][1] != kv, context.stripes(rank)
            shares = context.pcp > 1
            found.append(ContextGroup(stripes, queries, keys, leads, number, len(groups), most, most_kv, shares))
    return found


def deal_blocks(total: int, block: int, ranks: int) -> list[range]:
    """[0, total) cut at multiples of `block`. The last parts are the longer ones, where heads have it the other way."""
    blocks = -(-total // block)
    starts = [min(blocks * rank // ranks * block, total) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def deal_tensor(
    config: ModelConfig, ranks: int, experts: ExpertMap | None = None, lane: int = 0, context: Context = ALONE,
    slices: int = 1,
) -> list[Shard]:  # fmt: skip
    """The shards of `ranks` tensor ranks, all layers each. experts: whole experts on each rank of the expert group, in
    which those of a lane follow one another; None: each tensor rank has some columns of every expert, of `slices` lanes
    each of its own. Raises ConfigError where a rank would be left empty."""
    whole, moe = Shard.full(config), config.moe
    if ranks == 1 and experts is None and slices == 1:
        return [replace(whole, context=deal_context([(whole.heads, whole.kv_heads)], context)[0])]
    if config.foreign is not None and config.foreign.tensor_ranks % ranks:
        most, why = config.foreign.tensor_ranks, config.foreign.why_not
        raise ConfigError(
            "--tensor-parallel-size", ranks, f"{config.architecture} is run by Transformers' code, and "
            + (why or f"by its tp_plan a number of ranks must divide {most}"), f"use {most}",
        )  # fmt: skip
    limits = {
        "query heads": config.num_heads,
        f"blocks of {VOCAB_BLOCK} tokens": -(-config.vocab_size // VOCAB_BLOCK),
    }
    if not all(config.is_moe(layer) for layer in range(config.num_layers)):
        limits[f"blocks of {MLP_BLOCK} MLP columns"] = -(-config.intermediate_size // MLP_BLOCK)
    if moe and experts is None:
        blocks = -(-moe.intermediate_size // MLP_BLOCK)
        limits[f"blocks of {MLP_BLOCK} columns of an expert"] = blocks
        if slices > 1 and ranks * slices > blocks:
            raise ConfigError(
                "--data-parallel-size", slices,
                f"without --enable-expert-parallel each of -tp {ranks} x -dp {slices} ranks has a slice of every "
                f"expert, and its {moe.intermediate_size} columns are {blocks} blocks of {MLP_BLOCK}",
                f"use at most {blocks} ranks, or --enable-expert-parallel",
            )  # fmt: skip
    if moe and moe.shared_intermediate_size:
        limits[f"blocks of {MLP_BLOCK} shared columns"] = -(-moe.shared_intermediate_size // MLP_BLOCK)
    for what, most in limits.items():
        if ranks > most:
            raise ConfigError(
                "--tensor-parallel-size", ranks, f"{config.architecture} of this size has only {most} {what}",
                f"use at most {min(limits.values())}",
            )  # fmt: skip
    if experts is not None and len(experts.slots) < experts.num_ranks:
        raise ConfigError(
            "--enable-expert-parallel", "true",
            f"{len(experts.slots)} experts can't be on {experts.num_ranks} ranks: some would have none",
            f"use at most {len(experts.slots)} ranks",
        )  # fmt: skip
    heads = deal_heads(config.num_heads, config.num_kv_heads, ranks)
    columns = deal_blocks(config.intermediate_size, MLP_BLOCK, ranks)
    vocab = deal_blocks(config.vocab_size, VOCAB_BLOCK, ranks)
    shared = deal_blocks(len(whole.shared_columns), MLP_BLOCK, ranks)
    sliced = deal_blocks(len(whole.expert_columns), MLP_BLOCK, ranks * slices)[lane * ranks : (lane + 1) * ranks]
    contexts = deal_context(heads, context)
    return [
        Shard(
            *heads[rank], mlp_columns=columns[rank], vocab=vocab[rank], layers=whole.layers, leads=rank == 0,
            shared_columns=shared[rank], experts=experts or whole.experts,
            slots=experts.span(lane * ranks + rank) if experts else whole.slots,
            expert_columns=whole.expert_columns if experts else sliced[rank], apart=slices > 1, context=contexts[rank],
        )
        for rank in range(ranks)
    ]  # fmt: skip


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


def kv_parts(
    config: ModelConfig, tp: int, pp: int, partition: tuple[int, ...] | None = None, context: Context = ALONE
) -> list[KVRect]:
    """What every rank of a lane has of KV, in rank order. Raises ConfigError for a split that can't be."""
    if not 0 < tp <= config.num_heads:
        raise ConfigError("--tensor-parallel-size", tp, f"there are {config.num_heads} query heads")
    heads = deal_heads(config.num_heads, config.num_kv_heads, tp)
    dealt: list[tuple[range, Stripes]] = []
    for pcp_rank in range(context.pcp):
        for (_, own), group in zip(heads, deal_context(heads, context._replace(pcp_rank=pcp_rank)), strict=True):
            kv, stripes = (own, Stripes()) if group is None else (group.kv_heads, group.stripes)
            dealt.append((range(1) if config.mla is not None else kv, stripes))
    return [KVRect(layers, *each) for layers in deal_layers(config.num_layers, pp, partition) for each in dealt]


def kv_layout(
    config: ModelConfig, layout: Layout, context: Context, partition: tuple[int, ...] | None, block_size: int
) -> KVLayout:  # fmt: skip
    """What ranks have of KV in blocks of so many tokens, for who has another layout."""
    stages = tuple(map(len, deal_layers(config.num_layers, layout.pp, partition)))
    return KVLayout(layout.tp, stages, block_size, context.dcp, context.pcp, context.interleave)


def deal(
    config: ModelConfig, tp: int, pp: int, partition: tuple[int, ...] | None = None,
    experts: ExpertMap | None = None, lane: int = 0, context: Context = ALONE, slices: int = 1,
) -> list[Shard]:  # fmt: skip
    """The shard of every rank of a lane; rank = stage * tp + tensor rank. experts, slices: see `deal_tensor`."""
    if config.foreign is not None and pp > 1:
        rule = f"{config.architecture} is run by Transformers' code, which isn't cut into stages"
        raise ConfigError("--pipeline-parallel-size", pp, rule, "use tensor ranks")
    return [
        replace(shard, layers=layers)
        for layers in deal_layers(config.num_layers, pp, partition)
        for shard in deal_tensor(config, tp, experts, lane, context, slices)
    ]
