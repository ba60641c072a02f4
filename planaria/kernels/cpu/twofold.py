"""Products of K-quants with rows in bytes on AVX-512: what packed.py has for other kinds and CPUs.

Two sums of a row, of the halves of a block or of two blocks, are cut to 16 bits and stand in one register; one
instruction multiplies both by integers, their columns' scales times their row's, and adds them up. A row's scales are
integers for the same reason: those of a superblock, times one float32. So a superblock's products are one integer of 32
bits, its minima's another, exactly added up in whatever order, and two multiply-adds and a product of floats bring them
in after its last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planaria.kernels.blocks import BlockKind
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.emit import F32, I32, Function, literal
from planaria.kernels.cpu.micro import H32, Elements, finish
from planaria.kernels.cpu.rounded import (
    BLOCKS,
    InBytes,
    added,
    joined,
    larger,
    largest,
    of_each,
    quantised,
    superblocks,
)
from planaria.kernels.cpu.target import Target
from planaria.kernels.cpu.unpack import (
    AHEAD,
    PACKED_ARGS,
    WIDE_ARGS,
    Unpack,
    as_float,
    ask,
    half,
    rows_at,
    splat_word,
    sums_of_group,
)
from planaria.kernels.cpu.vector import ROUNDING, ROUNDING_BITS

ZERO = "zeroinitializer"
# Numbers of a row's block: its scale, as a pair of int16 (twice, or with its neighbour's); for the offset two int32,
# else its sums, as such a pair, and the float32 that those of its superblock are multiplied by; that of its scales
SUM, SUM_SCALE, SCALE, MOST_SUM = 4, 8, 12, 32767
PARTIAL = 64 * 3 * layout.ROW_BLOCK  # behind totals: of each row what a superblock has added up, then of its minima


class Twofold(Unpack):
    """Of one packed panel. A unit is what two sums of a row are of."""

    def __init__(self, target: Target, kind: BlockKind) -> None:
        super().__init__(target, kind)
        self.form = InBytes(target, kind)
        self.minima, self.unit = kind.both > 1, 2 // self.groups
        self.mask = ""  # of lower halves, where a register has it

    def places_of(self, f: Function, i: str, end: str) -> list[str]:
        """The blocks of a unit's two sums; where there is no second one the first again, whose scale will be 0."""
        if self.unit == 1:
            return [i, i]
        return [i, f.op(f"call i64 @llvm.smin.i64(i64 {f.add(i, 1)}, i64 {f.add(end, -1)})")]

    def codes(self, f: Function, w: str, blocks: Sequence[str]) -> Iterator[str]:
        """Of the first sum, then of the second."""
        for block in blocks[: self.unit]:
            yield from self.steps(f, f.at(w, f.mul(block, self.block_bytes)))

    def two(self, f: Function, scales: str, blocks: Sequence[str], index: int) -> str:
        """Small integers of both as pairs of int16. index: of the first."""
        at = [f.at(scales, f.mul(b, self.scale_bytes)) for b in blocks]
        low, high = (self.small(f, own, index + i * (self.groups - 1)) for i, own in enumerate(at))
        return paired(f, low, high, 0)

    def shared(self, f: Function, at: str) -> list[str]:
        """A superblock's scale, times what its integers are cut by, and what its minima are multiplied by."""
        factors = (1 << self.form.cut, -1)
        return [f.vec("fmul", half(f, at, i), f.const_f32(factors[i])) for i in range(self.kind.both)]

    def sums(self, f: Function, codes: Iterator[str], x_at: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        """Both sums of each row, i32 [16]. x_at: the rows' first blocks, then their second ones."""
        found = []
        for side, x in enumerate(x_at):
            start = "" if self.form.direct and self.kind.offset else f.const_i32(self.nearest(side))
            found.append(sums_of_group(f, self.form, side * (self.groups - 1), codes, x, start))
        return list(zip(*found, strict=True))

    def nearest(self, side: int) -> int:
        """What either sum begins with, so that what is cut off rounds them: one a half too high, one too low, or errors
        of all blocks would add up."""
        return max(0, (1 << self.form.cut >> 1) - side)

    def multiplied(self, f: Function, before: str, a: str, b: str) -> str:
        """before plus products of pairs of int16, i32 [16]."""
        if self.form.direct:
            return f.op(f"call {I32} @llvm.x86.avx512.vpdpwssd.512({I32} {before}, {I32} {a}, {I32} {b})")
        sides = [f.op(f"bitcast {I32} {v} to {H32}") for v in (a, b)]
        found = f.op(f"call {I32} @llvm.x86.avx512.pmaddw.d.512({H32} {sides[0]}, {H32} {sides[1]})")
        return f.op(f"add {I32} {before}, {found}")

    def scaled(self, f: Function, before: str, sums: Sequence[str], scales: str, numbers: str) -> str:
        """before plus two sums times their columns' and their row's scales, i32 [16]."""
        sides = [f.op(f"bitcast {I32} {v} to {H32}") for v in (scales, splat_word(f, numbers))]
        both = f.op(f"mul {H32} {sides[0]}, {sides[1]}")
        return self.multiplied(
            f, before, paired(f, sums[0], sums[1], self.form.cut, self.mask), f.op(f"bitcast {H32} {both} to {I32}")
        )

    def total(self, f: Function, before: str, found: Sequence[str], shared: Sequence[str], numbers: str) -> str:
        """before plus a superblock's products, and its minima's, whose integers are found."""
        for value, factor, place in zip(found, shared, (SCALE, SUM_SCALE), strict=False):
            own = f.splat("float", f.load("float", f.at(numbers, place), 4))
            before = f.fma(f.vec("fmul", as_float(f, value), factor), own, before)
        return before


def paired(f: Function, low: str, high: str, cut: int, mask: str = "") -> str:
    """Integers i32 [16] without their lowest bits as pairs of int16. mask: of the low ones, or ""."""
    masks = (
        [mask, f.op(f"xor {I32} {mask}, {f.const_i32(-1)}")] if mask else [f.const_i32(m) for m in (0xFFFF, -0x10000)]
    )
    low = f.op(f"lshr {I32} {low}, {f.const_i32(cut)}") if cut else low
    high = f.op(f"shl {I32} {high}, {f.const_i32(16 - cut)}")
    sides = [f.op(f"and {I32} {v}, {mask}") for v, mask in zip((low, high), masks, strict=True)]
    return f.op(f"or {I32} {sides[0]}, {sides[1]}")


def packed(target: Target, kind: BlockKind, rows: int) -> str:
    """As packed.packed."""
    f = Function(f"pl_packed_{rows}", PACKED_ARGS)
    panel, w, first_x = Twofold(target, kind), f.ptr("%w"), f.ptr("%x")
    form, scales, each = panel.form, f.ptr(f.op("and i64 %scales, -8")), range(rows)

    def rows_of(i: str) -> list[str]:
        return rows_at(f, f.at(first_x, f.mul(i, rows * form.row_bytes)), form, rows)

    def superblock(_: str, begin: str, end: str, acc: list[str]) -> list[str]:
        def unit(i: str, before: list[str]) -> list[str]:
            blocks = panel.places_of(f, i, end)
            for block in blocks[: panel.unit]:
                panel.prefetch(f, w, block, AHEAD)  # codes and scales of the panels that follow
            x_at, own = [rows_of(b) for b in blocks], panel.two(f, scales, blocks, 0)
            sums, numbers = panel.sums(f, panel.codes(f, w, blocks), x_at), [f.at(x, form.numbers) for x in x_at[0]]
            after = [panel.scaled(f, before[r], sums[r], own, numbers[r]) for r in each]
            if panel.minima:
                least = panel.two(f, scales, blocks, panel.groups)
                words = [splat_word(f, f.at(n, SUM)) for n in numbers]
                after += [panel.multiplied(f, before[rows + r], least, words[r]) for r in each]
            return after

        found = f.loop(begin, end, panel.unit, [(I32, ZERO)] * (rows * kind.both), unit)
        shared = panel.shared(f, f.ptr(panel.places(f, "%scales", "%blocks", begin)[1]))
        numbers = [f.at(x, form.numbers) for x in rows_of(begin)]
        return [panel.total(f, acc[r], found[r::rows], shared, numbers[r]) for r in each]

    total = superblocks(f, f.op("and i64 %scales, 7"), [(F32, ZERO)] * rows, superblock)
    finish(f, target, [[t] for t in total], "%out", "%ldo", "%mode", "%bias")
    return f.text()


def wide(target: Target, kind: BlockKind) -> str:
    """As packed.wide, of any number of panels up to three. Registers hold the codes of a unit, and two rows at a time
    meet them: of an odd number of rows what follows the last is computed, too, and left."""
    f = Function("pl_wide", WIDE_ARGS)
    panel, acc = Twofold(target, kind), f.ptr("%acc")
    form, partial, line, most = panel.form, f.at(acc, PARTIAL), f.shl("%panels", 6), target.tile_rows
    block_bytes, ahead = f.mul("%rows", form.row_bytes), f.mul("%panels", "%stride")
    panel.mask = f.opaque(I32, f.const_i32(0xFFFF))
    for at, size in ((acc, line), (partial, "128")):
        f.do(f"call void @llvm.memset.p0.i64(ptr {at}, i8 0, i64 {f.mul('%rows', size)}, i1 false)")

    def superblock(_: str, begin: str, end: str, fetch: list[str]) -> list[str]:
        def of_panel(v: str, fetch: list[str]) -> list[str]:
            moved = f.mul(v, "%stride")
            w, scales, behind = (
                f.at(f.ptr(p), moved)
                for p in ("%w", f.op("and i64 %scales, -8"), panel.places(f, "%scales", "%blocks", begin)[1])
            )
            each = f.op(f"select i1 {f.op(f'icmp eq i64 {v}, 0')}, i64 %each, i64 0")

            def unit(i: str, fetch: list[str]) -> list[str]:
                blocks = panel.places_of(f, i, end)
                for block in blocks[: panel.unit]:
                    panel.prefetch(f, w, block, ahead)
                codes = [f.opaque(I32, c) for c in panel.codes(f, w, blocks)]
                own = panel.two(f, scales, blocks, 0)
                least = panel.two(f, scales, blocks, panel.groups) if panel.minima else ""

                def two_rows(_: str, at: list[str]) -> list[str]:
                    x_at = [rows_at(f, x, form, 2) for x in at[:2]]
                    for r, sums in enumerate(panel.sums(f, iter(codes), x_at)):
                        numbers, place = f.at(x_at[0][r], form.numbers), f.at(at[2], 128 * r)
                        f.store(I32, panel.scaled(f, f.load(I32, place, 64), sums, own, numbers), place, 64)
                        if panel.minima:
                            place, word = f.at(place, 64), splat_word(f, f.at(numbers, SUM))
                            f.store(I32, panel.multiplied(f, f.load(I32, place, 64), least, word), place, 64)
                    return [
                        f.at(p, 2 * size) for p, size in zip(at, (form.row_bytes, form.row_bytes, 128), strict=True)
                    ]

                def tile(first: str, inner: list[str]) -> list[str]:
                    whole = f.op(f"icmp sle i64 {f.add(first, most)}, %rows")
                    after = f.op(f"select i1 {whole}, i64 {f.add(first, most)}, i64 %rows")
                    for k, block in enumerate(blocks[: panel.unit]):
                        ask(f, inner[0], each)
                        more = f.op(f"and i1 {whole}, {f.op(f'icmp ne i64 {block}, {i}')}") if k else whole
                        inner = [f.add(inner[0], f.op(f"select i1 {more}, i64 {each}, i64 0")), *inner[1:]]
                    return [inner[0], *f.loop(first, after, 2, [("ptr", p) for p in inner[1:]], two_rows)]

                at = [f.at(f.ptr("%x"), f.mul(b, block_bytes)) for b in blocks]
                return f.loop(0, "%rows", most, [("i64", fetch[0]), *(("ptr", p) for p in (*at, partial))], tile)[:1]

            fetch = f.loop(begin, end, panel.unit, [("i64", fetch[0])], unit)
            shared, x = panel.shared(f, behind), f.at(f.ptr("%x"), f.mul(begin, block_bytes))

            def row(_: str, at: list[str]) -> list[str]:
                places = [f.at(at[2], 64 * i) for i in range(kind.both)]
                found = [f.load(I32, p, 64) for p in places]
                f.store(F32, panel.total(f, f.load(F32, at[1], 64), found, shared, at[0]), at[1], 64)
                for p in places:
                    f.store(I32, ZERO, p, 64)
                return [f.at(p, size) for p, size in zip(at, (str(form.row_bytes), line, "128"), strict=True)]

            begins = (f.at(x, form.numbers), f.at(acc, f.shl(v, 6)), partial)
            f.loop(0, "%rows", 1, [("ptr", p) for p in begins], row)
            return fetch

        return f.loop(0, "%panels", 1, [("i64", fetch[0])], of_panel)

    superblocks(f, f.op("and i64 %scales, 7"), [("i64", "%fetch")], superblock)
    return f.end()


def round_rows(target: Target, kind: BlockKind) -> str:
    """As rounded.round_rows. A block's scale is an integer up to 127, at least as large as its largest number wants,
    times a float32 of its superblock."""
    f, panel = Function("pl_round", ("x", "blocks", "out", "step", "place")), Twofold(target, kind)
    act, x, out, form = Elements(f, target), f.ptr("%x"), f.ptr("%out"), panel.form
    ints, floats, most_wanted = "<8 x i32>", "<8 x float>", form.most * form.most

    def splat(value: int) -> str:
        return f.splat("i32", str(value), BLOCKS)

    def spread(value: str) -> str:
        return f.splat("float", value, BLOCKS)

    def eight(combined: Callable[[Function, str, str, str], str], vectors: Sequence[str]) -> str:
        return joined(f, "i32", [of_each(f, combined, vectors[i : i + 4]) for i in (0, 4)], 4)

    def pairs(low: str, high: str) -> str:
        return f.op(
            f"or {ints} {f.op(f'and {ints} {low}, {splat(0xFFFF)}')}, {f.op(f'shl {ints} {high}, {splat(16)}')}"
        )

    def whole(moved: str) -> str:
        """The integers in the low bits of floats, behind ROUNDING."""
        return f.op(f"sub {ints} {f.op(f'bitcast {floats} {moved} to {ints}')}, {splat(ROUNDING_BITS)}")

    def top_of(bits: str) -> tuple[str, Callable[[float], str]]:
        """The largest of floats, by their bits, and a number over it, as a vector; 0 over 0."""
        most = f.op(f"bitcast i32 {f.op(f'call i32 @llvm.vector.reduce.smax.v8i32({ints} {bits})')} to float")
        none = f.op(f"fcmp oeq float {most}, {literal(0.0)}")

        def over(value: float) -> str:
            found = f.op(f"fdiv float {literal(value)}, {most}")
            return spread(f.op(f"select i1 {none}, float {literal(0.0)}, float {found}"))

        return most, over

    def superblock(_: str, begin: str, end: str, carried: list[str]) -> list[str]:
        count, to, halves = f.op(f"sub i64 {end}, {begin}"), list[str](), list[list[str]]()
        for k in range(BLOCKS):  # behind the last that again
            block = f.op(f"call i64 @llvm.smin.i64(i64 {f.add(begin, k)}, i64 {f.add(end, -1)})")
            to.append(f.at(out, f.mul(block, "%step")))
            at = f.at(x, f.mul(block, 32 * target.item))
            halves.append([act.load(f.at(at, 16 * target.item * h)) for h in range(2)])
        tops = eight(larger, [largest(f, own) for own in halves])
        most, over = top_of(tops)
        # the next integer above, in the low bits of a float
        tops = f.op(f"fmul {floats} {f.op(f'bitcast {ints} {tops} to {floats}')}, {over(form.most)}")
        tops = f.op(
            f"fadd {floats} {f.op(f'fadd {floats} {tops}, {spread(literal(0.5))}')}, {spread(literal(ROUNDING))}"
        )
        own = f.op(f"call {ints} @llvm.smin.v8i32({ints} {whole(tops)}, {ints} {splat(form.most)})")
        own = f.op(f"call {ints} @llvm.smax.v8i32({ints} {own}, {ints} {splat(1)})")
        factor = f.op(f"fdiv {floats} {over(most_wanted)}, {f.op(f'sitofp {ints} {own} to {floats}')}")
        zero = f.op(f"fsub float {most}, {most}")  # or no number
        scale = f.op(f"fadd float {f.op(f'fmul float {most}, {literal(1 / most_wanted)}')}, {zero}")

        def following(values: str) -> str:
            """Each block's neighbour's, or 0."""
            picked = ", ".join(f"i32 {min(k + 1, BLOCKS - 1)}" for k in range(BLOCKS))
            moved = f.op(f"shufflevector {ints} {values}, {ints} poison, <8 x i32> <{picked}>")
            numbers = ", ".join(f"i32 {k + 1}" for k in range(BLOCKS))
            there = f.op(f"icmp slt {ints} <{numbers}>, {f.splat('i32', f.op(f'trunc i64 {count} to i32'), BLOCKS)}")
            return f.op(f"select <8 x i1> {there}, {ints} {moved}, {ints} {ZERO}")

        wholes = [
            quantised(f, form, halves[k], f.op(f"extractelement {floats} {factor}, i64 {k}"), to[k])
            for k in range(BLOCKS)
        ]
        totals = [eight(added, [own[g] for own in wholes]) for g in range(form.count)]
        words = [pairs(own, own if form.count > 1 else following(own))]
        if kind.both > 1:
            sums = [f.op(f"sitofp {ints} {f.op(f'mul {ints} {total}, {own}')} to {floats}") for total in totals]
            bits = [f.op(f"and {ints} {f.op(f'bitcast {floats} {v} to {ints}')}, {splat(0x7FFFFFFF)}") for v in sums]
            most, over = top_of(larger(f, ints, bits[0], bits[-1]))
            short = []
            for v in sums:
                args = ", ".join(f"{floats} {value}" for value in (v, over(MOST_SUM), spread(literal(ROUNDING))))
                short.append(whole(f.op(f"call {floats} @llvm.fma.v8f32({args})")))
            words.append(pairs(short[0], short[-1] if form.count > 1 else following(short[0])))
            sum_scale = f.op(f"fmul float {scale}, {f.op(f'fmul float {most}, {literal(1 / MOST_SUM)}')}")
            for place in to:
                f.store("float", sum_scale, f.at(place, form.numbers + SUM_SCALE), 4)
        for k, place in enumerate(to):
            for i, word in enumerate(words):
                f.store("i32", f.op(f"extractelement {ints} {word}, i64 {k}"), f.at(place, form.numbers + SUM * i), 4)
            if kind.offset:
                for g in range(form.count):
                    total = f.op(f"extractelement {ints} {totals[g]}, i64 {k}")
                    start = form.offsets(f, wholes[k][g], total)
                    start = f.op(f"add i32 {start}, {panel.nearest(g)}") if form.direct else start
                    f.store("i32", start, f.at(place, form.numbers + SUM + 4 * g), 4)
            f.store("float", scale, f.at(place, form.numbers + SCALE), 4)
        return carried

    superblocks(f, "%place", [], superblock)
    return f.end()
