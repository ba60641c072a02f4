"""The inner products: IR of the tiles that all matrix work is made of.

A *panel* is 16 columns of a weight. Along K it is a row of *steps* of 64 bytes: [16] float32, or [16][2] bfloat16
(two neighbours along K of each column), which meet 4 bytes of an activation row, broadcast. The keys and values of
the cache have the same form, so attention uses the same tiles.

A packed weight (pack.py) meets a row in integers: the row is rounded to 15 bits, each block of 32 by its own largest
value (vector.quantise), products of a block are summed exactly, and the sums are scaled and added in float32.

The rule: one output is summed over K in ascending order in one accumulator, whatever the tile, so that it depends on
neither the number of rows nor its place among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planaria.kernels.blocks import BLOCK, KINDS, LEVELS, BlockKind
from planaria.kernels.cpu.emit import F32, I32, Function
from planaria.kernels.cpu.target import Target

B32 = "<32 x bfloat>"
H32 = "<32 x i16>"
I64 = "<32 x i32>"

Operand = tuple[str, ...]  # one or two values, see Dot

STORE_ACT, ADD_RESIDUAL, STORE_F32 = 0, 1, 2
DENSE = 0  # the kind of a weight that isn't packed; others have their numbers in blocks.py
KIND_BITS = 5  # of a kind's number
ROUNDED_MOST = 16383  # of a row's numbers: with it no sum of a block of any kind leaves 32 bits
ROUNDED_BYTES = 80  # of a block of a row: [32] int16, float32 scale, scale * sum, int32 sums of either half
STREAM_AHEAD = 6144  # bytes

DECLARATIONS = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
declare float @llvm.vector.reduce.fadd.v16f32(float, <16 x float>)
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
declare <16 x i32> @llvm.x86.avx512.pmaddw.d.512(<32 x i16>, <32 x i16>)
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare float @llvm.sqrt.f32(float)
declare <16 x float> @llvm.rint.v16f32(<16 x float>)
declare <16 x float> @llvm.maxnum.v16f32(<16 x float>, <16 x float>)
declare <16 x float> @llvm.minnum.v16f32(<16 x float>, <16 x float>)
declare <16 x float> @llvm.masked.load.v16f32.p0(ptr, i32, <16 x i1>, <16 x float>)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, i32, <16 x i1>)
declare <16 x i16> @llvm.masked.load.v16i16.p0(ptr, i32, <16 x i1>, <16 x i16>)
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


class Dot:
    """How a step is multiplied on one target. An operand is one bfloat16 vector, one float32 vector, or the float32
    vectors of the even and the odd element of each pair."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def split(self, f: Function, words: str) -> Operand:
        low = f.op(f"shl {I32} {words}, {f.const_i32(16)}")
        high = f.op(f"and {I32} {words}, {f.const_i32(-65536)}")
        return f.op(f"bitcast {I32} {low} to {F32}"), f.op(f"bitcast {I32} {high} to {F32}")

    def weight(self, f: Function, pointer: str) -> Operand:
        """The 64 bytes at pointer."""
        if self.target.native:
            return (f.load(B32, pointer, 64),)
        if self.target.dtype == "float32":
            return (f.load(F32, pointer, 64),)
        return self.split(f, f.load(I32, pointer, 64))

    def broadcast(self, f: Function, pointer: str) -> Operand:
        """The 4 bytes at pointer, to all lanes."""
        if self.target.dtype == "float32":
            return (f.splat("float", f.load("float", pointer, 4)),)
        word = f.load("i32", pointer, 4)
        if self.target.native:
            return (f.op(f"bitcast {I32} {f.splat('i32', word)} to {B32}"),)
        low = f.op(f"bitcast i32 {f.op(f'shl i32 {word}, 16')} to float")
        high = f.op(f"bitcast i32 {f.op(f'and i32 {word}, -65536')} to float")
        return f.splat("float", low), f.splat("float", high)

    def broadcast_widened(self, f: Function, pointer: str) -> Operand:
        """A step of a row that was widened to float32, to all lanes."""
        return tuple(f.splat("float", f.load("float", f.at(pointer, 4 * part), 4)) for part in range(self.target.pair))

    def multiply(self, f: Function, acc: str, w: Operand, x: Operand) -> str:
        if self.target.native:
            return f.op(f"call {F32} @llvm.x86.avx512bf16.dpbf16ps.512({F32} {acc}, {B32} {w[0]}, {B32} {x[0]})")
        for a, b in zip(w, x, strict=True):
            acc = f.fma(a, b, acc)
        return acc


