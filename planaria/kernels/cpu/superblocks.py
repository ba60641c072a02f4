"""Products of K-quants with rows in bytes on AVX2: what packed.py has for other kinds and CPUs.

A superblock's integer scales are multiplied in integers, by the instruction that widens 16-bit sums; two of its blocks,
whose rows have one scale, are added up in integers; its float16 numbers come once, after its last block. One output is,
superblock after superblock, the sums of two blocks times their rows' scales, added up and times the superblock's scale;
then the minima's. So additions are in the same order whatever the tile. Sums of a row's blocks, which minima are
multiplied by, are rounded to int16 by the largest of a superblock, so that two minima are multiplied at once and added
up exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planaria.kernels.blocks import BlockKind
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.emit import F32, I32, Function, literal
from planaria.kernels.cpu.micro import H32, finish
from planaria.kernels.cpu.rounded import BLOCKS, InBytes, Superblock, half_of, joined, multiplied, superblocks
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

MOST = 6  # rows of a tile
ZERO = "zeroinitializer"
FIRST, NEXT = "pl_first", "pl_next"  # of a superblock's pairs of blocks
# What `wide` leaves, in bytes: of each of two blocks the codes and behind them its scales as pairs of int16; minima of
# the superblock as pairs of int16 of each column
SCALES, EACH = 512, 640
MINIMA = 2 * EACH
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

    def superblocks(self, f: Function, carried: list[tuple[str, str]], body: Superblock) -> list[str]:
        return superblocks(f, f.op("and i64 %scales, 7"), carried, body)

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
        self, f: Function, x_at: list[str], codes: Iterator[str], scale: Callable[[int], str], before: list[str]
    ) -> Iterator[str]:
        """before plus a block's sums, i32 [16], row after row. scale(group): pairs. All are asked for late, so that few
        values are alive at a time."""
        form, found = self.form, list(before)
        numbers = [f.at(x, form.numbers) for x in x_at]
        for group, runs in enumerate(form.groups):
            for first, last in runs:
                run = [form.begin(f, "", place, group) for place in numbers]
                for step in range(first, last):
                    code = next(codes)
                    for r, x in enumerate(x_at):
                        run[r] = kept(f, form.add(f, run[r], code, splat_word(f, f.at(x, 4 * step))))
                factors, ends = scale(group), last == form.steps
                for r, one in enumerate(run):
                    found[r] = widened(f, found[r], one, factors)
                    if ends:
                        yield found[r]

    def scaled(self, f: Function, before: str, sums: str, x: str) -> str:
        """before plus sums i32 times a row's scale."""
        return f.fma(as_float(f, sums), splat_float(f, f.at(x, self.form.numbers)), before)

    def total(self, f: Function, before: str, partial: str, minima: str, shared: list[str], numbers: str) -> str:
        """before plus a superblock's products, and its minima's (i32, or ""). numbers: of a row's block in it."""
        before = f.fma(partial, shared[0], before)
        if not minima:
            return before
        factor = f.vec("fmul", shared[1], splat_float(f, f.at(numbers, SUM_SCALE)))
        return f.fma(as_float(f, minima), factor, before)


def round_sums(f: Function, target: Target, kind: BlockKind, begin: str, end: str) -> None:
    """What minima are multiplied by (see SUM), of a superblock's blocks that rounded.round_rows has rounded."""
    form, out = InBytes(target, kind), f.ptr("%out")
    groups, lanes = form.count, BLOCKS * form.count
    words, floats, shorts = (f"<{n} x {t}>" for n, t in ((lanes, "i32"), (lanes, "float"), (2 * lanes, "i16")))
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


def packed(target: Target, kind: BlockKind, rows: int) -> str:
    """As packed.packed."""
    f = Function(f"pl_packed_{rows}", PACKED_ARGS)
    panel, w, first_x = Superblocks(target, kind), f.ptr("%w"), f.ptr("%x")
    form = panel.form

    def rows_of(i: str) -> list[str]:
        return rows_at(f, f.at(first_x, f.mul(i, rows * form.row_bytes)), form, rows)

    carried = [(I32, ZERO)] * (rows * panel.has_minima)

    def superblock(which: str, begin: str, end: str, acc: list[str]) -> list[str]:
        def block(i: str, before: list[str]) -> list[str]:
            panel.prefetch(f, w, i, AHEAD)  # codes and scales of the panels that follow
            own, x_at = panel.own(f, i), rows_of(i)
            codes = panel.steps(f, f.at(w, f.mul(i, panel.block_bytes)))
            sums = list(panel.sums(f, x_at, codes, lambda group: panel.scale(f, own, group), before[:rows]))
            if not panel.has_minima:
                return sums
            minima, each = panel.minima(f, own), zip(x_at, before[rows:], strict=True)
            return sums + [panel.with_minima(f, b, minima, f.at(x, form.numbers)) for x, b in each]

        def pair(i: str, before: list[str]) -> list[str]:
            after = f.op(f"call i64 @llvm.smin.i64(i64 {f.add(i, 2)}, i64 {end})")
            own = [(I32, ZERO)] * rows + [(I32, m) for m in before[rows:]]
            found, x_at = f.loop(i, after, 1, own, block), rows_of(i)
            return [panel.scaled(f, before[r], found[r], x_at[r]) for r in range(rows)] + found[rows:]

        found, shared = f.loop(begin, end, 2, [(F32, ZERO)] * rows + carried, pair), panel.shared(f, which)
        partial, minima = found[:rows], found[rows:] or [""] * rows
        each = zip(acc, partial, minima, rows_of(begin), strict=True)
        return [panel.total(f, a, p, m, shared, f.at(x, form.numbers)) for a, p, m, x in each]

    total = panel.superblocks(f, [(F32, ZERO)] * rows, superblock)
    finish(f, target, [[t] for t in total], "%out", "%ldo", "%mode", "%bias")
    return f.text()


