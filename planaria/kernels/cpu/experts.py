"""What `CpuOps` records for mixtures of experts: choosing, sorting, grouped products, sums (grouped.py runs them).

It owns the table of a layer's expert weights, an address a slot: an expert's weights may be replaced between steps by
changing its addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planaria.errors import ConfigError
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.expert_kernels import SIGMOID, SOFTMAX
from planaria.kernels.cpu.micro import DENSE, STORE_ACT, STORE_F32
from planaria.kernels.cpu.pack import Packed, up
from planaria.kernels.cpu.tape import Buffer, buffer
from planaria.kernels.cpu.target import Target
from planaria.kernels.ops import Slots
from planaria.models.config import MoEConfig


@dataclass(frozen=True)
class Experts:
    """Gate over up, and down, of a rank's slots. tables int64 [2, slots]: the addresses of their data."""

    gate_up: list[Packed]
    down: list[Packed]
    tables: npt.NDArray[np.int64]

    def put(self, slot: int, gate_up: Packed, down: Packed) -> None:
        """Another expert's weights in this slot (counted from the rank's first), from the next step on."""
        self.gate_up[slot], self.down[slot] = gate_up, down
        self.tables[:, slot] = gate_up.address, down.address


@dataclass(frozen=True)
class Routing:
    """slots int32, weights float32 [rows, k]."""

    slots: Buffer
    weights: Buffer
    rows: int
    k: int


def group(experts: Sequence[tuple[Packed, Packed]]) -> Experts:
    """Checks that all are alike: one operation computes them all."""
    for packed in zip(*experts, strict=True):
        if len({(p.kind, p.rows, p.columns) for p in packed}) > 1:
            raise ValueError("the experts of a layer have weights of different kinds or shapes")
    columns = experts[0][1].columns if experts else 0
    if columns % 16:
        raise ConfigError(
            "--device", "cpu", f"its kernels take experts of a size that is a multiple of 16, not {columns}"
        )
    gate_up, down = [pair[0] for pair in experts], [pair[1] for pair in experts]
    return Experts(gate_up, down, np.array([[p.address for p in side] for side in (gate_up, down)], np.int64))


def route_row(
    logits: tuple[Buffer, int], rows: int, most: int, rule: MoEConfig, slots: Slots, correction: int, positions: int
) -> tuple[Routing, list[int | Buffer]]:
    """The routing, and the fields of its ROUTE operation. logits: buffer, bytes of a row. most: rows there can be.
    correction: address of float32 padded to 16 with zeros, or 0."""
    k = rule.top_k
    routing = Routing(buffer(most, 4 * k), buffer(most, 4 * k), rows, k)
    scaling = int(struct.unpack("<i", struct.pack("<f", rule.scaling))[0])
    fields: list[int | Buffer] = [
        *logits, routing.slots, routing.weights, k, rule.num_experts,
        SOFTMAX if rule.scoring == "softmax" else SIGMOID, correction, rule.num_groups, rule.top_groups,
        int(rule.group_score == "sum2"), int(rule.renormalize), scaling, int(slots.table.ctypes.data),
        slots.table.shape[1], positions, 0 if slots.load is None else int(slots.load.ctypes.data),
    ]  # fmt: skip
    return routing, fields


def route_scratch(rule: MoEConfig) -> int:
    """Bytes of a thread's scratch memory that choosing takes."""
    return layout.BIG + 8 * up(rule.num_experts, 16) + 8 * up(rule.num_groups, 16)


@dataclass(frozen=True)
class Sorted:
    """Rows of x by slot: `first` row of each slot, the row of each choice (`places`), the rows."""

    first: Buffer
    places: Buffer
    x: Buffer


def sorted_buffers(most: int, k: int, ldx: int, held: int) -> Sorted:
    return Sorted(buffer(2 * held + 1, 8), buffer(most, 4 * k), buffer(most * k, ldx))


def sort_fields(routing: Routing, held: range, x: Buffer, ldx: int, out: Sorted) -> list[int | Buffer]:
    return [
        routing.slots, routing.k, routing.rows, held.start, len(held), out.first, out.places, x, ldx, out.x,
    ]  # fmt: skip


def grouped_fields(
    side: list[Packed], table: npt.NDArray[np.int64], first: Buffer, x: Buffer, ldx: int, out: Buffer, ldo: int,
    *, half: int, temp: int,
) -> list[int | Buffer]:  # fmt: skip
    """Of a GROUPED operation. half: panels of a half whose gated product is taken, 0 for the plain product in float32.
    The experts have no biases: the first one's zeros do for all."""
    w = side[0]
    return [
        w.kind, int(table.ctypes.data), w.stride, w.scales, w.length, x, ldx, out, ldo,
        STORE_ACT if half else STORE_F32, w.bias.ctypes.data, len(side), half, temp, w.panels, first,
    ]  # fmt: skip


def tile_bytes(w: Packed, target: Target) -> int:
    """Scratch memory of a product's tiles, before that of a fused activation."""
    if w.kind == DENSE:
        return up(layout.BIG, 64)
    return up(layout.FETCH + 8 * (layout.WIDE_ROWS // target.tile_rows) * w.length, 64)