class Elements:
    """16 elements of an activation in memory, as float32."""

    def __init__(self, f: Function, target: Target) -> None:
        self.f, self.target = f, target

    def _widen(self, halves: str) -> str:
        f = self.f
        words = f.op(f"shl {I32} {f.op(f'zext <16 x i16> {halves} to {I32}')}, {f.const_i32(16)}")
        return f.op(f"bitcast {I32} {words} to {F32}")

    def _narrow(self, value: str) -> str:
        """To bfloat16, nearest even."""
        f = self.f
        if self.target.native:
            rounded = f.op(f"fptrunc {F32} {value} to <16 x bfloat>")
            return f.op(f"bitcast <16 x bfloat> {rounded} to <16 x i16>")
        bits = f.op(f"bitcast {F32} {value} to {I32}")
        odd = f.op(f"and {I32} {f.op(f'lshr {I32} {bits}, {f.const_i32(16)}')}, {f.const_i32(1)}")
        rounded = f.op(f"add {I32} {f.op(f'add {I32} {bits}, {odd}')}, {f.const_i32(0x7FFF)}")
        quiet = f.op(f"or {I32} {bits}, {f.const_i32(0x400000)}")
        nan = f.op(f"fcmp uno {F32} {value}, {value}")
        chosen = f.op(f"select <16 x i1> {nan}, {I32} {quiet}, {I32} {rounded}")
        return f.op(f"trunc {I32} {f.op(f'lshr {I32} {chosen}, {f.const_i32(16)}')} to <16 x i16>")

    def place(self, array: str, i: str) -> str:
        """Where element i is."""
        return self.f.at(array, self.f.mul(i, self.target.item))

    def load(self, pointer: str) -> str:
        if self.target.item == 4:
            return self.f.load(F32, pointer)
        return self._widen(self.f.load("<16 x i16>", pointer))

    def store(self, value: str, pointer: str) -> None:
        if self.target.item == 4:
            self.f.store(F32, value, pointer)
        else:
            self.f.store("<16 x i16>", self._narrow(value), pointer)

    def load_some(self, pointer: str, mask: str) -> str:
        """Lanes outside the mask are 0 and are not read."""
        if self.target.item == 4:
            return self.f.load_some(pointer, mask)
        return self._widen(self.f.load_some(pointer, mask, "i16"))


def dispatcher(name: str, args: Sequence[str], selector: str, cases: dict[int, str]) -> str:
    """A function that calls one of the cases (each the last function of its IR) by the value of its argument
    `selector`, which the cases get as well."""
    f = Function(name, args)
    passed = ", ".join(f"i64 %{a}" for a in args)
    table = " ".join(f"i64 {key}, label %c{key}" for key in cases)
    f.do(f"switch i64 %{selector}, label %none [ {table} ]")
    for key, callee in cases.items():
        f.start(f"c{key}")
        f.do(f"tail call void @{callee.rpartition('define void @')[2].partition('(')[0]}({passed})")
        f.ret()
    f.start("none")
    return f.end()


def rows_of(f: Function, address: str, ld: str, rows: int) -> list[str]:
    """Pointers to rows `ld` bytes apart."""
    first = f.ptr(address)
    return [first if r == 0 else f.at(first, f.mul(ld, r)) for r in range(rows)]


def finish(f: Function, target: Target, acc: list[list[str]], out: str, ldo: str, mode: str, bias: str) -> None:
    """Add the bias to acc[rows][panels] and write it in one of three ways."""
    act = Elements(f, target)
    bias_at = f.ptr(bias)
    shifts = [f.load(F32, f.at(bias_at, 64 * v), 4) for v in range(len(acc[0]))]
    total = [[f.vec("fadd", a, b) for a, b in zip(row, shifts, strict=True)] for row in acc]
    rows = rows_of(f, out, ldo, len(acc))
    labels = [f.label() for _ in range(4)]
    f.do(
        f"switch i64 {mode}, label %{labels[STORE_ACT]} "
        f"[ i64 {ADD_RESIDUAL}, label %{labels[ADD_RESIDUAL]} i64 {STORE_F32}, label %{labels[STORE_F32]} ]"
    )
    for how in (STORE_ACT, ADD_RESIDUAL, STORE_F32):
        f.start(labels[how])
        for pointer, values in zip(rows, total, strict=True):
            for v, value in enumerate(values):
                if how == STORE_ACT:
                    act.store(value, f.at(pointer, 16 * target.item * v))
                else:
                    place = f.at(pointer, 64 * v)
                    if how == ADD_RESIDUAL:
                        value = f.vec("fadd", f.load(F32, place, 4), value)
                    f.store(F32, value, place, 4)
        f.branch(labels[3])
    f.start(labels[3])
    f.ret()


