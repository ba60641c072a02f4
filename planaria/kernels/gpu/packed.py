"""Weights that stay packed on a device, GGUF's kinds and float8: few rows meet them as they are, many meet them
unpacked.

Rule: a weight is scale * (code - offset) + minimum, scale * LEVELS[code], or scale * float8 / 256; each 16 or 32 along
K have a scale (and a minimum) of their own, in float32 where activations are, else in float16. Codes have 4, 6 or 8
bits here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.kernels.blocks import BLOCK, LEVELS, PACKED, BlockKind
from planaria.kernels.gpu.attention import interprets
from planaria.kernels.ops import Quantized, Stacked
from planaria.kernels.reference_linear import Linear, tensor_of

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
        kind = tuple(int(self.kind[name]) for name in ("bits", "group", "shifted", "coded"))
        return (*numbers, *kind), self._codes if self.bias is None else (*self._codes, self.bias)

    @classmethod
    def of_parts(cls, numbers: tuple[int, ...], tensors: list[Tensor]) -> DevicePacked:
        """Raises ValueError."""
        if len(numbers) != 8 or len(tensors) != 5 + numbers[1] or not 0 <= numbers[0] < len(DTYPES):
            raise ValueError(f"no packed weight is {numbers} with {len(tensors)} tensors")
        dtype, _, rows, columns, bits, group, shifted, coded = numbers
        low, high, scales, minima, levels, *bias = tensors
        kind = {"bits": bits, "group": group, "shifted": bool(shifted), "coded": coded}
        own = bias[0] if bias else None
        return cls(low, high, scales, minima, levels, own, (rows, columns), DTYPES[dtype], kind)

    @property
    def _codes(self) -> tuple[Tensor, ...]:
        return self.low, self.high, self.scales, self.minima, self.levels


Weights = Linear | DevicePacked


def pack(weight: Quantized, bias: npt.NDArray[Any] | None, dtype: torch.dtype, device: torch.device) -> DevicePacked:
    """On the device, of a weight as its file packs it. Codes, which are most of it, are taken apart there."""
    kind, (rows, width) = PACKED[weight.kind], weight.shape
    data = weight.data.whole() if isinstance(weight.data, Stacked) else weight.data
    blocks = data.reshape(rows, -1, kind.nbytes)
    form = torch.float32 if dtype == torch.float32 else torch.float16

    def put(array: npt.NDArray[Any]) -> Tensor:
        return tensor_of(np.ascontiguousarray(array)).to(device)

    codes = _codes(kind, put(blocks)).view(rows, -1)
    codes = _cut(codes, weight.skip, width, 1).reshape(rows, -1, BLOCK)
    found = [_cut(each, weight.skip, width, kind.group).to(form).contiguous() for each in _affine(kind, blocks, put)]
    bits = 8 if kind.bits == 8 else 4 if kind.bits <= 4 else 6
    low, high = _planes(codes, bits)
    shifted = len(found) > 1
    return DevicePacked(
        low, high, found[0], found[1] if shifted else found[0][:1, :1], put(np.array(LEVELS, np.float32)),
        None if bias is None else put(np.asarray(bias, np.float32)).to(dtype), (rows, width), dtype,
        {"bits": bits, "group": kind.group, "shifted": shifted, "coded": kind.levels + 2 * kind.float8},
    )  # fmt: skip


def _cut(values: Tensor, skip: int, width: int, each: int) -> Tensor:
    """Of what every `each` weights have one: that of `width` weights, in whole blocks, after `skip`."""
    return values[:, skip // each : (skip + -(-width // BLOCK) * BLOCK) // each]


def _codes(kind: BlockKind, blocks: Tensor) -> Tensor:
    """`BlockKind.codes` of blocks [rows, blocks, nbytes]: [rows, blocks, elements]."""
    codes, shift = blocks.new_zeros(()), 0
    for at, bits, run in kind.planes:
        packed = blocks[..., at : at + kind.elements * bits // 8].view(*blocks.shape[:2], -1, 1, run)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=blocks.device)[:, None]
        codes = codes | ((packed >> shifts) & (1 << bits) - 1).flatten(2) << shift
        shift += bits
    return codes


def _affine(kind: BlockKind, blocks: npt.NDArray[np.uint8], put: Callable[[npt.NDArray[Any]], Tensor]) -> list[Tensor]:
    """Scales of each group, and minima where there are any, float32 [rows, groups], on the device that they are `put`
    on."""
    parts = kind.scales(blocks)
    scale, minimum, more, less = (None if each is None else put(each).float() for each in parts)
    assert scale is not None
    scale = scale[..., None].expand(*scale.shape, kind.elements // kind.group)
    scale = scale if more is None else scale * more
    if minimum is not None:
        minimum = minimum[..., None].expand_as(scale) if less is None else -minimum[..., None] * less
    elif kind.offset:
        minimum = -scale * kind.offset
    return [scale.flatten(1)] if minimum is None else [scale.flatten(1), minimum.flatten(1)]


def _planes(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, blocks, 32] as the kernels read them."""
    none = codes.new_zeros(1)
    if bits == 8:
        return codes.contiguous().view(torch.int8), none
    low = codes[..., :16] & 15 | codes[..., 16:] << 4
    if bits == 4:
        return low, none
    upper = (codes >> 4).view(*codes.shape[:2], 4, 8)
    return low, upper[..., 0, :] | upper[..., 1, :] << 2 | upper[..., 2, :] << 4 | upper[..., 3, :] << 6
