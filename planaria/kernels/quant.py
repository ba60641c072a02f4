"""Packed weights: blocks of 32 along K in GGUF's formats, and their conversion from and to float32.

The arithmetic is that of the `gguf` package's reference, bit for bit.
"""

from __future__ import annotations

import torch

from planaria.errors import ModelError
from planaria.kernels.ops import Quantized

BLOCK = 32
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
PACKED_KINDS = tuple(BLOCK_BYTES)  # stay packed when loaded
_CHUNK = 1 << 22  # elements converted at a time: temporaries stay small


def dequantise(weight: Quantized) -> torch.Tensor:
    """The weight's values, float32 [N, K]."""
    num_rows, num_columns = weight.shape
    out = torch.empty(weight.shape, dtype=torch.float32)
    step = max(1, _CHUNK // max(num_columns, 1))
    for start in range(0, num_rows, step):
        rows = weight.data[start : start + step]
        blocks = rows.reshape(rows.shape[0], -1, BLOCK_BYTES[weight.kind])
        target = out[start : start + step].view(rows.shape[0], -1, BLOCK)
        _DEQUANTISE[weight.kind](blocks, target)
    return out


def quantise(tensor: torch.Tensor, kind: str) -> Quantized:
    """Pack a matrix [N, K], K a multiple of 32, as q8_0 or q4_1. Raises ModelError for another K or kind."""
    if kind not in _QUANTISE:
        raise ModelError(f"quantization {kind} can't be made here; these can: {', '.join(_QUANTISE)}")
    if tensor.ndim != 2 or tensor.shape[1] % BLOCK:
        raise ModelError(
            f"a weight of shape {list(tensor.shape)} can't be packed as {kind}: K must be a multiple of 32"
        )
    num_rows, num_columns = tensor.shape
    data = torch.empty(num_rows, num_columns // BLOCK, BLOCK_BYTES[kind], dtype=torch.uint8)
    step = max(1, _CHUNK // max(num_columns, 1))
    for start in range(0, num_rows, step):
        rows = tensor[start : start + step].to(torch.float32)
        _QUANTISE[kind](rows.reshape(rows.shape[0], -1, BLOCK), data[start : start + step])
    return Quantized(kind, data.view(num_rows, -1), (num_rows, num_columns))


def _halves(blocks: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """float16 values at byte `first` of each block, as float32 [..., count]."""
    raw = blocks[..., first : first + 2 * count].contiguous()
    return raw.view(torch.float16).to(torch.float32)


def _nibbles(blocks: torch.Tensor, first: int, target: torch.Tensor) -> None:
    packed = blocks[..., first:]
    target[..., : BLOCK // 2] = packed & 15
    target[..., BLOCK // 2 :] = packed >> 4


def _from_q4_0(blocks: torch.Tensor, target: torch.Tensor) -> None:
    _nibbles(blocks, 2, target)
    target.sub_(8).mul_(_halves(blocks, 0, 1))


def _from_q4_1(blocks: torch.Tensor, target: torch.Tensor) -> None:
    scale = _halves(blocks, 0, 2)
    _nibbles(blocks, 4, target)
    target.mul_(scale[..., :1]).add_(scale[..., 1:])


def _from_q8_0(blocks: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(blocks[..., 2:].view(torch.int8))
    target.mul_(_halves(blocks, 0, 1))


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _store_halves(values: torch.Tensor, out: torch.Tensor, first: int) -> None:
    count = values.shape[-1]
    out[..., first : first + 2 * count] = values.to(torch.float16).contiguous().view(torch.uint8)


def _to_q8_0(values: torch.Tensor, out: torch.Tensor) -> None:
    scale = values.abs().amax(-1, keepdim=True) / 127
    scaled = values * _inverse(scale)
    size = scaled.abs()
    floor = size.floor()
    rounded = floor + (2 * (size - floor)).floor()  # half away from zero, as ggml's roundf
    _store_halves(scale, out, 0)
    out[..., 2:] = (scaled.sign() * rounded).to(torch.int8).view(torch.uint8)


def _to_q4_1(values: torch.Tensor, out: torch.Tensor) -> None:
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    scale = (high - low) / 15
    q = ((values - low) * _inverse(scale) + 0.5).to(torch.uint8).clamp_(0, 15)
    _store_halves(torch.cat([scale, low], -1), out, 0)
    out[..., 4:] = q[..., : BLOCK // 2] | (q[..., BLOCK // 2 :] << 4)


_DEQUANTISE = {"q4_0": _from_q4_0, "q4_1": _from_q4_1, "q8_0": _from_q8_0}
_QUANTISE = {"q8_0": _to_q8_0, "q4_1": _to_q4_1}
