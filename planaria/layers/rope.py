"""Rotary tables: cos and sin for every position a model may reach, for every scaling.

Rule: each frequency is computed by the same float32 operations in the same order as in Transformers, because
at position 100,000 one rounding of a frequency is a visible angle.

Two scalings depend on the length of the text in Transformers, which recomputes them as a text grows and
leaves the cached keys rotated the old way. Here there is one table for the longest text allowed (`length`):
"dynamic" has its plain frequencies if `length` fits the trained context, else those of a text of `length`
tokens; "longrope" has its short factors if `length` fits the original context, else its long ones. So for a
text of `length` tokens the result is that of Transformers, and a sequence's keys agree with each other at
any length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from planaria.models.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """cos, sin float32 [length, rotated dimensions / 2], the scaling's attention factor multiplied in."""
    frequencies, factor = inverse_frequencies(rope, head_dim, length)
    angles = torch.arange(length).float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """float32 [rotated dimensions / 2] radians per position, and the factor on cos and sin."""
    dim, base, p = rope.dim or head_dim, rope.theta, rope.params
    exponents = torch.arange(0, dim, 2).float() / dim
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
    return _plain(base, exponents), 1.0


def _plain(base: float, exponents: Tensor) -> Tensor:
    return 1.0 / (base**exponents)


def _llama3(plain: Tensor, p: dict[str, Any]) -> Tensor:
    """Long wavelengths are slowed by the factor, short ones kept, those between mixed."""
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    context = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    slow = wavelength > context / low
    between = ~(wavelength < context / high) & ~slow
    smooth = (context / wavelength - low) / (high - low)
    mixed = (1 - smooth) * plain / factor + smooth * plain
    return torch.where(between, mixed, torch.where(slow, plain / factor, plain))


def _yarn_factor(p: dict[str, Any]) -> float:
    factor = p.get("factor")
    return float(p["max_position_embeddings"] / p["original_max_position_embeddings"] if factor is None else factor)


def _yarn(base: float, exponents: Tensor, dim: int, p: dict[str, Any]) -> Tensor:
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
    ramp = torch.clamp((torch.arange(dim // 2).float() - low) / (high - low), 0, 1)
    periods = base**exponents
    kept = 1 - ramp
    return 1.0 / (_yarn_factor(p) * periods) * (1 - kept) + 1.0 / periods * kept


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


def _longrope(base: float, exponents: Tensor, length: int, p: dict[str, Any]) -> tuple[Tensor, float]:
    context = p["original_max_position_embeddings"]
    factors = torch.tensor(p["long_factor"] if length > context else p["short_factor"], dtype=torch.float32)
    attention = p.get("attention_factor")
    if attention is None:
        factor = _yarn_factor(p)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    return 1.0 / (factors * base**exponents), float(attention)
