"""Packed weights in GGUF's formats (blocks.py), and their conversion from and to float32.

The arithmetic is that of the `gguf` package's reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.errors import ModelError
from planaria.kernels.blocks import BLOCK, FLOAT8, KINDS, LEVELS, PACKED, BlockKind, Bytes
from planaria.kernels.numbers import WORTH_THREADS, float8_values, in_parts, to_float32
from planaria.kernels.ops import Quantized

_CHUNK = 1 << 17  # elements converted at a time: temporaries stay in a core's caches

Floats = npt.NDArray[np.float32]


def dequantise(weight: Quantized, threads: int = 1) -> Floats:
    """The weight's values, float32 [N, K]."""
    kind, (num_rows, num_columns) = PACKED[weight.kind], weight.shape
    out = np.empty(weight.shape, np.float32)

    def some(first: int, last: int) -> None:
        blocks = weight.data[first:last].reshape(last - first, -1, kind.nbytes)
        values = _values(kind, blocks).reshape(last - first, -1)
        out[first:last] = values[:, weight.skip : weight.skip + num_columns]

    in_parts(num_rows, _CHUNK // max(num_columns, 1), threads if out.size >= WORTH_THREADS else 1, some)
    return out


def _values(kind: BlockKind, blocks: Bytes) -> Floats:
    """Weights [..., elements] of blocks [..., bytes]."""
    codes, parts = kind.codes(blocks), kind.scales(blocks)
    if kind.levels:
        values = np.array(LEVELS, np.float32)[codes]
    elif kind.float8:
        values = (float8_values(FLOAT8) / np.float32(256))[codes]
    else:
        values = (codes.view(np.int8) if kind.bits == 8 else codes).astype(np.float32)
        if kind.offset:
            values -= np.float32(kind.offset)
    scale = parts.scale.astype(np.float32)[..., None]
    if parts.sub_scales is not None:
        values = values.reshape(*parts.sub_scales.shape, kind.group)
        scale = (scale * parts.sub_scales)[..., None]
    values *= scale
    if parts.minimum is not None:
        minimum = parts.minimum.astype(np.float32)[..., None]
        if parts.sub_minima is None:
            values += minimum
        else:
            values -= (minimum * parts.sub_minima)[..., None]
    return values


def quantise(values: npt.NDArray[Any], kind: str, threads: int = 1) -> Quantized:
    """Pack a matrix [N, K], K a multiple of 32, as q8_0 or q4_1. Raises ModelError for another K or kind."""
    if kind not in _QUANTISE:
        raise ModelError(f"quantization {kind} can't be made here; these can: {', '.join(_QUANTISE)}")
    if values.ndim != 2 or values.shape[1] % BLOCK:
        raise ModelError(
            f"a weight of shape {list(values.shape)} can't be packed as {kind}: K must be a multiple of 32"
        )
    num_rows, num_columns = values.shape
    data = np.empty((num_rows, num_columns // BLOCK, KINDS[kind].nbytes), np.uint8)

    def some(first: int, last: int) -> None:
        rows = to_float32(values[first:last]).reshape(last - first, -1, BLOCK)
        with np.errstate(divide="ignore", over="ignore"):
            _QUANTISE[kind](rows, data[first:last])

    in_parts(num_rows, _CHUNK // max(num_columns, 1), threads if values.size >= WORTH_THREADS else 1, some)
    return Quantized(kind, data.reshape(num_rows, -1), (num_rows, num_columns))


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


_QUANTISE: dict[str, Callable[[Floats, Bytes], None]] = {"q8_0": _to_q8_0, "q4_1": _to_q4_1}
