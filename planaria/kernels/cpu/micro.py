"""The inner products: IR of the tiles that all matrix work is made of.

A *panel* is 16 columns of a weight. Along K it is a row of *steps* of 64 bytes: [16] float32, or [16][2] bfloat16
(two neighbours along K of each column), which meet 4 bytes of an activation row, broadcast. The keys and values of
the cache have the same form, so attention uses the same tiles.

The rule: one output is summed over K in ascending order in one accumulator, whatever the tile, so that it depends on
neither the number of rows nor its place among them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from planaria.kernels.cpu.emit import F32, I32, Function, literal
from planaria.kernels.cpu.target import Target

B32 = "<32 x bfloat>"
H32 = "<32 x i16>"

Operand = tuple[str, ...]  # one or two values, see Dot

STORE_ACT, ADD_RESIDUAL, STORE_F32 = 0, 1, 2
Q8_0, Q4_0, Q4_1 = 0, 1, 2  # packed kinds; a dense weight is kind 3
DENSE = 3
STREAM_AHEAD = 6144  # bytes

DECLARATIONS = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
declare <16 x float> @llvm.x86.avx512.permvar.sf.512(<16 x float>, <16 x i32>)
declare float @llvm.vector.reduce.fadd.v16f32(float, <16 x float>)
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
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

    def from_pair(self, f: Function, even: str, odd: str) -> list[Operand]:
        """Operands of the steps that hold two neighbours along K, given as float32 vectors of small integers."""
        if self.target.dtype == "float32":
            return [(even,), (odd,)]
        if not self.target.native:
            return [(even, odd)]
        low = f.op(f"lshr {I32} {f.op(f'bitcast {F32} {even} to {I32}')}, {f.const_i32(16)}")
        both = f.op(f"or {I32} {low}, {f.op(f'bitcast {F32} {odd} to {I32}')}")
        return [(f.op(f"bitcast {I32} {both} to {B32}"),)]

    def store(self, f: Function, w: Operand, pointer: str) -> None:
        """An operand as `weight` reads it."""
        if self.target.native:
            f.store(B32, w[0], pointer, 64)
        elif len(w) == 1:
            f.store(F32, w[0], pointer, 64)
        else:
            low = f.op(f"lshr {I32} {f.op(f'bitcast {F32} {w[0]} to {I32}')}, {f.const_i32(16)}")
            both = f.op(f"or {I32} {low}, {f.op(f'bitcast {F32} {w[1]} to {I32}')}")
            f.store(I32, both, pointer, 64)


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


def nibble_table(kind: int) -> list[int]:
    return [q - 8 if kind == Q4_0 else q for q in range(16)]


def bf16_bits(value: int) -> int:
    bits = int(struct.unpack("<I", struct.pack("<f", float(value)))[0]) >> 16
    return bits - 65536 if bits >= 32768 else bits


class Unpack:
    """Operands of a packed block of 32 along K for one panel: 16 steps of a bfloat16 target, 32 of a float32 one.

    q4: 4 groups of 64 bytes, each 8 along K: 32 bits for each column, whose nibble i is k = 0,2,4,6,1,3,5,7 [i].
    q8: 32 rows of 16 bytes, one signed byte for each column.
    """

    def __init__(self, target: Target, kind: int) -> None:
        self.target, self.kind, self.dot = target, kind, Dot(target)
        self.block_bytes = 512 if kind == Q8_0 else 256
        self.scale_bytes = 64 if kind == Q4_1 else 32

    def scales(self, f: Function, panel: str, block: str) -> tuple[str, str]:
        """Scale and minimum (or "") of a block, for each column."""
        place = f.at(panel, f.mul(block, self.scale_bytes))

        def half(pointer: str) -> str:
            return f.op(f"fpext <16 x half> {f.load('<16 x half>', pointer, 32)} to {F32}")

        return half(place), half(f.at(place, 32)) if self.kind == Q4_1 else ""

    def prefetch(self, f: Function, panel: str, block: str, ahead: int | str) -> None:
        """Ask for this block's share of a panel's bytes, `ahead` bytes on."""
        size = self.block_bytes + self.scale_bytes
        place = f.at(f.at(panel, f.mul(block, size)), ahead)
        for line in range(0, size, 64):
            prefetch(f, f.at(place, line))

    def steps(self, f: Function, block: str) -> Iterator[Operand]:
        """Operands in order of K; each is emitted when asked for, so that few values are alive at a time."""
        if self.kind == Q8_0:
            for k in range(0, 32, 2):
                yield from self._bytes(f, block, k)
            return
        for group in range(4):
            words = f.load(I32, f.at(block, 64 * group), 64)
            for i in range(4):
                yield from self._nibbles(f, words, i)

    def _bytes(self, f: Function, block: str, k: int) -> list[Operand]:
        both = []
        for j in (k, k + 1):
            wide = f.op(f"sext <16 x i8> {f.load('<16 x i8>', f.at(block, 16 * j), 16)} to {I32}")
            both.append(f.op(f"sitofp {I32} {wide} to {F32}"))
        return self.dot.from_pair(f, both[0], both[1])

    def _nibbles(self, f: Function, words: str, i: int) -> list[Operand]:
        if self.target.native:
            table = ", ".join(f"i16 {bf16_bits(v)}" for v in nibble_table(self.kind) * 2)
            lanes = f.op(f"bitcast {I32} {words} to {H32}")
            if i:
                amount = ", ".join([f"i16 {4 * i}"] * 32)
                lanes = f.op(f"lshr {H32} {lanes}, <{amount}>")
            found = f.op(f"call {H32} @llvm.x86.avx512.permvar.hi.512({H32} <{table}>, {H32} {lanes})")
            return [(f.op(f"bitcast {H32} {found} to {B32}"),)]
        both = []
        for shift in (4 * i, 4 * i + 16):
            lanes = words if shift == 0 else f.op(f"lshr {I32} {words}, {f.const_i32(shift)}")
            if self.target.wide:
                table = ", ".join(f"float {literal(v)}" for v in nibble_table(self.kind))
                both.append(f.op(f"call {F32} @llvm.x86.avx512.permvar.sf.512({F32} <{table}>, {I32} {lanes})"))
            else:
                small = f.op(f"and {I32} {lanes}, {f.const_i32(15)}")
                if self.kind == Q4_0:
                    small = f.op(f"sub {I32} {small}, {f.const_i32(8)}")
                both.append(f.op(f"sitofp {I32} {small} to {F32}"))
        return self.dot.from_pair(f, both[0], both[1])


PACKED_ARGS = ("rows", "x", "ldx", "w", "scales", "blocks", "out", "ldo", "mode", "bias", "sums", "lds")


def packed(target: Target, kind: int, rows: int) -> str:
    """out[rows][16] = sum over blocks b of scale[b] * (x . q)[b] + min[b] * sums[b], for one panel.

    `w` is the panel's packed codes; `scales` float16 [blocks][16] (q4_1: [blocks][2][16], scale then minimum);
    `sums` float32 [rows][blocks]: sums of x over a block.
    """
    f = Function(f"pl_packed_{kind}_{rows}", PACKED_ARGS)
    dot, unpack = Dot(target), Unpack(target, kind)
    w, scales = f.ptr("%w"), f.ptr("%scales")
    xs, ss = rows_of(f, "%x", "%ldx", rows), rows_of(f, "%sums", "%lds", rows)

    def body(i: str, acc: list[str]) -> list[str]:
        block = f.at(w, f.mul(i, unpack.block_bytes))
        unpack.prefetch(f, w, i, STREAM_AHEAD)  # codes and scales of the panels that follow
        x_at = [f.at(x, f.mul(i, 128 // target.pair)) for x in xs]
        part = ["zeroinitializer"] * rows
        for step, operand in enumerate(unpack.steps(f, block)):
            for r in range(rows):
                part[r] = dot.multiply(f, part[r], operand, dot.broadcast(f, f.at(x_at[r], 4 * step)))
        d, m = unpack.scales(f, scales, i)
        acc = [f.fma(part[r], d, acc[r]) for r in range(rows)]
        if m:
            acc = [f.fma(block_sum(f, ss[r], i), m, acc[r]) for r in range(rows)]
        return acc

    total = f.loop(0, "%blocks", 1, [(F32, "zeroinitializer")] * rows, body)
    finish(f, target, [[t] for t in total], "%out", "%ldo", "%mode", "%bias")
    return f.text()


def block_sum(f: Function, row: str, block: str) -> str:
    return f.splat("float", f.load("float", f.at(row, f.shl(block, 2)), 4))


def part_name(rows: int, panels: int, minimum: bool) -> str:
    return f"pl_part_{rows}_{panels}_{int(minimum)}"


PART_ARGS = ("x", "ldx", "codes", "scales", "stride", "acc", "sums", "lds")


def part(target: Target, rows: int, panels: int, minimum: bool) -> str:
    """acc[rows][16 * panels] += one block's products: `codes` [steps][panels] as `unpacked` leaves them, `scales`
    those of the block in the first panel. The totals are in memory: the registers hold the sums of the block.

    The order of additions is that of `packed`.
    """
    f, dot = Function(part_name(rows, panels, minimum), PART_ARGS), Dot(target)
    unpack = Unpack(target, Q4_1 if minimum else Q4_0)
    codes, scales, acc = f.ptr("%codes"), f.ptr("%scales"), f.ptr("%acc")
    xs, ss = rows_of(f, "%x", "%ldx", rows), rows_of(f, "%sums", "%lds", rows)

    def body(i: str, sums: list[str]) -> list[str]:
        code_at = f.at(codes, f.mul(i, 16 * panels))
        x_at = [f.at(x, i) for x in xs]
        for u in range(2):
            ws = [dot.weight(f, f.at(code_at, 64 * (u * panels + v))) for v in range(panels)]
            for r in range(rows):
                x = dot.broadcast(f, f.at(x_at[r], 4 * u))
                for v in range(panels):
                    sums[r * panels + v] = dot.multiply(f, sums[r * panels + v], ws[v], x)
        return sums

    steps = 32 // target.pair
    sums = f.loop(0, 4 * steps, 8, [(F32, "zeroinitializer")] * (rows * panels), body)
    for v in range(panels):
        d, m = unpack.scales(f, scales if v == 0 else f.at(scales, f.mul("%stride", v)), "0")
        for r in range(rows):
            place = f.at(acc, 64 * (r * panels + v))
            total = f.fma(sums[r * panels + v], d, f.load(F32, place, 64))
            if m:
                total = f.fma(block_sum(f, ss[r], "0"), m, total)
            f.store(F32, total, place, 64)
    return f.end()


WIDE_ARGS = (
    "select", "rows", "x", "ldx", "w", "scales", "blocks", "stride", "acc", "sums", "lds", "codes", "fetch",
)  # fmt: skip


def wide(target: Target, kind: int, panels: int) -> str:
    """acc[rows][16 * panels] = the products of `packed` for several panels, `stride` apart, and many rows: a block of
    codes is unpacked into `codes` (memory of 64 bytes for each step and panel) and used for all rows.

    Asks for the panels after these; and, with each tile of each block, for the 512 bytes at the next address in the
    list `fetch`.
    """
    f = Function(f"pl_wide_{kind}_{panels}", WIDE_ARGS)
    unpack, most = Unpack(target, kind), target.tile_rows
    minimum = kind == Q4_1
    w, codes = f.ptr("%w"), f.ptr("%codes")
    ws = [w if v == 0 else f.at(w, f.mul("%stride", v)) for v in range(panels)]
    f.do(f"call void @llvm.memset.p0.i64(ptr {f.ptr('%acc')}, i8 0, i64 {f.mul('%rows', 64 * panels)}, i1 false)")
    ahead = f.mul("%stride", panels)

    def tile_of(rows: int, first: str, x: str, scales: str, sums: str) -> None:
        passed = [
            f.op(f"add i64 {x}, {f.mul('%ldx', first)}"), "%ldx", "%codes", scales, "%stride",
            f.op(f"add i64 %acc, {f.mul(first, 64 * panels)}"), f.op(f"add i64 {sums}, {f.mul('%lds', first)}"), "%lds",
        ]  # fmt: skip
        f.do(f"call void @{part_name(rows, panels, minimum)}({', '.join(f'i64 {a}' for a in passed)})")

    def body(i: str, carried: list[str]) -> list[str]:
        for v, panel in enumerate(ws):
            unpack.prefetch(f, panel, i, ahead)
            for step, operand in enumerate(unpack.steps(f, f.at(panel, f.mul(i, unpack.block_bytes)))):
                unpack.dot.store(f, operand, f.at(codes, 64 * (step * panels + v)))
        x = f.op(f"add i64 %x, {f.mul(i, 128 // target.pair)}")
        scales = f.op(f"add i64 %scales, {f.mul(i, unpack.scale_bytes)}")
        sums = f.op(f"add i64 %sums, {f.shl(i, 2)}")
        rest = f.op(f"urem i64 %rows, {most}")
        whole = f.op(f"sub i64 %rows, {rest}")

        def full(first: str, inner: list[str]) -> list[str]:
            wanted = f.ptr(inner[0])
            line = f.load("ptr", wanted, 8)
            for k in range(8):
                prefetch(f, f.at(line, 64 * k))
            tile_of(most, first, x, scales, sums)
            return [f.op(f"add i64 {inner[0]}, 8")]

        after = f.loop(0, whole, most, [("i64", carried[0])], full)
        labels = [f.label() for _ in range(most)]
        table = " ".join(f"i64 {r}, label %{labels[r]}" for r in range(1, most))
        f.do(f"switch i64 {rest}, label %{labels[0]} [ {table} ]")
        for rows in range(1, most):
            f.start(labels[rows])
            tile_of(rows, whole, x, scales, sums)
            f.branch(labels[0])
        f.start(labels[0])
        return after

    f.loop(0, "%blocks", 1, [("i64", "%fetch")], body)
    return f.end()


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
    kinds = (Q8_0, Q4_0, Q4_1)
    tiles = {r * 4 + v: tile(target, r, v) for v in widths for r in rows}
    row_tiles = {r * 4 + 1: tile(target, r, 1, "pl_row_tile") for r in rows} if target.tile_panels == 1 else {}
    sums = {r * 8 + v: values(target, r, v) for v in value_widths for r in range(1, target.value_rows + 1)}
    inlined = {r * 4 + kind: packed(target, kind, r) for kind in kinds for r in inline}
    wides = {v * 4 + kind: wide(target, kind, v) for v in widths for kind in kinds}
    settles = {v: settle(target, v) for v in widths}
    parts = [part(target, r, v, minimum) for v in widths for minimum in (False, True) for r in rows]
    for cases in (tiles, row_tiles, sums, inlined, wides, settles):
        parts += cases.values()
    parts += [  # the caller passes rows * 4 + panels, or the like, as `rows`
        dispatcher("pl_tile", TILE_ARGS, "rows", tiles),
        dispatcher("pl_row_tile", TILE_ARGS, "rows", row_tiles or tiles),
        dispatcher("pl_values", VALUE_ARGS, "rows", sums), dispatcher("pl_packed", PACKED_ARGS, "rows", inlined),
        dispatcher("pl_wide", WIDE_ARGS, "select", wides), dispatcher("pl_settle", SETTLE_ARGS, "panels", settles),
    ]  # fmt: skip
    return "\n".join(parts)
