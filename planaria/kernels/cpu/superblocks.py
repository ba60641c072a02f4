"""Products of K-quants with rows in bytes on AVX2: what packed.py has for other kinds and CPUs.

A superblock's integer scales are multiplied in integers, by the instruction that widens 16-bit sums; its float16
numbers come once, after its last block. One output is, superblock after superblock, the sums of blocks times their
rows' scales, added up and times the superblock's scale; then the minima's. So additions are in the same order whatever
the tile. Sums of a row's blocks, which minima are multiplied by, are rounded to int16 by the largest of a superblock,
so that two minima are multiplied at once and added up exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planaria.kernels.blocks import BlockKind
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.emit import F32, I32, Function, literal
from planaria.kernels.cpu.micro import H32, finish
from planaria.kernels.cpu.rounded import InBytes, half_of, joined
from planaria.kernels.cpu.target import Target
from planaria.kernels.cpu.unpack import (
    AHEAD,
    PACKED_ARGS,
    WIDE_ARGS,
    Unpack,
    as_float,
    half,
    in_tiles,
    rows_at,
    splat,
    splat_word,
)
from planaria.kernels.cpu.vector import ROUNDING, ROUNDING_BITS

BLOCKS = 8  # of a superblock
MOST = 6  # rows of a tile
ZERO = "zeroinitializer"
FIRST, NEXT = "pl_first", "pl_next"  # of a superblock's blocks
# What `wide` leaves behind a block's codes, in bytes: its scales as pairs of int16, and minima of the superblock as
# pairs of int16 of each column
SCALES, MINIMA = 512, 640
PARTIAL = 64 * layout.ROW_BLOCK  # behind totals of ROW_BLOCK rows: what a superblock has added up
# Numbers of a row's block: behind its scale its sum, or sums, as a pair of int16 (of one sum, then its neighbour's),
# and the float32 that those of its superblock are multiplied by
SUM, SUM_SCALE, MOST_SUM = 4, 8, 32767


def splat_float(f: Function, pointer: str) -> str:
    return f.splat("float", f.load("float", pointer, 4))


def pairs(f: Function, small: str) -> str:
    """Integers i32 [16] of a byte as int16 [16][2], twice each."""
    picked = ", ".join(f"i32 {i & ~1}" for i in range(32))
    wide = f.op(f"bitcast {I32} {small} to {H32}")
    return f.op(f"shufflevector {H32} {wide}, {H32} poison, <32 x i32> <{picked}>")


def multiplied(f: Function, a: str, b: str) -> str:
    """Sums i32 [16] of the products of pairs, of int16 [16][2]."""
    sides = [[half_of(f, "i16", v, side, 32) for side in range(2)] for v in (a, b)]
    call = "call <8 x i32> @llvm.x86.avx2.pmadd.wd"
    return joined(f, "i32", [f.op(f"{call}(<16 x i16> {x}, <16 x i16> {y})") for x, y in zip(*sides, strict=True)], 8)


def kept(f: Function, run: str) -> str:
    """A run's sums so far, in registers, and computed before what follows: LLVM would add up in another order, and put
    sums into memory."""
    return joined(f, "i16", [f.opaque("<16 x i16>", half_of(f, "i16", run, side, 32)) for side in range(2)], 16)


def widened(f: Function, before: str, run: str, scales: str) -> str:
    """Sums of a block i32 [16], with those of a run times its scales."""
    both = multiplied(f, run, scales)
    return f.op(f"add {I32} {before}, {both}") if before else both


class Superblocks(Unpack):
    """Of one packed panel."""

    def __init__(self, target: Target, kind: BlockKind) -> None:
        super().__init__(target, kind)
        self.form = InBytes(target, kind)
        self.has_minima = kind.both > 1
        self.alike = 2 // self.groups  # blocks whose minima are multiplied at once

    def how_many(self, f: Function) -> str:
        """Superblocks of the panel, also in part."""
        place = f.op("and i64 %scales, 7")
        return f.op(f"lshr i64 {f.add(f.add(place, '%blocks'), BLOCKS - 1)}, 3")

    def within(self, f: Function, which: str) -> tuple[str, str]:
        """A superblock's blocks of the panel, the first and the end."""
        begin = f.op(f"sub i64 {f.shl(which, 3)}, {f.op('and i64 %scales, 7')}")
        end = f.op(f"call i64 @llvm.smin.i64(i64 {f.add(begin, BLOCKS)}, i64 %blocks)")
        return f.op(f"call i64 @llvm.smax.i64(i64 {begin}, i64 0)"), end

    def own(self, f: Function, block: str) -> str:
        base = f.op("and i64 %scales, -8")
        return f.ptr(f.op(f"add i64 {base}, {f.mul(block, self.scale_bytes)}"))

    def shared(self, f: Function, which: str) -> list[str]:
        """A superblock's scale, and what its minima are multiplied by."""
        behind = f.add(f.op("and i64 %scales, -8"), f.mul("%blocks", self.scale_bytes))
        at = f.ptr(f.add(behind, f.mul(which, self.shared_bytes)))
        found = [half(f, at, i) for i in range(self.kind.both)]
        return found[:1] + [f.op(f"fneg {F32} {minimum}") for minimum in found[1:]]

    def scale(self, f: Function, own: str, group: int) -> str:
        return pairs(f, self.small(f, own, group))

    def minima(self, f: Function, own: str) -> str:
        """Of a block, i32 [16]: one, or two int16."""
        found = self.small(f, own, self.groups)
        if self.groups == 1:
            return found
        other = f.op(f"shl {I32} {self.small(f, own, self.groups + 1)}, {f.const_i32(16)}")
        return f.op(f"or {I32} {found}, {other}")

    def with_minima(self, f: Function, before: str, minima: str, numbers: str) -> str:
        """before plus minima times the sums of a row's block, i32 [16]."""
        words = [f.op(f"bitcast {I32} {v} to {H32}") for v in (minima, splat_word(f, f.at(numbers, SUM)))]
        found = multiplied(f, *words)
        return f.op(f"add {I32} {before}, {found}") if before else found

    def sums(
        self, f: Function, x_at: list[str], codes: Iterator[str], scale: Callable[[int], str],
        partial: Callable[[int], str],
    ) -> Iterator[str]:  # fmt: skip
        """partial(row) plus a block's sums times the row's scale, row after row. scale(group): pairs. All are asked for
        late, so that few values are alive at a time."""
        form, found = self.form, [""] * len(x_at)
        numbers = [f.at(x, form.numbers) for x in x_at]
        for group, runs in enumerate(form.groups):
            for first, last in runs:
                run = [form.begin(f, "", place, group) for place in numbers]
                for step in range(first, last):
                    code = next(codes)
                    for r, x in enumerate(x_at):
                        run[r] = kept(f, form.add(f, run[r], code, splat_word(f, f.at(x, 4 * step))))
                factors, ends = scale(group), last == form.steps
                for r, (before, one) in enumerate(zip(found, run, strict=True)):
                    found[r] = widened(f, before, one, factors)
                    if ends:
                        yield f.fma(as_float(f, found[r]), splat_float(f, numbers[r]), partial(r))

    def total(self, f: Function, before: str, partial: str, minima: str, shared: list[str], numbers: str) -> str:
        """before plus a superblock's products, and its minima's (i32, or ""). numbers: of a row's block in it."""
        before = f.fma(partial, shared[0], before)
        if not minima:
            return before
        factor = f.vec("fmul", shared[1], splat_float(f, f.at(numbers, SUM_SCALE)))
        return f.fma(as_float(f, minima), factor, before)


