"""The kernels of experts.py. Importing this imports Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from planaria.kernels.gpu.fused_kernels import activated


@triton.jit
def gated(
    x, table, biases, out, order, tile_slots, tile_rows, ends, num_slots, k, width, hidden, kind: tl.constexpr,
    biased: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    slot = tl.load(tile_slots + tl.program_id(0))
    if slot < num_slots:
        row = tl.load(tile_rows + tl.program_id(0)) + tl.arange(0, block_m)
        real = row < tl.load(ends + slot)
        token = tl.load(order + row, mask=real, other=0) // k
        column = tl.program_id(1) * block_n + tl.arange(0, block_n)
        inside = column < width
        w = tl.load(table + slot).to(tl.pointer_type(x.dtype.element_ty))
        gate = tl.zeros((block_m, block_n), tl.float32)
        up = tl.zeros((block_m, block_n), tl.float32)
        for start in range(0, hidden, block_k):
            at = start + tl.arange(0, block_k)
            fits = at < hidden
            a = tl.load(x + token[:, None] * hidden + at[None, :], mask=real[:, None] & fits[None, :], other=0.0)
            taken = fits[:, None] & inside[None, :]
            g = tl.load(w + column[None, :] * hidden + at[:, None], mask=taken, other=0.0)
            u = tl.load(w + (column[None, :] + width) * hidden + at[:, None], mask=taken, other=0.0)
            gate = tl.dot(a, g, gate, input_precision="ieee")
            up = tl.dot(a, u, up, input_precision="ieee")
        if biased:
            b = tl.load(biases + slot).to(tl.pointer_type(x.dtype.element_ty))
            gate += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(b + width + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = activated(gate, up, kind)
        spot = out + row[:, None] * width + column[None, :]
        tl.store(spot, y.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def down(
    x, table, biases, out, tile_slots, tile_rows, ends, num_slots, width, hidden, biased: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    slot = tl.load(tile_slots + tl.program_id(0))
    if slot < num_slots:
        row = tl.load(tile_rows + tl.program_id(0)) + tl.arange(0, block_m)
        real = row < tl.load(ends + slot)
        column = tl.program_id(1) * block_n + tl.arange(0, block_n)
        inside = column < hidden
        w = tl.load(table + slot).to(tl.pointer_type(x.dtype.element_ty))
        y = tl.zeros((block_m, block_n), tl.float32)
        for start in range(0, width, block_k):
            at = start + tl.arange(0, block_k)
            fits = at < width
            a = tl.load(x + row[:, None] * width + at[None, :], mask=real[:, None] & fits[None, :], other=0.0)
            b = tl.load(w + column[None, :] * width + at[:, None], mask=fits[:, None] & inside[None, :], other=0.0)
            y = tl.dot(a, b, y, input_precision="ieee")
        if biased:
            b = tl.load(biases + slot).to(tl.pointer_type(x.dtype.element_ty))
            y += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + row[:, None] * hidden + column[None, :], y, mask=real[:, None] & inside[None, :])


@triton.jit
def combine(y, places, weights, out, k, hidden, block_h: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block_h + tl.arange(0, block_h)
    inside = column < hidden
    total = tl.zeros((block_h,), tl.float32)
    for j in range(k):
        row = tl.load(places + token * k + j)
        weight = tl.load(weights + token * k + j)
        part = tl.load(y + row * hidden + column, mask=inside & (row + tl.zeros_like(column) >= 0), other=0.0)
        total += part * weight
    tl.store(out + token * hidden + column, total, mask=inside)
