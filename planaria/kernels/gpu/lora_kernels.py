"""The kernels of lora.py. Importing this imports Triton.

Rule: a tile of rows goes through the slots that any of them has, with zeros in place of rows that have another, so a
row's sums don't depend on the others.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink(
    x, addresses, loras, inner, tokens, width, slots, parts, block_m: tl.constexpr, rank: tl.constexpr,
    exact: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """x A^T of a part, in the activation dtype: inner [parts, tokens, rank]."""
    row, part = tl.program_id(0) * block_m + tl.arange(0, block_m), tl.program_id(1)
    own = tl.load(loras + row, mask=row < tokens, other=-1)
    r = tl.arange(0, rank)
    line = row[:, None].to(tl.int64)
    sums = tl.zeros((block_m, rank), tl.float32)
    for slot in range(slots):
        mine = own == slot
        if tl.max(mine.to(tl.int32)) > 0:
            address = tl.load(addresses + (slot * parts + part) * 2)
            if address != 0:
                a = address.to(tl.pointer_type(x.dtype.element_ty))
                for start in range(0, width, block_k):
                    at = start + tl.arange(0, block_k)
                    fits = at < width
                    left = tl.load(x + line * width + at[None, :], mask=mine[:, None] & fits[None, :], other=0.0)
                    right = tl.load(a + r[None, :] * width + at[:, None], mask=fits[:, None], other=0.0)
                    if exact:
                        left = left.to(tl.float32)
                        right = right.to(tl.float32)
                    sums = tl.dot(left, right, sums, input_precision="ieee")
    spot = inner + (part * tokens + line) * rank + r[None, :]
    tl.store(spot, sums.to(inner.dtype.element_ty), mask=(row < tokens)[:, None])


@triton.jit
def expand(
    inner, addresses, bounds, loras, y, tokens, columns, slots, parts, block_m: tl.constexpr, rank: tl.constexpr,
    exact: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """To a part's columns of y [tokens, columns] each row's product with B."""
    row, part = tl.program_id(0) * block_m + tl.arange(0, block_m), tl.program_id(1)
    own = tl.load(loras + row, mask=row < tokens, other=-1)
    first = tl.load(bounds + 2 * part)
    column = tl.program_id(2) * block_n + tl.arange(0, block_n)
    inside = column < tl.load(bounds + 2 * part + 1) - first
    r = tl.arange(0, rank)
    line = row[:, None].to(tl.int64)
    sums = tl.zeros((block_m, block_n), tl.float32)
    for slot in range(slots):
        mine = own == slot
        if tl.max(mine.to(tl.int32)) > 0:
            address = tl.load(addresses + (slot * parts + part) * 2 + 1)
            if address != 0:
                b = address.to(tl.pointer_type(inner.dtype.element_ty))
                left = tl.load(inner + (part * tokens + line) * rank + r[None, :], mask=mine[:, None], other=0.0)
                right = tl.load(b + column[None, :] * rank + r[:, None], mask=inside[None, :], other=0.0)
                if exact:
                    left = left.to(tl.float32)
                    right = right.to(tl.float32)
                sums = tl.dot(left, right, sums, input_precision="ieee")
    spot = y + line * columns + first + column[None, :]
    changed = (own >= 0)[:, None] & inside[None, :]
    tl.store(spot, tl.load(spot, mask=changed, other=0.0) + sums, mask=changed)
