"""Weights in the form the tiles read (micro.py): panels of 16 columns, padded inside with zeros.

dense   [N/16][K/pair][16][pair], K padded to 16.
packed  [N/16] of codes, then scales; K in blocks of 32. Codes are q4: [K/8][16] words of 32 bits, whose nibble i is
        k = 0,2,4,6,1,3,5,7 [i]; q8: [K][16] signed bytes. Scales are the file's float16, [K/32][16] scale, for
        q4_1 [K/32][2][16] scale and minimum. So a packed weight takes what it takes in the file.

Behind the panels is the bias, float32 [N/16][16], where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu.micro import DENSE, Q4_0, Q4_1, Q8_0
from planaria.kernels.cpu.target import Target
from planaria.kernels.numbers import WORTH_THREADS, in_parts, to_bfloat16, to_float32
from planaria.kernels.ops import PartMemory, Quantized

KINDS = {"q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1}
PART = 1 << 18  # elements taken at a time, to bound temporary memory and to stay in caches
Array = npt.NDArray[Any]


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
    weight: Array | Quantized, bias: Array | None, target: Target, arena: PartMemory, threads: int = 1
) -> Packed:  # fmt: skip
    """Weight [N, K] and bias [N] or None in the layout above. Raises ValueError for a shape or kind it can't take."""
    rows, columns = weight.shape
    panels = up(rows, 16) // 16
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias of shape {tuple(bias.shape)} for a weight of {rows} rows; expected ({rows},)")
    if isinstance(weight, Quantized):
        return _pack_blocks(weight, bias, panels, arena, threads)
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


def _pack_blocks(weight: Quantized, bias: Array | None, panels: int, arena: PartMemory, threads: int) -> Packed:
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
    data, shift = _room(panels, stride, bias, arena)
    lines = data[: panels * stride].reshape(panels, stride)
    head = 4 if kind == Q4_1 else 2

    def some(first: int, last: int) -> None:
        count = last - first
        raw = weight.data[first * 16 : last * 16]
        if len(raw) < count * 16:
            raw = np.concatenate([raw, np.zeros((count * 16 - len(raw), raw.shape[1]), np.uint8)])
        file = raw.reshape(count, 16, blocks, size)
        codes = lines[first:last, :code_bytes]
        if kind == Q8_0:
            codes.reshape(count, blocks, 32, 16)[...] = file[..., head:].transpose(0, 2, 3, 1)
        else:
            words = codes.view(np.uint32).reshape(count, blocks, 4, 16)
            bytes = np.ascontiguousarray(file[..., head:]).view(np.uint64)  # elements e and e + 16 in each byte
            words[:, :, :2] = _neighbours(bytes).transpose(0, 2, 3, 1)
            words[:, :, 2:] = _neighbours(bytes >> np.uint64(4)).transpose(0, 2, 3, 1)
        scale = np.ascontiguousarray(file[..., :head]).view(np.uint16)
        place = lines[first:last, code_bytes : code_bytes + scale_bytes].view(np.uint16)
        place.reshape(count, blocks, head // 2, 16)[...] = scale.transpose(0, 2, 3, 1)

    in_parts(panels, PART // (16 * columns), threads if rows * columns >= WORTH_THREADS else 1, some)
    return Packed(kind, rows, columns, panels, blocks, stride, code_bytes, data, shift)


def _neighbours(bytes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """The low nibbles k of 8 bytes as the nibbles 0,2,4,6,1,3,5,7 of a word. A product brings every other one to its
    place among the uppermost 16 bits, and nothing else there."""
    together, others = np.uint64(0x1001001001000), np.uint64(0x000F000F000F000F)
    even, odd = bytes & others, bytes >> np.uint64(8) & others
    return (even * together >> np.uint64(48) | odd * together >> np.uint64(48) << np.uint64(16)).astype(np.uint32)
