"""The definition of `sampling` once more, in torch, for logits on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from planaria.types import SamplingParams, TokenLogprobs
from planaria.worker.sampling import (
    BANNED,
    BROKEN,
    EXP2_COEFFICIENTS,
    LOG2E,
    UNIT_BITS,
    FloatArray,
    IntArray,
    entries,
)


def edit(
    line: torch.Tensor,
    bans: IntArray,
    bias_ids: IntArray,
    bias: FloatArray,
    seen: IntArray,
    counts: FloatArray,
    repetition: np.float32,
    frequency: np.float32,
    presence: np.float32,
) -> None:
    """Steps 1 to 3 on one row's logits [V], in place. `seen`: distinct tokens so far; `counts`: in the output."""

    def on_device(values: npt.ArrayLike) -> torch.Tensor:
        # Penalties too are tensors there, for some devices divide by a Python number as a product.
        return torch.as_tensor(np.asarray(values), device=line.device)

    line[on_device(bans)] = -torch.inf
    line[on_device(bias_ids)] += on_device(bias)
    ids, numbers = on_device(seen), on_device(counts)
    x = line[ids]
    x = torch.where(x > 0, x / on_device(repetition), x * on_device(repetition))
    x = x - numbers * on_device(frequency)
    line[ids] = x - torch.where(numbers > 0, on_device(presence), 0.0)


def weigh(logits: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y float32 and weights int64, both [S, V], of rows with a finite maximum; scale [S, 1]: log2(e) / T."""
    top = logits.amax(-1, keepdim=True)
    y = ((top - logits) * scale).clamp(max=60.0)
    whole = y.to(torch.int32)
    part = y - whole
    value = torch.full_like(part, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        value = value * part + coefficient
    fixed = (value * 2.0**24).to(torch.int64)
    return y, (fixed << (UNIT_BITS - 24)) >> whole


def choose(
    logits: torch.Tensor, params: Sequence[SamplingParams], bits: Sequence[int]
) -> tuple[list[int], dict[int, str]]:
    """Steps 4 and 5: logits [S, V], each line's random bits -> tokens (0 where it failed), errors by line."""
    logits = logits + 0.0  # -0.0 and 0.0 are equals in every sort
    device, size = logits.device, logits.shape[-1]
    top = logits.amax(-1)
    broken, banned = (top.isnan() | (top == torch.inf)).tolist(), (top == -torch.inf).tolist()
    errors = {i: BROKEN if broken[i] else BANNED for i in range(len(broken)) if broken[i] or banned[i]}
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [i for i, p in enumerate(params) if not p.greedy and i not in errors]
    if drawn:
        chosen = [params[i] for i in drawn]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        logits = logits[drawn]
        y, w = weigh(logits, column([LOG2E / p.temperature for p in chosen], torch.float32))
        limit = column([-math.log2(p.min_p) if p.min_p > 0 else math.inf for p in chosen], torch.float32)
        w = torch.where(y <= limit, w, 0)
        if any(p.top_k > 0 or p.top_p < 1.0 for p in chosen):
            order = logits.sort(dim=-1, descending=True, stable=True).indices
            ranked = w.gather(-1, order)
            k = column([p.top_k if p.top_k > 0 else size for p in chosen], torch.int64)
            ranked = torch.where(torch.arange(size, device=device) < k, ranked, 0)
            mass = ranked.cumsum(-1)
            share, total = column([p.top_p for p in chosen], torch.float64), mass[:, -1:]
            goal = torch.where(share < 1.0, (share * total.double()).ceil().to(torch.int64), total)
            ranked = torch.where(mass - ranked < goal, ranked, 0)
            w = torch.zeros_like(w).scatter(-1, order, ranked)
        mass = w.cumsum(-1)
        totals: list[int] = mass[:, -1].tolist()
        points = [bits[i] * total >> 64 for i, total in zip(drawn, totals, strict=True)]
        picked = torch.searchsorted(mass, column(points, torch.int64), right=True)[:, 0].tolist()
        for i, token in zip(drawn, picked, strict=True):
            tokens[i] = token
    for i in errors:
        tokens[i] = 0
    return tokens, errors


def raw_logprobs(logits: torch.Tensor, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
    """For each line of logits [S, V]: the target's log-probability and rank, and the k likeliest tokens."""
    size = logits.shape[-1]
    ids = torch.tensor(list(targets), device=logits.device)[:, None]
    own = logits.gather(-1, ids)
    before = (logits > own) | ((logits == own) & (torch.arange(size, device=logits.device) < ids))
    best = (logits + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, : min(k, size)]
    _, weights = weigh(logits, torch.tensor(LOG2E, dtype=torch.float32, device=logits.device))
    return entries(
        targets,
        own[:, 0].tolist(),
        (before.sum(-1) + 1).tolist(),
        logits.amax(-1).tolist(),
        weights.sum(-1).tolist(),
        best.tolist(),
        logits.gather(-1, best).tolist(),
    )
