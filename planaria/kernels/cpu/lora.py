"""Low-rank products of a recorded pass: to each row that has an adapter, that adapter's is added. Part of the
interpreter's program.

Written like program.py. Rows of one adapter that follow one another are a piece; the runner puts rows of the same
adapter together. Each output is summed in one order whatever shares its piece (see micro.py), and one unit of work
writes a panel of the output, so two parts of a weight may meet in one.
"""

from __future__ import annotations

from planaria.kernels.cpu import fields, layout, native
from planaria.kernels.cpu.micro import ADD_RESIDUAL, STORE_ACT, STORE_F32
from planaria.kernels.cpu.native import TARGET, get, get32, put
from planaria.kernels.cpu.products import tiles
from planaria.kernels.cpu.threads import barrier, scratch


def piece_end(slots: int, t: int, n: int) -> int:
    """Where the piece of rows that begins with row t ends."""
    slot, last = get32(slots, t), min(n, t + layout.PIECE_ROWS)
    while t < last and get32(slots, t) == slot:
        t += 1
    return t


def narrow_rows(c: int, row: fields.LoraOp, mine: int, weights: int, first: int, count: int) -> None:
    """x A^T of a piece, the parts that there are one behind the other."""
    panels = 0
    for part in range(row.parts):
        a = get(weights, 2 * part)
        if a:
            for v in range(row.panels):
                put(mine + layout.POINTERS, panels, a + v * row.stride)
                panels += 1
    tiles(
        c, count, row.x + first * row.ldx, row.ldx, row.length, mine + layout.POINTERS, panels, TARGET.tile_panels,
        row.inner + first * row.ldi, row.ldi, STORE_ACT, 0,
    )  # fmt: skip


def widen_rows(
    c: int, row: fields.LoraOp, mine: int, weights: int, first: int, count: int, begin: int, end: int
) -> None:  # fmt: skip
    """What a piece adds to panels [begin, end) of the output."""
    inner, item = row.inner + first * row.ldi, TARGET.item
    for part in range(row.parts):
        b = get(weights, 2 * part + 1)
        if b == 0:
            continue
        start = get(row.places, 2 * part)
        low, high = max(begin, start), min(end, start + get(row.places, 2 * part + 1))
        if low < high:
            for v in range(high - low):
                put(mine + layout.POINTERS, v, b + (low - start + v) * row.b_stride)
            out = row.out + first * row.ldo
            if row.narrow:
                ld = layout.FUSED_PANELS * 64
                tiles(
                    c, count, inner, row.ldi, row.b_length, mine + layout.POINTERS, high - low, TARGET.tile_panels,
                    mine + layout.BIG, ld, STORE_F32, 0,
                )  # fmt: skip
                for r in range(count):
                    native.accrue(out + r * row.ldo + low * 16 * item, mine + layout.BIG + r * ld, (high - low) * 16)
            else:
                tiles(
                    c, count, inner, row.ldi, row.b_length, mine + layout.POINTERS, high - low, TARGET.tile_panels,
                    out + low * 64, row.ldo, ADD_RESIDUAL, 0,
                )  # fmt: skip
        inner += row.panels * 16 * item


def op_lora(c: int, row: fields.LoraOp, tid: int) -> None:
    n, threads = get(get(c, layout.COUNTS), row.rows), get(c, layout.THREADS)
    mine, size = scratch(c, tid), 16 * row.parts  # bytes of a slot's addresses
    unit, t = 0, 0
    while t < n:
        slot, end = get32(row.slots, t), piece_end(row.slots, t, n)
        if slot >= 0:
            if unit % threads == tid:
                narrow_rows(c, row, mine, row.table + slot * size, t, end - t)
            unit += 1
        t = end
    barrier(c)
    t = 0
    unit = 0
    while t < n:
        slot, end = get32(row.slots, t), piece_end(row.slots, t, n)
        if slot >= 0:
            for begin in range(0, row.columns, layout.FUSED_PANELS):
                if unit % threads == tid:
                    stop = min(row.columns, begin + layout.FUSED_PANELS)
                    widen_rows(c, row, mine, row.table + slot * size, t, end - t, begin, stop)
                unit += 1
        t = end
