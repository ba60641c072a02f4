"""KV of another layout, cut anew: a rank copies its heads of its layers from the parts that the ranks of that layout
had in the memory of this node. What a dying rank has scribbled over is known by its checksums, and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from planaria.config.options import EngineConfig
from planaria.hosts.memory import KVMemory
from planaria.models.deal import kv_layout, kv_parts
from planaria.protocol import KVCut
from planaria.topology.kv_parts import KVRect, pieces
from planaria.topology.layout import Layout
from planaria.types import KVLayout
from planaria.worker.kv_sums import BlockSums
from planaria.worker.parts import partition_of

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops

CACHES = 2  # of a layer, at most: keys and values
Items = Sequence[npt.NDArray[np.intp]]  # of each cache of a layer: [heads][tokens][numbers], see `items` of a cache
Indexes = slice | npt.NDArray[np.intp]  # of numbers in a block of one cache


def common(
    own: KVRect, own_items: Items, held: KVRect, held_items: Items, heads: range, apart: int = 0
) -> list[tuple[Indexes, Indexes]]:
    """Of each cache of a layer, where a rank that has `own` of a block puts what is in a block of another, of `held`,
    and where it is there. heads: that both have; apart: from the first token of that block to the first of this."""
    size = held_items[0].shape[1] * held.stripes.size
    tokens = own.stripes.position(np.arange(own_items[0].shape[1])) + apart
    here = np.flatnonzero((tokens >= 0) & (tokens < size) & held.stripes.here(tokens))
    there = held.stripes.local(tokens[here])
    return [
        _places(mine[_among(heads, own)][:, here].ravel(), its[_among(heads, held)][:, there].ravel())
        for mine, its in zip(own_items, held_items, strict=True)
    ]


def _among(heads: range, part: KVRect) -> slice:
    return slice(heads.start - part.heads.start, heads.stop - part.heads.start)


def _places(own: npt.NDArray[np.intp], held: npt.NDArray[np.intp]) -> tuple[Indexes, Indexes]:
    """In the order in which they are written; in one piece where they are one in both."""
    order = np.argsort(own)
    own, held = own[order], held[order]
    if len(own) and (np.diff(own) == 1).all() and (np.diff(held) == 1).all():
        return slice(own[0], own[-1] + 1), slice(held[0], held[-1] + 1)
    return own, held


class OldPart:
    """Of the rank that had this, as it was; tokens: of a block, that it had."""

    def __init__(
        self, memory: KVMemory, rank: int, cut: KVCut, held: KVRect, model: Any, ops: Ops, tokens: int
    ) -> None:  # fmt: skip
        like, heads, layers = model.layers[0].attention, len(held.heads), len(held.layers)
        size = like.cache_bytes(ops, tokens, heads)
        ops.kv_part = memory.part(rank, cut.number, cut.num_blocks * layers * size, CACHES * layers)
        try:
            self.caches = [like.cache(ops, cut.num_blocks, tokens, heads) for _ in held.layers]
        finally:
            ops.kv_part = None
        self.table = np.frombuffer(memory.sums(rank, cut.number, cut.num_blocks), np.int64)

    def wrong(self, blocks: Sequence[int], block_size: int) -> list[int]:
        every = [rows for cache in self.caches for rows in cache.blocks()]
        return BlockSums(every, self.table, 1, block_size).wrong(blocks)


def recut(
    config: EngineConfig, layout: Layout, rank: int, model: Any, ops: Ops, memory: KVMemory, cut: KVCut
) -> set[int]:
    """Copy what counts into this rank's caches. Blocks that don't hold what they are to hold, by their new numbers."""
    before, after = (parts_of_kv(config, each) for each in (cut.layout, layout))
    lane, tokens = layout.coords(rank).dp, config.tokens_here(cut.layout)
    own, old = after[rank % len(after)], np.frombuffer(cut.blocks[lane], np.int32)
    full = old[np.frombuffer(cut.full[lane], np.int32)] if cut.full else old[:0]
    parts: dict[int, OldPart] = {}
    for source, piece in pieces(own, before):
        held = before[source]
        if source not in parts:
            parts[source] = OldPart(memory, lane * len(before) + source, cut, held, model, ops, tokens)
        theirs = parts[source].caches
        ours = [layer.attention.kv for layer in model.layers]
        both = common(own, ours[0].items(), held, theirs[0].items(), piece.heads)
        number = np.dtype(f"u{ours[0].blocks()[0].shape[1] // ours[0].items()[0].size}")
        for layer in piece.layers:
            of, to = theirs[held.layers.index(layer)].blocks(), ours[own.layers.index(layer)].blocks()
            for there, here, (places, its) in zip(of, to, both, strict=True):
                _copy(old.tolist(), there.view(number), its, here.view(number), places)
    wrong = {block for part in parts.values() for block in part.wrong(full.tolist(), config.cache.block_size)}
    return {new for new, block in enumerate(old.tolist()) if block in wrong}


def parts_of_kv(config: EngineConfig, layout: Layout) -> list[KVRect]:
    """What each rank of a lane has of it."""
    context = config.parallel.context(layout)
    return kv_parts(config.model, layout.tp, layout.pp, partition_of(config, layout), context)


def layout_of_kv(config: EngineConfig, layout: Layout) -> KVLayout:
    """What others are told of it."""
    context, size = config.parallel.context(layout), config.cache.block_size
    return kv_layout(config.model, layout, context, partition_of(config, layout), size)


def _copy(
    blocks: Iterable[int], theirs: npt.NDArray[Any], its: Indexes, ours: npt.NDArray[Any], places: Indexes
) -> None:  # fmt: skip
    """[blocks, numbers]: of these blocks, to the first ones."""
    for new, block in enumerate(blocks):
        ours[new, places] = theirs[block, its]


def full_of(cut: KVCut, lane: int) -> Sequence[int]:
    """Blocks that are full, by their new numbers."""
    return np.frombuffer(cut.full[lane], np.int32).tolist() if cut.full else []
