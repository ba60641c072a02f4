"""Weights in the form the tiles read (micro.py): panels of 16 columns, padded inside with zeros.

dense   [N/16][K/pair][16][pair], K padded to 16.
packed  [N/16] of codes, then scales; K in blocks of 32, so that a cut between any two of them is one of the weight.
        Codes of 8 bits are [K/2][16][2] signed bytes. Others are split into planes of 4, 2 or 1 bits (blocks.py);
        a plane of p bits is [p][16] words of 32 bits a block, whose lower half has the even k in ascending order, the
        upper half the odd ones; where kinds are multiplied as bytes, byte i of each four has every fourth from i on.
        Scales of 32 weights that are the file's float16 are [K/32][16] scale, or
        [K/32][2][16] scale and minimum. Where they are small integers times numbers of a superblock these are bytes,
        [K/32][32/group][16] likewise, and behind them are the float16 numbers, [superblocks][16] or
        [superblocks][2][16]. So a packed weight takes what it takes in the file, or some hundredths more.

Behind the panels is the bias, float32 [N/16][16], where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.kernels.blocks import BLOCK, KINDS
from planaria.kernels.cpu.build import KindKernels
from planaria.kernels.cpu.micro import DENSE
from planaria.kernels.cpu.target import Target
from planaria.kernels.numbers import WORTH_THREADS, in_parts, to_bfloat16, to_float32
from planaria.kernels.ops import PartMemory, Quantized, Rows

PART = 1 << 18  # elements taken at a time, to bound temporary memory and to stay in caches
BLOCKS_PART = 1 << 20  # of packed ones: between two parts threads wait for the interpreter
Array = npt.NDArray[Any]
Kinds = Callable[[int], KindKernels]


@dataclass
class Packed:
    """One weight [rows, columns] (N, K). `length` is steps (dense) or blocks (packed) along K. kind: of micro.py."""

    kind: int
    rows: int
    columns: int
    panels: int
    length: int
    stride: int  # bytes from panel to panel
    scales: int  # offset of the scales in a panel, a multiple of 8; plus the first block's place in its superblock
    data: npt.NDArray[np.uint8]
    bias: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def biased(self) -> bool:
        return self.data.nbytes > self.panels * self.stride

    @property
    def nbytes(self) -> int:
        """Of its panels, the bias not among them."""
        return self.panels * self.stride


def up(value: int, unit: int) -> int:
    """value rounded up to a multiple of unit."""
    return -(-value // unit) * unit


def pack(
    weight: Rows | Quantized, bias: Array | None, target: Target, arena: PartMemory, threads: int = 1,
    kinds: Kinds | None = None,
) -> Packed:  # fmt: skip
    """Weight [N, K] and bias [N] or None in the layout above. kinds: kernels of a quantised one's kind
    by its number. Raises ValueError for a shape or kind it can't take."""
    rows, columns = weight.shape
    panels = up(rows, 16) // 16
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias of shape {tuple(bias.shape)} for a weight of {rows} rows; expected ({rows},)")
    if isinstance(weight, Quantized):
        assert kinds is not None
        return _pack_blocks(weight, bias, panels, arena, kinds, threads)
    steps = up(columns, 16) // target.pair
    data, shift = _room(panels, steps * 64, bias, arena)
    stored, width = (to_bfloat16 if target.item == 2 else to_float32), steps * target.pair
    # the pair of neighbours along K moves as one 32-bit word
    out = data[: panels * steps * 64].view(np.int32).reshape(panels, steps, 16)

    def some(first: int, last: int) -> None:
        piece = stored(weight[first * 16 : last * 16])
        if piece.shape != ((last - first) * 16, width):
            padded = np.zeros(((last - first) * 16, width), piece.dtype)
            padded[: len(piece), :columns] = piece
            piece = padded
        words = np.ascontiguousarray(piece).view(np.int32).reshape(last - first, 16, steps)
        out[first:last] = words.transpose(0, 2, 1)

    in_parts(panels, PART // (16 * columns), threads if rows * columns >= WORTH_THREADS else 1, some)
    return Packed(DENSE, rows, columns, panels, steps, steps * 64, 0, data, shift)


def _room(panels: int, stride: int, bias: Array | None, arena: PartMemory) -> tuple[npt.NDArray[np.uint8], Array]:
    """Memory of a weight, and the bias as its kernels read it."""
    if bias is None:
        return arena.take(panels * stride), arena.take(panels * 64).view(np.float32)
    data = arena.take(panels * (stride + 64))
    shift = data[panels * stride :].view(np.float32)
    shift[: len(bias)] = to_float32(bias)
    return data, shift


def form_of(w: Packed) -> tuple[int, ...]:
    """What `blank` makes another of."""
    return w.kind, w.rows, w.columns, w.panels, w.length, w.stride, w.scales, int(w.biased)


def blank(numbers: Sequence[int], bias: npt.NDArray[Any], arena: PartMemory) -> Packed:
    """A weight of a `form`, all zeros. bias: zeros, as many as it has rows in its panels."""
    kind, rows, columns, panels, length, stride, scales, biased = numbers
    data = arena.take(panels * (stride + 64 * biased))
    own = data[panels * stride :].view(np.float32) if biased else bias
    return Packed(kind, rows, columns, panels, length, stride, scales, data, own)


def _pack_blocks(
    weight: Quantized, bias: Array | None, panels: int, arena: PartMemory, kinds: Kinds, threads: int
) -> Packed:  # fmt: skip
    kind = KINDS.get(weight.kind)
    if kind is None:
        raise ValueError(f"packed weight of kind {weight.kind!r}: kernels take {', '.join(KINDS)}")
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"packed weight with K = {columns}: K must be a multiple of 32; unpack it first")
    in_file = -(-(weight.skip + columns) // kind.elements)  # blocks
    if tuple(weight.data.shape) != (rows, in_file * kind.nbytes):
        raise ValueError(
            f"{weight.kind} data of shape {tuple(weight.data.shape)} for a weight {weight.shape}; "
            f"expected ({rows}, {in_file * kind.nbytes})"
        )
    blocks, both, groups = columns // BLOCK, kind.both, BLOCK // kind.group
    code_bytes, scale_bytes = blocks * 64 * kind.bits, blocks * 16 * both * (groups if kind.small else 2)
    shared_bytes = in_file * 32 * both if kind.small else 0
    stride = up(code_bytes + scale_bytes + shared_bytes, 64)
    data, shift = _room(panels, stride, bias, arena)
    lines, first_block = data[: panels * stride].reshape(panels, stride), weight.skip // BLOCK
    place = kinds(kind.number).place

    def some(first: int, last: int) -> None:
        raw, count = np.ascontiguousarray(weight.data[first * 16 : last * 16]), last - first
        place(raw.ctypes.data, raw.shape[1], len(raw), first_block, blocks, lines[first:].ctypes.data, stride)
        if len(raw) < count * 16:
            raw = np.concatenate([raw, np.zeros((count * 16 - len(raw), raw.shape[1]), np.uint8)])
        scales = kind.scales(raw.reshape(count, 16, in_file, kind.nbytes))
        own = lines[first:last, code_bytes : code_bytes + scale_bytes]
        halves = own if scales.sub_scales is None else lines[first:last, code_bytes + scale_bytes :][:, :shared_bytes]
        for i, half in enumerate(h.view(np.uint16) for h in (scales.scale, scales.minimum) if h is not None):
            halves.view(np.uint16).reshape(count, -1, both, 16)[:, :, i] = half.transpose(0, 2, 1)
        for i, each in enumerate(s for s in (scales.sub_scales, scales.sub_minima) if s is not None):
            mine = each.reshape(count, 16, -1, groups)[:, :, first_block : first_block + blocks]
            own.view(np.int8).reshape(count, blocks, both, groups, 16)[:, :, i] = mine.transpose(0, 2, 3, 1)

    in_parts(panels, BLOCKS_PART // (16 * columns), threads if rows * columns >= WORTH_THREADS else 1, some)
    return Packed(kind.number, rows, columns, panels, blocks, stride, code_bytes + first_block, data, shift)
