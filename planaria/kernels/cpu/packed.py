"""Products with packed weights (pack.py): IR of one kind's kernels, which is an object of its own, compiled when a
weight of that kind is first there.

A row is rounded to 15 bits, each block of 32 by its own largest value (vector.quantise), products of a block are summed
exactly, and the sums are scaled and added in float32. The order of additions is that of micro.py's rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from planaria.kernels.blocks import BLOCK, LEVELS, BlockKind
from planaria.kernels.cpu.codes import place as place_codes
from planaria.kernels.cpu.emit import F32, I32, Function
from planaria.kernels.cpu.micro import (
    DECLARATIONS,
    H32,
    ROUNDED_BYTES,
    STREAM_AHEAD,
    dispatcher,
    finish,
    prefetch,
    rows_of,
)
from planaria.kernels.cpu.target import Target
from planaria.kernels.objects import initialise

I64 = "<32 x i32>"
B32 = "<32 x i8>"


class Unpack:
    """A block of 32 along K of one packed panel."""

    def __init__(self, target: Target, kind: BlockKind) -> None:
        self.target, self.kind, self.groups = target, kind, BLOCK // kind.group
        self.block_bytes = 64 * kind.bits
        self.scale_bytes = kind.both * (16 * self.groups if kind.small else 32)
        self.shared_bytes = kind.both * 32 if kind.small else 0
        self.count = 1 + (kind.both - 1) * self.groups  # of `factors`

    def places(self, f: Function, scales: str, blocks: str, block: str) -> tuple[str, str]:
        """Addresses of a block's scales, and of its superblock's numbers. scales: as `Packed` has it, in a panel."""
        base = f.op(f"and i64 {scales}, -8")
        own = f.op(f"add i64 {base}, {f.mul(block, self.scale_bytes)}")
        if not self.shared_bytes:
            return own, own
        place = f.op(f"and i64 {scales}, 7")
        which = f.op(f"lshr i64 {f.op(f'add i64 {block}, {place}')}, 3")
        behind = f.op(f"add i64 {base}, {f.mul(blocks, self.scale_bytes)}")
        return own, f.op(f"add i64 {behind}, {f.mul(which, self.shared_bytes)}")

    def factors(self, f: Function, own: str, shared: str) -> list[str]:
        """For each column what sums of a block are multiplied by, then minima: one, or one for each half."""

        def half(pointer: str) -> str:
            return f.op(f"fpext <16 x half> {f.load('<16 x half>', pointer, 2)} to {F32}")

        if not self.kind.small:
            return [half(f.at(own, 32 * i)) for i in range(self.kind.both)]
        scale = half(shared)
        if self.groups == 1:
            scale = f.vec("fmul", scale, f.op(f"sitofp {I32} {self._small(f, own, 0)} to {F32}"))
        if self.kind.both == 1:
            return [scale]
        less = f.op(f"fneg {F32} {half(f.at(shared, 32))}")
        small = [self._small(f, own, self.groups + g) for g in range(self.groups)]
        return [scale] + [f.vec("fmul", less, f.op(f"sitofp {I32} {m} to {F32}")) for m in small]

    def sub_scales(self, f: Function, own: str) -> list[str]:
        """Of either half, where these have scales of their own: they multiply sums as the integers they are."""
        return [self._small(f, own, g) for g in range(2)] if self.groups == 2 else []

    def _small(self, f: Function, own: str, index: int) -> str:
        return f.op(f"sext <16 x i8> {f.load('<16 x i8>', f.at(own, 16 * index), 1)} to {I32}")

    def prefetch(self, f: Function, panel: str, block: str, ahead: int | str) -> None:
        """Ask for this block's share of a panel's bytes, `ahead` bytes on."""
        size = self.block_bytes + self.scale_bytes + self.shared_bytes // 8
        place = f.at(f.at(panel, f.mul(block, size)), ahead)
        for line in range(0, size, 64):
            prefetch(f, f.at(place, line))

    def steps(self, f: Function, block: str) -> Iterator[str]:
        """Codes int16 [16][2], two neighbours along K of each column, in order of K, without their offset; each is
        emitted when asked for, so that few values are alive at a time."""
        if self.kind.bits == 8:
            for step in range(16):
                yield f.op(f"sext <32 x i8> {f.load('<32 x i8>', f.at(block, 32 * step), 32)} to {H32}")
            return
        words = [""] * 2
        for step in range(16):
            code, below = "", 0
            for number, (_, bits, _) in enumerate(self.kind.planes):
                word, turn = divmod(step * bits, 16)
                if not turn:
                    words[number] = f.load(H32, f.at(block, 64 * (below + word)), 64)
                part = shifted(f, words[number], turn - below)
                part = f.op(f"and {H32} {part}, {splat16(((1 << bits) - 1) << below)}")
                code = f.op(f"or {H32} {code}, {part}") if code else part
                below += bits
            yield self._level(f, code) if self.kind.levels else code

    def _level(self, f: Function, codes: str) -> str:
        if self.target.wide:
            table = ", ".join(f"i16 {v}" for v in LEVELS * 2)
            return f.op(f"call {H32} @llvm.x86.avx512.permvar.hi.512({H32} <{table}>, {H32} {codes})")
        # bytes of a table of 16, in each half of 256 bits; the upper bytes of codes are 0
        table, halves = ", ".join(f"i8 {v}" for v in LEVELS * 2), []
        for half in range(2):
            picked = ", ".join(f"i32 {16 * half + i}" for i in range(16))
            index = f.op(f"shufflevector {H32} {codes}, {H32} poison, <16 x i32> <{picked}>")
            halves.append(self._looked_up(f, f"<{table}>", f.op(f"bitcast <16 x i16> {index} to {B32}")))
        together = ", ".join(f"i32 {i}" for i in range(64))
        found = f.op(f"shufflevector {B32} {halves[0]}, {B32} {halves[1]}, <64 x i32> <{together}>")
        signed = f.op(f"shl {H32} {f.op(f'bitcast <64 x i8> {found} to {H32}')}, {splat16(8)}")
        return f.op(f"ashr {H32} {signed}, {splat16(8)}")

    @staticmethod
    def _looked_up(f: Function, table: str, index: str) -> str:
        """Bytes of a table, which both halves of it hold."""
        if has_avx2():
            return f.op(f"call {B32} @llvm.x86.avx2.pshuf.b({B32} {table}, {B32} {index})")
        found = "poison"
        for i in range(32):
            at = f.op(f"extractelement {B32} {index}, i64 {i}")
            level = f.op(f"extractelement {B32} {table}, i8 {at}")
            found = f.op(f"insertelement {B32} {found}, i8 {level}, i64 {i}")
        return found


@functools.cache
def has_avx2() -> bool:
    return bool(initialise().get_host_cpu_features().get("avx2"))


def splat16(value: int) -> str:
    return "<" + ", ".join([f"i16 {value}"] * 32) + ">"


def shifted(f: Function, lanes: str, right: int) -> str:
    if right == 0:
        return lanes
    return f.op(f"{'lshr' if right > 0 else 'shl'} {H32} {lanes}, {splat16(abs(right))}")


def splat_word(f: Function, pointer: str) -> str:
    """The 4 bytes at pointer, to all lanes."""
    return f.splat("i32", f.load("i32", pointer, 4))


def add_pairs(f: Function, target: Target, acc: str, w: str, x: str) -> str:
    """acc i32 [16] plus w[i][0] * x[0] + w[i][1] * x[1] of int16: one instruction or two (vpdpwssd, pmaddwd), which
    LLVM finds by itself; it takes three times as long to."""
    if target.wide:
        sums = f.op(f"call {I32} @llvm.x86.avx512.pmaddw.d.512({H32} {w}, {H32} {x})")
        return f.op(f"add {I32} {acc}, {sums}")
    wide = [f.op(f"sext {H32} {v} to {I64}") for v in (w, x)]
    product = f.op(f"mul nsw {I64} {wide[0]}, {wide[1]}")
    halves = []
    for odd in (0, 1):
        mask = ", ".join(f"i32 {2 * i + odd}" for i in range(16))
        halves.append(f.op(f"shufflevector {I64} {product}, {I64} poison, <16 x i32> <{mask}>"))
    return f.op(f"add {I32} {acc}, {f.op(f'add {I32} {halves[0]}, {halves[1]}')}")


def numbers(f: Function, x: str, factors: int) -> list[str]:
    """Of a block of a row, rounded: its scale, and what so many factors but the first are multiplied by."""
    scale = f.splat("float", f.load("float", f.at(x, 64), 4))
    if factors == 2:
        return [scale, f.splat("float", f.load("float", f.at(x, 68), 4))]
    sums = [f.op(f"sitofp {I32} {splat_word(f, f.at(x, 72 + 4 * i))} to {F32}") for i in range(factors - 1)]
    return [scale, *(f.vec("fmul", sum, scale) for sum in sums)]


def scaled(f: Function, total: str, sums: str, row: Sequence[str], factors: Sequence[str]) -> str:
    """total plus a block's sums i32, scaled, plus minima. row: its `numbers`."""
    total = f.fma(f.vec("fmul", f.op(f"sitofp {I32} {sums} to {F32}"), row[0]), factors[0], total)
    for sum, minimum in zip(row[1:], factors[1:], strict=True):
        total = f.fma(sum, minimum, total)
    return total