def round_sums(f: Function, target: Target, kind: BlockKind) -> None:
    """The end of rounded.round_rows: what minima are multiplied by (see SUM). %place: of the row in a superblock."""
    form, out = InBytes(target, kind), f.ptr("%out")
    groups, lanes = form.count, BLOCKS * form.count
    words, floats, shorts = (f"<{n} x {t}>" for n, t in ((lanes, "i32"), (lanes, "float"), (2 * lanes, "i16")))

    def superblock(which: str) -> None:
        begin = f.op(f"sub i64 {f.shl(which, 3)}, %place")
        end = f.op(f"call i64 @llvm.smin.i64(i64 {f.add(begin, BLOCKS)}, i64 %blocks)")
        begin = f.op(f"call i64 @llvm.smax.i64(i64 {begin}, i64 0)")
        last, at, sums = f.add(end, -1), list[str](), "poison"
        for k in range(BLOCKS):  # behind the last that again: nothing is multiplied by its neighbour then
            number = f.op(f"call i64 @llvm.smin.i64(i64 {f.add(begin, k)}, i64 {last})")
            at.append(f.at(out, f.add(f.mul(number, "%step"), form.numbers)))
            for g in range(groups):
                one = f.load("float", f.at(at[-1], SUM + 4 * g), 4)
                sums = f.op(f"insertelement {floats} {sums}, float {one}, i64 {k * groups + g}")
        bits = f.op(f"and {words} {f.op(f'bitcast {floats} {sums} to {words}')}, {splat(words, 0x7FFFFFFF)}")
        most = f.op(f"bitcast i32 {f.op(f'call i32 @llvm.vector.reduce.smax.v{lanes}i32({words} {bits})')} to float")
        none = f.op(f"fcmp oeq float {most}, {literal(0.0)}")
        inverse = f.op(f"fdiv float {literal(MOST_SUM)}, {most}")
        factor = f.op(f"select i1 {none}, float {literal(0.0)}, float {inverse}")
        wide = (f.splat("float", value, lanes) for value in (factor, literal(ROUNDING)))
        args = ", ".join(f"{floats} {value}" for value in (sums, *wide))
        moved = f.op(f"call {floats} @llvm.fma.v{lanes}f32({args})")
        whole = f.op(f"sub {words} {f.op(f'bitcast {floats} {moved} to {words}')}, {splat(words, ROUNDING_BITS)}")
        low = f.op(f"bitcast {words} {whole} to {shorts}")
        picked = ", ".join(f"i32 {2 * lane}" for i in range(lanes) for lane in (i, i ^ 1))
        pairs = f.op(f"shufflevector {shorts} {low}, {shorts} poison, <{2 * lanes} x i32> <{picked}>")
        pairs = f.op(f"bitcast {shorts} {pairs} to {words}")
        scale = f.op(f"fmul float {most}, {literal(1 / MOST_SUM)}")
        for k, place in enumerate(at):
            f.store("i32", f.op(f"extractelement {words} {pairs}, i64 {k * groups}"), f.at(place, SUM), 4)
            f.store("float", scale, f.at(place, SUM_SCALE), 4)

    count = f.op(f"lshr i64 {f.add(f.add('%place', '%blocks'), BLOCKS - 1)}, 3")
    f.each(count, 1, superblock)


