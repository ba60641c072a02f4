"""Mixtures of experts in a recorded pass: choosing, sorting by expert, products expert by expert. Part of the
interpreter's program.

Written like program.py. A token's choices are (slot, weight) pairs; a slot holds one expert's weights. Rows of x are
copied together by slot, so that products are those of products.py on each slot's rows; a token's sum takes its
experts in the order of its choice. Choices of slots that other ranks hold have no row here and add nothing.
"""

from __future__ import annotations

from planaria.kernels.cpu.layout import (
    BIG,
    COUNTS,
    FUSED_PANELS,
    ROW_BLOCK,
    ROW_WORDS,
    SHARED,
    STATE,
    THREADS,
)  # fmt: skip
from planaria.kernels.cpu.micro import Q4_1
from planaria.kernels.cpu.native import (
    atomic_add,
    get,
    get32,
    pl_block_sums,
    pl_combine,
    pl_copy,
    pl_gate,
    pl_rescale,
    pl_scores,
    pl_squares,
    pl_sum,
    pl_tile_panels,
    pl_weigh,
    put,
    put32,
)  # fmt: skip
from planaria.kernels.cpu.products import block, take_rows
from planaria.kernels.cpu.threads import barrier, bring, grab, scratch, share

CLOSED = -2147483648  # of an expert that can't be chosen (any more); below every number
UNITS_EACH = 8  # pieces of work that each thread should find


def ordered(bits: int) -> int:
    """Integers in the order of the floats whose bits these are."""
    if bits < 0:
        return bits ^ 0x7FFFFFFF
    return bits


def close_groups(row: int, choice: int, temp: int) -> None:
    """Close the experts of all groups but the best; of two alike the first is better."""
    experts, groups = get(row, 6), get(row, 9)
    members, padded = experts // groups, (groups + 15) >> 4 << 4
    worth, second = temp, temp + padded * 4
    for g in range(groups):
        best, other = g * members, -1
        for e in range(g * members + 1, (g + 1) * members):
            value = ordered(get32(choice, e))
            if value > ordered(get32(choice, best)):
                other = best
                best = e
            elif other < 0 or value > ordered(get32(choice, other)):
                other = e
        put32(worth, g, get32(choice, best))
        put32(second, g, get32(choice, max(other, 0)))
    if get(row, 11):
        pl_sum(worth, worth, second, padded)
    for g in range(groups):
        better = 0
        for h in range(groups):
            mine, theirs = ordered(get32(worth, g)), ordered(get32(worth, h))
            if theirs > mine or (theirs == mine and h < g):
                better += 1
        put32(second, g, better)
    for g in range(groups):
        if get32(second, g) >= get(row, 10):
            for e in range(g * members, (g + 1) * members):
                put32(choice, e, CLOSED)


def op_route(c: int, row: int, tid: int) -> None:
    # 1 logits, 2 ldl, 3 slots, 4 weights, 5 k, 6 experts, 7 kind of scores, 8 correction (0: none), 9 groups,
    # 10 how many of them, 11 their worth is the sum of their best two, 12 renormalise, 13 scaling, 14 slots of each
    # expert, 15 their row's words (how many there are, then their numbers), 16 positions, 17 load (0: not counted)
    n, threads = get(get(c, COUNTS), 0), get(c, THREADS)
    k, experts, load = get(row, 5), get(row, 6), get(row, 17)
    padded = (experts + 15) >> 4 << 4
    scores = scratch(c, tid) + BIG
    choice = scores + padded * 4
    for t in range(share(n, tid, threads), share(n, tid + 1, threads)):
        logits = get(row, 1) + t * get(row, 2)
        bring(logits, get(row, 2))
        pl_scores(logits, scores, experts, padded, get(row, 7))
        if get(row, 8):
            pl_sum(choice, scores, get(row, 8), padded)
        else:
            pl_copy(choice, scores, padded * 4)
        if get(row, 9) > 1:
            close_groups(row, choice, choice + padded * 4)
        for e in range(experts):
            value = get32(choice, e)
            put32(choice, e, value if value == CLOSED else ordered(value))
        position = get32(get(row, 16), t)
        for j in range(k):
            best, most = 0, CLOSED - 1
            for e in range(experts):
                if get32(choice, e) > most:
                    best, most = e, get32(choice, e)
            put32(choice, best, CLOSED)
            place = get(row, 14) + best * get(row, 15) * 4
            put32(get(row, 3), t * k + j, get32(place, 1 + position % get32(place, 0)))
            put32(get(row, 4), t * k + j, get32(scores, best))
            if load:
                atomic_add(load, best, 1)
        pl_weigh(get(row, 4) + t * k * 4, k, get(row, 12), get(row, 13))


def op_sort(c: int, row: int, tid: int) -> None:
    # 1 slots chosen, 2 k, 3 rows, 4 first slot held, 5 how many, 6 out: first row of each, 7 out: row of each choice,
    # 8 x, 9 ldx, 10 out: rows of x by slot
    n, threads, k = get(get(c, COUNTS), get(row, 3)), get(c, THREADS), get(row, 2)
    starts, places, held = get(row, 6), get(row, 7), get(row, 5)
    if tid == 0:
        following = starts + (held + 1) * 8
        for s in range(held + 1):
            put(starts, s, 0)
        for i in range(n * k):
            s = get32(get(row, 1), i) - get(row, 4)
            if 0 <= s < held:
                put(starts, s + 1, get(starts, s + 1) + 1)
        for s in range(held):
            put(following, s, get(starts, s))
            put(starts, s + 1, get(starts, s) + get(starts, s + 1))
        for i in range(n * k):
            s = get32(get(row, 1), i) - get(row, 4)
            if 0 <= s < held:
                put32(places, i, get(following, s))
                put(following, s, get(following, s) + 1)
            else:
                put32(places, i, -1)
    barrier(c)
    size = get(row, 9)
    for t in range(share(n, tid, threads), share(n, tid + 1, threads)):
        for j in range(k):
            place = get32(places, t * k + j)
            if place >= 0:
                pl_copy(get(row, 10) + place * size, get(row, 8) + t * size, size)