ENTRIES = ("pl_packed", "pl_wide", "pl_embed")
PACKED, WIDE, EMBED = range(3)  # their places
PACKED_ARGS = ("rows", "x", "ldx", "w", "scales", "blocks", "out", "ldo", "mode", "bias")


def packed(target: Target, kind: BlockKind, rows: int) -> str:
    """out[rows][16] of one panel: `w` is its codes, x rows that are rounded."""
    f = Function(f"pl_packed_{rows}", PACKED_ARGS)
    unpack, w, xs = Unpack(target, kind), f.ptr("%w"), rows_of(f, "%x", "%ldx", rows)
    steps_each = kind.group // 2

    def body(i: str, acc: list[str]) -> list[str]:
        unpack.prefetch(f, w, i, STREAM_AHEAD)  # codes and scales of the panels that follow
        own, shared = (f.ptr(p) for p in unpack.places(f, "%scales", "%blocks", i))
        x_at = [f.at(x, f.mul(i, ROUNDED_BYTES)) for x in xs]
        sub_scales = unpack.sub_scales(f, own)
        part, sums = ["zeroinitializer"] * rows, ["zeroinitializer"] * rows
        for step, codes in enumerate(unpack.steps(f, f.at(w, f.mul(i, unpack.block_bytes)))):
            for r in range(rows):
                x = f.op(f"bitcast {I32} {splat_word(f, f.at(x_at[r], 4 * step))} to {H32}")
                part[r] = add_pairs(f, target, part[r], codes, x)
            if (step + 1) % steps_each:
                continue
            half = step // steps_each
            for r in range(rows):
                whole = part[r]
                if kind.offset:
                    at = f.at(x_at[r], 72 + 4 * half)
                    count = splat_word(f, at)
                    if unpack.groups == 1:
                        count = f.op(f"add {I32} {count}, {splat_word(f, f.at(at, 4))}")
                    less = f.op(f"mul {I32} {count}, {f.const_i32(kind.offset)}")
                    whole = f.op(f"sub {I32} {whole}, {less}")
                if sub_scales:
                    whole = f.op(f"mul {I32} {whole}, {sub_scales[half]}")
                sums[r] = f.op(f"add {I32} {sums[r]}, {whole}")
                part[r] = "zeroinitializer"
        factors = unpack.factors(f, own, shared)
        return [scaled(f, acc[r], sums[r], numbers(f, x_at[r], len(factors)), factors) for r in range(rows)]

    total = f.loop(0, "%blocks", 1, [(F32, "zeroinitializer")] * rows, body)
    finish(f, target, [[t] for t in total], "%out", "%ldo", "%mode", "%bias")
    return f.text()


