"""Products with packed weights (pack.py): IR of one kind's kernels, which is an object of its own, compiled when a
weight of that kind is first there.

Rows are rounded (rounded.py), products of a block of 32 are summed exactly, and the sums are scaled and added in
float32. The order of additions is that of micro.py's rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planaria.kernels.blocks import BlockKind
from planaria.kernels.cpu import superblocks, twofold
from planaria.kernels.cpu.codes import place as place_codes
from planaria.kernels.cpu.emit import F32, I32, Function
from planaria.kernels.cpu.micro import (
    DECLARATIONS,
    H32,
    dispatcher,
    finish,
)
from planaria.kernels.cpu.rounded import (
    B32,
    INTRINSICS,
    InPairs,
    added,
    form_of,
    half_of,
    host_has,
    joined,
    round_rows,
)
from planaria.kernels.cpu.target import Target
from planaria.kernels.cpu.unpack import (
    AHEAD,
    PACKED_ARGS,
    WIDE_ARGS,
    Unpack,
    as_float,
    ask,
    in_tiles,
    rows_at,
    splat_word,
    sums_of_group,
)


def add_group(f: Function, before: str, sums: str, scales: str) -> str:
    """A block's sums i32, or those of a half, times their columns' scales, to the half before ("": none)."""
    wide = as_float(f, sums)
    return f.fma(wide, scales, before) if before else f.vec("fmul", wide, scales)


def scaled(f: Function, total: str, sum: str, numbers: str, minima: Sequence[str]) -> str:
    """total plus a block's sum times a row's scale, plus minima. numbers: those of the row's block (rounded.py)."""

    def number(i: int) -> str:
        return f.splat("float", f.load("float", f.at(numbers, 4 * i), 4))

    total = f.fma(sum, number(0), total)
    for i, minimum in enumerate(minima):
        total = f.fma(number(1 + i), minimum, total)
    return total


I8, H16 = "<8 x i32>", "<16 x i16>"
ENTRIES = ("pl_packed", "pl_wide", "pl_embed", "pl_round")
# Their places in a kind's table; bytes of a rounded block; rows up to which PACKED is there
PACKED, WIDE, EMBED, ROUND, ROUNDED_BYTES, FEW = range(6)


def in_halves(target: Target, kind: BlockKind) -> bool:
    """Whether sums are in two registers of AVX2 each, which are written one by one."""
    return not target.wide and not kind.by_bytes and host_has("avx2")


def few_rows(target: Target, kind: BlockKind) -> int:
    """Rows up to which a kernel of their own has their sums in registers. 9: a token and eight drafts; with int16 on
    AVX-512 as many are as fast in `in_registers`."""
    if target.wide and not form_of(target, kind).by_bytes:
        return 4
    return 9 if target.wide or in_halves(target, kind) else 2


def has_second(f: Function, form: InPairs, x_at: Sequence[str]) -> str:
    """Whether a block of any of these rows has second integers: their scale isn't 0 then."""
    bits, *more = (f.load("i32", f.at(x, form.second + form.numbers), 4) for x in x_at)
    for other in more:
        bits = f.op(f"or i32 {bits}, {other}")
    return f.op(f"icmp ne i32 {bits}, 0")


def sums_of_block(f: Function, form: InPairs, steps: Iterator[str], x_at: list[str], factors: list[str]) -> list[str]:
    """A block's sums of each row, times columns' scales."""
    sums = [""] * len(x_at)
    for number in range(form.count):
        whole = sums_of_group(f, form, number, steps, x_at)
        sums = [add_group(f, sum, one, factors[number]) for sum, one in zip(sums, whole, strict=True)]
    return sums


