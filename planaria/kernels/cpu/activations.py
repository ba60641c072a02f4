"""Row operations beside those of vector.py: IR of gated and plain activations, soft caps, layer norms, clipping.

Rule: each works on one row, and an element's result does not depend on its place in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planaria.kernels.cpu.emit import F32, Function
from planaria.kernels.cpu.micro import Elements, dispatcher
from planaria.kernels.cpu.target import Target
from planaria.kernels.cpu.vector import below, exp, inverse_rms, lanes, one_and_exp, squares_of, total

SILU, GELU, CLAMPED = 0, 1, 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU, "clamped": CLAMPED}  # see `Operations.gated`
ALPHA, LIMIT = 1.702, 7.0  # of the clamped one
NEAR = 0.125  # below it a polynomial is nearer to tanh than the quotient


def times(f: Function, value: str, factor: float) -> str:
    return f.vec("fmul", value, f.const_f32(factor))


def clamped(f: Function, value: str, low: str, high: str) -> str:
    over = f.op(f"call {F32} @llvm.maxnum.v16f32({F32} {value}, {F32} {low})")
    return f.op(f"call {F32} @llvm.minnum.v16f32({F32} {over}, {F32} {high})")


def silu(f: Function, x: str) -> str:
    return f.vec("fdiv", x, one_and_exp(f, x))


def gelu(f: Function, x: str) -> str:
    """x / 2 * (1 + tanh(u)) is x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    square = f.vec("fmul", x, x)
    inner = f.fma(square, f.const_f32(0.044715), f.const_f32(1.0))
    u = times(f, f.vec("fmul", x, inner), 2 * math.sqrt(2 / math.pi))
    return f.vec("fdiv", x, one_and_exp(f, u))


def tanh(f: Function, x: str) -> str:
    """To about 2e-7 relative."""
    e = exp(f, times(f, x, -2.0))
    far = f.vec("fdiv", f.vec("fsub", f.const_f32(1.0), e), f.vec("fadd", f.const_f32(1.0), e))
    square = f.vec("fmul", x, x)
    series = f.fma(square, f.const_f32(-17 / 315), f.const_f32(2 / 15))
    series = f.fma(square, series, f.const_f32(-1 / 3))
    near = f.fma(f.vec("fmul", x, square), series, x)
    small = f.op(f"fcmp olt {F32} {square}, {f.const_f32(NEAR * NEAR)}")
    return f.select(small, near, far)


GATED: dict[int, Callable[[Function, str, str], str]] = {
    SILU: lambda f, gate, up: f.vec("fmul", silu(f, gate), up),
    GELU: lambda f, gate, up: f.vec("fmul", gelu(f, gate), up),
    CLAMPED: lambda f, gate, up: _clamped_gate(f, gate, up),
}
GATED_ARGS = ("kind", "gate", "up", "out", "count", "padded")


def _clamped_gate(f: Function, gate: str, up: str) -> str:
    g = clamped(f, gate, f.const_f32(-3e38), f.const_f32(LIMIT))
    u = clamped(f, up, f.const_f32(-LIMIT), f.const_f32(LIMIT))
    glu = f.vec("fdiv", g, one_and_exp(f, times(f, g, ALPHA)))
    return f.vec("fmul", f.vec("fadd", u, f.const_f32(1.0)), glu)


def gated(target: Target, kind: int) -> str:
    """out[0:padded] = the activation of `count` elements, 0 after them."""
    f = Function(f"pl_gated_{kind}", GATED_ARGS)
    act = Elements(f, target)
    gate, up, out = f.ptr("%gate"), f.ptr("%up"), f.ptr("%out")

    def body(i: str, load: Callable[[str], str]) -> list[str]:
        g, u = load(act.place(gate, i)), load(act.place(up, i))
        act.store(GATED[kind](f, g, u), act.place(out, i))
        return []

    def part(i: str, _: list[str]) -> list[str]:
        mask = below(f, lanes(f, i), "%count")
        return body(i, lambda place: act.load_some(place, mask))

    # AVX2 reads 16 bits at a time where some are left out
    whole = f.op("and i64 %count, -16")
    f.loop(0, whole, 16, [], lambda i, _: body(i, act.load))
    f.loop(whole, "%padded", 16, [], part)
    return f.end()


