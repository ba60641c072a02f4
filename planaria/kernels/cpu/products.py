"""Matrix products of a recorded pass: how rows and panels are dealt to threads and tiles. Part of the interpreter's
program.

Written like program.py. The rule: how work is cut depends on row counts only where the result does not (see micro.py).
"""

from __future__ import annotations

from planaria.kernels.cpu.layout import (
    ACC,
    BIG,
    CODES,
    COUNTS,
    CURSOR,
    FETCH,
    FEW_ROWS,
    FUSED_PANELS,
    PLAN,
    POINTERS,
    ROW_BLOCK,
    SHARED,
    STREAM_ROWS,
    SUMS,
    THREADS,
    WHOLE_ROWS,
    WIDE_ROWS,
)  # fmt: skip
from planaria.kernels.cpu.micro import DENSE, Q4_1, STORE_ACT, STREAM_AHEAD
from planaria.kernels.cpu.native import (
    get,
    get32,
    pl_block_sums,
    pl_inline_rows,
    pl_item,
    pl_packed,
    pl_row_tile,
    pl_settle,
    pl_silu,
    pl_tile_panels,
    pl_tile_rows,
    pl_wide,
    pl_widen,
    pl_widens,
    put,
)  # fmt: skip
from planaria.kernels.cpu.threads import barrier, bring, grab, scratch, share


def foresee(c: int, row: int, mine: int, most: int) -> int:
    """Choose up to `most` lines of keys and values of the next attention to come into the cache now: how many, their
    address in PLAN. Each thread walks over every so many-th sequence; attention sets it back to the start."""
    attend, s = get(row, 16), get(mine + CURSOR, 0)
    if attend == 0 or s >= get(get(c, COUNTS), 1):
        return 0
    at, line = get(mine + CURSOR, 1), get(mine + CURSOR, 2)
    table = get(attend, 17) + get32(get(attend, 16), s) * get(attend, 18)
    lines = get(attend, 6) >> 6  # of a block
    count = min(lines - line, most)
    put(mine + PLAN, 2, get(attend, 5) + get32(table, at) * get(attend, 6) + line * 64)
    line += count
    if line == lines:
        line = 0
        at += 1
        if at * get(attend, 8) >= get32(get(attend, 15), s):
            at = 0
            s += get(c, THREADS)
    put(mine + CURSOR, 0, s)
    put(mine + CURSOR, 1, at)
    put(mine + CURSOR, 2, line)
    return count


def foresee_list(c: int, row: int, mine: int, count: int, useless: int) -> None:
    """Addresses of 8 lines each for pl_wide to fetch; where there are no more, one of what is there already."""
    i = 0
    while i < count:
        lines = foresee(c, row, mine, 8 * (count - i)) if useless == 0 else 0
        if lines < 8:
            for k in range(i, count):
                put(mine + FETCH, k, mine + ACC)
            return
        for line in range(0, lines, 8):
            put(mine + FETCH, i, get(mine + PLAN, 2) + line * 64)
            i += 1


def widened(row: int, mine: int) -> int:
    """Where a thread has the rows of its block in float32, on targets that widen them: behind the tiles of a fused
    activation."""
    return mine + get(row, 14) + 2 * ROW_BLOCK * FUSED_PANELS * 16 * pl_item()


def take_rows(row: int, mine: int, first: int, last: int) -> None:
    """To be called before the blocks of rows [first, last)."""
    if pl_widens() and get(row, 1) == DENSE:
        count = 2 * get(row, 5)
        for r in range(first, last):
            pl_widen(get(row, 6) + r * get(row, 7), widened(row, mine) + (r - first) * count * 4, count)