def sums_in_halves(f: Function, unpack: Unpack, form: InPairs, at: str, x_at: list[str]) -> list[str]:
    """Of the codes there a block's sums of each row, i32 [16]: in pairs on AVX2, whose 16 registers hold a panel's sums
    of six rows, or half a panel's of twelve. In this order: LLVM would change it, and put sums into memory."""
    numbers, runs = [f.at(x, form.numbers) for x in x_at], form.groups[0]
    wholes = [form.first(f, place, 0) for place in numbers]
    begins = [form.begin(f, whole, place, 0) for whole, place in zip(wholes, numbers, strict=True)]
    item, lanes, half, factors, call = (
        ("i16", 32, H16, B32, "pmadd.ub.sw") if form.by_bytes else ("i32", 16, I8, H16, "pmadd.wd")
    )

    def part_of(vector: str, side: int) -> str:
        """Half of 64 bytes."""
        return f.op(f"bitcast {I8} {half_of(f, 'i32', vector, side, 16)} to {factors}")

    sums = [[[""] * 2 for _ in x_at] for _ in runs]
    for sides in ([0, 1],) if len(x_at) <= 6 else ([0], [1]):
        codes = unpack.steps(f, at)
        for run, (first, last) in zip(sums, runs, strict=True):
            for own, begin in zip(run, begins, strict=True):
                for side in sides:
                    own[side] = half_of(f, item, begin, 0, lanes)
            for step in range(first, last):
                code = f.op(f"bitcast {form.codes} {next(codes)} to {I32}")
                parts = [(side, part_of(code, side)) for side in sides]
                for own, x in zip(run, x_at, strict=True):
                    word = part_of(splat_word(f, f.at(x, 4 * step)), 0)
                    for side, part in parts:
                        products = f.op(f"call {half} @llvm.x86.avx2.{call}({factors} {part}, {factors} {word})")
                        own[side] = f.opaque(half, f.op(f"add {half} {own[side]}, {products}"))
    for run in sums:
        both = [joined(f, item, own, lanes // 2) for own in run]
        wholes = [form.whole(f, whole, one) for whole, one in zip(wholes, both, strict=True)]
    return wholes


def packed(target: Target, kind: BlockKind, rows: int) -> str:
    """out[rows][16] of one panel: `w` is its codes, x rows that are rounded, block after block of all of them."""
    f = Function(f"pl_packed_{rows}", PACKED_ARGS)
    unpack, form, w, first_x = Unpack(target, kind), form_of(target, kind), f.ptr("%w"), f.ptr("%x")

    def body(i: str, acc: list[str]) -> list[str]:
        unpack.prefetch(f, w, i, AHEAD)  # codes and scales of the panels that follow
        own, shared = (f.ptr(p) for p in unpack.places(f, "%scales", "%blocks", i))
        x_at = rows_at(f, f.at(first_x, f.mul(i, rows * form.row_bytes)), form, rows)
        at = f.at(w, f.mul(i, unpack.block_bytes))

        def product(place: str | int, acc: list[str]) -> list[str]:
            own_x = [f.at(x, place) for x in x_at]
            if in_halves(target, kind):
                whole = sums_in_halves(f, unpack, form, at, own_x)
                factors = unpack.factors(f, own, shared)  # now: else they take registers all the while
                sums = [add_group(f, "", one, factors[0]) for one in whole]
            else:
                factors = unpack.factors(f, own, shared)
                sums = sums_of_block(f, form, unpack.steps(f, at), own_x, factors)
            minima = factors[unpack.scales :]
            return [scaled(f, acc[r], sums[r], f.at(own_x[r], form.numbers), minima) for r in range(rows)]

        if not form.second:
            return product(0, acc)
        end = f.op(f"select i1 {has_second(f, form, x_at)}, i64 {form.row_bytes}, i64 {form.second}")
        return f.loop(0, end, form.second, [(F32, a) for a in acc], product)

    total = f.loop(0, "%blocks", 1, [(F32, "zeroinitializer")] * rows, body)
    finish(f, target, [[t] for t in total], "%out", "%ldo", "%mode", "%bias")
    return f.text()


MOST = 6  # rows of a tile
PART_ARGS = ("x", "codes", "acc")
UNROLL = 2  # steps


def part(target: Target, kind: BlockKind, rows: int) -> str:
    """acc[rows][16] += one block's products: `codes` [steps] and behind them factors as `wide` leaves them. The totals
    are in memory: the registers hold the sums of the block.

    The order of additions is that of `packed`.
    """
    f = Function(f"pl_part_{rows}", PART_ARGS)
    unpack, form = Unpack(target, kind), form_of(target, kind)
    codes, acc, xs = f.ptr("%codes"), f.ptr("%acc"), rows_at(f, f.ptr("%x"), form, rows)
    places, unroll = [f.at(x, form.numbers) for x in xs], 1 if form.second else UNROLL

    def step(code_at: str, x_at: list[str], sums: list[str], u: int) -> list[str]:
        code = f.load(form.codes, f.at(code_at, 64 * u), 64)
        words = [splat_word(f, f.at(x, 4 * u)) for x in x_at]
        found = (form.add(f, sum, code, word) for sum, word in zip(sums, words, strict=True))
        return [superblocks.kept(f, one) for one in found] if form.second else list(found)

    def body(i: str, sums: list[str]) -> list[str]:
        code_at, x_at = f.at(codes, f.mul(i, 16)), [f.at(x, i) for x in xs]
        for u in range(unroll):
            sums = step(code_at, x_at, sums, u)
        return sums

    def factor(number: int) -> str:
        return f.load(F32, f.at(codes, 64 * (form.steps + number)), 64)

    sums = [""] * rows
    for number, runs in enumerate(form.groups):
        whole = [form.first(f, place, number) for place in places]
        for first, last in runs:
            run = [form.begin(f, w, place, number) for w, place in zip(whole, places, strict=True)]
            run = f.loop(4 * first, 4 * last, 4 * unroll, [(form.lanes, one) for one in run], body)
            whole = [form.whole(f, w, one) for w, one in zip(whole, run, strict=True)]
        scale = factor(number)
        sums = [add_group(f, s, w, scale) for s, w in zip(sums, whole, strict=True)]
    minima = [factor(i) for i in range(unpack.scales, unpack.count)]
    for r, (sum, place) in enumerate(zip(sums, places, strict=True)):
        total = f.at(acc, 64 * r)
        f.store(F32, scaled(f, f.load(F32, total, 64), sum, place, minima), total, 64)
    return f.end()


def wide(target: Target, kind: BlockKind) -> str:
    """acc[rows][16] = the products of `packed` for many rows: a block is unpacked into `codes` (its steps, then its
    factors) and used for all rows. panels: 1; they are `stride` apart.

    Asks for the panel after this; and, with each tile of each block, for the 512 bytes at the next address in the
    list `fetch`, whose addresses are `each` bytes apart.
    """
    f = Function("pl_wide", WIDE_ARGS)
    unpack, form = Unpack(target, kind), form_of(target, kind)
    w, codes = f.ptr("%w"), f.ptr("%codes")
    f.do(f"call void @llvm.memset.p0.i64(ptr {f.ptr('%acc')}, i8 0, i64 {f.mul('%rows', 64)}, i1 false)")
    block_bytes = f.mul("%rows", form.row_bytes)

    def body(i: str, carried: list[str]) -> list[str]:
        own, shared = (f.ptr(p) for p in unpack.places(f, "%scales", "%blocks", i))
        unpack.prefetch(f, w, i, "%stride")
        for step, code in enumerate(unpack.steps(f, f.at(w, f.mul(i, unpack.block_bytes)))):
            f.store(form.codes, code, f.at(codes, 64 * step), 64)
        for k, factor in enumerate(unpack.factors(f, own, shared)):
            f.store(F32, factor, f.at(codes, 64 * (form.steps + k)), 64)
        x = f.op(f"add i64 %x, {f.mul(i, block_bytes)}")

        def tile(rows: int, first: str) -> None:
            row, to = f.add(x, f.mul(first, form.row_bytes)), f.add("%acc", f.mul(first, 64))

            def call(row: str) -> None:
                f.do(f"call void @pl_part_{rows}(i64 {row}, i64 %codes, i64 {to})")

            call(row)
            if form.second:
                some = has_second(f, form, rows_at(f, f.ptr(row), form, rows))
                f.when(some, lambda: call(f.add(row, form.second)))

        return [in_tiles(f, MOST, tile, carried[0])]

    f.loop(0, "%blocks", 1, [("i64", "%fetch")], body)
    return f.end()


def in_registers(target: Target, kind: BlockKind) -> str:
    """As `wide` on AVX-512, of any number of panels up to three: registers hold the codes of a block, and rows meet
    them one after the other, each in several sums of four steps, as an addition to one would wait for the last. Rows
    meet them again with their second integers where one of a tile has such."""
    f = Function("pl_wide", WIDE_ARGS)
    unpack, form, line = Unpack(target, kind), form_of(target, kind), f.shl("%panels", 6)
    f.do(f"call void @llvm.memset.p0.i64(ptr {f.ptr('%acc')}, i8 0, i64 {f.mul('%rows', line)}, i1 false)")
    ahead, block_bytes, most = f.mul("%stride", "%panels"), f.mul("%rows", form.row_bytes), str(target.tile_rows)

    def block(i: str, fetch: list[str]) -> list[str]:
        places = ["%w", *unpack.places(f, "%scales", "%blocks", i)]

        def of_panel(v: str, fetch: list[str]) -> list[str]:
            w, own, shared = (f.at(f.ptr(p), f.mul(v, "%stride")) for p in places)
            each = f.op(f"select i1 {f.op(f'icmp eq i64 {v}, 0')}, i64 %each, i64 0")
            unpack.prefetch(f, w, i, ahead)
            steps = unpack.steps(f, f.at(w, f.mul(i, unpack.block_bytes)))
            codes = [f.opaque(form.codes, code) for code in steps]
            scale, *minima = (f.opaque(F32, factor) for factor in unpack.factors(f, own, shared))

            def row(_: str, at: list[str]) -> list[str]:
                x, total, *some = at
                numbers = f.at(x, form.numbers)
                sums = [form.first(f, numbers, 0), *["zeroinitializer"] * (form.steps // 4 - 1)]
                for step, code in enumerate(codes):
                    i = step % len(sums)
                    sums[i] = form.add(f, sums[i], code, splat_word(f, f.at(x, 4 * step)))
                while len(sums) > 1:
                    sums = [added(f, I32, *sums[i : i + 2]) for i in range(0, len(sums), 2)]
                sum = add_group(f, "", sums[0], scale)
                f.store(F32, scaled(f, f.load(F32, total, 64), sum, numbers, minima), total, 64)
                some = [f.op(f"or i1 {before}, {has_second(f, form, [x])}") for before in some]
                return [f.at(x, form.row_bytes), f.at(total, line), *some]

            def tile(first: str, inner: list[str]) -> list[str]:
                ask(f, inner[0], each)
                after = f.add(first, most)
                whole = f.op(f"icmp sle i64 {after}, %rows")
                after = f.op(f"select i1 {whole}, i64 {after}, i64 %rows")
                following = f.add(inner[0], f.op(f"select i1 {whole}, i64 {each}, i64 0"))
                x, total = inner[1:]
                some = [("i1", "false")] if form.second else []
                found = f.loop(first, after, 1, [("ptr", x), ("ptr", total), *some], row)

                def again() -> None:
                    f.loop(first, after, 1, [("ptr", f.at(x, form.second)), ("ptr", total)], row)

                for condition in found[2:]:
                    f.when(condition, again)
                return [following, *found[:2]]

            at = [f.at(f.ptr("%x"), f.mul(i, block_bytes)), f.at(f.ptr("%acc"), f.shl(v, 6))]
            carried = [("i64", fetch[0]), *(("ptr", p) for p in at)]
            return f.loop(0, "%rows", target.tile_rows, carried, tile)[:1]

        return f.loop(0, "%panels", 1, [("i64", fetch[0])], of_panel)

    f.loop(0, "%blocks", 1, [("i64", "%fetch")], block)
    return f.end()


EMBED_ARGS = ("w", "scales", "column", "count", "out")


def embed(target: Target, kind: BlockKind) -> str:
    """Column `column` of a panel of `count` blocks, to float32."""
    f = Function("pl_embed", EMBED_ARGS)
    unpack, form, w, out = Unpack(target, kind), form_of(target, kind), f.ptr("%w"), f.ptr("%out")
    even = f.shl("%column", 1)
    odd = f.add(even, 1)

    def body(i: str) -> None:
        own, shared = (f.ptr(p) for p in unpack.places(f, "%scales", "%count", i))
        factors = unpack.factors(f, own, shared)
        mine = [f.op(f"extractelement {F32} {v}, i64 %column") for v in factors]
        sides = [mine[: unpack.scales], mine[unpack.scales :]]
        for step, codes in enumerate(unpack.steps(f, f.at(w, f.mul(i, unpack.block_bytes)))):
            if form.by_bytes:
                word = f.op(f"extractelement {I32} {codes}, i64 %column")
                found = [f.op(f"and i32 {f.op(f'lshr i32 {word}, {8 * k}')}, 255") for k in range(4)]
            else:
                halves = [f.op(f"extractelement {H32} {codes}, i64 {place}") for place in (even, odd)]
                found = [f.op(f"sext i16 {half} to i32") for half in halves]
            for k, q in enumerate(found):
                if form.offset:
                    q = f.op(f"sub i32 {q}, {form.offset}")
                value = f.op(f"sitofp i32 {q} to float")
                for code, side in zip(("fmul", "fadd"), sides, strict=True):
                    if side:
                        value = f.op(f"{code} float {value}, {side[step * len(side) // form.steps]}")
                f.store("float", value, f.at(out, f.add(f.shl(i, 7), 4 * (len(found) * step + k))), 4)

    f.each("%count", 1, body)
    return f.end()


def kind_module(target: Target, kind: BlockKind) -> str:
    """IR of a kind's kernels: those of ENTRIES, which its table has in this order, and pl_place."""
    form, inline = form_of(target, kind), range(1, few_rows(target, kind) + 1)

    def then(f: Function, begin: str, end: str) -> None:
        if kind.both > 1:
            superblocks.round_sums(f, target, kind, begin, end)

    if kind.by_bytes and target.wide:
        few = {rows: twofold.packed(target, kind, rows) for rows in inline}
        parts, many, rounding = [], twofold.wide(target, kind), twofold.round_rows(target, kind)
    elif form.by_superblocks:
        few = {rows: superblocks.packed(target, kind, rows) for rows in inline}
        parts, many = superblocks.tiles(target, kind), superblocks.wide(target, kind)
        rounding = round_rows(target, kind, then)
    else:
        few = {rows: packed(target, kind, rows) for rows in inline}
        parts = [] if target.wide else [part(target, kind, rows) for rows in range(1, MOST + 1)]
        many = (in_registers if target.wide else wide)(target, kind)
        rounding = round_rows(target, kind, then)
    return "\n".join([
        DECLARATIONS, INTRINSICS,
        *parts, *few.values(), many, embed(target, kind), place_codes(kind, form.by_bytes), rounding,
        dispatcher("pl_packed", PACKED_ARGS, "rows", few),
    ])  # fmt: skip
