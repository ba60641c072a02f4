"""Row operations: IR of everything that is not an inner product (norm, rotation, softmax, copies).

Rows are padded to 16 elements; the padding of every buffer is 0 and stays 0.
"""

from __future__ import annotations

from collections.abc import Callable

from planaria.kernels.cpu.emit import F32, I32, Function, literal
from planaria.kernels.cpu.micro import Elements
from planaria.kernels.cpu.native import X86
from planaria.kernels.cpu.target import Target

LOWEST = -1e30  # stands for minus infinity: differences of it stay numbers
ROUNDING, ROUNDING_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23: adding it rounds to an integer, kept in the low bits


def exp(f: Function, x: str) -> str:
    """e^x to about 1e-7 relative; exactly 1 at 0, exactly 0 below -87; NaN stays NaN."""
    low, high = f.const_f32(-87.0), f.const_f32(88.0)
    under = f.op(f"fcmp olt {F32} {x}, {low}")
    over = f.op(f"fcmp ogt {F32} {x}, {high}")
    result = _exp(f, f.select(over, high, f.select(under, low, x)))
    return f.op(f"select <16 x i1> {under}, {F32} zeroinitializer, {F32} {result}")


def exp_of_less(f: Function, x: str) -> str:
    """The same of what is at most 0, but for rounding; e^-87 below -87, which is nothing beside the 1 of a softmax."""
    low = f.const_f32(-87.0)
    return _exp(f, f.select(f.op(f"fcmp olt {F32} {x}, {low}"), low, x))


def _exp(f: Function, c: str) -> str:
    """Of -87 to 88. What is rounded has the exponent of 2^n in its lowest bits."""
    magic = f.const_f32(ROUNDING + 127.0)
    shifted = f.fma(c, f.const_f32(1.4426950408889634), magic)
    n = f.vec("fsub", shifted, magic)
    r = f.fma(n, f.const_f32(-0.693359375), c)
    r = f.fma(n, f.const_f32(2.12194440e-4), r)
    p = f.const_f32(1.9875691500e-4)
    for c_k in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = f.fma(p, r, f.const_f32(c_k))
    p = f.fma(p, f.vec("fmul", r, r), f.vec("fadd", r, f.const_f32(1.0)))
    power = f.op(f"shl {I32} {f.op(f'bitcast {F32} {shifted} to {I32}')}, {f.const_i32(23)}")
    return f.vec("fmul", p, f.op(f"bitcast {I32} {power} to {F32}"))


def one_and_exp(f: Function, x: str) -> str:
    """1 + e^-x: a sigmoid is one over it."""
    return f.vec("fadd", exp(f, f.op(f"fneg {F32} {x}")), f.const_f32(1.0))


def total(f: Function, v: str) -> str:
    """Sum of 16 lanes, as a tree."""
    return f.op(f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float -0.0, {F32} {v})")


def lanes(f: Function, start: str) -> str:
    """start + 0..15 as i32."""
    first = f.splat("i32", f.op(f"trunc i64 {start} to i32"))
    return f.op(f"add {I32} {first}, {f.const_i32(list(range(16)))}")


def below(f: Function, index: str, limit: str) -> str:
    """Mask of lanes whose index is under an i64 limit."""
    top = f.splat("i32", f.op(f"trunc i64 {limit} to i32"))
    return f.op(f"icmp slt {I32} {index}, {top}")


def inverse_rms(f: Function, squares: str, count: str, eps: str) -> str:
    """1 / sqrt(sum of squares / count + eps), to all lanes."""
    n = f.op(f"sitofp i64 {count} to float")
    mean = f.op(f"fdiv float {total(f, squares)}, {n}")
    root = f.op(f"call float @llvm.sqrt.f32(float {f.op(f'fadd float {mean}, {eps}')})")
    return f.splat("float", f.op(f"fdiv float {literal(1.0)}, {root}"))


def squares_of(f: Function, count: str, values: Callable[[str], str]) -> str:
    """Sums of squares, lane by lane, of the `values` from element i on."""

    def square(i: str, acc: list[str]) -> list[str]:
        v = values(i)
        return [f.fma(v, v, acc[0])]

    return f.loop(0, count, 16, [(F32, "zeroinitializer")], square)[0]


def norm(target: Target) -> str:
    f = Function("pl_norm", ("x", "weight", "out", "padded", "count", "eps"))
    act = Elements(f, target)
    x, weight, out, eps = f.ptr("%x"), f.ptr("%weight"), f.ptr("%out"), f.float_of("%eps")

    scale = inverse_rms(f, squares_of(f, "%padded", lambda i: f.floats(x, i)), "%count", eps)

    def write(i: str) -> None:
        v = f.vec("fmul", f.floats(x, i), scale)
        act.store(f.vec("fmul", v, f.floats(weight, i)), act.place(out, i))

    f.each("%padded", 16, write)
    return f.end()