def product(
    c: int, row: int, mine: int, sums: int, first: int, last: int, panel: int, end: int, out: int, ldo: int, mode: int,
    next_panel: int,
) -> None:  # fmt: skip
    """Rows [first, last) x panels [panel, end) into out, where row `first`, panel `panel` begin. next_panel: the one
    that will be wanted after these."""
    kind, stride, length = get(row, 1), get(row, 3), get(row, 5)
    ldx = get(row, 7)
    x = get(row, 6) + first * ldx
    if pl_widens() and kind == DENSE:
        ldx = 8 * length
        x = widened(row, mine)
    n = last - first
    wide = 16 * (pl_item() if mode == STORE_ACT else 4)
    lds = length * 4
    while panel < end:
        w, bias = get(row, 2) + panel * stride, get(row, 11) + panel * 64
        if kind != DENSE and n <= pl_inline_rows():
            pl_packed(n * 4 + kind, x, ldx, w, w + get(row, 4), length, out, ldo, mode, bias, sums, lds)
            panel += 1
            out += wide
            continue
        panels = pl_tile_panels() if n > STREAM_ROWS and end - panel >= pl_tile_panels() else 1
        if kind != DENSE:
            for r in range(0, n, WIDE_ROWS):
                rows = min(WIDE_ROWS, n - r)
                foresee_list(c, row, mine, rows // pl_tile_rows() * length, n > WHOLE_ROWS)
                pl_wide(
                    panels * 4 + kind, rows, x + r * ldx, ldx, w, w + get(row, 4), length, stride, mine + ACC,
                    sums + r * lds, lds, mine + CODES, mine + FETCH,
                )  # fmt: skip
                pl_settle(panels, rows, mine + ACC, out + r * ldo, ldo, mode, bias)
        else:
            for v in range(panels):
                put(mine + POINTERS, v, w + v * stride)
            tiles = (n + pl_tile_rows() - 1) // pl_tile_rows()
            for turn in range(tiles):
                r = n * turn // tiles
                rows = n * (turn + 1) // tiles - r
                # while these panels are used the next come into the cache: a part with each of the first tiles, or
                # with each one; a single tile of one panel asks for what it reads itself
                put(mine + PLAN, 3, 0)
                if pl_tile_panels() > 1:
                    put(mine + PLAN, 0, w + (panels + turn) * stride)
                    put(mine + PLAN, 1, length * 4 if turn < panels else 0)
                elif tiles > 1:
                    following = panel + 1 if panel + 1 < end else next_panel
                    put(mine + PLAN, 0, get(row, 2) + following * stride + stride * turn // tiles)
                    put(mine + PLAN, 1, (1 << 20) // tiles)
                else:
                    put(mine + PLAN, 0, w + STREAM_AHEAD)
                    put(mine + PLAN, 1, 1 << 20)
                if panels > 1 and n <= WHOLE_ROWS:
                    put(mine + PLAN, 3, 8 * foresee(c, row, mine, length >> 1))
                pl_row_tile(
                    rows * 4 + panels, x + r * ldx, ldx, mine + POINTERS, length, out + r * ldo, ldo, mode, bias,
                    mine + PLAN,
                )  # fmt: skip
        panel += panels
        out += panels * wide


def block(c: int, row: int, mine: int, sums: int, first: int, last: int, panel: int, end: int) -> None:
    """Rows [first, last) x panels [panel, end) of a linear operation."""
    half, out, ldo, mode = get(row, 13), get(row, 8), get(row, 9), get(row, 10)
    out += first * ldo
    wide = 16 * (pl_item() if mode == STORE_ACT else 4)
    my_sums = sums + first * get(row, 5) * 4
    if half == 0:
        product(c, row, mine, my_sums, first, last, panel, end, out + panel * wide, ldo, mode, end)
        return
    # 14: offset in scratch of two tiles [ROW_BLOCK][FUSED_PANELS * 16], gate and up; a few rows take all panels of
    # a tile from one place, then from the other, so that memory is read in long runs
    ld = FUSED_PANELS * wide
    gate = mine + get(row, 14)
    up = gate + ROW_BLOCK * ld
    most = FUSED_PANELS if last - first <= WHOLE_ROWS else pl_tile_panels()
    while panel < end:
        stop = min(end, panel + most)
        product(c, row, mine, my_sums, first, last, panel, stop, gate, ld, STORE_ACT, panel + half)
        product(c, row, mine, my_sums, first, last, panel + half, stop + half, up, ld, STORE_ACT, stop)
        count = (stop - panel) * 16
        for r in range(last - first):
            pl_silu(gate + r * ld, up + r * ld, out + r * ldo + panel * wide, count, count)
        panel = stop


def op_linear(c: int, row: int, tid: int, ticket: int) -> None:
    # 1 kind, 2 w, 3 panel bytes, 4 offset of scales, 5 steps or blocks, 6 x, 7 ldx, 8 out, 9 ldo, 10 mode, 11 bias,
    # 12 rows, 13 panels of one half of a fused silu (0: plain), 14 its scratch, 15 panels
    n, threads = get(get(c, COUNTS), get(row, 12)), get(c, THREADS)
    if n == 0:
        return
    mine = scratch(c, tid)
    if n <= WHOLE_ROWS:
        bring(get(row, 6), n * get(row, 7))
    sums = mine + SUMS
    if get(row, 1) == Q4_1:
        blocks = get(row, 5)
        if n <= FEW_ROWS and blocks * n * 4 <= BIG - SUMS:
            for r in range(n):
                pl_block_sums(get(row, 6) + r * get(row, 7), blocks, sums + r * blocks * 4)
        else:
            sums = get(c, SHARED)
            for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
                pl_block_sums(get(row, 6) + r * get(row, 7), blocks, sums + r * blocks * 4)
            barrier(c)
    panels = get(row, 13)
    if panels == 0:
        panels = get(row, 15)
    if n <= STREAM_ROWS:
        take_rows(row, mine, 0, n)
        while True:
            taken = grab(ticket, panels, threads)
            if taken == 0:
                return
            block(c, row, mine, sums, 0, n, taken >> 32, taken & 0xFFFFFFFF)
    most = pl_tile_panels()
    groups = (panels + most - 1) // most
    units, ready = groups * ((n + ROW_BLOCK - 1) // ROW_BLOCK), -1
    while True:
        taken = grab(ticket, units, threads)
        if taken == 0:
            return
        for u in range(taken >> 32, taken & 0xFFFFFFFF):
            first, group = (u // groups) * ROW_BLOCK, (u % groups) * most
            if first != ready:
                take_rows(row, mine, first, min(n, first + ROW_BLOCK))
                ready = first
            block(c, row, mine, sums, first, min(n, first + ROW_BLOCK), group, min(panels, group + most))
