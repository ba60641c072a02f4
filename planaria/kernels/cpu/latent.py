"""Latent attention's own operations: into the cache, and head by head into the latent's space and back.

Written like program.py, and part of the interpreter's program. Attention itself is program.attend_tile.
"""

from __future__ import annotations

from planaria.kernels.cpu.layout import BIG, COUNTS, POINTERS, ROW_BLOCK, STREAM_ROWS, ZEROS
from planaria.kernels.cpu.micro import STORE_ACT
from planaria.kernels.cpu.native import (
    atomic_add,
    get,
    get32,
    pl_item,
    pl_rotate,
    pl_store_key,
    pl_tile,
    pl_tile_panels,
    pl_tile_rows,
    put,
)
from planaria.kernels.cpu.threads import clear, whole_chunks


def op_latent(c: int, row: int, first: int, last: int, mine: int) -> None:
    # 1 x, 2 ldx, 3 cache, 4 block bytes, 5 block size, 6 columns of the latent, 7 rotated ones, 8 norm, 9 eps, 10 cos,
    # 11 sin, 12 half, 13 slots, 14 positions
    n, slots = get(get(c, COUNTS), 0), get(row, 13)
    rank, rotated, size = get(row, 6), get(row, 7), get(row, 5)
    width = (rank + rotated) * pl_item()
    key = mine + BIG
    temp = key + width
    last = whole_chunks(slots, last, n)
    for t in range(whole_chunks(slots, first, n), last):
        x = get(row, 1) + t * get(row, 2)
        turn = get32(get(row, 14), t) * get(row, 12) * 4
        pl_rotate(x, key, temp, 0, 0, 0, rank, get(row, 8), get(row, 9))
        x, tail = x + rank * pl_item(), key + rank * pl_item()
        pl_rotate(x, tail, temp, get(row, 10) + turn, get(row, 11) + turn, get(row, 12), rotated, 0, 0)
        slot = get(slots, t)
        offset = slot % size
        place = get(row, 3) + (slot // size) * get(row, 4) + (offset >> 4) * 16 * width
        if offset & 15 == 0:  # keys are values here: what an earlier owner left must not meet a weight of 0 as a NaN
            clear(c, place, 16 * width)
        pl_store_key(key, place + (offset & 15) * 4, width >> 2)


def op_by_head(c: int, row: int, ticket: int, mine: int) -> None:
    # 1 w, 2 panel bytes, 3 steps, 4 panels of a head, 5 x, 6 ldx, 7 bytes of a head in it, 8 out, 9 ldo, 10 bytes of a
    # head in it, 11 heads, 12 columns to rotate, 13 their place in a head of x, 14 and of out, 15 cos, 16 sin, 17 half,
    # 18 positions
    n, heads = get(get(c, COUNTS), 0), get(row, 11)
    units = heads * ((n + ROW_BLOCK - 1) // ROW_BLOCK)
    unit = atomic_add(ticket, 0, 1)
    while unit < units:
        h, first = unit % heads, unit // heads * ROW_BLOCK
        count = min(n - first, ROW_BLOCK)
        x = get(row, 5) + first * get(row, 6) + h * get(row, 7)
        out = get(row, 8) + first * get(row, 9) + h * get(row, 10)
        head_product(c, row, mine, h, x, out, count)
        if get(row, 12):
            for t in range(count):
                turn = get32(get(row, 18), first + t) * get(row, 17) * 4
                pl_rotate(
                    x + t * get(row, 6) + get(row, 13), out + t * get(row, 9) + get(row, 14), mine + BIG,
                    get(row, 15) + turn, get(row, 16) + turn, get(row, 17), get(row, 12), 0, 0,
                )  # fmt: skip
        unit = atomic_add(ticket, 0, 1)


def head_product(c: int, row: int, mine: int, h: int, x: int, out: int, count: int) -> None:
    """`count` rows x the panels of head h."""
    panel, end, stride = 0, get(row, 4), get(row, 2)
    w = get(row, 1) + h * end * stride
    while panel < end:
        panels = pl_tile_panels() if count > STREAM_ROWS and end - panel >= pl_tile_panels() else 1
        for v in range(panels):
            put(mine + POINTERS, v, w + (panel + v) * stride)
        for r in range(0, count, pl_tile_rows()):
            rows = min(pl_tile_rows(), count - r)
            pl_tile(
                rows * 4 + panels, x + r * get(row, 6), get(row, 6), mine + POINTERS, get(row, 3),
                out + r * get(row, 9) + panel * 16 * pl_item(), get(row, 9), STORE_ACT, get(c, ZEROS), get(c, ZEROS),
            )  # fmt: skip
        panel += panels
