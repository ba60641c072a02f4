"""What is recorded for mixtures of experts: choosing, sorting, grouped products, sums (grouped.py runs them), tokens to
the experts of other lanes and back.

It owns the table of a layer's expert weights, an address a slot: an expert's weights may be replaced between steps by
changing its addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.errors import ConfigError
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.activations import ACTIVATIONS
from planaria.kernels.cpu.expert_kernels import SIGMOID, SOFTMAX
from planaria.kernels.cpu.fields import CombineOp, GroupedOp, RouteOp, SortOp
from planaria.kernels.cpu.micro import STORE_ACT, STORE_F32
from planaria.kernels.cpu.pack import Packed, up
from planaria.kernels.cpu.recorder import Recorder, Vector
from planaria.kernels.cpu.tape import Act, buffer
from planaria.kernels.ops import Slots
from planaria.models.config import MoEConfig


@dataclass(frozen=True)
class ExpertTable:
    """Gate over up, and down, of a rank's slots. tables int64 [2, slots]: the addresses of their data."""

    gate_up: list[Packed]
    down: list[Packed]
    tables: npt.NDArray[np.int64]

    def put(self, slot: int, gate_up: Packed, down: Packed) -> None:
        """Another expert's weights in this slot (counted from the rank's first), from the next step on."""
        self.gate_up[slot], self.down[slot] = gate_up, down
        self.tables[:, slot] = gate_up.address, down.address


@dataclass(frozen=True)
class RoutingBuffers:
    """slots int32 (said to be float32: they travel as the bits they are), weights float32 [rows, k]."""

    slots: Act
    weights: Act


def group(experts: Sequence[tuple[Packed, Packed]]) -> ExpertTable:
    """Checks that all are alike: one operation computes them all."""
    for packed in zip(*experts, strict=True):
        if len({(p.kind, p.rows, p.columns, p.biased) for p in packed}) > 1:
            raise ValueError("the experts of a layer have weights of different kinds or shapes")
    columns = experts[0][1].columns if experts else 0
    if columns % 16:
        raise ConfigError(
            "--device", "cpu", f"its kernels take experts of a size that is a multiple of 16, not {columns}"
        )
    gate_up, down = [pair[0] for pair in experts], [pair[1] for pair in experts]
    return ExpertTable(gate_up, down, np.array([[p.address for p in side] for side in (gate_up, down)], np.int64))


class ExpertOps:
    """A part of `RecordedOps`."""

    recorder: Recorder

    def route(self, logits: Act, rule: MoEConfig, slots: Slots, correction: Vector | None = None) -> RoutingBuffers:
        recorder, k = self.recorder, rule.top_k
        recorder.expect(logits, "route", "float32")
        recorder.own(slots)
        recorder.wants(layout.BIG + 8 * up(rule.num_experts, 16) + 8 * up(rule.num_groups, 16))
        routing = self._routing(logits.rows, k)
        recorder.add(
            RouteOp, logits=logits, slots=routing.slots, weights=routing.weights, k=k, experts=rule.num_experts,
            scoring=SOFTMAX if rule.scoring == "softmax" else SIGMOID, correction=correction, groups=rule.num_groups,
            top_groups=rule.top_groups, sum2=rule.group_score == "sum2", renormalize=rule.renormalize,
            scaling=rule.scaling, table=slots.table, ld_table=slots.table.shape[1], load=slots.load,
            positions=recorder.batch.positions,
        )  # fmt: skip
        return routing

    def _routing(self, rows: int, k: int) -> RoutingBuffers:
        slots, weights = (Act(buffer(self.recorder.rows(rows), 4 * k), rows, k, 4 * k, "float32") for _ in range(2))
        return RoutingBuffers(slots, weights)

    def experts(
        self, x: Act, routing: RoutingBuffers, weights: ExpertTable, slots: Slots, residual: Act | None = None, *,
        reduce: bool = False, kind: str = "silu",
    ) -> Act:  # fmt: skip
        recorder, held, k = self.recorder, slots.held, routing.slots.columns
        recorder.expect(x, "experts")
        recorder.own(weights)
        rows, gate_up, down = recorder.rows(x.rows), weights.gate_up[0], weights.down[0]
        if x.columns != gate_up.columns:
            raise ValueError(f"experts: {x.columns} columns into weights with K = {gate_up.columns}")
        most = rows * k
        starts, places, by_slot = buffer(2 * len(held) + 1, 8), buffer(rows, 4 * k), buffer(most, x.ld)
        recorder.add(
            SortOp, slots=routing.slots, k=k, rows=x.rows, first=held.start, held=len(held), starts=starts,
            places=places, x=x, out=by_slot,
        )  # fmt: skip
        inner = buffer(most, inner_ld := down.columns * recorder.target.item)
        y = buffer(most, y_ld := up(down.rows, 16) * 4)
        for w, table, (source, ldx), (out, ldo), half in (
            (gate_up, weights.tables[0], (by_slot, x.ld), (inner, inner_ld), gate_up.panels // 2),
            (down, weights.tables[1], (inner, inner_ld), (y, y_ld), 0),
        ):
            recorder.wants_product(w)
            recorder.add(  # experts without biases share the first one's zeros
                GroupedOp, kernels=recorder.kernels(w.kind), table=table, stride=w.stride, scales=w.scales,
                length=w.length, x=source, ldx=ldx, out=out, ldo=ldo, mode=STORE_ACT if half else STORE_F32,
                bias=w.bias, held=len(held), half=half, temp=recorder.tile_bytes(w), panels=w.panels, starts=starts,
                act=ACTIVATIONS[kind], first=0, own_bias=w.panels * w.stride if w.biased else 0,
            )  # fmt: skip
        summed = reduce and recorder.tp.size > 1
        target = recorder.new(x.rows, down.rows, "float32") if residual is None or summed else residual
        recorder.add(
            CombineOp, y=y, ldy=y_ld, places=places, weights=routing.weights, k=k, target=target, rows=x.rows,
            add=target is residual,
        )  # fmt: skip
        return recorder.reduce(target, residual) if residual is not None and summed else target

    def dispatch(self, x: Act, routing: RoutingBuffers) -> tuple[Act, RoutingBuffers]:
        recorder, lanes = self.recorder, self.recorder.lanes
        assert lanes is not None
        recorder.expect(x, "dispatch")
        every = recorder.new(layout.ROWS_ALL, x.columns, x.dtype)
        chosen = self._routing(layout.ROWS_ALL, routing.slots.columns)

        def between(*views: npt.NDArray[Any]) -> None:
            lanes.dispatch(list(views[:3]), list(views[3:]))

        recorder.cut(between, x, routing.slots, routing.weights, every, chosen.slots, chosen.weights)
        return every, chosen

    def combine(self, y: Act, residual: Act) -> Act:
        recorder, lanes = self.recorder, self.recorder.lanes
        assert lanes is not None
        recorder.expect(residual, "the residual of combine", "float32")

        def between(whole: npt.NDArray[Any], own: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
            lanes.combine(whole, own)
            target += own

        recorder.cut(between, y, recorder.new(residual.rows, y.columns, "float32"), residual)
        return residual
