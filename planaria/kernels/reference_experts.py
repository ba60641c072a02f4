"""Mixtures of experts in plain torch: what the kernels for them are tested against.

Rule: tokens are sorted by slot, each slot's are computed together, and a token adds up its experts in the order of
its choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from planaria.kernels.ops import Slots
from planaria.models.config import MoEConfig


@dataclass
class RoutedRows:
    """slots int64 [T, k] over all ranks, weights float32 [T, k]; a token's best expert first."""

    slots: Tensor
    weights: Tensor


class Product(Protocol):
    """weight [N, K], bias [N] or None."""

    weight: Tensor
    bias: Tensor | None


def route(logits: Tensor, rule: MoEConfig, slots: Slots, correction: Tensor | None, positions: Tensor) -> RoutedRows:
    """See `Ops.route`. positions int64 [T]: they choose among an expert's slots."""
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        groups = choice.view(-1, rule.num_groups, choice.shape[1] // rule.num_groups)
        best = groups.sort(-1, descending=True).values
        worth = best[..., 0] + best[..., 1] if rule.group_score == "sum2" else best[..., 0]
        opened = torch.zeros_like(worth, dtype=torch.bool).scatter(1, first(worth, rule.top_groups), True)
        choice = groups.masked_fill(~opened[..., None], -torch.inf).flatten(1)
    chosen = first(choice, rule.top_k)
    weights = scores.gather(1, chosen)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if slots.load is not None:
        slots.load += torch.bincount(chosen.flatten().cpu(), minlength=len(slots.load)).numpy()
    table = torch.from_numpy(slots.table).to(logits.device, torch.int64)
    number = positions[:, None] % table[chosen, 0]
    return RoutedRows(table[chosen, 1 + number], weights * rule.scaling)


def first(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row, of those alike the lower ones."""
    indices: Tensor = values.sort(dim=-1, descending=True, stable=True).indices
    return indices[:, :count]


def experts(
    x: Tensor, routing: RoutedRows, weights: Sequence[tuple[Product, Product]], held: range,
    gated: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """See `Ops.experts`: float32 [T, H]."""
    flat = routing.slots.flatten()
    products = torch.zeros(len(flat), x.shape[1], dtype=torch.float32, device=x.device)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=held.stop).tolist()
    at = sum(counts[: held.start])
    for slot, (gate_up, down) in zip(held, weights, strict=True):
        rows = order[at : at + counts[slot]]
        at += counts[slot]
        if len(rows):
            inner = gated(F.linear(x[rows // routing.slots.shape[1]], gate_up.weight, gate_up.bias))
            products[rows] = F.linear(inner, down.weight, down.bias).float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    each = products.view(*routing.slots.shape, x.shape[1]) * routing.weights[..., None]
    for j in range(each.shape[1]):
        out += each[:, j]
    return out