TILE_ARGS = ("rows", "x", "ldx", "wp", "steps", "out", "ldo", "mode", "bias", "plan")


def prefetch(f: Function, pointer: str) -> None:
    """Ask for a line, into the second-level cache: into the first, it would drive out what is being used."""
    f.do(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 2, i32 1)")


def tile(target: Target, rows: int, panels: int, name: str = "pl_tile") -> str:
    """out[rows][16 * panels] = x . w: `wp` holds the address of each panel; steps is a multiple of 8.

    A tile of one panel asks for memory some way ahead, where the next panel of the same weight follows. A wider one
    asks for what `plan` says: an address and 4 x a number of steps, a line each step; then an address and 4 x a
    number of steps, a line each second step. A "pl_row_tile" of one panel takes x in float32 where the target widens
    rows, and asks for memory from the address that `plan` says first, as many bytes as its second number / 2^20 of
    the panel.
    """
    f, dot, of_rows = Function(f"{name}_{rows}_{panels}", TILE_ARGS), Dot(target), name == "pl_row_tile"
    widened = of_rows and target.widens
    broadcast, step = (dot.broadcast_widened, 4 * target.pair) if widened else (dot.broadcast, 4)
    table = f.ptr("%wp")
    weights = [f.load("ptr", f.at(table, 8 * v), 8) for v in range(panels)]
    xs = rows_of(f, "%x", "%ldx", rows)
    if panels > 1 or of_rows:
        plan = f.ptr("%plan")
        ahead, limit = f.load("ptr", plan, 8), f.load("i64", f.at(plan, 8), 8)
    if panels > 1:
        other, other_limit = f.load("ptr", f.at(plan, 16), 8), f.load("i64", f.at(plan, 24), 8)
    unroll = 4 if rows * panels <= 8 else 2
    end = f.shl("%steps", 2)  # counted in bytes of x

    def body(i: str, acc: list[str]) -> list[str]:
        wide = f.shl(i, 4)
        w_at = [f.at(w, wide) for w in weights]
        place = f.mul(i, step // 4)
        x_at = [f.at(x, place) for x in xs]
        if of_rows:
            line = f.at(ahead, f.op(f"lshr i64 {f.mul(i, limit)}, 16"))
            for u in range(unroll):
                prefetch(f, f.at(line, 64 * u))
        elif panels == 1:
            for u in range(unroll):
                prefetch(f, f.at(w_at[0], 64 * u + STREAM_AHEAD))
        for u in range(unroll):
            ws = [dot.weight(f, f.at(w, 64 * u)) for w in w_at]
            for r in range(rows):
                x = broadcast(f, f.at(x_at[r], step * u))
                for v in range(panels):
                    acc[r * panels + v] = dot.multiply(f, acc[r * panels + v], ws[v], x)
        if panels > 1:
            # in a block of its own: among the products LLVM would keep to the order of memory accesses, and spill
            def fetch() -> None:
                place = f.at(ahead, f.shl(i, 4))
                for u in range(unroll):
                    prefetch(f, f.at(place, 64 * u))

            def fetch_other() -> None:
                prefetch(f, f.at(other, f.shl(i, 3)))

            f.when(f.op(f"icmp slt i64 {i}, {limit}"), fetch)
            f.when(f.op(f"icmp slt i64 {i}, {other_limit}"), fetch_other)
        return acc

    sums = f.loop(0, end, 4 * unroll, [(F32, "zeroinitializer")] * (rows * panels), body)
    acc = [sums[r * panels : (r + 1) * panels] for r in range(rows)]
    finish(f, target, acc, "%out", "%ldo", "%mode", "%bias")
    return f.text()


VALUE_ARGS = ("rows", "panels", "p", "ldp", "vp", "chunks", "first", "out", "ldo", "state")


def values(target: Target, rows: int, panels: int) -> str:
    """out = out * a + (p . v) * b, a and b per row from `state` (float32 [rows][4]: m, l, a, b).

    `vp` holds the address of each chunk of 16 tokens; panel v of a chunk is 1024 / pair bytes further; `first` is
    the byte offset of the first panel.
    """
    f, dot = Function(f"pl_values_{rows}_{panels}", VALUE_ARGS), Dot(target)
    steps = 16 // target.pair
    table = f.ptr("%vp")
    ps = rows_of(f, "%p", "%ldp", rows)

    def body(i: str, acc: list[str]) -> list[str]:
        chunk = f.at(f.load("ptr", f.at(table, f.shl(i, 3)), 8), "%first")
        place = f.mul(i, 4 * steps)
        p_at = [f.at(p, place) for p in ps]
        for u in range(steps):
            ws = [dot.weight(f, f.at(chunk, (v * steps + u) * 64)) for v in range(panels)]
            for r in range(rows):
                x = dot.broadcast(f, f.at(p_at[r], 4 * u))
                for v in range(panels):
                    acc[r * panels + v] = dot.multiply(f, acc[r * panels + v], ws[v], x)
        return acc

    sums = f.loop(0, "%chunks", 1, [(F32, "zeroinitializer")] * (rows * panels), body)
    state = f.ptr("%state")
    for r, pointer in enumerate(rows_of(f, "%out", "%ldo", rows)):
        keep = f.splat("float", f.load("float", f.at(state, 16 * r + 8), 4))
        take = f.splat("float", f.load("float", f.at(state, 16 * r + 12), 4))
        for v in range(panels):
            place = f.at(pointer, 64 * v)
            old = f.vec("fmul", f.load(F32, place, 4), keep)
            f.store(F32, f.fma(sums[r * panels + v], take, old), place, 4)
    return f.end()


class Unpack:
    """A block of 32 along K of one packed panel."""

    def __init__(self, target: Target, kind: BlockKind) -> None:
        self.target, self.kind, self.groups = target, kind, BLOCK // kind.group
        self.block_bytes = 64 * kind.bits
        self.scale_bytes = kind.both * (16 * self.groups if kind.small else 32)
        self.shared_bytes = kind.both * 32 if kind.small else 0

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
        # bytes of a table of 16: LLVM finds the instruction for that where there is one (pshufb)
        table, bytes = ", ".join(f"i8 {v}" for v in LEVELS), f.op(f"bitcast {H32} {codes} to <64 x i8>")
        quarters = []
        for quarter in range(4):
            picked = ", ".join(f"i32 {16 * quarter + i}" for i in range(16))
            index = f.op(f"shufflevector <64 x i8> {bytes}, <64 x i8> poison, <16 x i32> <{picked}>")
            found = "poison"
            for i in range(16):
                at = f.op(f"extractelement <16 x i8> {index}, i64 {i}")
                level = f.op(f"extractelement <16 x i8> <{table}>, i8 {at}")
                found = f.op(f"insertelement <16 x i8> {found}, i8 {level}, i64 {i}")
            quarters.append(found)
        for size in (16, 32):
            together = ", ".join(f"i32 {i}" for i in range(2 * size))
            quarters = [
                f.op(f"shufflevector <{size} x i8> {a}, <{size} x i8> {b}, <{2 * size} x i32> <{together}>")
                for a, b in zip(quarters[::2], quarters[1::2], strict=True)
            ]
        signed = f.op(f"shl {H32} {f.op(f'bitcast <64 x i8> {quarters[0]} to {H32}')}, {splat16(8)}")
        return f.op(f"ashr {H32} {signed}, {splat16(8)}")


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


PACKED_ARGS = ("rows", "x", "ldx", "w", "scales", "blocks", "out", "ldo", "mode", "bias")


def packed(target: Target, kind: BlockKind, rows: int) -> str:
    """out[rows][16] of one panel: `w` is its codes, x rows that are rounded."""
    f = Function(f"pl_packed_{kind.number}_{rows}", PACKED_ARGS)
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


def part_name(rows: int, panels: int, factors: int) -> str:
    return f"pl_part_{rows}_{panels}_{factors}"


PART_ARGS = ("x", "ldx", "codes", "acc")
FACTOR_BYTES = 192  # of a panel: up to three vectors
CODE_BYTES = 1024  # of a block of a panel: 16 steps


def part(target: Target, rows: int, panels: int, factors: int) -> str:
    """acc[rows][16 * panels] += one block's products: `codes` [steps][panels] and behind them factors [panels][3] as
    `wide` leaves them. The totals are in memory: the registers hold the sums of the block.

    The order of additions is that of `packed`.
    """
    f = Function(part_name(rows, panels, factors), PART_ARGS)
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
    "select", "rows", "x", "ldx", "w", "scales", "blocks", "stride", "acc", "codes", "fetch",
)  # fmt: skip


