"""Which part of a model's KV a rank has, and where ranks of another layout find theirs. Pure.

KV of a block is a rectangle, layers by heads. Each rank has one; those of a stage have the same layers, and where there
are more ranks than heads, several have the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class KVRect(NamedTuple):
    """Of the whole model's layers and KV heads; latents, which all tensor ranks have, are one head."""

    layers: range
    heads: range

    def __len__(self) -> int:
        return len(self.layers) * len(self.heads)

    def offset(self, layer: int, head: int) -> int:
        """Heads of layers before this one, one layer after the other."""
        return self.layers.index(layer) * len(self.heads) + self.heads.index(head)


class KVPiece(NamedTuple):
    rank: int
    part: KVRect


def pieces(wanted: KVRect, held: Sequence[KVRect]) -> list[KVPiece]:
    """From which ranks, that hold these, a part comes: all of it, and nothing twice. Raises ValueError where something
    is nobody's."""
    found: list[KVPiece] = []
    layer = wanted.layers.start
    while layer < wanted.layers.stop:
        head, layers = wanted.heads.start, range(layer, layer)
        while head < wanted.heads.stop:
            rank = next((i for i, part in enumerate(held) if layer in part.layers and head in part.heads), None)
            if rank is None:
                raise ValueError(f"no rank has KV head {head} of layer {layer}")
            layers = range(layer, min(wanted.layers.stop, held[rank].layers.stop))
            heads = range(head, min(wanted.heads.stop, held[rank].heads.stop))
            found.append(KVPiece(rank, KVRect(layers, heads)))
            head = heads.stop
        layer = layers.stop
    return found
