"""A rank's part of a model by Transformers' own `tp_plan`: products whose rows are dealt, and those whose columns are,
which are summed over the ranks. What the plan wants whole again, and what it doesn't name, each rank has whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from planaria.errors import ModelError

ROWS, COLUMNS = "colwise", "rowwise"  # of a weight [N, K], of which the plan names the transposed
WHOLE = {"embedding_rowwise", "colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce"}


def plan_of(net: Any) -> dict[str, str]:
    """Of each product that is cut, by its name, ROWS or COLUMNS. Raises ModelError."""
    plan: dict[str, str] = net.tp_plan or {}
    found = {}
    for name, module in net.named_modules():
        kind = plan.get(re.sub(r"\d+", "*", name))
        if kind is None or kind in WHOLE:
            continue
        if kind not in (ROWS, COLUMNS) or not isinstance(module, nn.Linear):
            raise ModelError(f"its tp_plan says {kind} of {name}, which tensor ranks here have not")
        found[name] = kind
    if not found:
        raise ModelError("it has no tp_plan")
    return found


def most_ranks(net: Any, plan: dict[str, str], heads: list[int]) -> int:
    """What a number of ranks must divide. heads: of each attending layer, its keys' and queries'."""
    sizes = [net.get_submodule(name).weight.shape[kind == COLUMNS] for name, kind in plan.items()]
    return math.gcd(*sizes, *heads)


def divided(module: str, plan: dict[str, str]) -> bool:
    """Are the heads of this attending module dealt?"""
    return any(kind == ROWS and name.startswith(f"{module}.") for name, kind in plan.items())


def cut(net: Any, plan: dict[str, str], rank: int, ranks: int, add_up: Callable[[Tensor], Tensor]) -> None:
    """Leave a rank its part. add_up: over the ranks."""
    for name, kind in plan.items():
        module = net.get_submodule(name)
        axis = int(kind == COLUMNS)
        module.weight = _part(module.weight, axis, rank, ranks)
        if kind == ROWS and module.bias is not None:
            module.bias = _part(module.bias, 0, rank, ranks)
        elif kind == COLUMNS:
            if module.bias is not None and rank:
                module.bias = None  # the first rank adds it
            module.register_forward_hook(lambda module, given, out: add_up(out))


def _part(whole: Tensor, axis: int, rank: int, ranks: int) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(whole.chunk(ranks, axis)[rank].clone(), requires_grad=False)
