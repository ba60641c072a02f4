"""Blocks of another layout: which ranks of a server have what this one needs of a block, and where in theirs it is.

Each sends its whole part of a block, since that is what its seal is of; this rank takes its own heads and tokens out of
it. Blocks of the other server may have another number of tokens: one of them is then in several of these, or the other
way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from planaria.errors import PlanariaError
from planaria.models.config import ModelConfig
from planaria.models.deal import kv_parts
from planaria.protocol import KVLoad
from planaria.topology.kv_parts import KVRect, pieces
from planaria.topology.stripes import Context
from planaria.types import KVLayout, KVOffer
from planaria.worker.kv_layout import Indexes, Items, common
from planaria.worker.kv_tier import Blocks, copy_in

MOST_RANKS, MOST_TOKENS = 256, 256  # of another server's engine; of a block, on each of them
MOST_LAYOUTS = 16  # that are remembered


class PartSource:
    """A rank of a server, what its blocks are of (see worker.kv.identity_of) and how large its part of one is; takers:
    ranks of this engine that fetch from it."""

    def __init__(self, rank: int, identity: bytes, size: int, takers: int = 1) -> None:
        self.rank, self.identity, self.size, self.takers = rank, identity, size, takers

    def put(self, blocks: Blocks, load: KVLoad, index: int, payload: memoryview) -> None:
        """What has come under `load.keys[index]`."""
        copy_in(blocks, load.blocks[index], payload)

    def whole(self, load: KVLoad, count: int) -> int:
        """Blocks of this engine, from the first on, of which all that comes from there is in the first `count` keys."""
        return count


class Span(NamedTuple):
    """Of one cache of a layer: `places` of a block of this rank's, from `held` of the row [start, stop) of a payload,
    in numbers."""

    cache: int
    places: Indexes
    start: int
    stop: int
    held: Indexes


class CutSource(PartSource):
    """Of another layout. its, own: tokens of a block there and here, on all ranks; number: bytes of one; spans: by
    `apart` (see `common`)."""

    def __init__(
        self, rank: int, identity: bytes, size: int, takers: int, its: int, own: int, number: int,
        spans: Callable[[int], list[Span]],
    ) -> None:  # fmt: skip
        super().__init__(rank, identity, size, takers)
        self.its, self.own, self.number, self._make = its, own, np.dtype(f"u{number}"), spans
        self._spans: dict[int, list[Span]] = {}

    def put(self, blocks: Blocks, load: KVLoad, index: int, payload: memoryview) -> None:
        assert isinstance(load.lease, KVOffer)
        data, first = np.frombuffer(payload, self.number), load.lease.blocks[index] * self.its
        end = -(-(first + self.its) // self.own) - load.first
        for at in range(max(0, first // self.own - load.first), min(end, len(load.blocks))):
            apart = (load.first + at) * self.own - first
            if apart not in self._spans:
                self._spans[apart] = self._make(apart)
            for cache, places, start, stop, held in self._spans[apart]:
                blocks[cache].view(self.number)[load.blocks[at], places] = data[start:stop][held]

    def whole(self, load: KVLoad, count: int) -> int:
        assert isinstance(load.lease, KVOffer)
        tokens = (load.lease.blocks[0] + count) * self.its
        return max(0, min(len(load.blocks), tokens // self.own - load.first))


class Recut:
    """Of the rank `rank` of an engine in which ranks have these parts of the KV of `model`, in blocks of `block_size`
    tokens on all ranks; blocks: of its caches, layer by layer; items: of a layer whose caches have so many heads and
    tokens in a block (raises PlanariaError where there can't be one); identity: of a part, of blocks of that layout.
    """

    def __init__(
        self, model: ModelConfig, own: Sequence[KVRect], rank: int, blocks: Blocks, block_size: int,
        items: Callable[[int, int], Items], identity: Callable[[KVRect, KVLayout], bytes],
    ) -> None:  # fmt: skip
        self.model, self.own, self.rank, self.block_size, self.items = model, own, rank, block_size, items
        self.identity = identity
        self._own = items(len(own[rank].heads), block_size // own[rank].stripes.size)
        self.number = blocks[0].shape[1] // self._own[0].size
        self._known: dict[KVLayout, list[PartSource]] = {}

    def sources(self, layout: KVLayout) -> list[PartSource]:
        """Who has this rank's part. Raises ValueError where the layout that is offered is none of this model's."""
        if layout not in self._known:
            if len(self._known) >= MOST_LAYOUTS:
                self._known.clear()
            self._known[layout] = self._sources(layout)
        return self._known[layout]

    def _sources(self, layout: KVLayout) -> list[PartSource]:
        context, size = Context(layout.dcp, layout.pcp, layout.interleave), layout.block_size
        tokens, rest = divmod(size, context.size * layout.interleave)
        ranks, tokens = layout.tp * layout.pcp * len(layout.layers), tokens * layout.interleave
        if layout.tp % layout.dcp or rest or ranks > MOST_RANKS or tokens > MOST_TOKENS:
            raise ValueError("no rank can have such a part of a block")
        try:
            held = kv_parts(self.model, layout.tp, len(layout.layers), layout.layers, context)
            found = {heads: self.items(heads, tokens) for heads in {len(part.heads) for part in held}}
        except PlanariaError as e:
            raise ValueError(str(e)) from None
        wanted = [pieces(part, held) for part in self.own]
        takers = Counter(rank for each in wanted for rank in {piece.rank for piece in each})
        parts: dict[int, list[KVRect]] = {}
        for rank, part in wanted[self.rank]:
            parts.setdefault(rank, []).append(part)
        return [
            CutSource(
                rank, self.identity(held[rank], layout),
                len(held[rank].layers) * sum(each.size for each in found[len(held[rank].heads)]) * self.number,
                takers[rank], size, self.block_size, self.number,
                partial(self._spans, held[rank], found[len(held[rank].heads)], some),
            )
            for rank, some in parts.items()
        ]  # fmt: skip

    def _spans(self, held: KVRect, items: Items, parts: Iterable[KVRect], apart: int) -> list[Span]:
        """From the payload of who holds that, of these parts of it."""
        own, sizes, found = self.own[self.rank], [each.size for each in items], list[Span]()
        for part in parts:
            both = common(own, self._own, held, items, part.heads, apart)
            for layer in part.layers:
                cache, start = own.layers.index(layer) * len(both), held.layers.index(layer) * sum(sizes)
                for (places, there), size in zip(both, sizes, strict=True):
                    found.append(Span(cache, places, start, start + size, there))
                    cache, start = cache + 1, start + size
        return found
