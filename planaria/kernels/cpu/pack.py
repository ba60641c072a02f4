"""Weights in the form the tiles read (micro.py): panels of 16 columns, padded inside with zeros.

dense   [N/16][K/pair][16][pair], K padded to 16.
packed  [N/16] of codes, then scales; K in blocks of 32. Codes are q4: [K/8][16] words of 32 bits, whose nibble i is
        k = 0,2,4,6,1,3,5,7 [i]; q8: [K][16] signed bytes. Scales are the file's float16, [K/32][16] scale, for
        q4_1 [K/32][2][16] scale and minimum. So a packed weight takes what it takes in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from planaria.kernels.cpu.memory import Arena
from planaria.kernels.cpu.micro import DENSE, Q4_0, Q4_1, Q8_0
from planaria.kernels.cpu.target import Target
from planaria.kernels.ops import Quantized

KINDS = {"q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1}
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
PART = 1 << 22  # elements taken at a time, to bound temporary memory


@dataclass
class Packed:
    """One weight [rows, columns] (N, K). `length` is steps (dense) or blocks (packed) along K."""

    kind: int
    rows: int
    columns: int
    panels: int
    length: int
    stride: int  # bytes from panel to panel
    scales: int  # offset of the scales in a panel
    data: npt.NDArray[np.uint8]
    bias: npt.NDArray[Any]

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


def up(value: int, unit: int) -> int:
    """value rounded up to a multiple of unit."""
    return -(-value // unit) * unit


def pack(weight: torch.Tensor | Quantized, bias: torch.Tensor | None, target: Target, arena: Arena) -> Packed:
    """Weight [N, K] and bias [N] or None in the layout above. Raises ValueError for a shape or kind it can't take."""
    rows, columns = weight.shape
    panels = up(rows, 16) // 16
    shift = arena.take(panels * 64).view(np.float32)
    if bias is not None:
        if bias.shape != (rows,):
            raise ValueError(f"bias of shape {tuple(bias.shape)} for a weight of {rows} rows; expected ({rows},)")
        shift[:rows] = bias.detach().to(torch.float32).cpu().numpy()
    if isinstance(weight, Quantized):
        return _pack_blocks(weight, shift, panels, arena)
    steps = up(columns, 16) // target.pair
    data = arena.take(panels * steps * 64)
    dtype = torch.bfloat16 if target.item == 2 else torch.float32
    # the pair of neighbours along K moves as one 32-bit word
    out = torch.from_numpy(data.view(np.int32)).view(panels, steps, 16)
    part = max(1, PART // (16 * columns))
    for first in range(0, panels, part):
        last = min(panels, first + part)
        piece = weight.detach()[first * 16 : last * 16].to(dtype)
        if piece.shape != ((last - first) * 16, steps * target.pair):
            padded = torch.zeros((last - first) * 16, steps * target.pair, dtype=dtype)
            padded[: piece.shape[0], :columns] = piece
            piece = padded
        words = piece.contiguous().view(torch.int32).view(last - first, 16, steps)
        out[first:last].copy_(words.transpose(1, 2))
    return Packed(DENSE, rows, columns, panels, steps, steps * 64, 0, data, shift)


def form_of(w: Packed) -> tuple[int, ...]:
    """What `blank` makes another of."""
    return w.kind, w.rows, w.columns, w.panels, w.length, w.stride, w.scales


def blank(numbers: Sequence[int], bias: npt.NDArray[Any], arena: Arena) -> Packed:
    """A weight of a `form`, all zeros. bias: zeros, as many as it has rows in its panels."""
    kind, rows, columns, panels, length, stride, scales = numbers
    return Packed(kind, rows, columns, panels, length, stride, scales, arena.take(panels * stride), bias)


def _pack_blocks(weight: Quantized, shift: npt.NDArray[Any], panels: int, arena: Arena) -> Packed:
    kind = KINDS.get(weight.kind)
    if kind is None:
        raise ValueError(f"packed weight of kind {weight.kind!r}: kernels take {', '.join(KINDS)}")
    rows, columns = weight.shape
    if columns % 32:
        raise ValueError(f"packed weight with K = {columns}: K must be a multiple of 32; unpack it first")
    blocks = columns // 32
    size = {Q8_0: 34, Q4_0: 18, Q4_1: 20}[kind]
    if tuple(weight.data.shape) != (rows, blocks * size):
        raise ValueError(
            f"{weight.kind} data of shape {tuple(weight.data.shape)} for a weight {weight.shape}; "
            f"expected ({rows}, {blocks * size})"
        )
    code_bytes = blocks * (512 if kind == Q8_0 else 256)
    scale_bytes = blocks * (64 if kind == Q4_1 else 32)
    stride = up(code_bytes + scale_bytes, 64)
    data = arena.take(panels * stride)
    lines = data.reshape(panels, stride)
    part = max(1, PART // (16 * columns))
    for first in range(0, panels, part):
        last = min(panels, first + part)
        raw = weight.data[first * 16 : last * 16].cpu()
        if raw.shape[0] < (last - first) * 16:
            raw = torch.cat([raw, torch.zeros((last - first) * 16 - raw.shape[0], raw.shape[1], dtype=torch.uint8)])
        file = raw.contiguous().view(last - first, 16, blocks, size)
        head = 4 if kind == Q4_1 else 2
        scale = file[..., :head].reshape(last - first, 16, blocks, head // 2, 2)
        codes = torch.from_numpy(lines[first:last, :code_bytes])
        if kind == Q8_0:
            codes.view(last - first, blocks, 32, 16).copy_(file[..., head:].permute(0, 2, 3, 1))
        else:
            # bytes hold elements e and e + 16; wanted are words of 8 neighbours, two nibbles a byte
            low, high = file[..., head:] & 15, file[..., head:] >> 4
            flat = torch.cat([low, high], dim=-1).view(last - first, 16, blocks, 4, 8)
            pairs = torch.stack(
                [flat[..., NIBBLES[2 * i]] | (flat[..., NIBBLES[2 * i + 1]] << 4) for i in range(4)], dim=-1
            )
            codes.view(last - first, blocks, 4, 16, 4).copy_(pairs.permute(0, 2, 3, 1, 4))
        place = torch.from_numpy(lines[first:last, code_bytes : code_bytes + scale_bytes])
        place.view(last - first, blocks, head // 2, 16, 2).copy_(scale.permute(0, 2, 3, 1, 4))
    return Packed(kind, rows, columns, panels, blocks, stride, code_bytes, data, shift)
