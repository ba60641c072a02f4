"""Products of K-quants with rows in bytes on AVX2: what packed.py has for other kinds and CPUs.

A superblock's integer scales are multiplied in integers, by the instruction that widens 16-bit sums; its float16
numbers come once, after its last block. One output is, superblock after superblock, the sums of blocks times their
rows' scales, added up and times the superblock's scale; then likewise the minima. So additions are in the same order
whatever the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planaria.kernels.blocks import BlockKind
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.emit import F32, I32, Function
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
    splat_word,
)

BLOCKS = 8  # of a superblock
MOST = 6  # rows of a tile
ZERO = "zeroinitializer"
FIRST, NEXT = "pl_first", "pl_next"  # of a superblock's blocks
# What `wide` leaves for tiles, in bytes behind a block's codes: its scales as pairs of int16; minima of the
# superblock as float32, its scale, and what minima are multiplied by
SCALES, MINIMA = 512, 640
SHARED = MINIMA + 64 * 2 * BLOCKS
# Of ROW_BLOCK rows there are totals, what a superblock has added up, and what its minima are multiplied by
PARTIAL, EACH = 64 * layout.ROW_BLOCK, 4 * layout.ROW_BLOCK


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
    sides = [[half_of(f, "i16", v, side, 32) for side in range(2)] for v in (run, scales)]
    call = "call <8 x i32> @llvm.x86.avx2.pmadd.wd"
    sums = [f.op(f"{call}(<16 x i16> {a}, <16 x i16> {b})") for a, b in zip(*sides, strict=True)]
    both = joined(f, "i32", sums, 8)
    return f.op(f"add {I32} {before}, {both}") if before else both


class Superblocks(Unpack):
    """Of one packed panel."""

    def __init__(self, target: Target, kind: BlockKind) -> None:
        super().__init__(target, kind)
        self.form = InBytes(target, kind)
        self.minima = self.groups * (kind.both - 1)  # of a block

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

    def minimum(self, f: Function, own: str, i: int) -> str:
        return as_float(f, self.small(f, own, self.groups + i))

    def sums(
        self, f: Function, x_at: list[str], codes: Iterator[str], scale: Callable[[int], str],
        partial: Callable[[int], str],
    ) -> list[str]:  # fmt: skip
        """partial(row) plus a block's sums times the row's scale. scale(group): pairs. Both are asked for late, so that
        few values are alive at a time."""
        form, found = self.form, [""] * len(x_at)
        numbers = [f.at(x, form.numbers) for x in x_at]
        for group, runs in enumerate(form.groups):
            for first, last in runs:
                run = [form.begin(f, "", place, group) for place in numbers]
                for step in range(first, last):
                    code = next(codes)
                    for r, x in enumerate(x_at):
                        run[r] = kept(f, form.add(f, run[r], code, splat_word(f, f.at(x, 4 * step))))
                factors = scale(group)
                found = [widened(f, a, b, factors) for a, b in zip(found, run, strict=True)]
        each = enumerate(zip(found, numbers, strict=True))
        return [f.fma(as_float(f, sum), splat_float(f, at), partial(r)) for r, (sum, at) in each]

    def least(self, f: Function, numbers: list[list[str]], minima: list[str], partial: list[str]) -> list[str]:
        """partial plus a block's minima. numbers: of each minimum, where those are of each row that it is multiplied
        by."""
        for places, minimum in zip(numbers, minima, strict=True):
            each = zip(places, partial, strict=True)
            partial = [f.fma(splat_float(f, at), minimum, before) for at, before in each]
        return partial

    def total(self, f: Function, before: str, partial: list[str], shared: list[str]) -> str:
        for one, factor in zip(partial, shared, strict=True):
            before = f.fma(one, factor, before)
        return before


def packed(target: Target, kind: BlockKind, rows: int) -> str:
    """As packed.packed."""
    f = Function(f"pl_packed_{rows}", PACKED_ARGS)
    panel, w, first_x = Superblocks(target, kind), f.ptr("%w"), f.ptr("%x")
    form, both = panel.form, kind.both

    def superblock(which: str, acc: list[str]) -> list[str]:
        def block(i: str, partial: list[str]) -> list[str]:
            panel.prefetch(f, w, i, AHEAD)  # codes and scales of the panels that follow
            own, x_at = panel.own(f, i), rows_at(f, f.at(first_x, f.mul(i, rows * form.row_bytes)), form, rows)
            codes = panel.steps(f, f.at(w, f.mul(i, panel.block_bytes)))
            sums = panel.sums(f, x_at, codes, lambda group: panel.scale(f, own, group), lambda r: partial[r])
            minima = [panel.minimum(f, own, k) for k in range(panel.minima)]
            numbers = [[f.at(x, form.numbers + 4 * (1 + k)) for x in x_at] for k in range(panel.minima)]
            return sums + panel.least(f, numbers, minima, partial[rows:])

        partial = f.loop(*panel.within(f, which), 1, [(F32, ZERO)] * (rows * both), block)
        shared = panel.shared(f, which)
        return [panel.total(f, acc[r], partial[r::rows], shared) for r in range(rows)]

    total = f.loop(0, panel.how_many(f), 1, [(F32, ZERO)] * rows, superblock)
    finish(f, target, [[t] for t in total], "%out", "%ldo", "%mode", "%bias")
    return f.text()


def part(target: Target, kind: BlockKind, rows: int, name: str) -> str:
    """partial[rows][16] = (FIRST) or += (NEXT) one block's products, of `codes` as `wide` leaves them.
    numbers: where those go that minima are multiplied by, [minima][ROW_BLOCK] float32."""
    f = Function(f"{name}_{rows}", ("x", "codes", "partial", "numbers"))
    panel, codes = Superblocks(target, kind), f.ptr("%codes")
    x_at, partial, numbers = rows_at(f, f.ptr("%x"), panel.form, rows), f.ptr("%partial"), f.ptr("%numbers")
    steps = (f.load(panel.form.codes, f.at(codes, 64 * i), 64) for i in range(panel.form.steps))
    sums = panel.sums(
        f, x_at, steps, lambda i: f.load(H32, f.at(codes, SCALES + 64 * i), 64),
        lambda r: ZERO if name == FIRST else f.load(F32, f.at(partial, 64 * r), 64),
    )  # fmt: skip
    for r, sum in enumerate(sums):
        f.store(F32, sum, f.at(partial, 64 * r), 64)
        for k in range(panel.minima):
            word = f.load("i32", f.at(x_at[r], panel.form.numbers + 4 * (1 + k)), 4)
            f.store("i32", word, f.at(numbers, EACH * k + 4 * r), 4)
    return f.end()


def fold(target: Target, kind: BlockKind, rows: int) -> str:
    """acc[rows][16] += what is added up for a superblock of so many blocks, and its minima."""
    f = Function(f"pl_fold_{rows}", ("numbers", "codes", "acc", "count"))
    panel, numbers, codes, acc = Superblocks(target, kind), f.ptr("%numbers"), f.ptr("%codes"), f.ptr("%acc")

    def block(i: str, partial: list[str]) -> list[str]:
        at, of_rows = (f.at(place, f.mul(i, each * panel.minima)) for place, each in ((codes, 64), (numbers, EACH)))
        minima = [f.load(F32, f.at(at, MINIMA + 64 * k), 64) for k in range(panel.minima)]
        places = [[f.at(of_rows, EACH * k + 4 * r) for r in range(rows)] for k in range(panel.minima)]
        return panel.least(f, places, minima, partial)

    minima = f.loop(0, "%count", 1, [(F32, ZERO)] * rows, block) if panel.minima else []
    shared = [f.load(F32, f.at(codes, SHARED + 64 * i), 64) for i in range(kind.both)]
    for r in range(rows):
        place = f.at(acc, 64 * r)
        partial = [f.load(F32, f.at(place, PARTIAL), 64), *minima[r : r + 1]]
        f.store(F32, panel.total(f, f.load(F32, place, 64), partial, shared), place, 64)
    return f.end()


def tiles(target: Target, kind: BlockKind) -> list[str]:
    """What `wide` calls."""
    sizes = range(1, MOST + 1)
    parts = [part(target, kind, rows, name) for name in (FIRST, NEXT) for rows in sizes]
    return parts + [fold(target, kind, rows) for rows in sizes]


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
            slot = f.at(codes, f.mul(number, 64 * panel.minima))
            for k in range(panel.minima):
                f.store(F32, panel.minimum(f, own, k), f.at(slot, MINIMA + 64 * k), 64)
            numbers = f.add(f.add("%acc", 2 * PARTIAL), f.mul(number, EACH * panel.minima))
            x = f.add("%x", f.mul(i, block_bytes))

            def tile(rows: int, r: str) -> None:
                partial = f.add(f.add("%acc", PARTIAL), f.shl(r, 6))
                row, of_row = f.add(x, f.mul(r, form.row_bytes)), f.add(numbers, f.shl(r, 2))
                call(f"{name}_{rows}", row, "%codes", partial, of_row)

            return in_tiles(f, MOST, tile, fetch)

        wanted = block(begin, fetch[0], FIRST)
        after = f.loop(f.add(begin, 1), end, 1, [("i64", wanted)], lambda i, fetch: [block(i, fetch[0], NEXT)])
        for i, factor in enumerate(panel.shared(f, which)):
            f.store(F32, factor, f.at(codes, SHARED + 64 * i), 64)
        count = f.op(f"sub i64 {end}, {begin}")

        def tile(rows: int, r: str) -> None:
            numbers = f.add(f.add("%acc", 2 * PARTIAL), f.shl(r, 2))
            call(f"pl_fold_{rows}", numbers, "%codes", f.add("%acc", f.shl(r, 6)), count)

        in_tiles(f, MOST, tile)
        return after

    f.loop(0, panel.how_many(f), 1, [("i64", "%fetch")], superblock)
    return f.end()