def softmax(target: Target) -> str:
    """One row of scores of one tile of keys, of which [lo, hi) count: p = exp(s * scale - m_tile), 0 elsewhere.

    `state` float32 [4]: m, l are merged with this tile's maximum and sum; a, b say how the values so far and this
    tile's values are weighted against each other.
    """
    f = Function("pl_softmax", ("scores", "p", "padded", "lo", "hi", "scale", "state"))
    act = Elements(f, target)
    s, p, state = f.ptr("%scores"), f.ptr("%p"), f.ptr("%state")
    factor = f.float_of("%scale")
    lowest = f.const_f32(LOWEST)
    lo = f.splat("i32", f.op("trunc i64 %lo to i32"))
    hi = f.splat("i32", f.op("trunc i64 %hi to i32"))

    def valid(i: str) -> str:
        index = lanes(f, i)
        over = f.op(f"icmp sge {I32} {index}, {lo}")
        return f.op(f"and <16 x i1> {over}, {f.op(f'icmp slt {I32} {index}, {hi}')}")

    # vectors between these count as they are
    begin = f.op(f"and i64 {f.add('%lo', 15)}, -16")
    begin = f.op(f"call i64 @llvm.smin.i64(i64 {begin}, i64 %padded)")
    end = f.op(f"call i64 @llvm.smax.i64(i64 {f.op('and i64 %hi, -16')}, i64 {begin})")

    def over_keys(first: str, body: Callable[[str, str, bool], str]) -> str:
        """body: of a vector's place, what was found before, and whether only some lanes count."""
        found = first
        for a, b, some in (("0", begin, True), (begin, end, False), (end, "%padded", True)):

            def one(i: str, before: list[str], some: bool = some) -> list[str]:
                return [body(i, before[0], some)]

            found = f.loop(a, b, 16, [(F32, found)], one)[0]
        return found

    def larger(i: str, before: str, some: bool) -> str:
        v = f.floats(s, i)
        v = f.select(valid(i), v, lowest) if some else v
        return f.select(f.op(f"fcmp ogt {F32} {v}, {before}"), v, before)

    top = over_keys(lowest, larger)
    top_one = f.op(f"call nnan float @llvm.vector.reduce.fmax.v16f32({F32} {top})")
    m_tile = f.op(f"fmul float {top_one}, {factor}")
    above = f.op(f"fcmp ogt float {m_tile}, {literal(LOWEST)}")
    m_tile = f.op(f"select i1 {above}, float {m_tile}, float {literal(LOWEST)}")
    minus = f.splat("float", f.op(f"fneg float {m_tile}"))
    factors = f.splat("float", factor)

    def weigh(i: str, before: str, some: bool) -> str:
        v = f.fma(f.floats(s, i), factors, minus)
        e = exp_of_less(f, v)
        e = f.select(valid(i), e) if some else e
        if target.row_item == 4:
            f.put_floats(e, p, i)
        else:
            act.store(e, act.place(p, i))
        return f.vec("fadd", before, e)

    l_tile = total(f, over_keys("zeroinitializer", weigh))
    m_old, l_old = f.load("float", state, 4), f.load("float", f.at(state, 4), 4)
    more = f.op(f"fcmp ogt float {m_tile}, {m_old}")
    m_new = f.op(f"select i1 {more}, float {m_tile}, float {m_old}")
    both = f.op(f"insertelement {F32} zeroinitializer, float {f.op(f'fsub float {m_old}, {m_new}')}, i64 0")
    both = f.op(f"insertelement {F32} {both}, float {f.op(f'fsub float {m_tile}, {m_new}')}, i64 1")
    weights = exp(f, both)
    a, b = (f.op(f"extractelement {F32} {weights}, i64 {k}") for k in (0, 1))
    l_new = f.op(f"fadd float {f.op(f'fmul float {l_old}, {a}')}, {f.op(f'fmul float {l_tile}, {b}')}")
    for k, value in enumerate((m_new, l_new, a, b)):
        f.store("float", value, f.at(state, 4 * k), 4)
    return f.end()