def wide(target: Target, kind: BlockKind, panels: int) -> str:
    """acc[rows][16 * panels] = the products of `packed` for several panels, `stride` apart, and many rows: a block is
    unpacked into `codes` (CODE_BYTES and FACTOR_BYTES for each panel) and used for all rows.

    Asks for the panels after these; and, with each tile of each block, for the 512 bytes at the next address in the
    list `fetch`.
    """
    f = Function(f"pl_wide_{kind.number}_{panels}", WIDE_ARGS)
    unpack, most = Unpack(target, kind), target.tile_rows
    factors = 1 + (kind.both - 1) * unpack.groups
    w, codes = f.ptr("%w"), f.ptr("%codes")
    f.do(f"call void @llvm.memset.p0.i64(ptr {f.ptr('%acc')}, i8 0, i64 {f.mul('%rows', 64 * panels)}, i1 false)")
    ahead = f.mul("%stride", panels)

    def tile_of(rows: int, first: str, x: str) -> None:
        passed = [
            f.op(f"add i64 {x}, {f.mul('%ldx', first)}"), "%ldx", "%codes",
            f.op(f"add i64 %acc, {f.mul(first, 64 * panels)}"),
        ]  # fmt: skip
        f.do(f"call void @{part_name(rows, panels, factors)}({', '.join(f'i64 {a}' for a in passed)})")

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