PART_ARGS = ("x", "ldx", "codes", "acc")
FACTOR_BYTES = 192  # of a panel: up to three vectors
CODE_BYTES = 1024  # of a block of a panel: 16 steps


def part(target: Target, rows: int, panels: int, factors: int) -> str:
    """acc[rows][16 * panels] += one block's products: `codes` [steps][panels] and behind them factors [panels][3] as
    `wide` leaves them. The totals are in memory: the registers hold the sums of the block.

    The order of additions is that of `packed`.
    """
    f = Function(f"pl_part_{rows}_{panels}", PART_ARGS)
    codes, acc, xs = f.ptr("%codes"), f.ptr("%acc"), rows_of(f, "%x", "%ldx", rows)

    def body(i: str, sums: list[str]) -> list[str]:
        code_at = f.at(codes, f.mul(i, 16 * panels))
        x_at = [f.at(x, i) for x in xs]
        for u in range(2):
            ws = [f.load(H32, f.at(code_at, 64 * (u * panels + v)), 64) for v in range(panels)]
            for r in range(rows):
                x = f.op(f"bitcast {I32} {splat_word(f, f.at(x_at[r], 4 * u))} to {H32}")
                for v in range(panels):
                    sums[r * panels + v] = add_pairs(f, target, sums[r * panels + v], ws[v], x)
        return sums

    sums = f.loop(0, 64, 8, [(I32, "zeroinitializer")] * (rows * panels), body)
    found = []
    for v in range(panels):
        place = f.at(codes, CODE_BYTES * panels + FACTOR_BYTES * v)
        found.append([f.load(F32, f.at(place, 64 * i), 64) for i in range(factors)])
    for r in range(rows):
        row = numbers(f, xs[r], factors)
        for v in range(panels):
            total = f.at(acc, 64 * (r * panels + v))
            f.store(F32, scaled(f, f.load(F32, total, 64), sums[r * panels + v], row, found[v]), total, 64)
    return f.end()