def part(target: Target, kind: BlockKind, rows: int, name: str) -> str:
    """partial[rows][16] = (FIRST) or += (NEXT) the products of two blocks, `apart` bytes apart, of `codes` as `wide`
    leaves them."""
    f = Function(f"{name}_{rows}", ("x", "codes", "partial", "apart"))
    panel, partial, before = Superblocks(target, kind), f.ptr("%partial"), [""] * rows
    first, second = (f.ptr("%x"), f.ptr(f.add("%x", "%apart")))
    for block, x in enumerate((first, second)):
        codes = f.at(f.ptr("%codes"), EACH * block)
        sums = panel.sums(
            f, rows_at(f, x, panel.form, rows), (f.load(I32, f.at(codes, 64 * i), 64) for i in range(panel.form.steps)),
            lambda i: f.load(H32, f.at(codes, SCALES + 64 * i), 64), before,  # noqa: B023
        )  # fmt: skip
        if not block:
            before = list(sums)
    for r, (sum, x) in enumerate(zip(sums, rows_at(f, first, panel.form, rows), strict=True)):
        place = f.at(partial, 64 * r)
        f.store(F32, panel.scaled(f, ZERO if name == FIRST else f.load(F32, place, 64), sum, x), place, 64)
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

    def superblock(which: str, begin: str, end: str, fetch: list[str]) -> list[str]:
        def unpacked(i: str, number: str) -> None:
            own, to = panel.own(f, i), f.at(codes, f.mul(f.op(f"and i64 {number}, 1"), EACH))
            panel.prefetch(f, w, i, "%stride")
            for step, code in enumerate(panel.steps(f, f.at(w, f.mul(i, panel.block_bytes)))):
                f.store(form.codes, code, f.at(to, 64 * step), 64)
            for group in range(panel.groups):
                f.store(H32, panel.scale(f, own, group), f.at(to, SCALES + 64 * group), 64)
            if panel.has_minima:
                minima, slot = panel.minima(f, own), f.op(f"udiv i64 {number}, {panel.alike}")
                place = f.at(codes, f.add(f.shl(slot, 6), MINIMA))
                odd = f.op(f"trunc i64 {f.op(f'urem i64 {number}, {panel.alike}')} to i32")  # behind what is there
                before = f.op(f"and {I32} {f.load(I32, place, 64)}, {f.splat('i32', f.op(f'sub i32 0, {odd}'))}")
                moved = f.op(f"shl {I32} {minima}, {f.splat('i32', f.op(f'shl i32 {odd}, 4'))}")
                f.store(I32, f.op(f"or {I32} {before}, {moved}"), place, 64)

        def pair(i: str, fetch: str, name: str) -> str:
            number, after = f.op(f"sub i64 {i}, {begin}"), f.add(i, 1)
            unpacked(i, number)
            alone = f.op(f"icmp eq i64 {after}, {end}")

            def nothing() -> None:
                for group in range(panel.groups):
                    f.store(H32, ZERO, f.at(codes, EACH + SCALES + 64 * group), 64)

            f.when(alone, nothing)
            f.when(f.op(f"xor i1 {alone}, true"), lambda: unpacked(after, f.add(number, 1)))
            apart, x = f.op(f"select i1 {alone}, i64 0, i64 {block_bytes}"), f.add("%x", f.mul(i, block_bytes))

            def tile(rows: int, r: str) -> None:
                partial = f.add(f.add("%acc", PARTIAL), f.shl(r, 6))
                call(f"{name}_{rows}", f.add(x, f.mul(r, form.row_bytes)), "%codes", partial, apart)

            return in_tiles(f, MOST, tile, fetch, 2)

        wanted = [("i64", pair(begin, fetch[0], FIRST))]
        later = f.loop(f.add(begin, 2), end, 2, wanted, lambda i, fetch: [pair(i, fetch[0], NEXT)])
        fold(f, panel, f.add("%x", f.mul(begin, block_bytes)), block_bytes, f.op(f"sub i64 {end}, {begin}"), which)
        return later

    panel.superblocks(f, [("i64", "%fetch")], superblock)
    return f.end()