def over_row(target: Target, name: str, args: tuple[str, ...], made: Callable[[Function, str], str]) -> str:
    """x in place, of the activation dtype: what is made of each 16 elements; the padding stays 0 if 0 becomes 0."""
    f = Function(name, ("x", "padded", *args))
    act = Elements(f, target)
    x = f.ptr("%x")

    def body(i: str) -> None:
        place = act.place(x, i)
        act.store(made(f, act.load(place)), place)

    f.each("%padded", 16, body)
    return f.end()


def clip(f: Function, value: str) -> str:
    """To [-limit, limit]."""
    limit = f.float_of("%limit")
    low = f.splat("float", f.op(f"fneg float {limit}"))
    return clamped(f, value, low, f.splat("float", limit))


def cap() -> str:
    """x = outer * tanh(inner * x) of float32, in place."""
    f = Function("pl_cap", ("x", "count", "inner", "outer"))
    x = f.ptr("%x")
    inner, outer = (f.splat("float", f.float_of(f"%{name}")) for name in ("inner", "outer"))

    def body(i: str) -> None:
        f.put_floats(f.vec("fmul", tanh(f, f.vec("fmul", f.floats(x, i), inner)), outer), x, i)

    f.each("%count", 16, body)
    return f.end()


def scale() -> str:
    """x *= factor of float32, in place."""
    f = Function("pl_scale", ("x", "count", "factor"))
    x, factor = f.ptr("%x"), f.splat("float", f.float_of("%factor"))
    f.each("%count", 16, lambda i: f.put_floats(f.vec("fmul", f.floats(x, i), factor), x, i))
    return f.end()


def layer_norm(target: Target) -> str:
    """(x - mean) / sqrt(variance + eps) * weight + bias of `count` float32 elements, 0 after them."""
    f = Function("pl_layer_norm", ("x", "weight", "bias", "out", "padded", "count", "eps"))
    act = Elements(f, target)
    x, weight, bias, out = (f.ptr(f"%{name}") for name in ("x", "weight", "bias", "out"))
    sums = f.loop(0, "%padded", 16, [(F32, "zeroinitializer")], lambda i, acc: [f.vec("fadd", acc[0], f.floats(x, i))])
    mean = f.op(f"fdiv float {total(f, sums[0])}, {f.op('sitofp i64 %count to float')}")
    means = f.splat("float", mean)

    def centred(i: str) -> str:
        return f.select(below(f, lanes(f, i), "%count"), f.vec("fsub", f.floats(x, i), means))

    factor = inverse_rms(f, squares_of(f, "%padded", centred), "%count", f.float_of("%eps"))

    def write(i: str) -> None:
        v = f.vec("fmul", f.vec("fmul", centred(i), factor), f.floats(weight, i))
        act.store(f.vec("fadd", v, f.floats(bias, i)), act.place(out, i))

    f.each("%padded", 16, write)
    return f.end()


def add_norm() -> str:
    """target += the RMS norm of x, all float32."""
    f = Function("pl_add_norm", ("x", "weight", "target", "padded", "count", "eps"))
    x, weight, target = f.ptr("%x"), f.ptr("%weight"), f.ptr("%target")
    factor = inverse_rms(f, squares_of(f, "%padded", lambda i: f.floats(x, i)), "%count", f.float_of("%eps"))

    def write(i: str) -> None:
        v = f.vec("fmul", f.vec("fmul", f.floats(x, i), factor), f.floats(weight, i))
        f.put_floats(f.vec("fadd", f.floats(target, i), v), target, i)

    f.each("%padded", 16, write)
    return f.end()


def activation_module(target: Target) -> str:
    """IR of all of them."""
    kinds = {kind: gated(target, kind) for kind in GATED}
    return "\n".join([
        *kinds.values(), dispatcher("pl_gated", GATED_ARGS, "kind", kinds), over_row(target, "pl_gelu", (), gelu),
        over_row(target, "pl_clip", ("limit",), clip), cap(), scale(), layer_norm(target), add_norm(),
    ])  # fmt: skip
