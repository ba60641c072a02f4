"""Grouped products of experts for GPUs, in Triton: three kernels, and the sorting before them, which looks at no value.

Rule: an element of a product is summed over K in blocks of BLOCK_K in ascending order, and a token adds up its experts
in the order of its choice, so a row's result does not depend on the others. Weights are read through a table of
addresses, one a slot, as on the CPU. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.kernels.gpu.fused import KINDS
from planaria.kernels.reference_linear import Linear

BLOCK_M, BLOCK_N, BLOCK_K = 32, 64, 32
BLOCK_H = 256  # columns of a token's sum at a time


LinearPair = tuple[Linear, Linear]


@dataclass(frozen=True)
class Table:
    """Weights of a rank's slots, and their addresses on the device: int64 [4, slots], gate over up, down, and the
    biases of the two. biased: have they such?"""

    weights: list[LinearPair]
    addresses: Tensor
    biased: tuple[bool, bool]

    @classmethod
    def of(cls, weights: list[LinearPair]) -> Table:
        """weights: (gate over up [2 I, H], down [H, I]) of each slot, contiguous, all of one form."""
        found = torch.tensor([_addresses(pair) for pair in weights], dtype=torch.int64).view(-1, 4).T.contiguous()
        if not weights:
            return cls(weights, found, (False, False))
        first, second = weights[0]
        return cls(weights, found.to(first.weight.device), (first.bias is not None, second.bias is not None))

    def put(self, slot: int, pair: LinearPair) -> None:
        """Another expert in a slot, from the next step on."""
        self.weights[slot] = pair
        self.addresses[:, slot] = torch.tensor(_addresses(pair), dtype=torch.int64)


def _addresses(pair: LinearPair) -> list[int]:
    biases = (half.bias for half in pair)
    return [*(half.weight.data_ptr() for half in pair), *(0 if bias is None else bias.data_ptr() for bias in biases)]


@dataclass(frozen=True)
class Tiles:
    """Rows (a token's choices) by slot, cut into tiles of BLOCK_M of one slot. All int64, on the device.

    order [T k]: row -> choice. places [T k]: choice -> row, or -1 where another rank holds the slot. slots, rows
    [tiles]: a tile's slot (the number of slots: no tile) and first row. ends [slots + 1]: end of each slot's rows.
    """

    order: Tensor
    places: Tensor
    slots: Tensor
    rows: Tensor
    ends: Tensor


def tiles_of(chosen: Tensor, held: range) -> Tiles:
    """chosen int64 [T, k]: slots over all ranks."""
    flat, count = chosen.flatten(), len(held)
    here = (flat >= held.start) & (flat < held.stop)
    key, order = torch.where(here, flat - held.start, count).sort(stable=True)
    numbers = torch.arange(count + 1, device=flat.device)
    ends = torch.searchsorted(key, numbers, right=True)
    starts = torch.searchsorted(key, numbers)
    last = torch.cumsum((ends - starts + BLOCK_M - 1)[:count] // BLOCK_M, 0)  # tiles of the slots up to each
    every = torch.arange(len(flat) // BLOCK_M + count, device=flat.device)  # as many as there can be
    slots = torch.searchsorted(last, every, right=True)
    before = torch.cat([last.new_zeros(1), last])[slots]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    return Tiles(order, places.where(here, -1), slots, starts[slots] + (every - before) * BLOCK_M, ends)


def experts(x: Tensor, chosen: Tensor, weights: Tensor, table: Table, held: range, kind: str = "silu") -> Tensor:
    """The weighted sum of each token's experts that this rank holds: float32 [T, H].

    x [T, H] in the weights' dtype, contiguous; chosen int64 [T, k], slots over all ranks; weights float32 [T, k].
    kind: see `Operations.gated`.
    """
    from planaria.kernels.gpu.experts_kernels import combine, down, gated

    (tokens, hidden), k = x.shape, chosen.shape[1]
    out = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return out
    tiles, width = tiles_of(chosen, held), table.weights[0][1].weight.shape[1]
    (gate_up, back, gate_up_bias, back_bias), biased = table.addresses, table.biased
    inner = torch.empty(tokens * k, width, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens * k, hidden, dtype=torch.float32, device=x.device)
    blocks = {"block_m": BLOCK_M, "block_n": BLOCK_N, "block_k": BLOCK_K}
    grid = len(tiles.slots), -(-width // BLOCK_N)
    gated[grid](
        x, gate_up, gate_up_bias, inner, tiles.order, tiles.slots, tiles.rows, tiles.ends, len(held), k, width, hidden,
        kind=KINDS.index(kind), biased=biased[0], **blocks,
    )  # fmt: skip
    grid = len(tiles.slots), -(-hidden // BLOCK_N)
    down[grid](
        inner, back, back_bias, y, tiles.slots, tiles.rows, tiles.ends, len(held), width, hidden, biased=biased[1],
        **blocks,
    )  # fmt: skip
    combine[(tokens, -(-hidden // BLOCK_H))](y, tiles.places, weights, out, k, hidden, block_h=BLOCK_H)
    return out
