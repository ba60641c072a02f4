"""The inner products: IR of the tiles that all matrix work is made of.

A *panel* is 16 columns of a weight. Along K it is a row of *steps* of 64 bytes: [16] float32, or [16][2] bfloat16
(two neighbours along K of each column), which meet 4 bytes of an activation row, broadcast. The keys and values of
the cache have the same form, so attention uses the same tiles.

Products with packed weights are in packed.py.

The rule: one output is summed over K in ascending order in one accumulator, whatever the tile, so that it depends on
neither the number of rows nor its place among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planaria.kernels.cpu.emit import F32, I32, Function
from planaria.kernels.cpu.target import Target

B32 = "<32 x bfloat>"
H32 = "<32 x i16>"

Operand = tuple[str, ...]  # one or two values, see Dot

STORE_ACT, ADD_RESIDUAL, STORE_F32 = 0, 1, 2
DENSE = 0  # the kind of a weight that isn't packed; others have their numbers in blocks.py
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


def dispatcher(name: str, args: Sequence[str], selector: str, cases: dict[int, str], bits: int = 0) -> str:
    """A function that calls one of the cases (each the last function of its IR) by the value of its argument
    `selector`, or of so many of its lowest bits; the cases get all of it as well."""
    f = Function(name, args)
    passed = ", ".join(f"i64 %{a}" for a in args)
    table = " ".join(f"i64 {key}, label %c{key}" for key in cases)
    chosen = f.op(f"and i64 %{selector}, {(1 << bits) - 1}") if bits else f"%{selector}"
    f.do(f"switch i64 {chosen}, label %none [ {table} ]")
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
    shifts = bias_of(f, bias, len(acc[0]))
    total = [[f.vec("fadd", a, b) for a, b in zip(row, shifts, strict=True)] for row in acc]
    rows = rows_of(f, out, ldo, len(acc))

    def write(how: int) -> None:
        for pointer, values in zip(rows, total, strict=True):
            write_row(f, target, how, values, pointer)

    in_mode(f, mode, write)
    f.ret()


def bias_of(f: Function, bias: str, panels: int) -> list[str]:
    at = f.ptr(bias)
    return [f.load(F32, f.at(at, 64 * v), 4) for v in range(panels)]


def write_row(f: Function, target: Target, how: int, values: list[str], pointer: str) -> None:
    act = Elements(f, target)
    for v, value in enumerate(values):
        if how == STORE_ACT:
            act.store(value, f.at(pointer, 16 * target.item * v))
        else:
            place = f.at(pointer, 64 * v)
            if how == ADD_RESIDUAL:
                value = f.vec("fadd", f.load(F32, place, 4), value)
            f.store(F32, value, place, 4)


def in_mode(f: Function, mode: str, write: Callable[[int], None]) -> None:
    """write(mode), a constant there."""
    labels = [f.label() for _ in range(4)]
    f.do(
        f"switch i64 {mode}, label %{labels[STORE_ACT]} "
        f"[ i64 {ADD_RESIDUAL}, label %{labels[ADD_RESIDUAL]} i64 {STORE_F32}, label %{labels[STORE_F32]} ]"
    )
    for how in (STORE_ACT, ADD_RESIDUAL, STORE_F32):
        f.start(labels[how])
        write(how)
        f.branch(labels[3])
    f.start(labels[3])


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
    steps, step = 16 // target.pair, target.pair * target.row_item
    broadcast = dot.broadcast_widened if target.widens else dot.broadcast
    table = f.ptr("%vp")
    ps = rows_of(f, "%p", "%ldp", rows)

    def body(i: str, acc: list[str]) -> list[str]:
        chunk = f.at(f.load("ptr", f.at(table, f.shl(i, 3)), 8), "%first")
        place = f.mul(i, step * steps)
        p_at = [f.at(p, place) for p in ps]
        for u in range(steps):
            ws = [dot.weight(f, f.at(chunk, (v * steps + u) * 64)) for v in range(panels)]
            for r in range(rows):
                x = broadcast(f, f.at(p_at[r], step * u))
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


SETTLE_ARGS = ("panels", "rows", "acc", "out", "ldo", "mode", "bias")


def settle(target: Target, panels: int) -> str:
    """Write acc[rows][16 * panels] as a tile writes its sums, with bias, in one of three ways."""
    f = Function(f"pl_settle_{panels}", SETTLE_ARGS)
    acc, out, shifts = f.ptr("%acc"), f.ptr("%out"), bias_of(f, "%bias", panels)

    def write(how: int) -> None:
        def row(r: str) -> None:
            place = f.at(acc, f.mul(r, 64 * panels))
            values = [f.vec("fadd", f.load(F32, f.at(place, 64 * v), 64), shift) for v, shift in enumerate(shifts)]
            write_row(f, target, how, values, f.at(out, f.mul(r, "%ldo")))

        f.each("%rows", 1, row)

    in_mode(f, "%mode", write)
    return f.end()


def matrix_module(target: Target) -> str:
    """IR of all tiles and of the functions that choose one."""
    rows = range(1, target.tile_rows + 1)
    widths, value_widths = sorted({1, target.tile_panels}), sorted({1, target.value_panels})
    tiles = {r * 4 + v: tile(target, r, v) for v in widths for r in rows}
    row_tiles = {r * 4 + 1: tile(target, r, 1, "pl_row_tile") for r in rows} if target.tile_panels == 1 else {}
    sums = {r * 8 + v: values(target, r, v) for v in value_widths for r in range(1, target.value_rows + 1)}
    settles = {v: settle(target, v) for v in widths}
    parts = [text for cases in (tiles, row_tiles, sums, settles) for text in cases.values()]
    parts += [  # the caller passes rows * 4 + panels, or the like, as `rows`
        dispatcher("pl_tile", TILE_ARGS, "rows", tiles),
        dispatcher("pl_row_tile", TILE_ARGS, "rows", row_tiles or tiles),
        dispatcher("pl_values", VALUE_ARGS, "rows", sums), dispatcher("pl_settle", SETTLE_ARGS, "panels", settles),
        Function("pl_configure", ("rows",)).end(),
    ]  # fmt: skip
    return "\n".join(parts)
