"""Adapters of the plain back end: the definition of what `linear` adds to rows that have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from planaria.kernels.ops import Array


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


class LoraTensors:
    """A part of `TorchOps`."""

    dtype: torch.dtype

    def _keep(self, values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def lora_table(self, parts: Sequence[range], rank: int, slots: int) -> LowRank:
        return LowRank(parts, [[None] * len(parts) for _ in range(slots)])

    def put_lora(self, table: LowRank, slot: int, pairs: Sequence[tuple[Array, Array] | None]) -> None:
        table.slots[slot] = [
            None if pair is None else (self._keep(pair[0], self.dtype), self._keep(pair[1], self.dtype))
            for pair in pairs
        ]  # fmt: skip
