"""The same inner products as micro.py's by AMX: tiles of up to 16 rows of bfloat16, multiplied by registers of 16 x 32
weights, which are panels' own 16 steps, in this order.

An output is summed over K in ascending order, 32 at a time, whatever the tile (Intel's Software Developer's Manual,
TDPBF16PS). A thread has to say first how many rows its tiles have (`configure`), which takes as long as some tens of
products; so tiles of one operation are equally high, and the last may begin with rows of the one before, which it
leaves as they are (`skip`).
"""

from __future__ import annotations

import ctypes
import functools
import platform

from planaria.kernels.cpu.emit import F32, Function
from planaria.kernels.cpu.micro import (
    SETTLE_ARGS,
    STREAM_AHEAD,
    TILE_ARGS,
    VALUE_ARGS,
    dispatcher,
    prefetch,
    settle,
)
from planaria.kernels.cpu.target import Target

ROWS = 16
# Registers: sums; weights of 32 along K, twice, that they can be loaded while others are multiplied; rows of 32; then
# both of 16 along K
SUMS, WEIGHTS, FIRST, SHORT_ROWS, SHORT_WEIGHTS = range(3), (3, 4), 5, 6, 7
ARCH_REQ_XCOMP_PERM, XTILEDATA = 0x1023, 18
DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
"""


@functools.cache
def allowed() -> bool:
    """Has this process, with all its threads, the registers? Linux gives them to who asks."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    arch_prctl = 158
    return bool(ctypes.CDLL(None).syscall(arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0)


def _configuration(rows: int) -> bytes:
    """What the registers are, as LDTILECFG reads it."""
    high = {**dict.fromkeys((*SUMS, FIRST, SHORT_ROWS), rows), **dict.fromkeys(WEIGHTS, 16), SHORT_WEIGHTS: 8}
    wide = [32 if i == SHORT_ROWS else 64 for i in range(8)]
    lines = b"".join(size.to_bytes(2, "little") for size in wide).ljust(32, b"\0")
    return b"\1".ljust(16, b"\0") + lines + bytes(high[i] for i in range(8)).ljust(16, b"\0")


def configure() -> str:
    """Tiles of so many rows from now on, in this thread; 0: its registers are free for others."""
    table = b"".join(_configuration(rows) for rows in range(1, ROWS + 1))
    text = "".join(f"\\{byte:02X}" for byte in table)
    f = Function("pl_configure", ("rows",))

    def load() -> None:
        place = f.shl(f.add("%rows", -1), 6)
        f.do(f"call void @llvm.x86.ldtilecfg(ptr {f.at('@pl_configurations', place)})")
        f.ret()
        f.start(f.label())

    f.when(f.op("icmp ne i64 %rows, 0"), load)
    f.do("call void @llvm.x86.tilerelease()")
    constant = f'@pl_configurations = private unnamed_addr constant [{len(table)} x i8] c"{text}", align 64\n'
    return constant + f.end()


def _multiply(f: Function, sums: int, rows: int, weights: int) -> None:
    f.do(f"call void @llvm.x86.tdpbf16ps(i8 {sums}, i8 {rows}, i8 {weights})")


def _load(f: Function, register: int, place: str, stride: str | int = 64) -> None:
    f.do(f"call void @llvm.x86.tileloadd64(i8 {register}, ptr {place}, i64 {stride})")


def _clear(f: Function, panels: int) -> None:
    for v in range(panels):
        f.do(f"call void @llvm.x86.tilezero(i8 {SUMS[v]})")


def _room(f: Function) -> str:
    return f.op(f"alloca [{64 * ROWS * len(SUMS)} x i8], align 64")


def _stored(f: Function, room: str, panels: int) -> None:
    for v in range(panels):
        f.do(f"call void @llvm.x86.tilestored64(i8 {SUMS[v]}, ptr {f.at(room, 64 * v)}, i64 {64 * panels})")


def _height(f: Function, select: str, panel_bits: int) -> tuple[str, str]:
    """The first row that is written, and the end."""
    high = f.op(f"lshr i64 {select}, {panel_bits}")
    return f.op(f"lshr i64 {high}, 5"), f.op(f"and i64 {high}, 31")


def tile(panels: int) -> str:
    """As micro.tile, of rows as configured: select = (skip * 32 + rows) * 4 + panels. bias 0: sums of all rows go to
    out as they are, whatever the mode; else the first `skip` rows aren't written."""
    f = Function(f"pl_tile_{panels}", TILE_ARGS)
    room, (skip, rows), table, x = _room(f), _height(f, "%rows", 2), f.ptr("%wp"), f.ptr("%x")
    weights = [f.load("ptr", f.at(table, 8 * v), 8) for v in range(panels)]
    if panels > 1:
        plan = f.ptr("%plan")
        asked = [(f.load("ptr", f.at(plan, 16 * i), 8), f.load("i64", f.at(plan, 16 * i + 8), 8)) for i in range(2)]
    _clear(f, panels)

    def block(i: str, _: list[str]) -> list[str]:
        """i: bytes of rows."""
        place = f.shl(i, 4)
        _load(f, FIRST, f.at(x, i), "%ldx")
        for v, w in enumerate(weights):
            own = WEIGHTS[v % 2]
            _load(f, own, f.at(w, place))
            _multiply(f, SUMS[v], FIRST, own)
        if panels == 1:
            for line in range(0, 1024, 64):
                prefetch(f, f.at(weights[0], f.add(place, line + STREAM_AHEAD)))
            return []
        for turn, (ahead, limit) in enumerate(asked):

            def fetch(ahead: str = ahead, turn: int = turn) -> None:
                for line in range(0, 1024 >> turn, 64):
                    prefetch(f, f.at(ahead, f.add(f.shl(i, 4 - turn), line)))

            f.when(f.op(f"icmp slt i64 {i}, {limit}"), fetch)
        return []

    whole = f.shl(f.op("and i64 %steps, -16"), 2)
    f.loop(0, whole, 64, [], block)

    def rest() -> None:
        _load(f, SHORT_ROWS, f.at(x, whole), "%ldx")
        for v, w in enumerate(weights):
            _load(f, SHORT_WEIGHTS, f.at(w, f.shl(whole, 4)))
            _multiply(f, SUMS[v], SHORT_ROWS, SHORT_WEIGHTS)

    f.when(f.op(f"icmp ne i64 {f.op('and i64 %steps, 8')}, 0"), rest)

    def as_they_are() -> None:
        for v in range(panels):
            f.do(f"call void @llvm.x86.tilestored64(i8 {SUMS[v]}, ptr {f.at(out, 64 * v)}, i64 %ldo)")
        f.ret()
        f.start(f.label())

    out = f.ptr("%out")
    f.when(f.op("icmp eq i64 %bias, 0"), as_they_are)
    _stored(f, room, panels)
    places = (
        f.op(f"ptrtoint ptr {f.at(room, f.mul(skip, 64 * panels))} to i64"), f.add("%out", f.mul(skip, "%ldo")),
    )  # fmt: skip
    args = (str(panels), f.op(f"sub i64 {rows}, {skip}"), *places, "%ldo", "%mode", "%bias")
    f.do(f"call void @pl_settle_{panels}({', '.join(f'i64 {a}' for a in args)})")
    return f.end()


def values(panels: int) -> str:
    """As micro.values, of rows as configured: select = (skip * 32 + rows) * 8 + panels."""
    f = Function(f"pl_values_{panels}", VALUE_ARGS)
    room, (skip, rows), table, p = _room(f), _height(f, "%rows", 3), f.ptr("%vp"), f.ptr("%p")
    _clear(f, panels)

    def chunk(i: str, _: list[str]) -> list[str]:
        place = f.at(f.load("ptr", f.at(table, f.shl(i, 3)), 8), "%first")
        _load(f, SHORT_ROWS, f.at(p, f.shl(i, 5)), "%ldp")
        for v in range(panels):
            _load(f, SHORT_WEIGHTS, f.at(place, 512 * v))
            _multiply(f, SUMS[v], SHORT_ROWS, SHORT_WEIGHTS)
        return []

    f.loop(0, "%chunks", 1, [], chunk)
    _stored(f, room, panels)
    state, out = f.ptr("%state"), f.ptr("%out")

    def row(r: str, _: list[str]) -> list[str]:
        own = f.at(state, f.shl(r, 4))
        keep, take = (f.splat("float", f.load("float", f.at(own, at), 4)) for at in (8, 12))
        for v in range(panels):
            place = f.at(f.at(out, f.mul(r, "%ldo")), 64 * v)
            found = f.load(F32, f.at(room, f.add(f.mul(r, 64 * panels), 64 * v)), 64)
            f.store(F32, f.fma(found, take, f.vec("fmul", f.load(F32, place, 4), keep)), place, 4)
        return []

    f.loop(skip, rows, 1, [], row)
    return f.end()


def matrix_module(target: Target) -> str:
    """As micro.matrix_module."""
    widths, value_widths = (1, target.tile_panels), (1, target.value_panels)
    tiles, sums = {v: tile(v) for v in widths}, {v: values(v) for v in value_widths}
    settles = {v: settle(target, v) for v in widths}
    return "\n".join([
        DECLARATIONS, configure(), *tiles.values(), *sums.values(), *settles.values(),
        dispatcher("pl_tile", TILE_ARGS, "rows", tiles, 2), dispatcher("pl_row_tile", TILE_ARGS, "rows", tiles, 2),
        dispatcher("pl_values", VALUE_ARGS, "rows", sums, 3), dispatcher("pl_settle", SETTLE_ARGS, "panels", settles),
    ])  # fmt: skip