WIDE_ARGS = (
    "panels", "rows", "x", "ldx", "w", "scales", "blocks", "stride", "acc", "codes", "fetch",
)  # fmt: skip


def wide(target: Target, kind: BlockKind, panels: int) -> str:
    """acc[rows][16 * panels] = the products of `packed` for several panels, `stride` apart, and many rows: a block is
    unpacked into `codes` (CODE_BYTES and FACTOR_BYTES for each panel) and used for all rows.

    Asks for the panels after these; and, with each tile of each block, for the 512 bytes at the next address in the
    list `fetch`.
    """
    f = Function(f"pl_wide_{panels}", WIDE_ARGS)
    unpack, most = Unpack(target, kind), target.tile_rows
    w, codes = f.ptr("%w"), f.ptr("%codes")
    f.do(f"call void @llvm.memset.p0.i64(ptr {f.ptr('%acc')}, i8 0, i64 {f.mul('%rows', 64 * panels)}, i1 false)")
    ahead = f.mul("%stride", panels)

    def tile_of(rows: int, first: str, x: str) -> None:
        passed = [
            f.op(f"add i64 {x}, {f.mul('%ldx', first)}"), "%ldx", "%codes",
            f.op(f"add i64 %acc, {f.mul(first, 64 * panels)}"),
        ]  # fmt: skip
        f.do(f"call void @pl_part_{rows}_{panels}({', '.join(f'i64 {a}' for a in passed)})")

    def body(i: str, carried: list[str]) -> list[str]:
        places = [f.ptr(p) for p in unpack.places(f, "%scales", "%blocks", i)]

        def unpack_panel(v: str) -> None:
            panel, own, shared = (f.at(place, f.mul(v, "%stride")) for place in (w, *places))
            unpack.prefetch(f, panel, i, ahead)
            sub_scales, to = [pairs_of(f, s) for s in unpack.sub_scales(f, own)], f.at(codes, f.shl(v, 6))
            for step, code in enumerate(unpack.steps(f, f.at(panel, f.mul(i, unpack.block_bytes)))):
                if kind.offset:
                    code = f.op(f"sub {H32} {code}, {splat16(kind.offset)}")
                if sub_scales:
                    code = f.op(f"mul {H32} {code}, {sub_scales[step // 8]}")
                f.store(H32, code, f.at(to, 64 * step * panels), 64)
            to = f.at(codes, f.add(f.mul(v, FACTOR_BYTES), CODE_BYTES * panels))
            for k, factor in enumerate(unpack.factors(f, own, shared)):
                f.store(F32, factor, f.at(to, 64 * k), 64)

        f.each(panels, 1, unpack_panel)
        x = f.op(f"add i64 %x, {f.mul(i, ROUNDED_BYTES)}")
        rest = f.op(f"urem i64 %rows, {most}")
        whole = f.op(f"sub i64 %rows, {rest}")

        def full(first: str, inner: list[str]) -> list[str]:
            wanted = f.ptr(inner[0])
            line = f.load("ptr", wanted, 8)
            for k in range(8):
                prefetch(f, f.at(line, 64 * k))
            tile_of(most, first, x)
            return [f.op(f"add i64 {inner[0]}, 8")]

        after = f.loop(0, whole, most, [("i64", carried[0])], full)
        labels = [f.label() for _ in range(most)]
        table = " ".join(f"i64 {r}, label %{labels[r]}" for r in range(1, most))
        f.do(f"switch i64 {rest}, label %{labels[0]} [ {table} ]")
        for rows in range(1, most):
            f.start(labels[rows])
            tile_of(rows, whole, x)
            f.branch(labels[0])
        f.start(labels[0])
        return after

    f.loop(0, "%blocks", 1, [("i64", "%fetch")], body)
    return f.end()


