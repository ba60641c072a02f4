"""Weights that a checkpoint has in several tensors, or another way round, as the kernels take them.

Rule: what blocks of 32 with a float16 scale say stays packed (minima and scales rounded to float16, which must be right
to a thousandth); the rest becomes float32. Only the rows and columns that are asked for are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError
from planaria.kernels.blocks import BLOCK, FLOAT8
from planaria.kernels.blocks import KINDS as KEPT
from planaria.kernels.numbers import float8_values, to_float32
from planaria.kernels.ops import Quantized
from planaria.kernels.quant import dequantise

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word holds column 0, 1, ...
CHUNK = 1 << 20  # elements at a time


class Wanted(NamedTuple):
    """Of a weight [N, K]: what is asked for, and `read(part, rows, columns)`: values of a part in these ranges of its
    first two dimensions, None for all. float8: may such weights stay so?"""

    info: TensorInfo
    rows: range
    columns: range
    read: Callable[..., Array]
    float8: bool


def composed(
    info: TensorInfo, rows: range, columns: range, read: Callable[..., Array], *, float8: bool = False
) -> Array | Quantized:  # fmt: skip
    """Rows and columns of a tensor with parts; columns begin and end at multiples of 32, or at the tensor's end."""
    first, last = rows.start + info.first, rows.stop + info.first
    step, make = max(1, CHUNK // max(len(columns), 1)), KINDS[info.kind.partition(":")[0]]
    try:
        made = [
            make(Wanted(info, range(row, min(row + step, last)), columns, read, float8))
            for row in range(first, last, step) or (first,)
        ]  # fmt: skip
    except (ArithmeticError, IndexError, TypeError, ValueError) as e:
        raise ModelError(
            f"tensor {info.name}: its parts don't fit together ({e}); get the model's files again"
        ) from None
    packed = [part for part in made if isinstance(part, Quantized)]
    if len(packed) == len(made) and len({part.kind for part in packed}) == 1:
        return Quantized(packed[0].kind, np.concatenate([part.data for part in packed]), (len(rows), len(columns)))
    return np.concatenate([dequantise(part) if isinstance(part, Quantized) else part for part in made])


def _turned(p: Wanted) -> Array:
    """[K, N], the other way round."""
    return p.read(p.info.parts[0], p.columns, p.rows).T


def _latent(p: Wanted) -> Floats:
    """Of each head its keys' part [key, rank], which is stored turned, [rank, key], and its values' [value, rank]."""
    keys, values = p.info.parts
    heads, rank = int(p.info.kind.partition(":")[2]), p.info.shape[1]
    each = p.info.shape[0] // heads
    some = range(p.rows.start // each, -(-p.rows.stop // each))

    def read(part: TensorInfo) -> Floats:
        rows = range(some.start * part.shape[0] // heads, some.stop * part.shape[0] // heads)
        raw = p.read(part, rows)
        if part.kind in KEPT:
            raw = dequantise(Quantized(part.kind, raw, (len(rows), part.shape[1])))
        elif raw.dtype == np.uint8:
            raise ModelError(
                f"tensor {p.info.name}: element type {part.kind} is not supported for it; get another file"
            )
        return to_float32(raw).reshape(len(some), -1, part.shape[1])

    whole = np.concatenate([read(keys).transpose(0, 2, 1), read(values)], 1).reshape(-1, rank)
    first = p.rows.start - some.start * each
    return whole[first : first + len(p.rows), p.columns.start : p.columns.stop]


def _mxfp4(p: Wanted) -> Quantized:
    """Codes [N, K / 32, 16], two neighbours along K in a byte, and exponents of 2 [N, K / 32]; or GGUF's blocks
    [N, K / 32, 17] of an exponent and 16 bytes, where code i shares a byte with code i + 16. Exact in q8_0, as a code's
    double is an integer; but a scale below 2^-23 is 0."""
    blocks = range(p.columns.start // BLOCK, p.columns.stop // BLOCK)
    codes, *exponents = (p.read(part, p.rows, blocks) for part in p.info.parts)
    axis, powers = (-1, exponents[0]) if exponents else (-2, codes[..., 0])
    codes = codes[..., -BLOCK // 2 :]
    if powers.max(initial=0) > 143:
        raise ModelError(f"tensor {p.info.name}: a block's scale is 2^{int(powers.max()) - 127}; get the file again")
    values = np.stack([FP4[codes & 15], FP4[codes >> 4]], axis).reshape(*codes.shape[:2], BLOCK)
    with np.errstate(under="ignore"):
        scales = np.ldexp(np.float32(1), powers.astype(np.int32) - 128)
    return _of_bytes("q8_0", values, scales)


def _gptq(p: Wanted) -> Array | Quantized:
    qweight, scale, qzeros, *order = p.info.parts
    _, width, sym, version, *_ = p.info.kind.split(":")
    bits = int(width)
    each = 32 // bits
    words = range(p.columns.start // each, -(-p.columns.stop // each))
    codes = _unpacked(p.read(qweight, words, p.rows), bits, 0)[: len(p.columns)].T
    scales = to_float32(p.read(scale, None, p.rows)).T
    zeros = _along_rows(p, qzeros, bits) + (version == "v1")
    groups = _groups(p, scales.shape[1], order)
    return _grouped(codes, scales, zeros, groups, bits, sym == "sym")


def _awq(p: Wanted) -> Array | Quantized:
    qweight, scale, qzeros = p.info.parts
    words = range(p.rows.start // 8, -(-p.rows.stop // 8))
    own = slice(p.rows.start - words.start * 8, p.rows.stop - words.start * 8)

    def columns(part: TensorInfo, rows: range | None) -> Array:
        nibbles = p.read(part, rows, words).view(np.uint32)[..., None] >> np.array(AWQ_NIBBLES, np.uint32) * 4 & 15
        return nibbles.reshape(len(nibbles), -1)[:, own].T

    scales = to_float32(p.read(scale, None, p.rows)).T
    return _grouped(
        columns(qweight, p.columns), scales, columns(qzeros, None), _groups(p, scales.shape[1], []), 4, False
    )  # fmt: skip


def _ints(p: Wanted) -> Array | Quantized:
    found = {part.name.rpartition(".")[2]: part for part in p.info.parts}
    _, width, sym, *_ = p.info.kind.split(":")
    bits = int(width)
    each = 32 // bits
    words = range(p.columns.start // each, -(-p.columns.stop // each))
    codes = _unpacked(p.read(found["weight_packed"], p.rows, words), bits, 1)[:, : len(p.columns)]
    scales = _row_scales(p, found["weight_scale"])
    zeros = np.full(scales.shape, 1 << bits - 1, np.int32)
    if sym == "asym":
        packed = range(p.rows.start // each, -(-p.rows.stop // each))
        every = _unpacked(p.read(found["weight_zero_point"], packed), bits, 0)
        zeros = every[p.rows.start - packed.start * each :][: len(p.rows)]
    order = [found["weight_g_idx"]] if "weight_g_idx" in found else []
    return _grouped(codes, scales, zeros, _groups(p, scales.shape[1], order), bits, sym == "sym")


def _int8(p: Wanted) -> Array | Quantized:
    weight, scale, *zero = p.info.parts
    codes = p.read(weight, p.rows, p.columns).astype(np.int32) + 128
    scales = _row_scales(p, scale) / (127 if p.info.kind.startswith("bnb8") else 1)
    zeros = np.full(scales.shape, 128, np.int32)
    if zero:
        zeros += _row_scales(p, zero[0]).astype(np.int32)
    return _grouped(codes, scales.astype(np.float32), zeros, _groups(p, scales.shape[1], []), 8, True)


def _fp8(p: Wanted) -> Floats | Quantized:
    weight, scale = p.info.parts
    codes = p.read(weight, p.rows, p.columns)
    _, *tile = p.info.kind.split(":")
    if tile:
        down, along = (np.arange(part.start, part.stop) // int(tile[0]) for part in (p.rows, p.columns))
        scales = to_float32(p.read(scale))[down[:, None], along]
    else:
        scales = np.broadcast_to(_row_scales(p, scale), codes.shape)
    if p.float8 and weight.kind == FLOAT8 and len(p.columns) % BLOCK == 0 and p.columns.start % BLOCK == 0:
        of_blocks = scales[:, ::BLOCK] * np.float32(256)
        if _right(of_blocks) and not (codes & 127 == 127).any():  # those are no numbers
            return _of_bytes(FLOAT8, codes.reshape(len(codes), -1, BLOCK), of_blocks)
    found: Floats = float8_values(weight.kind)[codes] * scales
    return found


def _bnb4(p: Wanted) -> Floats:
    """Codes of the whole weight, row after row, the first of two in the upper half of a byte."""
    weight, absmax, table, *nested = p.info.parts
    _, size, *outer = p.info.kind.split(":")
    width = p.info.shape[1]
    first, last = p.rows.start * width, p.rows.stop * width
    blocks = range(first // int(size), -(-last // int(size)))
    most: Array = p.read(absmax, blocks)
    if outer:
        around, codebook = (p.read(part) for part in nested)
        of = np.arange(blocks.start, blocks.stop) // int(outer[0])
        most = codebook.reshape(-1)[most] * around.reshape(-1)[of] + np.float32(float(outer[1]))
    half = range(first // 2, -(-last // 2))
    codes = p.read(weight, half).reshape(-1)
    both = np.stack([codes >> 4, codes & 15], -1).reshape(-1)[first - half.start * 2 :][: last - first]
    of = np.arange(first, last) // int(size) - blocks.start
    values = p.read(table).reshape(-1)[both] * most.reshape(-1)[of]
    rows: Floats = values.reshape(len(p.rows), width)[:, p.columns.start : p.columns.stop].astype(np.float32)
    return rows


def _unpacked(words: Array, bits: int, axis: int) -> Array:
    """The codes in words of 32 bits, the lowest first, along an axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = np.expand_dims(words.view(np.uint32), axis + 1) >> (shifts[:, None] if axis == 0 else shifts)
    shape = list(words.shape)
    shape[axis] *= len(shifts)
    found: Array = (codes & np.uint32((1 << bits) - 1)).astype(np.int32).reshape(shape)
    return found


def _along_rows(p: Wanted, zeros: TensorInfo, bits: int) -> Array:
    """GPTQ's zeros [groups, N / (32 / bits)], of these rows: [rows, groups]."""
    each = 32 // bits
    words = range(p.rows.start // each, -(-p.rows.stop // each))
    every = _unpacked(p.read(zeros, None, words), bits, 1)
    return every[:, p.rows.start - words.start * each :][:, : len(p.rows)].T


def _row_scales(p: Wanted, scale: TensorInfo) -> Floats:
    """[rows, groups], of a scale of all, of each row, or of each row's groups."""
    shape = scale.shape
    if len(shape) == 0 or shape == (1,) or (shape == (1, 1)):
        return np.broadcast_to(to_float32(p.read(scale)).reshape(1, 1), (len(p.rows), 1))
    values = to_float32(p.read(scale, p.rows))
    if shape[0] != p.info.parts[0].shape[0]:
        raise ModelError(f"tensor {scale.name} has shape {list(shape)}, which is no scale of {p.info.name}")
    return values.reshape(len(p.rows), -1)


def _groups(p: Wanted, count: int, order: list[TensorInfo]) -> Array:
    """The group of each column."""
    if order:
        given = p.read(order[0], p.columns)
        if given.min(initial=0) < 0 or given.max(initial=0) >= count:
            raise ModelError(f"tensor {order[0].name}: names a group that isn't there; get the file again")
        return given
    return np.arange(p.columns.start, p.columns.stop) // -(-p.info.shape[1] // count)


def _grouped(
    codes: Array, scales: Floats, zeros: Array, groups: Array, bits: int, sym: bool
) -> Floats | Quantized:  # fmt: skip
    """(code - zero) * scale, scale and zero [N, groups] of each column's group."""
    if scales.shape != zeros.shape:
        raise ValueError(f"scales {list(scales.shape)} and zero points {list(zeros.shape)}")
    blocks = groups.reshape(-1, BLOCK) if len(groups) % BLOCK == 0 else groups[:0].reshape(0, BLOCK)
    if len(blocks) and (blocks == blocks[:, :1]).all():
        scale, zero = scales[:, blocks[:, 0]], zeros[:, blocks[:, 0]]
        parts = codes.reshape(len(codes), -1, BLOCK)
        if _right(scale) and bits == 8 and (zero == 128).all():
            return _of_bytes("q8_0", (parts - 128).astype(np.int8), scale)
        if _right(scale) and bits == 4 and (not sym or (zero == 8).all()):
            return _q4(parts.astype(np.uint8), scale, None if sym else -scale * zero)
    found: Floats = ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32)
    return found


def _right(scales: Floats) -> bool:
    """Can they be float16?"""
    with np.errstate(over="ignore"):
        error = np.abs(scales.astype(np.float16).astype(np.float32) - scales)
    return bool((error <= np.abs(scales) * 1e-3).all())


def _of_bytes(kind: str, codes: Array, scales: Floats) -> Quantized:
    """codes of 8 bits [N, blocks, 32], scales [N, blocks]."""
    half = np.ascontiguousarray(scales.astype(np.float16))[..., None].view(np.uint8)
    data = np.concatenate([half, np.ascontiguousarray(codes).view(np.uint8)], -1)
    return Quantized(kind, data.reshape(len(codes), -1), (len(codes), codes.shape[1] * BLOCK))


def _q4(codes: npt.NDArray[np.uint8], scales: Floats, minima: Floats | None) -> Quantized:
    """codes [N, blocks, 32], scales and minima [N, blocks]; without minima 8 is subtracted from codes."""
    half = BLOCK // 2
    heads = [scales] if minima is None else [scales, minima]
    head = np.stack(heads, -1).astype(np.float16).view(np.uint8)
    data = np.concatenate([head, codes[..., :half] | codes[..., half:] << 4], -1)
    kind = "q4_0" if minima is None else "q4_1"
    return Quantized(kind, data.reshape(len(codes), -1), (len(codes), codes.shape[1] * BLOCK))


KINDS: dict[str, Callable[[Wanted], Array | Quantized]] = {
    "turned": _turned, "mxfp4": _mxfp4, "latent": _latent, "gptq": _gptq, "awq": _awq, "ints": _ints, "int8": _int8,
    "fp8": _fp8, "bnb4": _bnb4, "bnb8": _int8,
}  # fmt: skip
