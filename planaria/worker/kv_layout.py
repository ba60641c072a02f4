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
from planaria.models.deal import kv_parts
from planaria.protocol import KVCut
from planaria.topology.kv_parts import KVRect, pieces
from planaria.topology.layout import Layout
from planaria.worker.kv_sums import BlockSums
from planaria.worker.parts import partition_of

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops

CACHES = 2  # of a layer, at most: keys and values


class OldPart:
    """Of the rank that had this, as it was."""

    def __init__(
        self, memory: KVMemory, rank: int, cut: KVCut, held: KVRect, model: Any, ops: Ops, block_size: int
    ) -> None:  # fmt: skip
        like, heads, layers = model.layers[0].attention, len(held.heads), len(held.layers)
        size = like.cache_bytes(ops, block_size, heads)
        ops.kv_part = memory.part(rank, cut.number, cut.num_blocks * layers * size, CACHES * layers)
        try:
            self.caches = [like.cache(ops, cut.num_blocks, block_size, heads) for _ in held.layers]
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
    before, after = (_parts(config, each) for each in (cut.layout, layout))
    (lane, *_), size = layout.coords(rank), config.cache.block_size
    own, old = after[rank % len(after)], np.frombuffer(cut.blocks[lane], np.int32)
    full = old[np.frombuffer(cut.full[lane], np.int32)] if cut.full else old[:0]
    parts: dict[int, OldPart] = {}
    for source, piece in pieces(own, before):
        held = before[source]
        if source not in parts:
            parts[source] = OldPart(memory, lane * len(before) + source, cut, held, model, ops, size)
        for layer in piece.layers:
            theirs = parts[source].caches[held.layers.index(layer)]
            ours = model.layers[own.layers.index(layer)].attention.kv
            for there, here in zip(theirs.by_head(), ours.by_head(), strict=True):
                _copy(old.tolist(), there, _among(piece.heads, held.heads), here, _among(piece.heads, own.heads))
    wrong = {block for part in parts.values() for block in part.wrong(full.tolist(), size)}
    return {new for new, block in enumerate(old.tolist()) if block in wrong}


def _parts(config: EngineConfig, layout: Layout) -> list[KVRect]:
    return kv_parts(config.model, layout.tp, layout.pp, partition_of(config, layout))


def _among(heads: range, held: range) -> slice:
    return slice(heads.start - held.start, heads.stop - held.start)


def _copy(blocks: Iterable[int], theirs: npt.NDArray[Any], there: slice, ours: npt.NDArray[Any], here: slice) -> None:
    """[blocks, ..., heads, bytes]: of these blocks, to the first ones."""
    for new, block in enumerate(blocks):
        ours[new, :, here] = theirs[block, :, there]


def full_of(cut: KVCut, lane: int) -> Sequence[int]:
    """Blocks that are full, by their new numbers."""
    return np.frombuffer(cut.full[lane], np.int32).tolist() if cut.full else []
