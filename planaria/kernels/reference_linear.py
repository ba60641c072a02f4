"""Products of the plain back end, and what adapters add to rows that have one: the definition."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from planaria.kernels.numbers import BFLOAT16
from planaria.kernels.ops import Array, Quantized, Rows, Stacked, parts_of
from planaria.kernels.quant import dequantise
from planaria.mesh.comm import Comm


def tensor_of(values: npt.NDArray[Any]) -> Tensor:
    """The same memory; bfloat16 is what its bits say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors and warns of it
        found = torch.from_numpy(values)
    return found.view(torch.bfloat16) if values.dtype == BFLOAT16 else found


@dataclass
class Linear:
    """weight [N, K], bias [N] or None; both are views of `whole`, one after the other."""

    weight: Tensor
    bias: Tensor | None
    whole: Tensor

    @classmethod
    def of(cls, whole: Tensor, rows: int, columns: int, biased: int) -> Linear:
        weight = whole[: rows * columns].view(rows, columns)
        return cls(weight, whole[rows * columns :] if biased else None, whole)

    def product(self, x: Tensor) -> Tensor:
        """x W^T + bias."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, which: Tensor) -> Tensor:
        return F.embedding(which, self.weight)


@dataclass
class LowRank:
    """parts: of the weight's rows. slots: of each slot, of each part, A [r, K] and B [rows of the part, r], or None."""

    parts: Sequence[range]
    slots: list[Sequence[tuple[Tensor, Tensor] | None]]

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> Tensor:
        """To y [T, N] float32; slots: of each row."""
        for slot, pairs in enumerate(self.slots):
            rows = torch.nonzero(slots == slot)[:, 0]
            for part, pair in zip(self.parts, pairs, strict=True):
                if len(rows) and pair is not None:
                    y[rows, part.start : part.stop] += F.linear(F.linear(x[rows], pair[0]), pair[1]).float()
        return y


class Products:
    """A part of `TorchOps`."""

    device: torch.device
    dtype: torch.dtype
    tp: Comm
    step: Any
    _shared: Callable[[Tensor], Array]
    _norm: Callable[[Tensor, Tensor, float], Tensor]

    def pack(self, weight: Rows | Quantized, bias: npt.NDArray[Any] | None = None) -> Linear:
        values = dequantise(weight) if isinstance(weight, Quantized) else weight
        parts = values.parts if isinstance(values, Stacked) else (values,)
        if bias is not None:
            parts = *parts, bias
        rows, columns = values.shape
        if len(parts) == 1:
            return Linear.of(self._keep(parts[0], self.dtype).view(-1), rows, columns, False)
        whole = torch.empty(sum(part.size for part in parts), dtype=self.dtype, device=self.device)
        for part, into in zip(parts, torch.split(whole, [part.size for part in parts]), strict=True):
            into.view(part.shape).copy_(tensor_of(part))
        return Linear.of(whole, rows, columns, bias is not None)

    def _keep(self, values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        return tensor_of(values).to(device=self.device, dtype=dtype).contiguous()

    def _product(self, x: Tensor, weight: Linear | tuple[Linear, ...], lora: LowRank | None) -> Tensor:
        parts = [w.product(x) for w in parts_of(weight)]
        y = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return y if lora is None else lora.add(x, y.float(), self.step.loras)

    def linear(
        self, x: Tensor, weight: Linear | tuple[Linear, ...], residual: Tensor | None = None, *, reduce: bool = False,
        lora: LowRank | None = None,
    ) -> Tensor:  # fmt: skip
        y = self._product(x, weight, lora)
        if reduce and self.tp.size > 1:
            y = y.float()
            self.tp.all_reduce(self._shared(y))
        return y.to(self.dtype) if residual is None else residual.add_(y)

    def linear_norm(
        self, x: Tensor, weight: Linear, norm: Tensor, eps: float, residual: Tensor, *, lora: LowRank | None = None
    ) -> Tensor:
        y = self._product(x, weight, lora).float()
        if self.tp.size > 1:
            self.tp.all_reduce(self._shared(y))
        return residual.add_(self._norm(y, norm, eps))

    def lora_table(self, parts: Sequence[range], rank: int, slots: int) -> LowRank:
        return LowRank(parts, [[None] * len(parts) for _ in range(slots)])

    def put_lora(self, table: LowRank, slot: int, pairs: Sequence[tuple[Array, Array] | None]) -> None:
        table.slots[slot] = [
            None if pair is None else (self._keep(pair[0], self.dtype), self._keep(pair[1], self.dtype))
            for pair in pairs
        ]  # fmt: skip