def divide(target: Target) -> str:
    """out = o / l, in the activation dtype."""
    f = Function("pl_divide", ("o", "state", "out", "count"))
    act = Elements(f, target)
    o, out = f.ptr("%o"), f.ptr("%out")
    l = f.load("float", f.at(f.ptr("%state"), 4), 4)
    inverse = f.splat("float", f.op(f"fdiv float {literal(1.0)}, {l}"))

    f.each("%count", 16, lambda i: act.store(f.vec("fmul", f.floats(o, i), inverse), act.place(out, i)))
    return f.end()


def merge() -> str:
    """Two parts of a head's attention, each [count] sums of values and then a softmax's m, l, into the first."""
    f = Function("pl_merge", ("part", "other", "count"))
    parts = [f.ptr("%part"), f.ptr("%other")]
    states = [f.at(part, f.shl("%count", 2)) for part in parts]
    ms, ls = ([f.load("float", f.at(state, 4 * k), 4) for state in states] for k in (0, 1))
    m = f.op(f"select i1 {f.op(f'fcmp ogt float {ms[1]}, {ms[0]}')}, float {ms[1]}, float {ms[0]}")
    both = "zeroinitializer"
    for k in (0, 1):
        less = f.op(f"fsub float {ms[k]}, {m}")
        both = f.op(f"insertelement {F32} {both}, float {less}, i64 {k}")
    weights = exp(f, both)
    a, b = (f.op(f"extractelement {F32} {weights}, i64 {k}") for k in (0, 1))
    l = f.op(f"fadd float {f.op(f'fmul float {ls[0]}, {a}')}, {f.op(f'fmul float {ls[1]}, {b}')}")
    every_a, every_b = f.splat("float", a), f.splat("float", b)

    def body(i: str) -> None:
        scaled = [f.vec("fmul", f.floats(part, i), by) for part, by in zip(parts, (every_a, every_b), strict=True)]
        f.put_floats(f.vec("fadd", *scaled), parts[0], i)

    f.each("%count", 16, body)
    for k, value in enumerate((m, l)):
        f.store("float", value, f.at(states[0], 4 * k), 4)
    return f.end()


def rotate(target: Target) -> str:
    """One head: RMS norm where `weight` is not 0, then the first 2 * half elements rotated. temp: float32 [dim]."""
    f = Function("pl_rotate", ("src", "dst", "temp", "cos", "sin", "half", "dim", "weight", "eps"))
    act = Elements(f, target)
    src, dst, temp, cos, sin = (f.ptr(f"%{a}") for a in ("src", "dst", "temp", "cos", "sin"))

    def widened(i: str) -> str:
        v = act.load(act.place(src, i))
        f.put_floats(v, temp, i)
        return v

    squares = squares_of(f, "%dim", widened)

    def normalise() -> None:
        scale = inverse_rms(f, squares, "%dim", f.float_of("%eps"))
        weight = f.ptr("%weight")

        def body(i: str) -> None:
            f.put_floats(f.vec("fmul", f.vec("fmul", f.floats(temp, i), scale), f.floats(weight, i)), temp, i)

        f.each("%dim", 16, body)

    f.when(f.op("icmp ne i64 %weight, 0"), normalise)

    def turn(i: str) -> None:
        mask = below(f, lanes(f, i), "%half")
        first = f.at(temp, f.shl(i, 2))
        second = f.at(first, f.shl("%half", 2))
        x1, x2 = f.load_some(first, mask), f.load_some(second, mask)
        c, s = (f.load_some(f.at(table, f.shl(i, 2)), mask) for table in (cos, sin))
        y1 = f.vec("fsub", f.vec("fmul", x1, c), f.vec("fmul", x2, s))
        y2 = f.vec("fadd", f.vec("fmul", x2, c), f.vec("fmul", x1, s))
        for y, place in ((y1, first), (y2, second)):
            f.do(f"call void @llvm.masked.store.v16f32.p0({F32} {y}, ptr {place}, i32 4, <16 x i1> {mask})")

    f.each("%half", 16, turn)

    f.each("%dim", 16, lambda i: act.store(f.floats(temp, i), act.place(dst, i)))
    return f.end()


def store_key(target: Target) -> str:
    """Spread a key over a chunk of 16 tokens: 4 bytes into each of its steps. `dst` includes the token's column."""
    f = Function("pl_store_key", ("src", "dst", "steps"))
    src, dst = f.ptr("%src"), f.ptr("%dst")

    f.each("%steps", 1, lambda i: f.store("i32", f.load("i32", f.at(src, f.shl(i, 2)), 4), f.at(dst, f.shl(i, 6)), 4))
    return f.end()


