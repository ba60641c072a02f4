"""Tensors that a file holds as one, named as if each had its own.

Their rows are contiguous, so another index over the same bytes is all that is needed, and a rank still reads its own
alone: Phi-3's q, k and v and its gate and up; a layer's experts as Transformers keeps them, `experts.gate_up_proj`
[experts, 2 x size, hidden], gate rows first, and `experts.down_proj` [experts, hidden, size] (it writes them so with
`save_original_format=False`); GPT-OSS's experts with their biases; GraniteMoE's, under names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError

EXPERTS = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
ROUTER = re.compile(r"(.+)\.mlp\.gate\.weight")
ROWS = re.compile(r"(.+)\.(self_attn\.qkv_proj|mlp\.gate_up_proj)\.(weight|bias)")
LINEARS = re.compile(r"(.+)\.block_sparse_moe\.(input|output)_linear\.weight")
OWN = {  # as the family's own checkpoints name them
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "granitemoe": ("block_sparse_moe", ("gate_proj", "up_proj", "down_proj")),
}
OTHERS = ("mlp", ("gate_proj", "up_proj", "down_proj"))


def unfused(path: str, config: dict[str, Any], tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """The tensors, with fused ones in as many parts as the model asks for. Raises ModelError naming a tensor that can't
    be divided."""
    experts = any(EXPERTS.fullmatch(t.name) or LINEARS.fullmatch(t.name) for t in tensors)
    gpt_oss = config.get("model_type") == "gpt_oss"
    out: list[TensorInfo] = []
    for tensor in tensors:
        if rows := ROWS.fullmatch(tensor.name):
            out += _rows(path, config, tensor, rows)
        elif experts and gpt_oss:
            out += _gpt_oss(path, tensor, tensors)
        elif experts:
            out += _experts(path, config, tensor)
        else:
            out.append(tensor)
    return out


def _rows(path: str, config: dict[str, Any], tensor: TensorInfo, match: re.Match[str]) -> Iterator[TensorInfo]:
    """q, k and v, or gate and up."""
    layer, fused, suffix = match.groups()
    every = tensor.shape[0] if tensor.shape else 0
    sizes = [every // 2] * 2
    names: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    if fused.startswith("self_attn"):
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        heads: Any = config.get("num_attention_heads")
        kv_heads: Any = config.get("num_key_value_heads") or heads
        if not all(isinstance(count, int) and count > 0 for count in (heads, kv_heads)):
            raise ModelError(f"{path}: config.json: num_attention_heads, num_key_value_heads: must be positive numbers")
        sizes = [count * (every // (heads + 2 * kv_heads)) for count in (heads, kv_heads, kv_heads)]
    if sum(sizes) != every or not every:
        raise _undivided(path, tensor, ", ".join(names))
    first, width = tensor.offset, tensor.nbytes // every
    row = 0
    for name, size in zip(names, sizes, strict=True):
        yield replace(
            tensor, name=f"{layer}.{name}.{suffix}", shape=(size, *tensor.shape[1:]), offset=first + row * width,
            nbytes=size * width, first=row if tensor.parts else 0,
        )  # fmt: skip
        row += size


def _experts(path: str, config: dict[str, Any], tensor: TensorInfo) -> Iterator[TensorInfo]:
    block, names = OWN.get(str(config.get("model_type")), OTHERS)
    if fused := EXPERTS.fullmatch(tensor.name) or LINEARS.fullmatch(tensor.name):
        parts = names[:2] if fused[2] in ("gate_up_proj", "input") else names[2:]
        every = len(parts) * (tensor.shape[0] if tensor.shape else 0)
        if len(tensor.shape) != 3 or not every or tensor.shape[1] % len(parts):
            raise _undivided(path, tensor, f"{' and '.join(parts)} of each expert")
        for number, part in enumerate(divided(tensor, every, (tensor.shape[1] // len(parts), tensor.shape[2]))):
            which = parts[number % len(parts)]
            yield replace(part, name=f"{fused[1]}.{block}.experts.{number // len(parts)}.{which}.weight")
    elif router := ROUTER.fullmatch(tensor.name):
        yield replace(tensor, name=f"{router[1]}.{block}.gate.weight")
    else:
        yield tensor


def _gpt_oss(path: str, tensor: TensorInfo, tensors: Sequence[TensorInfo]) -> Iterator[TensorInfo]:
    """Plain, [experts, in, out]; or MXFP4, blocks of codes [experts, out, in / 32, 16] and scales beside them; biases
    [experts, out]."""
    fused = EXPERTS.fullmatch(tensor.name)
    if fused is None:
        yield tensor
        return
    shape, names = tensor.shape, f"{fused[1]}.mlp.experts.{{}}.{fused[2]}."
    if fused[3] == "_scales":
        return
    if len(shape) != {None: 3, "_bias": 2, "_blocks": 4}[fused[3]] or 0 in shape:
        raise _undivided(path, tensor, "those of each expert")
    if fused[3] == "_bias":
        for number, part in enumerate(divided(tensor, shape[0], shape[1:])):
            yield replace(part, name=names.format(number) + "bias")
    elif fused[3] is None:
        for number, part in enumerate(divided(tensor, shape[0], shape[1:])):
            yield replace(part, name=names.format(number) + "weight", kind="turned", shape=shape[:0:-1], parts=(part,))
    else:
        scales = next((t for t in tensors if t.name == f"{tensor.name.removesuffix('_blocks')}_scales"), None)
        if scales is None or scales.shape != shape[:3] or shape[3] != 16:
            raise _undivided(path, tensor, "MXFP4 blocks of 32 with a scale each")
        pairs = zip(divided(tensor, shape[0], shape[1:]), divided(scales, shape[0], shape[1:3]), strict=True)
        for number, pair in enumerate(pairs):
            size = (shape[1], shape[2] * 32)
            nbytes = sum(part.nbytes for part in pair)
            name = names.format(number) + "weight"
            yield replace(pair[0], name=name, kind="mxfp4", shape=size, nbytes=nbytes, parts=pair)


def divided(tensor: TensorInfo, count: int, shape: tuple[int, ...]) -> Iterator[TensorInfo]:
    """A tensor in `count` equal parts, which lie one after the other."""
    size = tensor.nbytes // count
    for number in range(count):
        yield replace(tensor, shape=shape, offset=tensor.offset + number * size, nbytes=size)


def _undivided(path: str, tensor: TensorInfo, what: str) -> ModelError:
    return ModelError(
        f"{path}: tensor {tensor.name} has shape {list(tensor.shape)}, which is not {what}; get a checkpoint with a "
        "tensor for each"
    )
