"""Weights that stay packed on a device, GGUF's kinds: few rows meet them as they are, many meet them unpacked.

Rule: a weight is scale * (code - offset) + minimum, or scale * LEVELS[code]; each 16 or 32 along K have a scale (and a
minimum) of their own, in float32 where activations are, else in float16. Codes have 4, 6 or 8 bits here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.kernels.blocks import BLOCK, KINDS, LEVELS, BlockKind
from planaria.kernels.gpu.attention import interprets
from planaria.kernels.ops import Quantized
from planaria.kernels.reference_linear import Linear

DTYPES = (torch.float32, torch.bfloat16)  # of activations
FEW_ROWS = 64  # up to which unpacking on the way is less than unpacking first


@dataclass
class DevicePacked:
    """A weight [N, K] (`shape`) and its bias [N] or None. low, high: codes, see packed_kernels.py. Where something asks
    for its `weight`, as of a `Linear`, that is unpacked for it."""

    low: Tensor
    high: Tensor
    scales: Tensor
    minima: Tensor
    levels: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    dtype: torch.dtype
    kind: dict[str, Any]

    @property
    def weight(self) -> Tensor:
        return self.rows(None)

    @property
    def whole(self) -> Tensor:
        plain = self.weight.view(-1)
        return plain if self.bias is None else torch.cat([plain, self.bias])

    def rows(self, which: Tensor | None) -> Tensor:
        """Those that int32 `which` names; None: all."""
        from planaria.kernels.gpu.packed_kernels import unpack

        count, width = self.shape[0] if which is None else len(which), self.shape[1]
        out = torch.empty(count, width, dtype=self.dtype, device=self.low.device)
        if count:
            blocks = -(-width // BLOCK)
            unpack[count, -(-blocks * 16 // 512)](
                *self._codes, self.low if which is None else which, out, width, blocks, **self.kind,
                picks=which is not None, block_k=512,
            )  # fmt: skip
        return out

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K]: x W^T + bias, in the activation dtype, or, of FEW_ROWS at most, in `dtype`."""
        if len(x) > FEW_ROWS:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        from planaria.kernels.gpu.packed_kernels import product

        (columns, width), bias = self.shape, self.bias
        out = torch.empty(len(x), columns, dtype=dtype or self.dtype, device=x.device)
        if len(x):
            block_m, block_n = 16 if len(x) <= 16 else 32, 32 if columns < 8192 else 64
            other = self.levels if bias is None else bias
            product[-(-len(x) // block_m), -(-columns // block_n)](
                x.contiguous(), *self._codes, other, out, len(x), columns, width, -(-width // BLOCK),
                has_bias=bias is not None, **self.kind, exact=interprets(), block_m=block_m, block_n=block_n,
                block_k=64,
            )  # fmt: skip
        return out

    def packed_parts(self) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
        """Numbers and tensors that `of_parts` makes the same of. The first number says the dtype, the second whether
        there is a bias."""
        numbers = (DTYPES.index(self.dtype), int(self.bias is not None), *self.shape)
        kind = tuple(int(self.kind[name]) for name in ("bits", "group", "shifted", "by_level"))
        return (*numbers, *kind), self._codes if self.bias is None else (*self._codes, self.bias)

    @classmethod
    def of_parts(cls, numbers: tuple[int, ...], tensors: list[Tensor]) -> DevicePacked:
        """Raises ValueError."""
        if len(numbers) != 8 or len(tensors) != 5 + numbers[1] or not 0 <= numbers[0] < len(DTYPES):
            raise ValueError(f"no packed weight is {numbers} with {len(tensors)} tensors")
        dtype, _, rows, columns, bits, group, shifted, by_level = numbers
        low, high, scales, minima, levels, *bias = tensors
        kind = {"bits": bits, "group": group, "shifted": bool(shifted), "by_level": bool(by_level)}
        own = bias[0] if bias else None
        return cls(low, high, scales, minima, levels, own, (rows, columns), DTYPES[dtype], kind)

    @property
    def _codes(self) -> tuple[Tensor, ...]:
        return self.low, self.high, self.scales, self.minima, self.levels


Weights = Linear | DevicePacked


def pack(weight: Quantized, bias: npt.NDArray[Any] | None, dtype: torch.dtype, device: torch.device) -> DevicePacked:
    """On the device, of a weight as its file packs it."""
    kind, (rows, width) = KINDS[weight.kind], weight.shape
    blocks = weight.data.reshape(rows, -1, kind.nbytes)
    codes = _cut(kind.codes(blocks).reshape(rows, -1), weight.skip, width, BLOCK).reshape(rows, -1, BLOCK)
    scales, minima = (_cut(each, weight.skip, width, kind.group) for each in _affine(kind, blocks))
    bits = 8 if kind.bits == 8 else 4 if kind.bits <= 4 else 6
    low, high = _planes(codes, bits)
    form = np.float32 if dtype == torch.float32 else np.float16

    def put(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return DevicePacked(
        put(low), put(high), put(scales.astype(form)), put(minima.astype(form)), put(np.array(LEVELS, np.float32)),
        None if bias is None else put(np.asarray(bias, np.float32)).to(dtype), (rows, width), dtype,
        {"bits": bits, "group": kind.group, "shifted": bool(minima.size), "by_level": kind.levels},
    )  # fmt: skip


def _cut(values: npt.NDArray[Any], skip: int, width: int, each: int) -> npt.NDArray[Any]:
    """Of what every `each` weights have one: that of `width` weights, in whole blocks, after `skip`."""
    per_block = BLOCK // each if each < BLOCK else 1
    first, count = (skip, -(-width // BLOCK) * BLOCK) if values.dtype.itemsize == 1 else (
        skip // each, -(-width // BLOCK) * per_block
    )  # fmt: skip
    return values[:, first : first + count] if values.size else values


def _affine(kind: BlockKind, blocks: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and minima of each group, float32 [rows, groups]; no minima: an empty array."""
    parts = kind.scales(blocks)
    groups = kind.elements // kind.group
    scale = parts.scale.astype(np.float32)[..., None]
    scale = scale * (np.ones(groups, np.float32) if parts.sub_scales is None else parts.sub_scales)
    minimum = -scale * np.float32(kind.offset) if kind.offset else np.zeros((0,), np.float32)
    if parts.minimum is not None:
        minimum = parts.minimum.astype(np.float32)[..., None]
        minimum = np.repeat(minimum, groups, -1) if parts.sub_minima is None else -minimum * parts.sub_minima
    rows = len(blocks)
    return scale.reshape(rows, -1), minimum.reshape(rows, -1) if minimum.size else minimum


def _planes(codes: npt.NDArray[np.uint8], bits: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Codes [rows, blocks, 32] as the kernels read them."""
    none = np.zeros(1, np.uint8)
    if bits == 8:
        return codes.view(np.int8), none
    low = codes[..., :16] & 15 | codes[..., 16:] << 4
    if bits == 4:
        return low, none
    upper = (codes >> 4).reshape(*codes.shape[:-1], 4, 8)
    return low, upper[..., 0, :] | upper[..., 1, :] << 2 | upper[..., 2, :] << 4 | upper[..., 3, :] << 6