def store_value(target: Target) -> str:
    """Put a value into token `token` (0..15) of a chunk; the first token clears the chunk, so that what an earlier
    owner left there never meets a weight of 0 as a NaN."""
    f = Function("pl_store_value", ("src", "dst", "token", "dim"))
    src, dst = f.ptr("%src"), f.ptr("%dst")

    def clear() -> None:
        size = f.mul("%dim", 16 * target.item)
        f.do(f"call void @llvm.memset.p0.i64(ptr {dst}, i8 0, i64 {size}, i1 false)")

    f.when(f.op("icmp eq i64 %token, 0"), clear)

    def body(i: str) -> None:
        panel = f.at(dst, f.mul(i, 16 * target.item))
        if target.item == 4:
            f.store(F32, f.floats(src, i), f.at(panel, f.shl("%token", 6)), 4)
            return
        place = f.at(panel, f.shl(f.op("lshr i64 %token, 1"), 6))
        new = f.op(f"zext <16 x i16> {f.load('<16 x i16>', f.at(src, f.shl(i, 1)), 2)} to {I32}")
        odd = f.op("trunc i64 %token to i1")
        old = f.op(f"and {I32} {f.load(I32, place, 4)}, {f.const_i32(65535)}")
        second = f.op(f"or {I32} {old}, {f.op(f'shl {I32} {new}, {f.const_i32(16)}')}")
        f.store(I32, f.op(f"select i1 {odd}, {I32} {second}, {I32} {new}"), place, 4)

    f.each("%dim", 16, body)
    return f.end()


EMBED_ARGS = ("w", "column", "count", "out")


def embed(target: Target) -> str:
    """Column `column` of a dense panel of `count` steps, to float32."""
    f = Function("pl_embed", EMBED_ARGS)
    w, out = f.at(f.ptr("%w"), f.shl("%column", 2)), f.ptr("%out")

    def body(i: str) -> None:
        word = f.load("i32", f.at(w, f.shl(i, 6)), 4)
        if target.item == 4:
            f.store("i32", word, f.at(out, f.shl(i, 2)), 4)
        else:
            place = f.at(out, f.shl(i, 3))
            f.store("i32", f.op(f"shl i32 {word}, 16"), place, 4)
            f.store("i32", f.op(f"and i32 {word}, -65536"), f.at(place, 4), 4)

    f.each("%count", 1, body)
    return f.end()


def copy() -> str:
    f = Function("pl_copy", ("dst", "src", "count"))
    f.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {f.ptr('%dst')}, ptr {f.ptr('%src')}, i64 %count, i1 false)")
    return f.end()


def widen(target: Target) -> str:
    f = Function("pl_widen", ("src", "dst", "count"))
    act = Elements(f, target)
    src, dst = f.ptr("%src"), f.ptr("%dst")

    f.each("%count", 16, lambda i: f.put_floats(act.load(act.place(src, i)), dst, i))
    return f.end()


def put_past() -> str:
    """To memory past the caches: another core reads it, and taking its lines from there costs more than the memory."""
    f = Function("pl_put_past", ("dst", "src", "count"))
    dst, src = f.ptr("%dst"), f.ptr("%src")

    def body(i: str) -> None:
        value = f.load(F32, f.at(src, i), 1)
        f.do(f"store {F32} {value}, ptr {f.at(dst, i)}, align 64, !nontemporal !{{i32 1}}")

    f.each("%count", 64, body)
    f.do("fence seq_cst")  # such stores keep no order by themselves
    return f.end()


def add() -> str:
    f = Function("pl_sum", ("out", "a", "b", "count"))
    out, a, b = f.ptr("%out"), f.ptr("%a"), f.ptr("%b")

    f.each("%count", 16, lambda i: f.put_floats(f.vec("fadd", f.floats(a, i), f.floats(b, i)), out, i))
    return f.end()


def accrue(target: Target) -> str:
    """out += delta: an activation and float32."""
    f = Function("pl_accrue", ("out", "delta", "count"))
    act = Elements(f, target)
    out, delta = f.ptr("%out"), f.ptr("%delta")

    def body(i: str) -> None:
        place = act.place(out, i)
        act.store(f.vec("fadd", act.load(place), f.floats(delta, i)), place)

    f.each("%count", 16, body)
    return f.end()


def vector_module(target: Target) -> str:
    """IR of all row operations."""
    pause = "call void @llvm.x86.sse2.pause() " if X86 else ""
    return "\n".join([
        norm(target), softmax(target), divide(target), merge(), rotate(target), store_key(target),
        store_value(target), copy(), widen(target), put_past(), add(), accrue(target),
        embed(target),
        "declare void @llvm.x86.sse2.pause()\n" if X86 else "",
        f"define void @pl_relax() nounwind {{ {pause}ret void }}\n",
    ])  # fmt: skip
