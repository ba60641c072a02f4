"""A mixture's experts on a device, by kernels that ask the host for nothing: where experts are is kept there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planaria.kernels import reference_experts as mixture
from planaria.kernels.gpu import experts as grouped
from planaria.kernels.gpu.packed import Weights
from planaria.kernels.ops import Slots
from planaria.kernels.reference import SlotExperts, TorchOps
from planaria.kernels.reference_linear import Linear
from planaria.mesh.comm import Comm
from planaria.models.config import MoEConfig


class GroupedExperts(SlotExperts):
    """table: for the kernels."""

    def __init__(self, experts: Sequence[tuple[Weights, Weights]]) -> None:
        super().__init__([(_plain(a), _plain(b)) for a, b in experts])
        self.table = grouped.Table.of(self.pairs)


class PlacedSlots:
    """`Slots` on a device. table: int64; load [experts]: what is still to be added to theirs, where that is counted."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self.table = torch.from_numpy(slots.table).to(device, torch.int64)
        self.load = None if slots.load is None else torch.zeros(len(slots.load), dtype=torch.int64, device=device)
        self.number = slots.number

    def refresh(self, slots: Slots) -> None:
        """After experts were placed anew."""
        if self.number != slots.number:
            self.table.copy_(torch.from_numpy(slots.table))
            self.number = slots.number


def _plain(weight: Weights) -> Linear:
    """Experts travel between ranks, and meet their rows unpacked."""
    if isinstance(weight, Linear):
        return weight
    return Linear.of(weight.whole, *weight.shape, weight.bias is not None)


class ExpertKernels(TorchOps):
    """A part of `GpuOps`."""

    _paid: Callable[[Any], Any]

    def __init__(self, device: str, dtype: str, tp: Comm | None) -> None:
        super().__init__(device, dtype, tp)
        self._slots = weakref.WeakKeyDictionary[Slots, PlacedSlots]()

    def group(self, experts: Sequence[tuple[Weights, Weights]]) -> SlotExperts:
        return GroupedExperts(experts)

    def put(self, experts: SlotExperts, slot: int, expert: tuple[Weights, Weights]) -> None:
        pair = _plain(expert[0]), _plain(expert[1])
        super().put(experts, slot, pair)
        if isinstance(experts, GroupedExperts):
            experts.table.put(slot, pair)

    def refresh_slots(self) -> None:
        """Take in where experts are by now; before a step."""
        for slots, placed in self._slots.items() if self._slots else ():
            placed.refresh(slots)

    def read_loads(self) -> None:
        for slots, placed in self._slots.items():
            if slots.load is not None and placed.load is not None:
                slots.load += placed.load.cpu().numpy()
                placed.load.zero_()

    def route(
        self, logits: Tensor, rule: MoEConfig, slots: Slots, correction: Tensor | None = None
    ) -> mixture.RoutedRows:  # fmt: skip
        """Counted are tokens of sequences: those of nobody have a slot of their own kind (`step.NOBODY`)."""
        placed = self._slots.get(slots)
        if placed is None:
            placed = self._slots[slots] = PlacedSlots(slots, self.device)
        routing, chosen = mixture.route(logits, rule, placed.table, correction, self.step.positions)
        if placed.load is not None and slots.load is not None:
            own = self.step.slots[self.step.first : self.step.first + len(chosen)]
            counted = (own >= -1).long()[:, None].expand_as(chosen)
            placed.load.index_add_(0, chosen.flatten(), counted.flatten())
        return routing

    def experts(
        self, x: Tensor, routing: mixture.RoutedRows, weights: SlotExperts, slots: Slots,
        residual: Tensor | None = None, *, reduce: bool = False, kind: str = "silu",
    ) -> Tensor:  # fmt: skip
        residual = self._paid(residual)
        table: grouped.Table = weights.table  # type: ignore[attr-defined]
        y = grouped.experts(x.contiguous(), routing.slots, routing.weights, table, slots.held, kind)
        if reduce and self.tp.size > 1:
            self.tp.all_reduce(self._shared(y))
        return y if residual is None else residual.add_(y)
