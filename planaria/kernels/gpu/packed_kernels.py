"""The kernels of packed.py. Importing this imports Triton.

Of each 32 weights along K a row has 16 bytes of the lowest four bits (the first 16 codes in the low halves, the others
in the high ones), where codes have six 8 bytes more with the others, two bits each; or 32 bytes, where they have eight.
coded: 0, a code is an integer; 1, a place in `levels`; 2, a float8 (e4m3), a 256th of which is a float16.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half(
    low, high, scales, minima, levels, column, inside, block, byte, upper: tl.constexpr, row_blocks, bits: tl.constexpr,
    group: tl.constexpr, shifted: tl.constexpr, coded: tl.constexpr,
):  # fmt: skip
    """Float32 weights [block_n, block_k] of the first or the other (`upper`) 16 of some blocks. column [block_n]: rows
    of the weight; block, byte [block_k]: which block, which of its 16."""
    spot = column[:, None] * row_blocks + block[None, :]
    if bits == 8:
        code = tl.load(low + spot * 32 + 16 * upper + byte[None, :], mask=inside, other=0).to(tl.int32)
    else:
        code = (tl.load(low + spot * 16 + byte[None, :], mask=inside, other=0).to(tl.int32) >> (4 * upper)) & 15
        if bits == 6:
            two = tl.load(high + spot * 8 + byte[None, :] % 8, mask=inside, other=0).to(tl.int32)
            code += ((two >> (4 * upper + 2 * (byte[None, :] // 8))) & 3) << 4
    if coded == 1:
        value = tl.load(levels + code)
    elif coded == 2:
        bits16 = ((code & 128) << 8) | ((code & 127) << 7)
        value = bits16.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = code.to(tl.float32)
    of = spot if group == 32 else spot * 2 + upper
    value = value * tl.load(scales + of, mask=inside, other=0.0).to(tl.float32)
    if shifted:
        value += tl.load(minima + of, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def product(
    x, low, high, scales, minima, levels, bias, out, rows, columns, width, row_blocks, has_bias: tl.constexpr,
    bits: tl.constexpr, group: tl.constexpr, shifted: tl.constexpr, coded: tl.constexpr, exact: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """x [rows, width] times the weight [columns, width], transposed. block_k: of half of the codes."""
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    column = (tl.program_id(1) * block_n + tl.arange(0, block_n)).to(tl.int64)
    sums = tl.zeros((block_m, block_n), tl.float32)
    for at in range(0, row_blocks * 16, block_k):
        k = at + tl.arange(0, block_k)
        block, byte = k // 16, k % 16
        inside = (column < columns)[:, None] & (block < row_blocks)[None, :]
        for upper in tl.static_range(2):
            place = block * 32 + 16 * upper + byte
            taken = (row < rows)[:, None] & (place < width)[None, :]
            a = tl.load(x + row[:, None].to(tl.int64) * width + place[None, :], mask=taken, other=0.0)
            w = _half(
                low, high, scales, minima, levels, column, inside, block, byte, upper, row_blocks, bits, group, shifted,
                coded,
            )  # fmt: skip
            w = w.to(a.dtype)
            if exact:
                a = a.to(tl.float32)
                w = w.to(tl.float32)
            sums = tl.dot(a, tl.trans(w), sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    spot = out + row[:, None].to(tl.int64) * columns + column[None, :]
    kept = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(spot, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit
def unpack(
    low, high, scales, minima, levels, which, out, width, row_blocks, bits: tl.constexpr, group: tl.constexpr,
    shifted: tl.constexpr, coded: tl.constexpr, picks: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """A row of weights; with `picks` the one that `which` names."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(which + line).to(tl.int64) if picks else line
    column = row + tl.zeros((1,), tl.int64)
    k = tl.program_id(1) * block_k + tl.arange(0, block_k)
    block, byte = k // 16, k % 16
    inside = (block < row_blocks)[None, :]
    for upper in tl.static_range(2):
        w = _half(
            low, high, scales, minima, levels, column, inside, block, byte, upper, row_blocks, bits, group, shifted,
            coded,
        )  # fmt: skip
        place = block * 32 + 16 * upper + byte
        to = out + line * width + place[None, :]
        tl.store(to, w.to(out.dtype.element_ty), mask=inside & (place < width)[None, :])
