"""Rotary tables: cos and sin for every position a model may reach, for every scaling.

Rule: each frequency is computed by the same float32 operations in the same order as in Transformers, because
at position 100,000 one rounding of a frequency is a visible angle.

Two scalings depend on the length of the text in Transformers, which recomputes them as a text grows and
leaves the cached keys rotated the old way. Here there is one table for the longest text allowed (`length`):
"dynamic" has its plain frequencies if `length` fits the trained context, else those of a text of `length`
tokens; "longrope" has its short factors if `length` fits the original context, else its long ones. So for a
text of `length` tokens the result is that of Transformers, and a sequence's keys agree with each other at
any length.

Powers, cosines and sines are the exact ones, rounded to float32: whatever machine a rank is on, it has the same table.
Torch's own are one unit in the last place away here and there, and not the same on every processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.models.config import RopeConfig

Floats = npt.NDArray[np.float32]
# pi / 2 in three parts; the product of the first two with whole numbers below 2^27 is exact
_QUARTER = (1.5707963109016418, 1.5893254712295857e-08, 6.123233995736766e-17)
_SERIES = [(-1) ** (n // 2) / math.factorial(n) for n in range(16)]  # of the sine (odd) and the cosine
_CHUNK = 1 << 13  # angles at a time: temporaries stay in a core's caches


def rope_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[Floats, Floats]:
    """cos, sin float32 [length, rotated dimensions / 2], the scaling's attention factor multiplied in."""
    frequencies, factor = inverse_frequencies(rope, head_dim, length)
    cos, sin = np.empty((length, len(frequencies)), np.float32), np.empty((length, len(frequencies)), np.float32)
    step = max(1, _CHUNK // max(len(frequencies), 1))
    for first in range(0, length, step):
        positions = np.arange(first, min(first + step, length), dtype=np.float32)
        part = slice(first, first + len(positions))
        cos[part], sin[part] = _turns(positions[:, None] * frequencies)
    return cos * np.float32(factor), sin * np.float32(factor)


def _turns(angles: Floats) -> tuple[Floats, Floats]:
    """cos, sin of radians below 2^27, rounded from float64. Only sums and products, which are alike everywhere."""
    x = angles.astype(np.float64)
    quarters = np.rint(x * (2 / math.pi))
    for part in _QUARTER:
        x -= quarters * part
    square = x * x
    sin, cos = np.full_like(x, _SERIES[15]), np.full_like(x, _SERIES[14])
    for n in range(13, 0, -2):
        sin *= square
        sin += _SERIES[n]
        cos *= square
        cos += _SERIES[n - 1]
    sin *= x
    turn = quarters.astype(np.int32)
    swapped = (turn & 1).astype(np.bool_)
    up = np.where(swapped, cos, sin) * (1 - (turn & 2))
    right = np.where(swapped, sin, cos) * (1 - (turn + 1 & 2))
    return right.astype(np.float32), up.astype(np.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int) -> tuple[Floats, float]:
    """float32 [rotated dimensions / 2] radians per position, and the factor on cos and sin."""
    dim, base, p = rope.dim or head_dim, rope.theta, rope.params
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    match rope.kind:
        case "linear":
            return _plain(base, exponents) / p["factor"], 1.0
        case "dynamic":
            trained, factor = p["max_position_embeddings"], p["factor"]
            reach = max(length, trained)
            stretched = base * ((factor * reach / trained) - (factor - 1)) ** (dim / (dim - 2))
            return _plain(stretched, exponents), 1.0
        case "yarn":
            return _yarn(base, exponents, dim, p), _yarn_attention(p)
        case "llama3":
            return _llama3(_plain(base, exponents), p), 1.0
        case "longrope":
            return _longrope(base, exponents, length, p)
        case "none":
            return np.zeros_like(exponents), 1.0
    return _plain(base, exponents), 1.0


def _plain(base: float, exponents: Floats) -> Floats:
    return _over(1, _powers(base, exponents))


def _powers(base: float, exponents: Floats) -> Floats:
    """Of the base as float32."""
    exact = np.power(float(np.float32(base)), exponents.astype(np.float64))
    return np.asarray(exact, np.float32)


def _over(value: float, values: Floats) -> Floats:
    """value / values, as torch has it: times the reciprocal."""
    return np.asarray((1 / values) * np.float32(value), np.float32)


def _llama3(plain: Floats, p: dict[str, Any]) -> Floats:
    """Long wavelengths are slowed by the factor, short ones kept, those between mixed."""
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    context = p["original_max_position_embeddings"]
    wavelength = _over(2 * math.pi, plain)
    slow = wavelength > context / low
    between = ~(wavelength < context / high) & ~slow
    smooth = (_over(context, wavelength) - low) / (high - low)
    mixed = (1 - smooth) * plain / factor + smooth * plain
    return np.where(between, mixed, np.where(slow, plain / factor, plain))


def _yarn_factor(p: dict[str, Any]) -> float:
    factor = p.get("factor")
    return float(p["max_position_embeddings"] / p["original_max_position_embeddings"] if factor is None else factor)


def _yarn(base: float, exponents: Floats, dim: int, p: dict[str, Any]) -> Floats:
    """A ramp over the dimensions: kept with many turns within the original context, slowed with under one."""
    context = p["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return (dim * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((np.arange(dim // 2).astype(np.float32) - low) / (high - low)).clip(0, 1)
    periods = _powers(base, exponents)
    kept = 1 - ramp
    return np.asarray(1.0 / (_yarn_factor(p) * periods) * (1 - kept) + 1.0 / periods * kept, np.float32)


def _yarn_scale(p: dict[str, Any], mscale: float) -> float:
    factor = _yarn_factor(p)
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention(p: dict[str, Any]) -> float:
    given = p.get("attention_factor")
    if given is not None:
        return float(given)
    if p.get("mscale") and p.get("mscale_all_dim"):
        return _yarn_scale(p, p["mscale"]) / _yarn_scale(p, p["mscale_all_dim"])
    return _yarn_scale(p, 1)


def softmax_factor(rope: RopeConfig) -> float:
    """DeepSeek's factor on the scale of scores: `mscale_all_dim` acts on all columns of queries and keys, also those
    that are not rotated."""
    if rope.kind == "yarn" and rope.params.get("mscale_all_dim"):
        return _yarn_scale(rope.params, rope.params["mscale_all_dim"]) ** 2
    return 1.0


def _longrope(base: float, exponents: Floats, length: int, p: dict[str, Any]) -> tuple[Floats, float]:
    context = p["original_max_position_embeddings"]
    factors = np.array(p["long_factor"] if length > context else p["short_factor"], np.float32)
    attention = p.get("attention_factor")
    if attention is None:
        factor = _yarn_factor(p)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    return 1.0 / (factors * _powers(base, exponents)), float(attention)