SETTLE_ARGS = ("panels", "rows", "acc", "out", "ldo", "mode", "bias")


def settle(target: Target, panels: int) -> str:
    """Write acc[rows][16 * panels] as a tile writes its sums, with bias, in one of three ways."""
    f = Function(f"pl_settle_{panels}", SETTLE_ARGS)
    row = Function(f"pl_settle_row_{panels}", SETTLE_ARGS)
    acc = row.ptr("%acc")
    values = [row.load(F32, row.at(acc, 64 * v), 64) for v in range(panels)]
    finish(row, target, [values], "%out", "%ldo", "%mode", "%bias")

    def body(r: str) -> None:
        place = f.op(f"add i64 %acc, {f.mul(r, 64 * panels)}")
        out = f.op(f"add i64 %out, {f.mul(r, '%ldo')}")
        passed = f"i64 1, i64 1, i64 {place}, i64 {out}, i64 %ldo, i64 %mode, i64 %bias"
        f.do(f"call void @pl_settle_row_{panels}({passed})")

    f.each("%rows", 1, body)
    f.ret()
    return row.text() + f.text()


def matrix_module(target: Target) -> str:
    """IR of all tiles and of the functions that choose one."""
    rows, inline = range(1, target.tile_rows + 1), range(1, target.inline_rows + 1)
    widths, value_widths = sorted({1, target.tile_panels}), sorted({1, target.value_panels})
    kinds = KINDS.values()
    tiles = {r * 4 + v: tile(target, r, v) for v in widths for r in rows}
    row_tiles = {r * 4 + 1: tile(target, r, 1, "pl_row_tile") for r in rows} if target.tile_panels == 1 else {}
    sums = {r * 8 + v: values(target, r, v) for v in value_widths for r in range(1, target.value_rows + 1)}
    inlined = {r << KIND_BITS | kind.number: packed(target, kind, r) for kind in kinds for r in inline}
    wides = {v << KIND_BITS | kind.number: wide(target, kind, v) for v in widths for kind in kinds}
    settles = {v: settle(target, v) for v in widths}
    parts = [part(target, r, v, factors) for v in widths for factors in (1, 2, 3) for r in rows]
    for cases in (tiles, row_tiles, sums, inlined, wides, settles):
        parts += cases.values()
    parts += [  # the caller passes rows * 4 + panels, or the like, as `rows`
        dispatcher("pl_tile", TILE_ARGS, "rows", tiles),
        dispatcher("pl_row_tile", TILE_ARGS, "rows", row_tiles or tiles),
        dispatcher("pl_values", VALUE_ARGS, "rows", sums), dispatcher("pl_packed", PACKED_ARGS, "rows", inlined),
        dispatcher("pl_wide", WIDE_ARGS, "select", wides), dispatcher("pl_settle", SETTLE_ARGS, "panels", settles),
    ]  # fmt: skip
    return "\n".join(parts)
