"""Matrix products of a recorded pass: how rows and panels are dealt to threads and tiles. Part of the interpreter's
program.

Written like program.py. The rule: how work is cut depends on row counts only where the result does not (see micro.py).
"""

from __future__ import annotations

from planaria.kernels.cpu import fields, layout, native, packed
from planaria.kernels.cpu.fields import AttendOp
from planaria.kernels.cpu.micro import STORE_ACT, STORE_F32, STREAM_AHEAD
from planaria.kernels.cpu.native import TARGET, get, get32, invoke, put
from planaria.kernels.cpu.striped import held
from planaria.kernels.cpu.threads import bring, grab, scratch


def tall(rows: int) -> int:
    """Rows of each tile, where these are equally high."""
    count = max(1, (rows + TARGET.tile_rows - 1) // TARGET.tile_rows)
    return (rows + count - 1) // count


def tiles(
    c: int, rows: int, x: int, ldx: int, steps: int, pointers: int, panels: int, most: int, out: int, ldo: int,
    mode: int, plan: int,
) -> None:  # fmt: skip
    """Rows x dense panels, whose addresses are at `pointers`, `most` of them at a time; nothing is added. plan: 0, or
    where rows are as `row_tile` takes them, its plan."""
    wide = 16 * (TARGET.item if mode == STORE_ACT else 4)
    panel, high = 0, tall(rows)
    native.configure(high)
    while panel < panels:
        some = most if panels - panel >= most else 1
        if TARGET.tiled:
            for begin in range(0, rows, high):
                r, bias = min(begin, rows - high), get(c, layout.ZEROS)
                if mode == STORE_F32:  # rows that are done twice are the same
                    bias = 0
                native.tile(
                    ((begin - r) * 32 + high) * 4 + some, x + r * ldx, ldx, pointers + 8 * panel, steps,
                    out + r * ldo + panel * wide, ldo, mode, bias, get(c, layout.ZEROS),
                )  # fmt: skip
            panel += some
            continue
        for r in range(0, rows, TARGET.tile_rows):
            select, at = min(TARGET.tile_rows, rows - r) * 4 + some, out + r * ldo + panel * wide
            if plan and TARGET.widens:
                native.row_tile(
                    select, x + r * ldx, ldx, pointers + 8 * panel, steps, at, ldo, mode, get(c, layout.ZEROS), plan
                )  # fmt: skip
                continue
            native.tile(
                select, x + r * ldx, ldx, pointers + 8 * panel, steps, at, ldo, mode, get(c, layout.ZEROS),
                get(c, layout.ZEROS),
            )  # fmt: skip
        panel += some


def foresee(c: int, row: fields.LinearOp, mine: int, most: int) -> int:
    """Choose up to `most` lines of keys and values of the next attention to come into the cache now: how many, their
    address in PLAN. Each thread walks over every so many-th sequence; attention sets it back to the start."""
    attend, s = row.attend, get(mine + layout.CURSOR, 0)
    if attend == 0 or s >= get(get(c, layout.COUNTS), layout.SEQUENCES):
        return 0
    at, line = get(mine + layout.CURSOR, 1), get(mine + layout.CURSOR, 2)
    table = get(attend, AttendOp.table) + get32(get(attend, AttendOp.seq_row), s) * get(attend, AttendOp.ld_table)
    lines = get(attend, AttendOp.block_bytes) >> 6  # of a block
    count = min(lines - line, most)
    put(
        mine + layout.PLAN, 2,
        get(attend, AttendOp.cache) + get32(table, at) * get(attend, AttendOp.block_bytes) + line * 64,
    )  # fmt: skip
    line += count
    if line == lines:
        line = 0
        at += 1
        length = get32(get(attend, AttendOp.seq_len), s)
        if at * get(attend, AttendOp.block_size) >= held(get(attend, AttendOp.stripes), length):
            at = 0
            s += get(c, layout.THREADS)
    put(mine + layout.CURSOR, 0, s)
    put(mine + layout.CURSOR, 1, at)
    put(mine + layout.CURSOR, 2, line)
    return count


def foresee_list(c: int, row: fields.LinearOp, mine: int, count: int) -> int:
    """Addresses of 8 lines each for `wide` to fetch; where there are no more, one of what is there already. Returns how
    far they are apart."""
    i = 0
    while i < count:
        lines = foresee(c, row, mine, 8 * (count - i))
        if lines < 8:
            break
        for line in range(0, lines, 8):
            put(mine + layout.FETCH, i, get(mine + layout.PLAN, 2) + line * 64)
            i += 1
    for k in range(i, count if i > 0 else 1):
        put(mine + layout.FETCH, k, mine + layout.ACC)
    return 8 if i > 0 else 0


def own_rows(row: fields.LinearOp, mine: int) -> int:
    """Where a thread has the rows of its block as its kernels take them: in float32 on targets that widen them, rounded
    for packed weights. Behind the tiles of a fused activation."""
    return mine + row.temp + 2 * layout.ROW_BLOCK * layout.FUSED_PANELS * 16 * TARGET.item


def take_rows(row: fields.LinearOp, mine: int, first: int, last: int) -> None:
    """To be called before the blocks of rows [first, last). Rounded, the first block of all of them comes first."""
    to, length = own_rows(row, mine), row.length
    for r in range(first, last):
        if row.kernels:
            size = get(row.kernels, packed.ROUNDED_BYTES)
            step, place = (last - first) * size, row.scales & 7  # of a superblock
            invoke(get(row.kernels, packed.ROUND), row.x + r * row.ldx, length, to + (r - first) * size, step, place)
        elif TARGET.widens:
            native.widen(row.x + r * row.ldx, to + (r - first) * length * 8, 2 * length)


def product(
    c: int, row: fields.LinearOp, mine: int, first: int, last: int, panel: int, end: int, out: int, ldo: int, mode: int,
    next_panel: int,
) -> None:  # fmt: skip
    """Rows [first, last) x panels [panel, end) into out, where row `first`, panel `panel` begin. next_panel: the one
    that will be wanted after these."""
    kernels, stride, length = row.kernels, row.stride, row.length
    ldx = row.ldx
    x = row.x + first * ldx
    if kernels:
        x = own_rows(row, mine)
    elif TARGET.widens:
        ldx = 8 * length
        x = own_rows(row, mine)
    n = last - first
    high = tall(n)
    if kernels == 0:
        native.configure(high)
    wide = 16 * (TARGET.item if mode == STORE_ACT else 4)
    while panel < end:
        w, bias = row.w + panel * stride, row.bias + panel * 64
        if kernels and n <= get(kernels, packed.FEW):
            invoke(get(kernels, packed.PACKED), n, x, w, w + row.scales, length, out, ldo, mode, bias)
            panel += 1
            out += wide
            continue
        panels = TARGET.tile_panels if n > layout.STREAM_ROWS and end - panel >= TARGET.tile_panels else 1
        if kernels:
            each = foresee_list(c, row, mine, 0 if n > layout.WHOLE_ROWS else n // TARGET.tile_rows * length)
            invoke(
                get(kernels, packed.WIDE), panels, n, x, w, w + row.scales, length, stride, mine + layout.ACC,
                mine + layout.CODES, mine + layout.FETCH, each,
            )  # fmt: skip
            native.settle(panels, n, mine + layout.ACC, out, ldo, mode, bias)
        else:
            for v in range(panels):
                put(mine + layout.POINTERS, v, w + v * stride)
            tiles = (n + TARGET.tile_rows - 1) // TARGET.tile_rows
            for turn in range(tiles):
                r = n * turn // tiles
                rows, skip = n * (turn + 1) // tiles - r, 0
                if TARGET.tiled:
                    r = min(turn * high, n - high)
                    rows, skip = high, turn * high - r
                # while these panels are used the next come into the cache: a part with each of the first tiles, or
                # with each one; a single tile of one panel asks for what it reads itself
                put(mine + layout.PLAN, 3, 0)
                if TARGET.tile_panels > 1:
                    put(mine + layout.PLAN, 0, w + (panels + turn) * stride)
                    put(mine + layout.PLAN, 1, length * 4 if turn < panels else 0)
                elif tiles > 1:
                    following = panel + 1 if panel + 1 < end else next_panel
                    put(mine + layout.PLAN, 0, row.w + following * stride + stride * turn // tiles)
                    put(mine + layout.PLAN, 1, (1 << 20) // tiles)
                else:
                    put(mine + layout.PLAN, 0, w + STREAM_AHEAD)
                    put(mine + layout.PLAN, 1, 1 << 20)
                if panels > 1 and n <= layout.WHOLE_ROWS:
                    put(mine + layout.PLAN, 3, 8 * foresee(c, row, mine, length >> 1))
                native.row_tile(
                    (skip * 32 + rows) * 4 + panels, x + r * ldx, ldx, mine + layout.POINTERS, length,
                    out + r * ldo, ldo, mode, bias, mine + layout.PLAN,
                )  # fmt: skip
        panel += panels
        out += panels * wide


def block(c: int, row: fields.LinearOp, mine: int, first: int, last: int, panel: int, end: int) -> None:
    """Rows [first, last) x panels [panel, end) of a linear operation."""
    half, out, ldo, mode = row.half, row.out, row.ldo, row.mode
    out += first * ldo + row.first
    wide = 16 * (TARGET.item if mode == STORE_ACT else 4)
    if half == 0:
        product(c, row, mine, first, last, panel, end, out + panel * wide, ldo, mode, end)
        return
    # in scratch two tiles [ROW_BLOCK][FUSED_PANELS * 16], gate and up; a few rows take all panels of
    # a tile from one place, then from the other, so that memory is read in long runs
    ld = layout.FUSED_PANELS * wide
    gate = mine + row.temp
    up = gate + layout.ROW_BLOCK * ld
    most = layout.FUSED_PANELS if last - first <= layout.WHOLE_ROWS else TARGET.tile_panels
    while panel < end:
        stop = min(end, panel + most)
        product(c, row, mine, first, last, panel, stop, gate, ld, STORE_ACT, panel + half)
        product(c, row, mine, first, last, panel + half, stop + half, up, ld, STORE_ACT, stop)
        count = (stop - panel) * 16
        for r in range(last - first):
            native.gated(row.act, gate + r * ld, up + r * ld, out + r * ldo + panel * wide, count, count)
        panel = stop


def op_linear(c: int, row: fields.LinearOp, tid: int, ticket: int) -> None:
    n, threads = get(get(c, layout.COUNTS), row.rows), get(c, layout.THREADS)
    if n == 0:
        return
    mine = scratch(c, tid)
    if n <= layout.WHOLE_ROWS:
        bring(row.x, n * row.ldx)
    panels = row.half
    if panels == 0:
        panels = row.panels
    most = TARGET.tile_panels
    if n <= layout.ROW_BLOCK:
        take_rows(row, mine, 0, n)
        while True:
            taken = grab(ticket, panels, threads, 1 if n <= layout.STREAM_ROWS else most)
            if taken == 0:
                return
            block(c, row, mine, 0, n, taken >> 32, taken & 0xFFFFFFFF)
    groups = (panels + most - 1) // most
    units, ready = groups * ((n + layout.ROW_BLOCK - 1) // layout.ROW_BLOCK), -1
    while True:
        taken = grab(ticket, units, threads, 1)
        if taken == 0:
            return
        for u in range(taken >> 32, taken & 0xFFFFFFFF):
            first, group = (u // groups) * layout.ROW_BLOCK, (u % groups) * most
            if first != ready:
                take_rows(row, mine, first, min(n, first + layout.ROW_BLOCK))
                ready = first
            block(c, row, mine, first, min(n, first + layout.ROW_BLOCK), group, min(panels, group + most))
