"""Which part of the model a rank has, which experts on top of it, and reading both from the checkpoint.

Rule: a part is the same in every lane; whole experts are not of it. So a rank that changes its lane keeps its part, and
only experts come and go. Where lanes have slices of experts a rank's part has its own, and only the others' rest is the
same. Torch is imported by what reads.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from planaria.checkpoint import Checkpoint
from planaria.config.experts import expert_map
from planaria.config.options import EngineConfig
from planaria.models.deal import deal, deal_context, deal_heads
from planaria.models.shard import ContextGroup, Shard
from planaria.topology import Layout
from planaria.topology.experts import Maps, slots_at

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops
    from planaria.layers.decoder import Model
    from planaria.layers.weights import Packings
    from planaria.worker.weights import RankWeights

logger = logging.getLogger("planaria.worker")

Part = tuple[int, Layout]  # of the model: what this rank of this layout has


def part_of(config: EngineConfig, rank: int, layout: Layout) -> Part:
    """What of the model a rank of a layout has besides whole experts."""
    return (rank, layout) if config.parallel.slices(layout) > 1 else common_part(rank, layout)


def common_part(rank: int, layout: Layout) -> Part:
    """What of it ranks of all lanes have in common that have the same place in theirs."""
    at = layout.coords(rank)
    return at.pp * layout.tp + at.tp, Layout(tp=layout.tp, pp=layout.pp)


def context_of(config: EngineConfig, rank: int, layout: Layout) -> ContextGroup | None:
    """With whom a rank of a layout shares the tokens of a sequence."""
    at, model = layout.coords(rank), config.model
    heads = deal_heads(model.num_heads, model.num_kv_heads, layout.tp)
    return deal_context(heads, config.parallel.context(layout, at.pcp))[at.tp]


def configured(config: EngineConfig, layout: Layout) -> Maps:
    """Where experts are at the start, by layer; empty: they aren't dealt whole."""
    placed = expert_map(config.model, config.parallel, layout.expert_ranks)
    return (placed.slots,) * len(config.model.moe_layers) if placed is not None else ()


def of_any_lane(config: EngineConfig, layout: Layout, part: Part, *, sent: bool) -> Maps | None:
    """Experts that a rank with this part has in one lane or the other, by layer; none if they will be `sent`."""
    placed = expert_map(config.model, config.parallel, layout.expert_ranks)
    if placed is None:
        return None
    ranks = range(part[0] % layout.tp, placed.num_ranks, layout.tp) if not sent else ()
    experts = tuple(sorted({expert for rank in ranks for expert in placed.of(rank)}))
    return (experts,) * len(config.model.moe_layers)


def of_rank(layout: Layout, rank: int, maps: Maps) -> dict[int, list[int]]:
    """Experts of this rank's slots, by layer."""
    group = layout.group(rank, "dp", "pcp", "tp")
    own, size = group.index(rank), len(group)
    return {layer: sorted(set(slots_at(experts, size, own))) for layer, experts in enumerate(maps)}


def partition_of(config: EngineConfig, layout: Layout) -> tuple[int, ...] | None:
    """Of layers; None: dealt evenly, for it is of the layout that was asked for, and this is another."""
    partition = config.parallel.pp_layer_partition
    return partition if partition is not None and len(partition) == layout.pp else None


def read_part(
    config: EngineConfig, ops: Ops, part: Part, reads: Maps | None, progress: Callable[[str, float], None],
    weights: RankWeights,
) -> Model:  # fmt: skip
    """A model. reads: experts to read, by layer; None: those of its slots, if they aren't dealt whole. Experts that
    other lanes have otherwise are read apart (see `read_experts_apart`)."""
    from planaria.layers.build import build
    from planaria.loader import WeightSource
    from planaria.loader.forms import unpacked_line

    rank, layout = common_part(*part)
    checkpoint = msgspec.convert(config.checkpoint, Checkpoint)
    if config.model.foreign is not None:
        return _read_foreign(config, checkpoint, ops, (rank, layout), weights)
    device, float8 = config.device, getattr(ops, "float8", False)
    if rank == 0 and (line := unpacked_line(checkpoint, device.quantization, device.dtype, float8=float8)):
        logger.warning(line)
    tp, pp, partition = layout.tp, layout.pp, partition_of(config, layout)
    at, slices = part[1].coords(part[0]), config.parallel.slices(part[1])
    lane = at.dp * part[1].pcp + at.pcp if slices > 1 else 0
    experts = expert_map(config.model, config.parallel, tp)
    shard = deal(config.model, tp, pp, partition, experts, lane, slices=slices)[rank]
    if slices > 1:
        reads = (shard.held_experts,) * len(config.model.moe_layers)
    nothing = tuple(() for _ in reads) if reads is not None else None

    def make(packings: Packings | None, heard: Callable[[float], None]) -> Model:
        return build(
            config.model, WeightSource(checkpoint, float8=float8), ops,
            quantization=config.device.quantization, max_positions=config.scheduler.max_model_len,
            progress=lambda done, total: heard(done / total), shard=dataclasses.replace(shard, reads=nothing),
            packings=packings,
        )  # fmt: skip

    what = f"with layers {partition}, {'all' if reads is None else 'no'} experts"
    model = weights.make((rank, layout), what, make, ops, lambda fraction: progress("weights", fraction))
    if reads is not None and any(reads):
        read_experts_apart(config, ops, model, (rank, layout), dict(enumerate(reads)), weights)
    return model


def _read_foreign(config: EngineConfig, checkpoint: Checkpoint, ops: Any, part: Part, weights: RankWeights) -> Model:
    from planaria.hf.model import read

    def make(packings: Packings | None, heard: Callable[[float], None]) -> Any:
        return read(config.model, checkpoint, ops, Shard.full(config.model), (part[0], part[1].tp), packings)

    return weights.make_apart(part, "by Transformers", make, ops)


def read_experts_apart(
    config: EngineConfig, ops: Ops, model: Model, part: Part, reads: Mapping[int, Sequence[int]], weights: RankWeights
) -> None:
    """Experts that are not of a model's part, by layer: of the checkpoint, if nobody has packed them before."""
    from planaria.layers.build import read_experts
    from planaria.loader import WeightSource

    own = {block.number: tuple(sorted(set(reads.get(block.number, ())))) for block in model.blocks}

    def make(packings: Packings | None, heard: Callable[[float], None]) -> Model:
        source = WeightSource(msgspec.convert(config.checkpoint, Checkpoint))
        read_experts(model, source, ops, config.device.quantization, own, packings=packings, heard=heard)
        return model

    weights.make_apart(part, f"columns {model.shard.expert_columns} of experts {own}", make, ops)
