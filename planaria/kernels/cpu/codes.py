"""How codes come from a file's blocks into panels (pack.py): IR of that function of a packed kind."""

from __future__ import annotations

from planaria.kernels.blocks import BLOCK, BlockKind, Plane
from planaria.kernels.cpu.emit import Function

PLACE_ARGS = ("source", "row_bytes", "rows", "first", "blocks", "out", "stride")
APART = 0x0002040810204081  # times 7 bits: each in a byte of its own
EIGHTS = "<4 x i64>"


def place(kind: BlockKind, by_bytes: bool) -> str:
    """Codes of `rows` rows, `row_bytes` apart, from block `first` (of 32) on, into panels of `stride` bytes."""
    f = Function("pl_place", PLACE_ARGS)
    source, out = f.ptr("%source"), f.ptr("%out")
    each = kind.elements // BLOCK

    def row(r: str) -> None:
        line = f.at(source, f.mul(r, "%row_bytes"))
        lane = f.at(f.at(out, f.mul(f.op(f"lshr i64 {r}, 4"), "%stride")), f.shl(f.op(f"and i64 {r}, 15"), 2))

        def block(b: str) -> None:
            number = f.add(b, "%first")
            whole = f.at(line, f.mul(f.op(f"udiv i64 {number}, {each}"), kind.nbytes))
            begin = f.mul(f.op(f"urem i64 {number}, {each}"), BLOCK)
            to = f.at(lane, f.mul(b, 64 * kind.bits))
            if kind.bits == 8:
                to = f.at(lane, f.add(f.mul(b, 512), f.mul(f.op(f"and i64 {r}, 15"), -2)))  # 2 bytes a lane
                for step in range(16):
                    f.store("i16", f.load("i16", f.at(whole, kind.planes[0].at + 2 * step)), f.at(to, 32 * step))
                return
            below = 0
            for plane in kind.planes:
                for word, value in enumerate(words(f, by_bytes, plane, f.at(whole, plane.at), begin)):
                    f.store("i32", value, f.at(to, 64 * (below + word)), 4)
                below += plane.bits

        f.each("%blocks", 1, block)

    f.each("%rows", 1, row)
    return f.end()


def words(f: Function, by_bytes: bool, plane: Plane, at: str, begin: str) -> list[str]:
    """A plane's words of the block that begins with code `begin`, of each 32 / bits codes: the even ones from bit 0 on,
    the odd ones from bit 16 on; or, by bytes, in each byte every fourth."""
    bits = plane.bits
    bytes = eights(f, plane, at, begin)
    if by_bytes:
        apart = f.op(f"and {EIGHTS} {bytes}, {splat(0x0101010101010101 * ((1 << bits) - 1))}")
        both = f.op(f"or {EIGHTS} {apart}, {f.op(f'lshr {EIGHTS} {apart}, {splat(32 - bits)}')}")
        width = 2 * bits
    else:
        halves = []
        for lanes in (bytes, f.op(f"lshr {EIGHTS} {bytes}, {splat(8)}")):
            apart = f.op(f"and {EIGHTS} {lanes}, {splat(0x0001000100010001 * ((1 << bits) - 1))}")
            pairs = f.op(f"or {EIGHTS} {apart}, {f.op(f'lshr {EIGHTS} {apart}, {splat(16 - bits)}')}")
            pairs = f.op(f"and {EIGHTS} {pairs}, {splat(0x0000000100000001 * ((1 << 2 * bits) - 1))}")
            fours = f.op(f"or {EIGHTS} {pairs}, {f.op(f'lshr {EIGHTS} {pairs}, {splat(32 - 2 * bits)}')}")
            halves.append(f.op(f"and {EIGHTS} {fours}, {splat((1 << 4 * bits) - 1)}"))
        both = f.op(f"or {EIGHTS} {halves[0]}, {f.op(f'shl {EIGHTS} {halves[1]}, {splat(16)}')}")
        width = 4 * bits
    each = 4 // bits
    shifts = ", ".join(f"i64 {i % each * width}" for i in range(4))
    placed = f.op(f"trunc {EIGHTS} {f.op(f'shl {EIGHTS} {both}, <{shifts}>')} to <4 x i32>")
    parts = [f.op(f"extractelement <4 x i32> {placed}, i64 {i}") for i in range(4)]
    found = []
    for first in range(0, 4, each):
        word = parts[first]
        for part in parts[first + 1 : first + each]:
            word = f.op(f"or i32 {word}, {part}")
        found.append(word)
    return found


def eights(f: Function, plane: Plane, at: str, begin: str) -> str:
    """32 codes from `begin` on, a byte each, with a plane's bits in the lowest bits of the bytes."""
    if plane.run == 1:  # a byte has the bits of eight
        place = f.at(at, f.op(f"lshr i64 {begin}, 3"))
        byte = f.op(f"zext <4 x i8> {f.load('<4 x i8>', place)} to {EIGHTS}")
        seven = f.op(f"mul {EIGHTS} {f.op(f'and {EIGHTS} {byte}, {splat(127)}')}, {splat(APART)}")
        return f.op(f"or {EIGHTS} {seven}, {f.op(f'shl {EIGHTS} {byte}, {splat(49)}')}")
    if plane.run == 16:  # the lower bits are of the first 16, the upper ones of the others
        half = f.load("<2 x i64>", f.at(at, f.op(f"lshr i64 {f.mul(begin, plane.bits)}, 3")))
        twice = f.op(f"shufflevector <2 x i64> {half}, <2 x i64> poison, <4 x i32> <i32 0, i32 1, i32 0, i32 1>")
        return f.op(f"lshr {EIGHTS} {twice}, <i64 0, i64 0, i64 {plane.bits}, i64 {plane.bits}>")
    span = plane.run * 8 // plane.bits
    within = f.op(f"urem i64 {begin}, {span}")
    run = f.mul(f.op(f"udiv i64 {begin}, {span}"), plane.run)
    place = f.at(at, f.add(run, f.op(f"urem i64 {within}, {plane.run}")))
    turn = f.mul(f.op(f"udiv i64 {within}, {plane.run}"), plane.bits)
    return f.op(f"lshr {EIGHTS} {f.load(EIGHTS, place)}, {f.splat('i64', turn, 4)}")


def splat(value: int) -> str:
    return "<" + ", ".join([f"i64 {value}"] * 4) + ">"