def blocks_of(rows: int) -> int:
    """In how many blocks of rows a slot's are done, even ones: a short last one would read all weights for little."""
    return (rows + ROW_BLOCK - 1) // ROW_BLOCK


def op_grouped(c: int, row: int, tid: int, ticket: int) -> None:
    # as op_linear, but 2 addresses of the slots' weights, 12 how many slots, 16 first row of each slot
    held, starts, threads = get(row, 12), get(row, 16), get(c, THREADS)
    total = get(starts, held)
    if total == 0:
        return
    mine, sums, length = scratch(c, tid), get(c, SHARED), get(row, 5)
    if get(row, 1) == Q4_1:
        for r in range(share(total, tid, threads), share(total, tid + 1, threads)):
            pl_block_sums(get(row, 6) + r * get(row, 7), length, sums + r * length * 4)
        barrier(c)
    panels = get(row, 13)
    if panels == 0:
        panels = get(row, 15)
    most, hit = FUSED_PANELS, 0
    for s in range(held):
        if get(starts, s + 1) > get(starts, s):
            hit += 1
    if panels * hit < UNITS_EACH * threads * most:
        most = pl_tile_panels()
    groups = (panels + most - 1) // most
    units = 0
    for s in range(held):
        units += blocks_of(get(starts, s + 1) - get(starts, s)) * groups
    line, ready = mine + STATE, -1  # this operation as one of a single slot; the first of the rows it has at hand
    pl_copy(line, row, ROW_WORDS * 8)
    put(line, 16, 0)
    while True:
        taken = grab(ticket, units, threads)
        if taken == 0:
            return
        unit, end, s, passed = taken >> 32, taken & 0xFFFFFFFF, 0, 0
        while unit < end:
            first = get(starts, s)
            rows = get(starts, s + 1) - first
            parts = blocks_of(rows)
            if unit >= passed + parts * groups:
                passed += parts * groups
                s += 1
                continue
            part, panel = (unit - passed) // groups, (unit - passed) % groups * most
            put(line, 2, get(get(row, 2), s))
            put(line, 6, get(row, 6) + first * get(row, 7))
            put(line, 8, get(row, 8) + first * get(row, 9))
            begin, stop = rows * part // parts, rows * (part + 1) // parts
            if first + begin != ready:
                take_rows(line, mine, begin, stop)
                ready = first + begin
            block(c, line, mine, sums + first * length * 4, begin, stop, panel, min(panels, panel + most))
            unit += 1


def op_combine(c: int, row: int, tid: int) -> None:
    # 1 y, 2 ldy, 3 row of each choice, 4 weights, 5 k, 6 target, 7 ldt, 8 rows, 9 add to the target
    n, threads, k = get(get(c, COUNTS), get(row, 8)), get(c, THREADS), get(row, 5)
    for t in range(share(n, tid, threads), share(n, tid + 1, threads)):
        pl_combine(
            get(row, 1), get(row, 2), get(row, 3) + t * k * 4, get(row, 4) + t * k * 4, k,
            get(row, 6) + t * get(row, 7), get(row, 7) >> 2, get(row, 9),
        )  # fmt: skip


def op_gate(c: int, row: int, tid: int) -> None:
    # 1 x, 2 ldx, 3 logits, 4 ldl, 5 out, 6 ldo, 7 padded, 8 rows
    n, threads = get(get(c, COUNTS), get(row, 8)), get(c, THREADS)
    for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
        pl_gate(
            get(row, 1) + r * get(row, 2), get(row, 3) + r * get(row, 4), get(row, 5) + r * get(row, 6), get(row, 7)
        )


def op_squares(c: int, row: int, tid: int) -> None:
    # 1 x, 2 ldx, 3 out, 4 ldo, 5 columns of the first part, 6 bytes to the second, 7 its columns, 8 rows
    n, threads = get(get(c, COUNTS), get(row, 8)), get(c, THREADS)
    for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
        x, out = get(row, 1) + r * get(row, 2), get(row, 3) + r * get(row, 4)
        bring(x, get(row, 2))
        for i in range(8):
            put(out, i, 0)
        pl_squares(x, get(row, 5), out)
        pl_squares(x + get(row, 6), get(row, 7), out + 4)


def op_rescale(c: int, row: int, tid: int) -> None:
    # 1 x, 2 ldx, 3 sums, 4 lds, 5 columns of the first part, 6 bytes to the second, 7 its columns, 8 rows,
    # 9 and 10 columns that the sums are over, 11 and 12 weights, 13 eps
    n, threads = get(get(c, COUNTS), get(row, 8)), get(c, THREADS)
    for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
        x, sums = get(row, 1) + r * get(row, 2), get(row, 3) + r * get(row, 4)
        pl_rescale(x, sums, get(row, 11), get(row, 5), get(row, 9), get(row, 13))
        pl_rescale(x + get(row, 6), sums + 4, get(row, 12), get(row, 7), get(row, 10), get(row, 13))
