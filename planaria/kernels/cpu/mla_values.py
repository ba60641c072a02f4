"""IR of the tile that sums up keys as values, where values are the first columns of keys (latent attention).

A chunk of keys is a row of steps of 64 bytes, each one column (or a pair of neighbours, bfloat16) of 16 tokens. So a
sum over tokens runs along the lanes: an accumulator holds one column's 16 partial sums, one for each place in a
chunk, and they are added up as a tree at the end. Nothing is stored twice and nothing turned round.

The rule of micro.py holds: chunks in ascending order, then the tree, whatever the tile.
"""

from __future__ import annotations

from planaria.kernels.cpu.emit import F32, I32, Function
from planaria.kernels.cpu.micro import VALUE_ARGS, Dot, Elements, dispatcher, rows_of
from planaria.kernels.cpu.target import Target
from planaria.kernels.cpu.vector import total


def latents(target: Target, rows: int, steps: int) -> str:
    """out = out * a + (p . v) * b, as `micro.values`, for the columns of `steps` steps from byte `first` of each chunk
    on. `vp` holds the address of each chunk of keys; p is of `row_item` bytes, out in float32."""
    f, dot = Function(f"pl_latents_{rows}_{steps}", VALUE_ARGS), Dot(target)
    act = Elements(f, target)
    table, ps = f.ptr("%vp"), rows_of(f, "%p", "%ldp", rows)
    columns = steps * target.pair

    def body(i: str, acc: list[str]) -> list[str]:
        chunk = f.at(f.load("ptr", f.at(table, f.shl(i, 3)), 8), "%first")
        weights: list[str] = []
        for u in range(steps):
            place = f.at(chunk, 64 * u)
            weights += [f.load(F32, place, 64)] if target.item == 4 else dot.split(f, f.load(I32, place, 64))
        at = f.mul(i, 16 * target.row_item)
        for r in range(rows):
            place = f.at(ps[r], at)
            p = f.load(F32, place, 4) if target.row_item == 4 else act.load(place)
            for k in range(columns):
                acc[r * columns + k] = f.fma(weights[k], p, acc[r * columns + k])
        return acc

    sums = f.loop(0, "%chunks", 1, [(F32, "zeroinitializer")] * (rows * columns), body)
    state = f.ptr("%state")
    for r, pointer in enumerate(rows_of(f, "%out", "%ldo", rows)):
        keep = f.load("float", f.at(state, 16 * r + 8), 4)
        take = f.load("float", f.at(state, 16 * r + 12), 4)
        for k in range(columns):
            place = f.at(pointer, 4 * k)
            old = f.op(f"fmul float {f.load('float', place, 4)}, {keep}")
            new = f.op(f"fmul float {total(f, sums[r * columns + k])}, {take}")
            f.store("float", f.op(f"fadd float {old}, {new}"), place, 4)
    return f.end()


def mla_module(target: Target) -> str:
    """IR of all these tiles and of the function that chooses one: by rows * 8 + steps."""
    steps = target.latent_steps
    cases = {rows * 8 + steps: latents(target, rows, steps) for rows in range(1, target.latent_rows + 1)}
    return "\n".join([*cases.values(), dispatcher("pl_latents", VALUE_ARGS, "rows", cases)])
