"""Mixtures of experts in a recorded pass: choosing, sorting by expert, products expert by expert. Part of the
interpreter's program.

Written like program.py. A token's choices are (slot, weight) pairs; a slot holds one expert's weights. Rows of x are
copied together by slot, so that products are those of products.py on each slot's rows; a token's sum takes its
experts in the order of its choice. Choices of slots that other ranks hold have no row here and add nothing.
"""

from __future__ import annotations

from typing import Any

from planaria.kernels.cpu import fields, layout, native
from planaria.kernels.cpu.native import TARGET, atomic_add, get, get32, put, put32
from planaria.kernels.cpu.products import block, take_rows
from planaria.kernels.cpu.threads import barrier, bring, grab, rows_from, scratch

CLOSED = -2147483648  # of an expert that can't be chosen (any more); below every number
UNITS_EACH = 8  # pieces of work that each thread should find


def ordered(bits: int) -> int:
    """Integers in the order of the floats whose bits these are."""
    if bits < 0:
        return bits ^ 0x7FFFFFFF
    return bits


def close_groups(row: fields.RouteOp, choice: int, temp: int) -> None:
    """Close the experts of all groups but the best; of two alike the first is better."""
    experts, groups = row.experts, row.groups
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
    if row.sum2:
        native.sum(worth, worth, second, padded)
    for g in range(groups):
        better = 0
        for h in range(groups):
            mine, theirs = ordered(get32(worth, g)), ordered(get32(worth, h))
            if theirs > mine or (theirs == mine and h < g):
                better += 1
        put32(second, g, better)
    for g in range(groups):
        if get32(second, g) >= row.top_groups:
            for e in range(g * members, (g + 1) * members):
                put32(choice, e, CLOSED)


def op_route(c: int, row: fields.RouteOp, tid: int) -> None:
    k, experts, load = row.k, row.experts, row.load
    padded = (experts + 15) >> 4 << 4
    scores = scratch(c, tid) + layout.BIG
    choice = scores + padded * 4
    for t in range(rows_from(c, layout.ROWS_TOKENS, tid), rows_from(c, layout.ROWS_TOKENS, tid + 1)):
        logits = row.logits + t * row.ldl
        bring(logits, row.ldl)
        native.scores(logits, scores, experts, padded, row.scoring)
        if row.correction:
            native.sum(choice, scores, row.correction, padded)
        else:
            native.copy(choice, scores, padded * 4)
        if row.groups > 1:
            close_groups(row, choice, choice + padded * 4)
        for e in range(experts):
            value = get32(choice, e)
            put32(choice, e, value if value == CLOSED else ordered(value))
        position = get32(row.positions, t)
        for j in range(k):
            best, most = 0, CLOSED - 1
            for e in range(experts):
                if get32(choice, e) > most:
                    best, most = e, get32(choice, e)
            put32(choice, best, CLOSED)
            place = row.table + best * row.ld_table * 4
            put32(row.slots, t * k + j, get32(place, 1 + position % get32(place, 0)))
            put32(row.weights, t * k + j, get32(scores, best))
            if load:
                atomic_add(load, best, 1)
        native.weigh(row.weights + t * k * 4, k, row.renormalize, row.scaling)


def op_sort(c: int, row: fields.SortOp, tid: int) -> None:
    n, k = get(get(c, layout.COUNTS), row.rows), row.k
    starts, places, held = row.starts, row.places, row.held
    if tid == 0:
        following = starts + (held + 1) * 8
        for s in range(held + 1):
            put(starts, s, 0)
        for i in range(n * k):
            s = get32(row.slots, i) - row.first
            if 0 <= s < held:
                put(starts, s + 1, get(starts, s + 1) + 1)
        for s in range(held):
            put(following, s, get(starts, s))
            put(starts, s + 1, get(starts, s) + get(starts, s + 1))
        for i in range(n * k):
            s = get32(row.slots, i) - row.first
            if 0 <= s < held:
                put32(places, i, get(following, s))
                put(following, s, get(following, s) + 1)
            else:
                put32(places, i, -1)
    barrier(c)
    size = row.ldx
    for t in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        for j in range(k):
            place = get32(places, t * k + j)
            if place >= 0:
                native.copy(row.out + place * size, row.x + t * size, size)


def blocks_of(rows: int) -> int:
    """In how many blocks of rows a slot's are done, even ones: a short last one would read all weights for little."""
    return (rows + layout.ROW_BLOCK - 1) // layout.ROW_BLOCK


def op_grouped(c: int, row: fields.GroupedOp, tid: int, ticket: int) -> None:
    held, starts, threads = row.held, row.starts, get(c, layout.THREADS)
    total = get(starts, held)
    if total == 0:
        return
    mine = scratch(c, tid)
    panels = row.half
    if panels == 0:
        panels = row.panels
    most, hit = layout.FUSED_PANELS, 0
    for s in range(held):
        if get(starts, s + 1) > get(starts, s):
            hit += 1
    if panels * hit < UNITS_EACH * threads * most:
        most = TARGET.tile_panels
    groups = (panels + most - 1) // most
    units = 0
    for s in range(held):
        units += blocks_of(get(starts, s + 1) - get(starts, s)) * groups
    line: Any  # this operation as one of a single slot; ready: the first of the rows it has at hand
    line, ready = mine + layout.STATE, -1
    native.copy(line, row, fields.ROW_WORDS * 8)
    put(line, fields.LinearOp.attend, 0)
    while True:
        taken = grab(ticket, units, threads, 1)
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
            put(line, fields.LinearOp.w, get(row.table, s))
            if row.own_bias:
                put(line, fields.LinearOp.bias, get(row.table, s) + row.own_bias)
            put(line, fields.LinearOp.x, row.x + first * row.ldx)
            put(line, fields.LinearOp.out, row.out + first * row.ldo)
            begin, stop = rows * part // parts, rows * (part + 1) // parts
            if first + begin != ready:
                take_rows(line, mine, begin, stop)
                ready = first + begin
            block(c, line, mine, begin, stop, panel, min(panels, panel + most))
            unit += 1


def op_combine(c: int, row: fields.CombineOp, tid: int) -> None:
    k = row.k
    for t in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        native.combine(
            row.y, row.ldy, row.places + t * k * 4, row.weights + t * k * 4, k,
            row.target + t * row.ldt, row.ldt >> 2, row.add,
        )  # fmt: skip


def op_gate(c: int, row: fields.GateOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        native.gate(row.x + r * row.ldx, row.logits + r * row.ldl, row.out + r * row.ldo, row.padded)


def op_squares(c: int, row: fields.SquaresOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        x, out = row.x + r * row.ldx, row.out + r * row.ldo
        bring(x, row.ldx)
        for i in range(8):
            put(out, i, 0)
        native.squares(x, row.first, out)
        native.squares(x + row.second, row.last, out + 4)


def op_rescale(c: int, row: fields.RescaleOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        x, sums = row.x + r * row.ldx, row.sums + r * row.lds
        native.rescale(x, sums, row.first_weight, row.first, row.whole_first, row.eps)
        native.rescale(x + row.second, sums + 4, row.last_weight, row.last, row.whole_last, row.eps)
