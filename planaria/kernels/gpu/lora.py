"""What adapters add to rows that have one, by two kernels: which row has which is looked up on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planaria.kernels.gpu.attention import interprets
from planaria.kernels.gpu.fused import power

TensorPair = tuple[Tensor, Tensor]
BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64


class LoraPointers:
    """See `Ops.lora_table`. A slot has of each part A [rank, K] and B [rows of the part, rank], filled up with zeros,
    or None; `addresses` int64 [slots, parts, 2] are theirs, 0: none, and stay where they are."""

    def __init__(self, parts: Sequence[range], rank: int, slots: int, device: torch.device) -> None:
        self.parts, self.rank = parts, max(16, power(rank))
        self.slots: list[list[TensorPair | None]] = [[None] * len(parts) for _ in range(slots)]
        self.addresses = torch.zeros(slots, len(parts), 2, dtype=torch.int64, device=device)
        bounds = [(part.start, part.stop) for part in parts]
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self._widest = max(map(len, parts))

    def put(self, slot: int, pairs: Sequence[TensorPair | None]) -> None:
        """Between two steps. Each A [r, K] and B [N, r], r up to the table's rank."""
        self.slots[slot] = [pair and self._filled(*pair) for pair in pairs]
        found = [[0, 0] if pair is None else [half.data_ptr() for half in pair] for pair in self.slots[slot]]
        self.addresses[slot] = torch.tensor(found, dtype=torch.int64)

    def _filled(self, a: Tensor, b: Tensor) -> TensorPair:
        more = self.rank - len(a)
        return torch.cat([a, a.new_zeros(more, a.shape[1])]), torch.cat([b, b.new_zeros(len(b), more)], 1)

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> Tensor:
        """To y [T, N] float32, contiguous, of x [T, K]. slots int32 [T], -1: no adapter."""
        from planaria.kernels.gpu.lora_kernels import expand, shrink

        (tokens, width), parts = x.shape, len(self.parts)
        inner = torch.empty(parts, tokens, self.rank, dtype=x.dtype, device=x.device)
        sizes: dict[str, Any] = {"block_m": BLOCK_M, "rank": self.rank, "exact": interprets()}
        if tokens:
            tiles = -(-tokens // BLOCK_M)
            shrink[tiles, parts](
                x.contiguous(),
                self.addresses,
                slots,
                inner,
                tokens,
                width,
                len(self.slots),
                parts,
                block_k=BLOCK_K,
                **sizes,
            )
            expand[tiles, parts, -(-self._widest // BLOCK_N)](
                inner, self.addresses, self._bounds, slots, y, tokens, y.shape[1], len(self.slots), parts,
                block_n=BLOCK_N, **sizes,
            )  # fmt: skip
        return y
