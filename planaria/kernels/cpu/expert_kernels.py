"""Row operations of mixtures of experts: IR of scores, weights, the sum over chosen experts, gates, wide norms.

Rule: each works on one row and adds in one order, so that a row's result depends on no other row.
"""

from __future__ import annotations

from planaria.kernels.cpu.emit import F32, Function, literal
from planaria.kernels.cpu.micro import Elements
from planaria.kernels.cpu.target import Target
from planaria.kernels.cpu.vector import LOWEST, below, exp, inverse_rms, lanes, one_and_exp, squares_of, total

SOFTMAX, SIGMOID = 0, 1  # how logits become scores
LEAST = 1e-20  # added to the sum that weights are divided by


def scores() -> str:
    """out[0:padded] = softmax or sigmoid (`kind`) of `count` logits, 0 after them."""
    f = Function("pl_scores", ("logits", "out", "count", "padded", "kind"))
    x, out = f.ptr("%logits"), f.ptr("%out")
    lowest = f.const_f32(LOWEST)
    soft, sigmoid, done = f.label(), f.label(), f.label()

    def valid(i: str) -> str:
        return below(f, lanes(f, i), "%count")

    f.do(f"br i1 {f.op(f'icmp eq i64 %kind, {SOFTMAX}')}, label %{soft}, label %{sigmoid}")
    f.start(sigmoid)

    def logistic(i: str) -> None:
        s = f.vec("fdiv", f.const_f32(1.0), one_and_exp(f, f.floats(x, i)))
        f.put_floats(f.select(valid(i), s), out, i)

    f.each("%padded", 16, logistic)
    f.branch(done)
    f.start(soft)

    def largest(i: str, acc: list[str]) -> list[str]:
        v = f.select(valid(i), f.floats(x, i), lowest)
        return [f.op(f"call {F32} @llvm.maxnum.v16f32({F32} {v}, {F32} {acc[0]})")]

    top = f.loop(0, "%padded", 16, [(F32, lowest)], largest)[0]
    most = f.splat("float", f.op(f"call nnan float @llvm.vector.reduce.fmax.v16f32({F32} {top})"))

    def raise_e(i: str, acc: list[str]) -> list[str]:
        e = f.select(valid(i), exp(f, f.vec("fsub", f.floats(x, i), most)))
        f.put_floats(e, out, i)
        return [f.vec("fadd", acc[0], e)]

    sums = f.loop(0, "%padded", 16, [(F32, "zeroinitializer")], raise_e)[0]
    whole = f.splat("float", total(f, sums))

    f.each("%padded", 16, lambda i: f.put_floats(f.vec("fdiv", f.floats(out, i), whole), out, i))
    f.branch(done)
    f.start(done)
    return f.end()


def weigh() -> str:
    """`count` weights in place: divided by their sum if `renormalise`, times `scaling` (float32 bits)."""
    f = Function("pl_weigh", ("weights", "count", "renormalise", "scaling"))
    w, scaling = f.ptr("%weights"), f.float_of("%scaling")

    def add(i: str, acc: list[str]) -> list[str]:
        return [f.op(f"fadd float {acc[0]}, {f.load('float', f.at(w, f.shl(i, 2)), 4)}")]

    whole = f.op(f"fadd float {f.loop(0, '%count', 1, [('float', literal(0.0))], add)[0]}, {literal(LEAST)}")
    divisor = f.op(f"select i1 {f.op('icmp ne i64 %renormalise, 0')}, float {whole}, float {literal(1.0)}")

    def write(i: str) -> None:
        place = f.at(w, f.shl(i, 2))
        part = f.op(f"fdiv float {f.load('float', place, 4)}, {divisor}")
        f.store("float", f.op(f"fmul float {part}, {scaling}"), place, 4)

    f.each("%count", 1, write)
    return f.end()


def combine() -> str:
    """out[0:padded] (+)= the sum over j of weights[j] * y[place[j]], in order of j, without those placed below 0."""
    f = Function("pl_combine", ("y", "ldy", "place", "weights", "k", "out", "padded", "add"))
    place, weights, out = f.ptr("%place"), f.ptr("%weights"), f.ptr("%out")
    more = f.op("icmp ne i64 %add, 0")

    def columns(i: str) -> None:
        at = f.shl(i, 2)

        def expert(j: str, acc: list[str]) -> list[str]:
            row = f.op(f"sext i32 {f.load('i32', f.at(place, f.shl(j, 2)), 4)} to i64")
            here = f.op(f"icmp sge i64 {row}, 0")
            row = f.op(f"select i1 {here}, i64 {row}, i64 0")
            weight = f.splat("float", f.load("float", f.at(weights, f.shl(j, 2)), 4))
            y = f.ptr(f.op(f"add i64 %y, {f.mul(row, '%ldy')}"))
            taken = f.fma(f.load(F32, f.at(y, at), 4), weight, acc[0])
            return [f.op(f"select i1 {here}, {F32} {taken}, {F32} {acc[0]}")]

        whole = f.loop(0, "%k", 1, [(F32, "zeroinitializer")], expert)[0]
        target = f.at(out, at)
        joined = f.vec("fadd", f.load(F32, target, 4), whole)
        f.store(F32, f.op(f"select i1 {more}, {F32} {joined}, {F32} {whole}"), target, 4)

    f.each("%padded", 16, columns)
    return f.end()


def gate(target: Target) -> str:
    """out = x * sigmoid(the first element of `logit`, float32)."""
    f = Function("pl_gate", ("x", "logit", "out", "padded"))
    act = Elements(f, target)
    x, out = f.ptr("%x"), f.ptr("%out")
    logit = f.splat("float", f.load("float", f.ptr("%logit"), 4))
    factor = f.vec("fdiv", f.const_f32(1.0), one_and_exp(f, logit))
    f.each("%padded", 16, lambda i: act.store(f.vec("fmul", act.load(act.place(x, i)), factor), act.place(out, i)))
    return f.end()


def squares(target: Target) -> str:
    """out = the sum of squares of `count` elements (a multiple of 16), one float32."""
    f = Function("pl_squares", ("x", "count", "out"))
    act = Elements(f, target)
    x = f.ptr("%x")
    sums = squares_of(f, "%count", lambda i: act.load(act.place(x, i)))
    f.store("float", total(f, sums), f.ptr("%out"), 4)
    return f.end()


def rescale(target: Target) -> str:
    """x[0:count] in place: RMS-normalised by a sum of squares over `whole` elements, times the weight."""
    f = Function("pl_rescale", ("x", "sum", "weight", "count", "whole", "eps"))
    act = Elements(f, target)
    x, weight = f.ptr("%x"), f.ptr("%weight")
    first = f.op(f"insertelement {F32} zeroinitializer, float {f.load('float', f.ptr('%sum'), 4)}, i64 0")
    scale = inverse_rms(f, first, "%whole", f.float_of("%eps"))

    def body(i: str) -> None:
        place = act.place(x, i)
        v = f.vec("fmul", act.load(place), scale)
        act.store(f.vec("fmul", v, f.floats(weight, i)), place)

    f.each("%count", 16, body)
    return f.end()


def expert_module(target: Target) -> str:
    """IR of all of them."""
    return "\n".join([scores(), weigh(), combine(), gate(target), squares(target), rescale(target)])
