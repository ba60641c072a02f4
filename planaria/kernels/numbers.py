"""Kinds of numbers that NumPy has not: bfloat16 is its bits in uint16, which no tensor of a model is otherwise; floats
of 8 bits are only read. And work on large arrays, in parts for several threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BFLOAT16 = np.dtype(np.uint16)
WORTH_THREADS = 1 << 20  # elements that are worth handing to several threads
_CHUNK = 1 << 16  # elements converted at a time: temporaries stay in a core's caches


def to_float32(values: Array) -> npt.NDArray[np.float32]:
    """Exact, but for float64 and integers beyond 2^24. A float32 array is given back as it is."""
    if values.dtype == np.float16:
        return _from_float16(values)
    if values.dtype != BFLOAT16:
        return values.astype(np.float32, copy=False)
    wide = values.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def main_memory(values: Any) -> npt.NDArray[np.float32]:
    """What a forward pass gave, on a device or not, as float32."""
    return to_float32(values) if isinstance(values, np.ndarray) else values.float().cpu().numpy()


def _from_float16(values: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    """In parts of their own width, several times as fast as NumPy; which does those with infinities or NaN."""
    out = np.empty(values.shape, np.float32)
    flat, into = np.ascontiguousarray(values).reshape(-1), out.reshape(-1)
    for first in range(0, len(flat), _CHUNK):
        some = flat[first : first + _CHUNK]
        bits = some.view(np.uint16).astype(np.uint32)
        sign = bits & np.uint32(0x8000)
        bits ^= sign
        if bits.max() >= 0x7C00:
            into[first : first + len(some)] = some
            continue
        bits <<= np.uint32(13)
        exact = bits.view(np.float32)
        exact *= np.float32(2.0**112)
        sign <<= np.uint32(16)
        np.bitwise_or(bits, sign, out=into[first : first + len(some)].view(np.uint32))
    return out


def to_bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even. An array that is bfloat16 is given back as it is."""
    if values.dtype == BFLOAT16:
        return values
    out = np.empty(values.shape, BFLOAT16)
    if values.size <= _CHUNK or values.ndim == 0:
        _round(values, out)
        return out
    step = max(1, _CHUNK * len(values) // values.size)
    for first in range(0, len(values), step):
        _round(values[first : first + step], out[first : first + step])
    return out


def _round(values: Array, out: npt.NDArray[np.uint16]) -> None:
    exact = np.ascontiguousarray(to_float32(values))
    bits = exact.view(np.uint32)
    rest = bits >> np.uint32(16)
    rest &= np.uint32(1)
    rest += np.uint32(0x7FFF)
    rest += bits  # a NaN of all ones would become zero
    rest >>= np.uint32(16)
    out[...] = rest
    broken = np.isnan(exact)
    if broken.any():
        out[broken] = 0x7FC0


def float8_values(kind: str) -> npt.NDArray[np.float32]:
    """What each byte means: kind f8_e5m2 (the upper half of a float16) or f8_e4m3 (without infinities)."""
    codes = np.arange(256, dtype=np.uint16)
    if kind == "f8_e5m2":
        return (codes << 8).view(np.float16).astype(np.float32)
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


def in_parts(count: int, step: int, threads: int, work: Callable[[int, int], None]) -> None:
    """`work(first, last)` for `count` things, `step` at a time; on several threads where there are many."""
    starts = range(0, count, max(step, 1))
    threads = min(threads, len(starts))
    if threads < 2:
        for first in starts:
            work(first, min(first + step, count))
        return
    with ThreadPoolExecutor(threads, "planaria-load") as pool:
        for _ in pool.map(lambda first: work(first, min(first + step, count)), starts):
            pass
