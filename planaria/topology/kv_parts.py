"""Which part of a model's KV a rank has, and where ranks of another layout find theirs. Pure.

KV of a block is a rectangle, layers by heads, of some of its tokens. Each rank has one; those of a stage have the same
layers, where there are more ranks than heads several have the same heads, and context ranks have the same heads of
other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planaria.topology.stripes import Stripes

ALL = Stripes()


class KVRect(NamedTuple):
    """Of the whole model's layers and KV heads; latents, which all tensor ranks have, are one head. stripes: of which
    tokens."""

    layers: range
    heads: range
    stripes: Stripes = ALL

    def __len__(self) -> int:
        return len(self.layers) * len(self.heads)


class KVPiece(NamedTuple):
    """Of a rank that holds it: `part` of what is wanted, as far as its tokens are wanted."""

    rank: int
    part: KVRect


def pieces(wanted: KVRect, held: Sequence[KVRect]) -> list[KVPiece]:
    """From which ranks, that hold these, a part comes: all of it, and nothing twice. Raises ValueError where something
    is nobody's."""
    ranks: dict[Stripes, dict[int, KVRect]] = {}
    for rank, part in enumerate(held):
        ranks.setdefault(part.stripes, {})[rank] = part
    there = [(stripes, parts) for stripes, parts in ranks.items() if stripes.meets(wanted.stripes)]
    return [piece for stripes, parts in there for piece in _of(wanted, parts, stripes)]


def _of(wanted: KVRect, held: dict[int, KVRect], stripes: Stripes) -> list[KVPiece]:
    """Of ranks that have the same tokens."""
    found: list[KVPiece] = []
    layer = wanted.layers.start
    while layer < wanted.layers.stop:
        head, layers = wanted.heads.start, range(layer, layer)
        while head < wanted.heads.stop:
            rank = next((i for i, part in held.items() if layer in part.layers and head in part.heads), None)
            if rank is None:
                raise ValueError(f"no rank has KV head {head} of layer {layer}")
            layers = range(layer, min(wanted.layers.stop, held[rank].layers.stop))
            heads = range(head, min(wanted.heads.stop, held[rank].heads.stop))
            found.append(KVPiece(rank, KVRect(layers, heads, stripes)))
            head = heads.stop
        layer = layers.stop
    return found