def packed(target: Target, kind: BlockKind, rows: int) -> str:
    """As packed.packed."""
    f = Function(f"pl_packed_{rows}", PACKED_ARGS)
    panel, w, first_x = Superblocks(target, kind), f.ptr("%w"), f.ptr("%x")
    form = panel.form

    def rows_of(i: str) -> list[str]:
        return rows_at(f, f.at(first_x, f.mul(i, rows * form.row_bytes)), form, rows)

    def superblock(which: str, acc: list[str]) -> list[str]:
        def block(i: str, partial: list[str]) -> list[str]:
            panel.prefetch(f, w, i, AHEAD)  # codes and scales of the panels that follow
            own, x_at = panel.own(f, i), rows_of(i)
            codes = panel.steps(f, f.at(w, f.mul(i, panel.block_bytes)))
            sums = list(panel.sums(f, x_at, codes, lambda group: panel.scale(f, own, group), lambda r: partial[r]))
            if not panel.has_minima:
                return sums
            minima, each = panel.minima(f, own), zip(x_at, partial[rows:], strict=True)
            return sums + [panel.with_minima(f, before, minima, f.at(x, form.numbers)) for x, before in each]

        begin, end = panel.within(f, which)
        carried = [(F32, ZERO)] * rows + [(I32, ZERO)] * (rows * panel.has_minima)
        found, shared = f.loop(begin, end, 1, carried, block), panel.shared(f, which)
        partial, minima = found[:rows], found[rows:] or [""] * rows
        each = zip(acc, partial, minima, rows_of(begin), strict=True)
        return [panel.total(f, a, p, m, shared, f.at(x, form.numbers)) for a, p, m, x in each]

    total = f.loop(0, panel.how_many(f), 1, [(F32, ZERO)] * rows, superblock)
    finish(f, target, [[t] for t in total], "%out", "%ldo", "%mode", "%bias")
    return f.text()


def part(target: Target, kind: BlockKind, rows: int, name: str) -> str:
    """partial[rows][16] = (FIRST) or += (NEXT) one block's products, of `codes` as `wide` leaves them."""
    f = Function(f"{name}_{rows}", ("x", "codes", "partial"))
    panel, codes = Superblocks(target, kind), f.ptr("%codes")
    x_at, partial = rows_at(f, f.ptr("%x"), panel.form, rows), f.ptr("%partial")
    steps = (f.load(panel.form.codes, f.at(codes, 64 * i), 64) for i in range(panel.form.steps))
    sums = panel.sums(
        f, x_at, steps, lambda i: f.load(H32, f.at(codes, SCALES + 64 * i), 64),
        lambda r: ZERO if name == FIRST else f.load(F32, f.at(partial, 64 * r), 64),
    )  # fmt: skip
    for r, sum in enumerate(sums):
        f.store(F32, sum, f.at(partial, 64 * r), 64)
    return f.end()


