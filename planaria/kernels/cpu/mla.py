"""Latent attention's own operations: into the cache, and head by head into the latent's space and back.

Written like program.py, and part of the interpreter's program. Attention itself is program.attend_tile.
"""

from __future__ import annotations

from planaria.kernels.cpu import fields, layout, native
from planaria.kernels.cpu.micro import STORE_ACT
from planaria.kernels.cpu.native import TARGET, atomic_add, get, get32, put
from planaria.kernels.cpu.products import tiles
from planaria.kernels.cpu.threads import clear, rows_from, scratch, whole_chunks


def op_mla_store(c: int, row: fields.MlaStoreOp, tid: int) -> None:
    n, slots = get(get(c, layout.COUNTS), row.rows), row.slots
    rank, rotated, size = row.rank, row.rotated, row.block_size
    width = (rank + rotated) * TARGET.item
    key = scratch(c, tid) + layout.BIG
    temp = key + width
    last = whole_chunks(slots, rows_from(c, row.rows, tid + 1), n)
    for t in range(whole_chunks(slots, rows_from(c, row.rows, tid), n), last):
        slot = get(slots, t)
        if slot < 0:
            continue
        x = row.x + t * row.ldx
        turn = get32(row.positions, t) * row.half * 4
        native.rotate(x, key, temp, 0, 0, 0, rank, row.norm, row.eps)
        x, tail = x + rank * TARGET.item, key + rank * TARGET.item
        native.rotate(x, tail, temp, row.cos + turn, row.sin + turn, row.half, rotated, 0, 0)
        offset = slot % size
        place = row.cache + (slot // size) * row.block_bytes + (offset >> 4) * 16 * width
        if offset & 15 == 0:  # keys are values here: what an earlier owner left must not meet a weight of 0 as a NaN
            clear(c, place, 16 * width)
        native.store_key(key, place + (offset & 15) * 4, width >> 2)


def op_by_head(c: int, row: fields.ByHeadOp, tid: int, ticket: int) -> None:
    n, heads, mine = get(get(c, layout.COUNTS), layout.ROWS_TOKENS), row.heads, scratch(c, tid)
    units = heads * ((n + layout.ROW_BLOCK - 1) // layout.ROW_BLOCK)
    unit = atomic_add(ticket, 0, 1)
    while unit < units:
        h, first = unit % heads, unit // heads * layout.ROW_BLOCK
        count = min(n - first, layout.ROW_BLOCK)
        x = row.x + first * row.ldx + h * row.x_head
        out = row.out + first * row.ldo + h * row.out_head
        for v in range(row.panels):
            put(mine + layout.POINTERS, v, row.w + (h * row.panels + v) * row.stride)
        most = TARGET.tile_panels if count > layout.STREAM_ROWS else 1
        tiles(c, count, x, row.ldx, row.length, mine + layout.POINTERS, row.panels, most, out, row.ldo, STORE_ACT, 0)
        if row.rotated:
            for t in range(count):
                turn = get32(row.positions, first + t) * row.half * 4
                native.rotate(
                    x + t * row.ldx + row.x_tail, out + t * row.ldo + row.out_tail, mine + layout.BIG,
                    row.cos + turn, row.sin + turn, row.half, row.rotated, 0, 0,
                )  # fmt: skip
        unit = atomic_add(ticket, 0, 1)