def pairs_of(f: Function, values: str) -> str:
    """i32 [16] that fit 16 bits, each twice: int16 [16][2]."""
    low = f.op(f"and {I32} {values}, {f.const_i32(65535)}")
    high = f.op(f"shl {I32} {values}, {f.const_i32(16)}")
    return f.op(f"bitcast {I32} {f.op(f'or {I32} {low}, {high}')} to {H32}")


EMBED_ARGS = ("w", "scales", "column", "count", "out")


def embed(target: Target, kind: BlockKind) -> str:
    """Column `column` of a panel of `count` blocks, to float32."""
    f = Function("pl_embed", EMBED_ARGS)
    unpack, w, out = Unpack(target, kind), f.ptr("%w"), f.ptr("%out")
    even = f.shl("%column", 1)
    odd = f.add(even, 1)

    def body(i: str) -> None:
        own, shared = (f.ptr(p) for p in unpack.places(f, "%scales", "%count", i))
        scale, *minima = unpack.factors(f, own, shared)
        halves = [f.op(f"sitofp {I32} {s} to {F32}") for s in unpack.sub_scales(f, own)]
        scales = [f.vec("fmul", scale, half) for half in halves] or [scale]
        mine = [[f.op(f"extractelement {F32} {v}, i64 %column") for v in side] for side in (scales, minima)]
        for step, codes in enumerate(unpack.steps(f, f.at(w, f.mul(i, unpack.block_bytes)))):
            for k, place in enumerate((even, odd)):
                q = f.op(f"sext i16 {f.op(f'extractelement {H32} {codes}, i64 {place}')} to i32")
                if kind.offset:
                    q = f.op(f"sub i32 {q}, {kind.offset}")
                value = f.op(f"sitofp i32 {q} to float")
                for code, side in zip(("fmul", "fadd"), mine, strict=True):
                    if side:
                        value = f.op(f"{code} float {value}, {side[step * len(side) // 16]}")
                f.store("float", value, f.at(out, f.add(f.shl(i, 7), 8 * step + 4 * k)), 4)

    f.each("%count", 1, body)
    return f.end()


def kind_module(target: Target, kind: BlockKind) -> str:
    """IR of a kind's kernels: those of ENTRIES, which its table has in this order, and pl_place."""
    widths = sorted({1, target.tile_panels})
    few = {rows: packed(target, kind, rows) for rows in range(1, target.inline_rows + 1)}
    many = {panels: wide(target, kind, panels) for panels in widths}
    count = Unpack(target, kind).count
    parts = [part(target, rows, panels, count) for panels in widths for rows in range(1, target.tile_rows + 1)]
    return "\n".join([
        DECLARATIONS, f"declare {B32} @llvm.x86.avx2.pshuf.b({B32}, {B32})" if has_avx2() else "",
        *parts, *few.values(), *many.values(), embed(target, kind), place_codes(kind),
        dispatcher("pl_packed", PACKED_ARGS, "rows", few), dispatcher("pl_wide", WIDE_ARGS, "panels", many),
    ])  # fmt: skip