def tiles(target: Target, kind: BlockKind) -> list[str]:
    """What `wide` calls."""
    return [part(target, kind, rows, name) for name in (FIRST, NEXT) for rows in range(1, MOST + 1)]


def fold(f: Function, panel: Superblocks, x: str, block_bytes: str, blocks: str, which: str) -> None:
    """Totals += what is added up for a superblock of so many blocks, the first of them at x, and its minima."""
    form, codes, shared, minima, apart = panel.form, f.ptr("%codes"), panel.shared(f, which), list[str](), list[str]()
    if panel.has_minima:
        last = f.op(f"udiv i64 {f.add(blocks, -1)}, {panel.alike}")
        for i in range(BLOCKS // panel.alike):  # behind the last none, of a row's numbers that are there
            there = f.op(f"icmp sle i64 {i}, {last}")
            found = f.load(I32, f.at(codes, MINIMA + 64 * i), 64)
            minima.append(f.op(f"select i1 {there}, {I32} {found}, {I32} {ZERO}"))
            block = f.op(f"select i1 {there}, i64 {i * panel.alike}, i64 0")
            apart.append(f.mul(block, block_bytes))

    def row(_: str, at: list[str]) -> list[str]:
        numbers, own = f.at(at[0], form.numbers), ""
        for place, one in zip(apart, minima, strict=True):
            own = panel.with_minima(f, own, one, f.at(numbers, place))
        partial = f.load(F32, f.at(at[1], PARTIAL), 64)
        f.store(F32, panel.total(f, f.load(F32, at[1], 64), partial, own, shared, numbers), at[1], 64)
        return [f.at(at[0], form.row_bytes), f.at(at[1], 64)]

    f.loop(0, "%rows", 1, [("ptr", f.ptr(x)), ("ptr", f.ptr("%acc"))], row)


def wide(target: Target, kind: BlockKind) -> str:
    """As packed.wide, of one panel at a time."""
    f = Function("pl_wide", WIDE_ARGS)
    panel, w, codes = Superblocks(target, kind), f.ptr("%w"), f.ptr("%codes")
    form = panel.form
    f.do(f"call void @llvm.memset.p0.i64(ptr {f.ptr('%acc')}, i8 0, i64 {f.mul('%rows', 64)}, i1 false)")
    block_bytes = f.mul("%rows", form.row_bytes)

    def call(name: str, *args: str) -> None:
        f.do(f"call void @{name}({', '.join(f'i64 {arg}' for arg in args)})")

    def superblock(which: str, fetch: list[str]) -> list[str]:
        begin, end = panel.within(f, which)

        def block(i: str, fetch: str, name: str) -> str:
            own, number = panel.own(f, i), f.op(f"sub i64 {i}, {begin}")
            panel.prefetch(f, w, i, "%stride")
            for step, code in enumerate(panel.steps(f, f.at(w, f.mul(i, panel.block_bytes)))):
                f.store(form.codes, code, f.at(codes, 64 * step), 64)
            for group in range(panel.groups):
                f.store(H32, panel.scale(f, own, group), f.at(codes, SCALES + 64 * group), 64)
            if panel.has_minima:
                minima, slot = panel.minima(f, own), f.op(f"udiv i64 {number}, {panel.alike}")
                place = f.at(codes, f.add(f.shl(slot, 6), MINIMA))
                odd = f.op(f"trunc i64 {f.op(f'urem i64 {number}, {panel.alike}')} to i32")  # behind what is there
                before = f.op(f"and {I32} {f.load(I32, place, 64)}, {f.splat('i32', f.op(f'sub i32 0, {odd}'))}")
                moved = f.op(f"shl {I32} {minima}, {f.splat('i32', f.op(f'shl i32 {odd}, 4'))}")
                f.store(I32, f.op(f"or {I32} {before}, {moved}"), place, 64)
            x = f.add("%x", f.mul(i, block_bytes))

            def tile(rows: int, r: str) -> None:
                partial = f.add(f.add("%acc", PARTIAL), f.shl(r, 6))
                call(f"{name}_{rows}", f.add(x, f.mul(r, form.row_bytes)), "%codes", partial)

            return in_tiles(f, MOST, tile, fetch)

        wanted = block(begin, fetch[0], FIRST)
        after = f.loop(f.add(begin, 1), end, 1, [("i64", wanted)], lambda i, fetch: [block(i, fetch[0], NEXT)])
        fold(f, panel, f.add("%x", f.mul(begin, block_bytes)), block_bytes, f.op(f"sub i64 {end}, {begin}"), which)
        return after

    f.loop(0, panel.how_many(f), 1, [("i64", "%fetch")], superblock)
    return f.end()
