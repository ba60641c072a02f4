"""Blocks of another layout: which ranks of a server have what this one needs of a block, and where in theirs it is.

Each sends its whole part of a block, since that is what its seal is of; this rank takes its own heads out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from planaria.errors import ConfigError
from planaria.models.config import ModelConfig
from planaria.models.deal import kv_parts
from planaria.topology.kv_parts import KVRect, pieces
from planaria.types import KVOffer
from planaria.worker.kv_tier import Blocks, copy_in


class Span(NamedTuple):
    """`size` bytes: of a cache of this rank's from `to` on, of another's payload from `start` on."""

    cache: int
    to: int
    start: int
    size: int


class PartSource(NamedTuple):
    """A rank of a server, what its blocks are of (see worker.kv.identity_of) and how large; takers: ranks of this
    engine that fetch from it; spans: of its payload that are put into this rank's; None: all of it."""

    rank: int
    identity: bytes
    size: int
    takers: int = 1
    spans: tuple[Span, ...] | None = None

    def put(self, blocks: Blocks, block: int, payload: memoryview) -> None:
        if self.spans is None:
            return copy_in(blocks, block, payload)
        data = np.frombuffer(payload, np.uint8)
        for cache, to, start, size in self.spans:
            blocks[cache][block, to : to + size] = data[start : start + size]


class Recut:
    """Of the rank `rank` of an engine in which ranks have these parts of the KV of `model`; blocks: of its caches, one
    a layer, in which heads follow one another; identity: of a part."""

    def __init__(
        self, model: ModelConfig, own: Sequence[KVRect], rank: int, blocks: Blocks, identity: Callable[[KVRect], bytes]
    ) -> None:
        self.model, self.own, self.rank, self.identity = model, own, rank, identity
        self.head_bytes = sum(cache.shape[1] for cache in blocks) // len(own[rank])

    def sources(self, offer: KVOffer) -> list[PartSource]:
        """Who has this rank's part. Raises ValueError where the layout that is offered is none of this model's."""
        try:
            held = kv_parts(self.model, offer.tp, len(offer.layers), offer.layers)
        except ConfigError as e:
            raise ValueError(str(e)) from None
        wanted = [pieces(part, held) for part in self.own]
        takers = [sum(any(piece.rank == rank for piece in each) for each in wanted) for rank in range(len(held))]
        found: dict[int, list[Span]] = {}
        for rank, part in wanted[self.rank]:
            found.setdefault(rank, []).extend(self._spans(part, held[rank]))
        return [
            PartSource(rank, self.identity(held[rank]), len(held[rank]) * self.head_bytes, takers[rank], tuple(spans))
            for rank, spans in found.items()
        ]

    def _spans(self, part: KVRect, held: KVRect) -> list[Span]:
        """Of each layer of a part, from the payload of who holds it."""
        own, size = self.own[self.rank], len(part.heads) * self.head_bytes
        return [
            Span(
                own.layers.index(layer), own.heads.index(part.heads.start) * self.head_bytes,
                held.offset(layer, part.heads.start) * self.head_bytes, size,
            )
            for layer in part.layers
        ]  # fmt: skip
