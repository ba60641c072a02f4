"""Packed weights: blocks of 32 along K in GGUF's formats, and their conversion from and to float32.

The arithmetic is that of the `gguf` package's reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.errors import ModelError
from planaria.kernels.numbers import WORTH_THREADS, in_parts, to_float32
from planaria.kernels.ops import Quantized

BLOCK = 32
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
PACKED_KINDS = tuple(BLOCK_BYTES)  # stay packed when loaded
_CHUNK = 1 << 17  # elements converted at a time: temporaries stay in a core's caches

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantise(weight: Quantized, threads: int = 1) -> Floats:
    """The weight's values, float32 [N, K]."""
    num_rows, num_columns = weight.shape
    out = np.empty(weight.shape, np.float32)

    def some(first: int, last: int) -> None:
        blocks = weight.data[first:last].reshape(last - first, -1, BLOCK_BYTES[weight.kind])
        _DEQUANTISE[weight.kind](blocks, out[first:last].reshape(last - first, -1, BLOCK))

    in_parts(num_rows, _CHUNK // max(num_columns, 1), threads if out.size >= WORTH_THREADS else 1, some)
    return out


def quantise(values: npt.NDArray[Any], kind: str, threads: int = 1) -> Quantized:
    """Pack a matrix [N, K], K a multiple of 32, as q8_0 or q4_1. Raises ModelError for another K or kind."""
    if kind not in _QUANTISE:
        raise ModelError(f"quantization {kind} can't be made here; these can: {', '.join(_QUANTISE)}")
    if values.ndim != 2 or values.shape[1] % BLOCK:
        raise ModelError(
            f"a weight of shape {list(values.shape)} can't be packed as {kind}: K must be a multiple of 32"
        )
    num_rows, num_columns = values.shape
    data = np.empty((num_rows, num_columns // BLOCK, BLOCK_BYTES[kind]), np.uint8)

    def some(first: int, last: int) -> None:
        rows = to_float32(values[first:last]).reshape(last - first, -1, BLOCK)
        with np.errstate(divide="ignore", over="ignore"):
            _QUANTISE[kind](rows, data[first:last])

    in_parts(num_rows, _CHUNK // max(num_columns, 1), threads if values.size >= WORTH_THREADS else 1, some)
    return Quantized(kind, data.reshape(num_rows, -1), (num_rows, num_columns))


def _halves(blocks: Bytes, first: int, count: int) -> Floats:
    """float16 values at byte `first` of each block, as float32 [..., count]."""
    return np.ascontiguousarray(blocks[..., first : first + 2 * count]).view(np.float16).astype(np.float32)


def _nibbles(blocks: Bytes, first: int, target: Floats) -> None:
    packed = blocks[..., first:]
    target[..., : BLOCK // 2] = packed & 15
    target[..., BLOCK // 2 :] = packed >> 4


def _from_q4_0(blocks: Bytes, target: Floats) -> None:
    _nibbles(blocks, 2, target)
    target -= np.float32(8)
    target *= _halves(blocks, 0, 1)


def _from_q4_1(blocks: Bytes, target: Floats) -> None:
    scale = _halves(blocks, 0, 2)
    _nibbles(blocks, 4, target)
    target *= scale[..., :1]
    target += scale[..., 1:]


def _from_q8_0(blocks: Bytes, target: Floats) -> None:
    np.multiply(blocks[..., 2:].view(np.int8), _halves(blocks, 0, 1), out=target)


def _inverse(scale: Floats) -> Floats:
    return np.where(scale == 0, np.float32(0), 1 / scale)


def _store_halves(values: Floats, out: Bytes, first: int) -> None:
    count = values.shape[-1]
    out[..., first : first + 2 * count] = values.astype(np.float16).view(np.uint8)


def _across(values: Floats) -> Floats:
    """[32, blocks]: what is reduced along its first axis is faster by far than along the last, short one."""
    return values.reshape(-1, BLOCK).T.copy()


def _to_q8_0(values: Floats, out: Bytes) -> None:
    size = np.abs(values)
    scale = (_across(size).max(0) / np.float32(127)).reshape(*values.shape[:-1], 1)
    size *= _inverse(scale)
    rounded = np.floor(size)
    size -= rounded
    size += size
    rounded += np.floor(size, out=size)  # half away from zero, as ggml's roundf
    _store_halves(scale, out, 0)
    np.copyto(out[..., 2:].view(np.int8), np.copysign(rounded, values), casting="unsafe")


def _to_q4_1(values: Floats, out: Bytes) -> None:
    across, one = _across(values), (*values.shape[:-1], 1)
    low, high = across.min(0).reshape(one), across.max(0).reshape(one)
    scale = (high - low) / np.float32(15)
    q = values - low
    q *= _inverse(scale)
    q += np.float32(0.5)
    codes = q.astype(np.uint8)
    np.minimum(codes, np.uint8(15), out=codes)
    _store_halves(np.concatenate([scale, low], -1), out, 0)
    out[..., 4:] = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)


_DEQUANTISE: dict[str, Callable[[Bytes, Floats], None]] = {
    "q4_0": _from_q4_0, "q4_1": _from_q4_1, "q8_0": _from_q8_0,
}  # fmt: skip
_QUANTISE: dict[str, Callable[[Floats, Bytes], None]] = {"q8_0": _to_q8_0, "q4_1": _to_q4_1}
