"""Attention whose tokens context ranks share: which of them are here, columns for the others, parts made one. Part of
the interpreter's program.

Written like program.py. A rank attends with the heads of its whole group to its own tokens (program.attend_tile), and
writes each head's part of the softmax, [dim] sums of values and the state of vector.softmax behind them, where all
ranks of the group can read it. Parts are merged by pairs, neighbours first, so the tree is that of their numbers.
"""

from __future__ import annotations

from planaria.kernels.cpu import fields, layout, native
from planaria.kernels.cpu.native import TARGET, get, get32, put32
from planaria.kernels.cpu.threads import bring, clear, rows_from, scratch


def held(stripes: int, length: int) -> int:
    """How many of a sequence's first `length` tokens are here; stripes: the address of three numbers of a
    topology.stripes.Stripes, or 0: all."""
    if stripes == 0:
        return length
    size, rank, interleave = get(stripes, 0), get(stripes, 1), get(stripes, 2)
    cycle = size * interleave
    return length // cycle * interleave + max(0, min(length % cycle - rank * interleave, interleave))


def op_gather(c: int, row: fields.GatherOp, tid: int) -> None:
    first = get(get(c, layout.COUNTS), layout.FIRST)
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        x, out = row.x + r * row.ldx, row.out + (first + r) * row.ldo
        if row.size1:
            native.copy(out + row.to1, x, row.size1)
        if row.size2:
            native.copy(out + row.to2, x + row.from2, row.size2)
            native.copy(out + row.to3, x + row.from3, row.size2)


def op_merge(c: int, row: fields.MergeOp, tid: int) -> None:
    dim, ranks = row.dim, row.ranks
    size = (dim + layout.PART_STATE) * 4
    parts, skip = scratch(c, tid) + layout.BIG, get(get(c, layout.COUNTS), layout.FIRST)
    for t in range(rows_from(c, layout.ROWS_TOKENS, tid), rows_from(c, layout.ROWS_TOKENS, tid + 1)):
        for h in range(row.heads):
            place = row.parts + (skip + t) * row.ldp + (row.first + h) * size
            for k in range(ranks):
                bring(place + k * row.part_bytes + size, size)
                native.copy(parts + k * size, place + k * row.part_bytes, size)
            apart = 1
            while apart < ranks:
                for k in range(0, ranks - apart, 2 * apart):
                    native.merge(parts + k * size, parts + (k + apart) * size, dim)
                apart *= 2
            if row.sinks:  # as the part of a rank more, of one key whose value is 0
                sink = parts + ranks * size
                clear(c, sink, size)
                put32(sink + dim * 4, 0, get32(row.sinks, h))
                put32(sink + dim * 4, 1, layout.ONE)
                native.merge(parts, sink, dim)
            native.divide(parts, parts + dim * 4, row.out + t * row.ldo + h * dim * TARGET.item, dim)
