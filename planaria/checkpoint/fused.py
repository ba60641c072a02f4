"""Experts that a file holds as one tensor of all of them, named as if each had its own.

Transformers keeps a layer's experts as `experts.gate_up_proj` [experts, 2 x size, hidden], gate rows first, and
`experts.down_proj` [experts, hidden, size]; it writes them so with `save_original_format=False`. Each expert's rows are
contiguous there, so another index over the same bytes is all that is needed, and a rank still reads its own alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError

FUSED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")
ROUTER = re.compile(r"(.+)\.mlp\.gate\.weight")
OWN = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}  # as the family's own checkpoints name them
OTHERS = ("mlp", ("gate_proj", "up_proj", "down_proj"))


def unfused(path: str, config: dict[str, Any], tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """The tensors, with those of all experts of a layer in as many parts as the family's own checkpoints have. Raises
    ModelError naming a tensor that can't be divided."""
    if not any(FUSED.fullmatch(t.name) for t in tensors):
        return list(tensors)
    block, names = OWN.get(str(config.get("model_type")), OTHERS)
    out: list[TensorInfo] = []
    for tensor in tensors:
        if fused := FUSED.fullmatch(tensor.name):
            parts = names[:2] if fused[2] == "gate_up_proj" else names[2:]
            out += _parts(path, tensor, f"{fused[1]}.{block}.experts", parts)
        elif router := ROUTER.fullmatch(tensor.name):
            out.append(msgspec.structs.replace(tensor, name=f"{router[1]}.{block}.gate.weight"))
        else:
            out.append(tensor)
    return out


def _parts(path: str, tensor: TensorInfo, block: str, parts: Sequence[str]) -> list[TensorInfo]:
    """Of each expert the named matrices, which lie one after the other."""
    if len(tensor.shape) != 3 or 0 in tensor.shape or tensor.shape[1] % len(parts):
        raise ModelError(
            f"{path}: tensor {tensor.name} has shape {list(tensor.shape)}, which is not {' and '.join(parts)} of each "
            "expert; get a checkpoint with a tensor for each expert"
        )
    experts, rows, columns = tensor.shape
    size = tensor.nbytes // experts // len(parts)
    return [
        TensorInfo(
            f"{block}.{number // len(parts)}.{parts[number % len(parts)]}.weight", tensor.kind,
            (rows // len(parts), columns), tensor.file, tensor.offset + number * size, size,
        )
        for number in range(experts * len(parts))
    ]  # fmt: skip
