"""Rows as packed weights meet them: each block of 32 rounded by its own largest value (or that of two, see round_rows),
to integers of 15 or 8 bits, or of 8 bits twice, and how those are multiplied by codes. Part of a packed kind's object
(packed.py).

A block of a row is its integers [32], then its numbers: a float32 scale, and for the block or each of its halves what
is added to sums of codes for their offset (int32), or what minima are multiplied by (float32). Sums of products are
exact, whatever the instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from planaria.kernels.blocks import BLOCK, KINDS, BlockKind
from planaria.kernels.cpu.emit import F32, I32, Function, literal
from planaria.kernels.cpu.micro import H32, Elements
from planaria.kernels.cpu.target import Target
from planaria.kernels.cpu.vector import ROUNDING, ROUNDING_BITS
from planaria.kernels.objects import initialise

I64 = "<32 x i32>"
B64, B32 = "<64 x i8>", "<32 x i8>"
LEVELS_OFFSET = 127  # of levels, so that they are unsigned
ONES = "<" + ", ".join(["i16 1"] * 32) + ">"
INTRINSICS = f"""
declare {I32} @llvm.x86.avx512.vpdpbusd.512({I32}, {I32}, {I32})
declare {I32} @llvm.x86.avx512.vpdpwssd.512({I32}, {I32}, {I32})
declare {H32} @llvm.x86.avx512.pmaddubs.w.512({B64}, {B64})
declare {B64} @llvm.x86.avx512.pshuf.b.512({B64}, {B64})
declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw({B32}, {B32})
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
declare {I32} @llvm.smax.v16i32({I32}, {I32})
declare <8 x i32> @llvm.smax.v8i32(<8 x i32>, <8 x i32>)
declare <4 x i32> @llvm.smax.v4i32(<4 x i32>, <4 x i32>)
declare {B32} @llvm.x86.avx2.pshuf.b({B32}, {B32})
declare i32 @llvm.vector.reduce.smax.v8i32(<8 x i32>)
declare i32 @llvm.vector.reduce.smax.v16i32({I32})
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare <8 x i32> @llvm.smin.v8i32(<8 x i32>, <8 x i32>)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
"""


@functools.cache
def host_has(feature: str) -> bool:
    return bool(initialise().get_host_cpu_features().get(feature))


def has_vnni(target: Target) -> bool:
    """Whether bytes are multiplied and added up by one instruction. CPUs of avx512_bf16 have it; "avx512" may be chosen
    on them, without."""
    bfloat = target.isa in ("amx", "avx512_bf16")
    return bfloat or (target.wide and host_has("avx512vnni") and not host_has("avx512bf16"))


class InPairs:
    """int16 of 15 bits: a step is two neighbours along K, codes int16 [16][2].

    most: the largest integer. numbers: where they are in a block of a row, of `row_bytes`. run: steps whose sums are
    held in `lanes`, which are of one group of weights. second: where a block's second integers are, see InPlanes."""

    steps, item, most, lanes, codes = 16, 16, 16383, I32, H32  # so that no sum of a block of any kind leaves 32 bits
    by_bytes, second = False, 0

    def __init__(self, target: Target, kind: BlockKind) -> None:
        self.target, self.count = target, BLOCK // kind.group
        self.offset = LEVELS_OFFSET if kind.levels else kind.offset
        self.numbers, self.row_bytes = 4 * self.steps, 4 * self.steps + 16
        self.run = self.steps * kind.group // BLOCK

    @property
    def by_superblocks(self) -> bool:
        """Whether its products are those of superblocks.py."""
        return False

    @property
    def groups(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Of each group of weights its runs: steps [first, last)."""
        each = self.steps // self.count
        return [[(i, i + self.run) for i in range(each * g, each * (g + 1), self.run)] for g in range(self.count)]

    def first(self, f: Function, numbers: str, group: int) -> str:
        """What a group's sums begin with, i32 [16]."""
        return f.splat("i32", f.load("i32", f.at(numbers, 4 + 4 * group), 4)) if self.offset else "zeroinitializer"

    def begin(self, f: Function, whole: str, numbers: str, group: int) -> str:
        """What a run's sums begin with, where those before are `whole`."""
        return whole

    def offsets(self, f: Function, whole: str, sum: str) -> str:
        """What is added for the offset to sums of codes, of a group's integers i32 [16], whose sum is `sum`; i32."""
        return f.op(f"mul i32 {sum}, {-self.offset}")

    def add(self, f: Function, acc: str, w: str, x: str) -> str:
        """acc plus a step's codes times 4 bytes of a row in all lanes, i32 [16]: one instruction or two (vpdpwssd,
        pmaddwd), which LLVM finds by itself; it takes three times as long to."""
        x = f.op(f"bitcast {I32} {x} to {H32}")
        if self.target.wide:
            sums = f.op(f"call {I32} @llvm.x86.avx512.pmaddw.d.512({H32} {w}, {H32} {x})")
            return f.op(f"add {I32} {acc}, {sums}")
        wide = [f.op(f"sext {H32} {v} to {I64}") for v in (w, x)]
        product = f.op(f"mul nsw {I64} {wide[0]}, {wide[1]}")
        halves = []
        for odd in (0, 1):
            mask = ", ".join(f"i32 {2 * i + odd}" for i in range(16))
            halves.append(f.op(f"shufflevector {I64} {product}, {I64} poison, <16 x i32> <{mask}>"))
        return f.op(f"add {I32} {acc}, {f.op(f'add {I32} {halves[0]}, {halves[1]}')}")

    def whole(self, f: Function, before: str, run: str) -> str:
        """Sums after a run, i32 [16]."""
        return run


class InBytes(InPairs):
    """int8: a step is four neighbours along K, codes uint8 [16][4] as i32 [16]. One instruction multiplies and adds
    (vpdpbusd), or one multiplies and adds pairs into 16 bits (pmaddubsw), which hold the sums of a run. With an offset
    a run is a group then, and its sums begin with what the offset makes of them: two int16, of either pair of four.

    cut: lowest bits that twofold.py takes off sums of products, so that two are in 32 bits, and a superblock's, too."""

    steps, item, most, codes = 8, 8, 127, I32
    by_bytes, cut = True, 0

    def __init__(self, target: Target, kind: BlockKind) -> None:
        super().__init__(target, kind)
        self.direct = has_vnni(target) or not host_has("avx2")
        most = self.most * max(kind.offset, (1 << kind.bits) - 1 - kind.offset)  # of a product
        if target.wide:
            scale = 128 if kind.offset else 63
            bound = most * kind.group * 8 * self.count * self.most * scale  # of a superblock's, times scales of both
            self.cut = (bound >> 31).bit_length()
        if not self.direct:
            self.lanes = H32
            fit = 32767 // (2 * most)
            self.run = min(self.run, 1 << fit.bit_length() - 1)

    @property
    def by_superblocks(self) -> bool:
        return not self.direct and not self.target.wide

    def first(self, f: Function, numbers: str, group: int) -> str:
        return super().first(f, numbers, group) if self.direct else "zeroinitializer"

    def begin(self, f: Function, whole: str, numbers: str, group: int) -> str:
        if self.direct:
            return whole
        return f.op(f"bitcast {I32} {super().first(f, numbers, group)} to {H32}") if self.offset else "zeroinitializer"

    def offsets(self, f: Function, whole: str, sum: str) -> str:
        if self.direct:
            return super().offsets(f, whole, sum)
        mask = ", ".join(f"i32 {-(i % 4 < 2)}" for i in range(16))
        first = f.op(f"call i32 @llvm.vector.reduce.add.v16i32({I32} {f.op(f'and {I32} {whole}, <{mask}>')})")
        low, high = (super(InBytes, self).offsets(f, whole, s) for s in (first, f.op(f"sub i32 {sum}, {first}")))
        return f.op(f"or i32 {f.op(f'and i32 {low}, 65535')}, {f.op(f'shl i32 {high}, 16')}")

    def add(self, f: Function, acc: str, w: str, x: str) -> str:
        if not self.direct:
            return f.op(f"add {H32} {acc}, {self._pairs(f, w, x)}")
        if self.target.wide:
            return f.op(f"call {I32} @llvm.x86.avx512.vpdpbusd.512({I32} {acc}, {I32} {w}, {I32} {x})")
        for k in range(4):
            code = f.op(f"and {I32} {f.op(f'lshr {I32} {w}, {f.const_i32(8 * k)}')}, {f.const_i32(255)}")
            signed = f.op(f"ashr {I32} {f.op(f'shl {I32} {x}, {f.const_i32(24 - 8 * k)}')}, {f.const_i32(24)}")
            acc = f.op(f"add {I32} {acc}, {f.op(f'mul {I32} {code}, {signed}')}")
        return acc

    def _pairs(self, f: Function, w: str, x: str) -> str:
        if self.target.wide:
            both = [f.op(f"bitcast {I32} {v} to {B64}") for v in (w, x)]
            return f.op(f"call {H32} @llvm.x86.avx512.pmaddubs.w.512({B64} {both[0]}, {B64} {both[1]})")
        halves = []
        for half in range(2):
            w8, x8 = (f.op(f"bitcast <8 x i32> {half_of(f, 'i32', v, half, 16)} to {B32}") for v in (w, x))
            halves.append(f.op(f"call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw({B32} {w8}, {B32} {x8})"))
        return joined(f, "i16", halves, 16)

    def whole(self, f: Function, before: str, run: str) -> str:
        """On AVX2 superblocks.py has another."""
        if self.direct:
            return run
        if not self.target.wide:
            return f.op(f"add {I32} {before}, {multiplied(f, run, ONES)}")
        sums = f.op(f"call {I32} @llvm.x86.avx512.pmaddw.d.512({H32} {run}, {H32} {ONES})")
        return f.op(f"add {I32} {before}, {sums}")


class InPlanes(InBytes):
    """int8, and a second block behind the first: what rounding left, in FINER parts of one, where the block's largest
    number is FAR times the mean of its row's; else zeros, with a scale of 0. Products take both, one after the other,
    with the same codes."""

    def __init__(self, target: Target, kind: BlockKind) -> None:
        super().__init__(target, kind)
        self.second, self.row_bytes = self.row_bytes, 2 * self.row_bytes

    @property
    def by_superblocks(self) -> bool:
        return False


def form_of(target: Target, kind: BlockKind) -> InPairs:
    if kind.by_bytes:
        return InBytes(target, kind)
    return (InPlanes if in_planes(target, kind) else InPairs)(target, kind)


def in_planes(target: Target, kind: BlockKind) -> bool:
    """Whether rows have second integers: those of codes of 4 and 5 bits, on AVX2, where their products are summed in 16
    bits, and on AVX-512 where one instruction takes four; of levels on the latter alone: they have 8 bits."""
    # Q4_1 is quick enough, and what people run first: it stays as near to the unpacked product as 15 bits are
    if kind.by_bytes or kind.bits == 8 or kind is KINDS["q4_1"]:
        return False
    return has_vnni(target) if target.wide else host_has("avx2") and not kind.levels


def half_of(f: Function, item: str, vector: str, half: int, lanes: int) -> str:
    """The first or second half of a vector of so many lanes."""
    kind, size = f"<{lanes} x {item}>", lanes // 2
    picked = ", ".join(f"i32 {half * size + i}" for i in range(size))
    return f.op(f"shufflevector {kind} {vector}, {kind} poison, <{size} x i32> <{picked}>")


def joined(f: Function, item: str, halves: list[str], lanes: int) -> str:
    """Two vectors of so many lanes as one."""
    picked = ", ".join(f"i32 {i}" for i in range(2 * lanes))
    kind = f"<{lanes} x {item}>"
    return f.op(f"shufflevector {kind} {halves[0]}, {kind} {halves[1]}, <{2 * lanes} x i32> <{picked}>")


def multiplied(f: Function, a: str, b: str) -> str:
    """Sums i32 [16] of the products of pairs, of int16 [16][2], on AVX2."""
    sides = [[half_of(f, "i16", v, side, 32) for side in range(2)] for v in (a, b)]
    call = "call <8 x i32> @llvm.x86.avx2.pmadd.wd"
    return joined(f, "i32", [f.op(f"{call}(<16 x i16> {x}, <16 x i16> {y})") for x, y in zip(*sides, strict=True)], 8)


AT_ONCE = 4  # blocks whose largest values and sums are found together
FAR, FINER = 1.5, 254  # see InPlanes
BLOCKS = 8  # of a superblock
Superblock = Callable[[str, str, str, list[str]], list[str]]  # number, first block, end, values carried -> those after


def superblocks(f: Function, place: str, carried: list[tuple[str, str]], body: Superblock) -> list[str]:
    """For each superblock of %blocks blocks, of which the first is at this place in one."""

    def each(which: str, values: list[str]) -> list[str]:
        begin = f.op(f"sub i64 {f.shl(which, 3)}, {place}")
        end = f.op(f"call i64 @llvm.smin.i64(i64 {f.add(begin, BLOCKS)}, i64 %blocks)")
        return body(which, f.op(f"call i64 @llvm.smax.i64(i64 {begin}, i64 0)"), end, values)

    count = f.op(f"lshr i64 {f.add(f.add(place, '%blocks'), BLOCKS - 1)}, 3")
    return f.loop(0, count, 1, carried, each)


def larger(f: Function, kind: str, a: str, b: str) -> str:
    """Of floats' magnitudes, as integers, whose order is that of floats: their maximum is a tree, that of floats a
    chain for NaNs' sake."""
    return f.op(f"call {kind} @llvm.smax.v{kind[1:].split()[0]}i32({kind} {a}, {kind} {b})")


def added(f: Function, kind: str, a: str, b: str) -> str:
    return f.op(f"add {kind} {a}, {b}")


def largest(f: Function, halves: Sequence[str]) -> str:
    """Bits of the larger magnitudes of a block's two halves, i32 [16]."""
    bits = [f.op(f"bitcast {F32} {v} to {I32}") for v in halves]
    return larger(f, I32, *(f.op(f"and {I32} {b}, {f.const_i32(0x7FFFFFFF)}") for b in bits))


def quantised(f: Function, form: InPairs, halves: Sequence[str], factor: str, to: str) -> list[str]:
    """A block's numbers times a factor, as integers, which are stored; i32 [16] whose lanes add up to each group's."""
    own, wholes, short = f.splat("float", factor), list[str](), f"<16 x i{form.item}>"
    for h, v in enumerate(halves):
        moved = f.op(f"bitcast {F32} {f.fma(v, own, f.const_f32(ROUNDING))} to {I32}")
        wholes.append(f.op(f"sub {I32} {moved}, {f.const_i32(ROUNDING_BITS)}"))
        f.store(short, f.op(f"trunc {I32} {wholes[-1]} to {short}"), f.at(to, 2 * form.item * h), 2)
    return wholes if form.count > 1 else [added(f, I32, *wholes)]


def remainder(f: Function, values: str, factor: str) -> str:
    """What rounding takes from values times a factor."""
    own = f.splat("float", factor)
    whole = f.vec("fsub", f.fma(values, own, f.const_f32(ROUNDING)), f.const_f32(ROUNDING))
    return f.fma(values, own, f.op(f"fneg {F32} {whole}"))


def of_each(f: Function, combined: Callable[[Function, str, str, str], str], vectors: Sequence[str]) -> str:
    """All lanes of each of four vectors i32 [16], combined: i32 [4]. combined: of two vectors of that type."""

    def picked(a: str, b: str, lanes: Sequence[int]) -> str:
        """Of each quarter of both these lanes."""
        mask = ", ".join(f"i32 {4 * q + lane % 4 + 16 * (lane // 4)}" for q in range(4) for lane in lanes)
        return f.op(f"shufflevector {I32} {a}, {I32} {b}, <16 x i32> <{mask}>")

    def pair(a: str, b: str, first: Sequence[int], second: Sequence[int]) -> str:
        return combined(f, I32, picked(a, b, first), picked(a, b, second))

    halves = [pair(vectors[i], vectors[i + 1], (0, 4, 1, 5), (2, 6, 3, 7)) for i in (0, 2)]
    found, lanes = pair(halves[0], halves[1], (0, 1, 4, 5), (2, 3, 6, 7)), 16
    while lanes > 4:
        first, second = (half_of(f, "i32", found, half, lanes) for half in (0, 1))
        lanes //= 2
        found = combined(f, f"<{lanes} x i32>", first, second)
    return found


def round_rows(target: Target, kind: BlockKind, then: Callable[[Function, str, str], None]) -> str:
    """A row of so many blocks, rounded, each `step` bytes after the last. What isn't finite makes its block's scale no
    number. place: of the row's first block in a superblock. Where products are of superblocks, two of their blocks have
    one scale, and `then` comes after each, with its first block and the end. See InPlanes."""
    f, form = Function("pl_round", ("x", "blocks", "out", "step", "place")), form_of(target, kind)
    act, x, out = Elements(f, target), f.ptr("%x"), f.ptr("%out")

    def spread(value: float) -> str:
        return f"<{', '.join([f'float {literal(value)}'] * AT_ONCE)}>"

    most_wanted, share, nothing = (spread(value) for value in (form.most, 1 / form.most, 0.0))
    floats, places = f"<{AT_ONCE} x float>", range(AT_ONCE)

    def one(vector: str, place: int, kind: str = "float") -> str:
        return f.op(f"extractelement <{AT_ONCE} x {kind}> {vector}, i64 {place}")

    def smaller(a: str, b: str) -> str:
        return f.op(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

    def halves_of(block: str) -> list[str]:
        at = f.at(x, f.mul(block, 32 * target.item))
        return [act.load(f.at(at, 16 * target.item * h)) for h in range(2)]

    def stored(to: Sequence[str], halves: Sequence[Sequence[str]], factor: str, scale: str) -> None:
        """Integers of each block, and behind them its numbers."""
        sums = [quantised(f, form, halves[k], one(factor, k), to[k]) for k in places]  # by group
        for k in places:
            f.store("float", one(scale, k), f.at(to[k], form.numbers), 4)
        for g in range(form.count):
            total = of_each(f, added, [each[g] for each in sums])
            times = f.op(f"fmul {floats} {scale}, {f.op(f'sitofp <{AT_ONCE} x i32> {total} to {floats}')}")
            for k in places:
                place = f.at(to[k], form.numbers + 4 + 4 * g)
                if form.offset:
                    f.store("i32", form.offsets(f, sums[k][g], one(total, k, "i32")), place, 4)
                else:
                    f.store("float", one(times, k), place, 4)

    def limit_of_row() -> str:
        """What a block's largest number is to be above for it to have second integers."""

        def block(i: str, sum: list[str]) -> list[str]:
            bits = f.op(f"call i32 @llvm.vector.reduce.smax.v16i32({I32} {largest(f, halves_of(i))})")
            return [f.op(f"fadd float {sum[0]}, {f.op(f'bitcast i32 {bits} to float')}")]

        (sum,) = f.loop(0, "%blocks", 1, [("float", literal(0.0))], block)
        share = f.op(f"fdiv float {literal(FAR)}, {f.op('sitofp i64 %blocks to float')}")
        return f.splat("float", f.op(f"fmul float {sum}, {share}"), AT_ONCE)

    limit = limit_of_row() if form.second else ""

    def body(i: str, begin: str | int, last: str) -> None:
        # behind the last pair, or block of it, that again
        pair = f.op(f"and i64 {f.op(f'sub i64 {last}, {begin}')}, -2")
        second = smaller(f.add(i, 2), f.add(pair, begin))
        blocks = [i, smaller(f.add(i, 1), last), second, smaller(f.add(second, 1), last)]
        to, halves, tops = [f.at(out, f.mul(block, "%step")) for block in blocks], list[list[str]](), list[str]()
        for block in blocks:
            halves.append(halves_of(block))
            tops.append(largest(f, halves[-1]))
        if form.by_superblocks:
            tops = [top for k in (0, 2) for top in [larger(f, I32, *tops[k : k + 2])] * 2]
        most = f.op(f"bitcast <{AT_ONCE} x i32> {of_each(f, larger, tops)} to {floats}")
        inverse = f.op(f"fdiv {floats} {most_wanted}, {most}")
        none = f.op(f"fcmp oeq {floats} {most}, {nothing}")
        factor = f.op(f"select <{AT_ONCE} x i1> {none}, {floats} {nothing}, {floats} {inverse}")
        zero = f.op(f"fsub {floats} {most}, {most}")  # or no number
        scale = f.op(f"fadd {floats} {f.op(f'fmul {floats} {most}, {share}')}, {zero}")
        stored(to, halves, factor, scale)
        if form.second:
            far = f.op(f"fcmp ogt {floats} {most}, {limit}")
            finer = (
                f.op(f"select <{AT_ONCE} x i1> {far}, {floats} {v}, {floats} {nothing}")
                for v in (spread(FINER), f.op(f"fmul {floats} {scale}, {spread(1 / FINER)}"))
            )
            left = [[remainder(f, v, one(factor, k)) for v in halves[k]] for k in places]
            stored([f.at(at, form.second) for at in to], left, *finer)

    def several(begin: str | int, end: str) -> None:
        last = f.add(end, -1)

        def some(i: str, _: list[str]) -> list[str]:
            body(i, begin, last)
            return []

        f.loop(begin, end, AT_ONCE, [], some)

    def superblock(which: str, begin: str, end: str, carried: list[str]) -> list[str]:
        several(begin, end)
        then(f, begin, end)
        return carried

    if form.by_superblocks:
        superblocks(f, "%place", [], superblock)
    else:
        several(0, "%blocks")
    return f.end()
