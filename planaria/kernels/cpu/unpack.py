"""How codes and scales come from a packed panel (pack.py): IR that the kernels of all packed kinds begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planaria.kernels.blocks import BLOCK, LEVELS, BlockKind
from planaria.kernels.cpu.emit import F32, I32, Function
from planaria.kernels.cpu.micro import H32, prefetch
from planaria.kernels.cpu.rounded import B32, B64, LEVELS_OFFSET, InPairs, form_of, half_of, host_has, joined
from planaria.kernels.cpu.target import Target

AHEAD = 32768  # bytes that are asked for before they are read: as many as are on their way, and more
PACKED_ARGS = ("rows", "x", "w", "scales", "blocks", "out", "ldo", "mode", "bias")
WIDE_ARGS = (
    "panels", "rows", "x", "w", "scales", "blocks", "stride", "acc", "codes", "fetch", "each",
)  # fmt: skip


def half(f: Function, shared: str, i: int) -> str:
    """The i-th vector of 16 float16 there, as float32."""
    return f.op(f"fpext <16 x half> {f.load('<16 x half>', f.at(shared, 32 * i), 2)} to {F32}")


def as_float(f: Function, value: str) -> str:
    return f.op(f"sitofp {I32} {value} to {F32}")


class Unpack:
    """A block of 32 along K of one packed panel."""

    def __init__(self, target: Target, kind: BlockKind) -> None:
        self.target, self.kind, self.groups = target, kind, BLOCK // kind.group
        self.block_bytes = 64 * kind.bits
        self.scale_bytes = kind.both * (16 * self.groups if kind.small else 32)
        self.shared_bytes = kind.both * 32 if kind.small else 0
        self.scales = self.groups if kind.small else 1  # vectors of `factors`
        self.count = self.scales * kind.both
        self.words = [""] * 2  # of each plane, which the next codes are in

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
        """For each column what sums of a block, or of either half, are multiplied by; then minima likewise."""
        if not self.kind.small:
            return [half(f, own, i) for i in range(self.kind.both)]
        found = []
        for side in range(self.kind.both):
            scale = half(f, shared, side)
            if side:
                scale = f.op(f"fneg {F32} {scale}")
            small = [self.small(f, own, self.groups * side + g) for g in range(self.groups)]
            found += [f.vec("fmul", scale, as_float(f, s)) for s in small]
        return found

    def small(self, f: Function, own: str, index: int) -> str:
        """A vector of small integers, i32 [16]: the scales of each group, then the minima."""
        return f.op(f"sext <16 x i8> {f.load('<16 x i8>', f.at(own, 16 * index), 1)} to {I32}")

    def prefetch(self, f: Function, panel: str, block: str, ahead: int | str) -> None:
        """Ask for this block's share of a panel's bytes, `ahead` bytes on."""
        size = self.block_bytes + self.scale_bytes + self.shared_bytes // 8
        place = f.at(f.at(panel, f.mul(block, size)), ahead)
        for line in range(0, size, 64):
            prefetch(f, f.at(place, line))

    def steps(self, f: Function, block: str) -> Iterator[str]:
        """Codes as the kind's rows meet them (rounded.py), in order of K, without their offset; each is emitted when
        asked for, so that few values are alive at a time."""
        if form_of(self.target, self.kind).by_bytes:
            for step in range(8):
                code = self._fields(f, block, step, I32, 8, (1 + (1 << 8)) * (1 + (1 << 16)))
                yield self._four_levels(f, code) if self.kind.levels else code
            return
        if self.kind.bits == 8:
            for step in range(16):
                yield f.op(f"sext <32 x i8> {f.load('<32 x i8>', f.at(block, 32 * step), 32)} to {H32}")
            return
        if self.kind.levels and not self.target.wide:
            for word in range(4):
                yield from self._levels(f, f.load(H32, f.at(block, 64 * word), 64))
            return
        for step in range(16):
            code = self._fields(f, block, step, H32, 16, 1)
            yield self._level(f, code) if self.kind.levels else code

    def _fields(self, f: Function, block: str, step: int, lanes: str, field: int, ones: int) -> str:
        """A step's codes: `field` bits of a word have those of one place along K. ones: 1 in each field of a lane."""
        code, below = "", 0
        for number, (_, bits, _) in enumerate(self.kind.planes):
            word, turn = divmod(step * bits, field)
            if not turn:
                self.words[number] = f.load(lanes, f.at(block, 64 * (below + word)), 64)
            part = shifted(f, lanes, self.words[number], turn - below)
            part = f.op(f"and {lanes} {part}, {splat(lanes, (((1 << bits) - 1) << below) * ones)}")
            code = f.op(f"or {lanes} {code}, {part}") if code else part
            below += bits
        return code

    def _level(self, f: Function, codes: str) -> str:
        table = ", ".join(f"i16 {v + LEVELS_OFFSET}" for v in LEVELS * 2)
        return f.op(f"call {H32} @llvm.x86.avx512.permvar.hi.512({H32} <{table}>, {H32} {codes})")

    def _four_levels(self, f: Function, codes: str) -> str:
        """Bytes, unsigned."""
        table = ", ".join(f"i8 {((v + LEVELS_OFFSET) ^ 128) - 128}" for v in LEVELS * 4)
        index = f.op(f"bitcast {I32} {codes} to {B64}")
        found = f.op(f"call {B64} @llvm.x86.avx512.pshuf.b.512({B64} <{table}>, {B64} {index})")
        return f.op(f"bitcast {B64} {found} to {I32}")

    def _levels(self, f: Function, words: str) -> list[str]:
        """Of four steps: two codes of 16 bits are looked up at once, by bytes, in each half of 256 bits."""
        table = ", ".join(f"i8 {((v + LEVELS_OFFSET) ^ 128) - 128}" for v in LEVELS * 2)
        found = list[str]()
        for turn in (0, 4):
            codes = f.op(f"and {H32} {shifted(f, H32, words, turn)}, {splat(H32, 0x0F0F)}")
            halves = []
            for half in range(2):
                index = f.op(f"bitcast <16 x i16> {half_of(f, 'i16', codes, half, 32)} to {B32}")
                halves.append(self._looked_up(f, f"<{table}>", index))
            found.append(f.op(f"bitcast <64 x i8> {joined(f, 'i8', halves, 32)} to {H32}"))
        lower = [f.op(f"and {H32} {both}, {splat(H32, 0xFF)}") for both in found]
        return lower + [shifted(f, H32, both, 8) for both in found]

    @staticmethod
    def _looked_up(f: Function, table: str, index: str) -> str:
        """Bytes of a table, which both halves of it hold."""
        if host_has("avx2"):
            return f.op(f"call {B32} @llvm.x86.avx2.pshuf.b({B32} {table}, {B32} {index})")
        found = "poison"
        for i in range(32):
            at = f.op(f"extractelement {B32} {index}, i64 {i}")
            level = f.op(f"extractelement {B32} {table}, i8 {at}")
            found = f.op(f"insertelement {B32} {found}, i8 {level}, i64 {i}")
        return found


def splat(lanes: str, value: int) -> str:
    """A vector of one number."""
    count, item = lanes.strip("<>").split(" x ")
    return "<" + ", ".join([f"{item} {value}"] * int(count)) + ">"


def shifted(f: Function, lanes: str, vector: str, right: int) -> str:
    if right == 0:
        return vector
    return f.op(f"{'lshr' if right > 0 else 'shl'} {lanes} {vector}, {splat(lanes, abs(right))}")


def splat_word(f: Function, pointer: str) -> str:
    """The 4 bytes at pointer, to all lanes."""
    return f.splat("i32", f.load("i32", pointer, 4))


def rows_at(f: Function, first: str, form: InPairs, rows: int) -> list[str]:
    """A block of each of these rows."""
    return [f.at(first, form.row_bytes * r) for r in range(rows)]


def sums_of_group(
    f: Function, form: InPairs, group: int, codes: Iterator[str], x_at: Sequence[str], start: str = ""
) -> list[str]:
    """Each row's sums of a block's group, i32 [16]. start: what they begin with, else what the form says."""
    places = [f.at(x, form.numbers) for x in x_at]
    whole = [start or form.first(f, place, group) for place in places]
    for first, last in form.groups[group]:
        run = [form.begin(f, w, place, group) for w, place in zip(whole, places, strict=True)]
        for step in range(first, last):
            code = next(codes)
            for r, x in enumerate(x_at):
                run[r] = form.add(f, run[r], code, splat_word(f, f.at(x, 4 * step)))
        whole = [form.whole(f, w, one) for w, one in zip(whole, run, strict=True)]
    return whole


def ask(f: Function, fetch: str, each: str = "%each") -> None:
    """For the 512 bytes at the next address of a list, which `fetch` is the place of; where there are any."""

    def lines() -> None:
        line = f.load("ptr", f.ptr(fetch), 8)
        for k in range(8):
            prefetch(f, f.at(line, 64 * k))

    f.when(f.op(f"icmp ne i64 {each}, 0"), lines)


def in_tiles(f: Function, most: int, tile: Callable[[int, str], None], fetch: str = "", times: int = 1) -> str:
    """All rows in tiles of so many and one of the rest: how many, and the first. fetch: what is asked for with each,
    so many times, see `ask`, or none; what follows."""
    rest = f.op(f"urem i64 %rows, {most}")
    whole = f.op(f"sub i64 %rows, {rest}")

    def full(first: str, inner: list[str]) -> list[str]:
        for _ in range(times if fetch else 0):
            ask(f, inner[0])
            inner = [f.op(f"add i64 {inner[0]}, %each")]
        tile(most, first)
        return inner

    after = f.loop(0, whole, most, [("i64", fetch)] if fetch else [], full)
    labels = [f.label() for _ in range(most)]
    table = " ".join(f"i64 {r}, label %{labels[r]}" for r in range(1, most))
    f.do(f"switch i64 {rest}, label %{labels[0]} [ {table} ]")
    for rows in range(1, most):
        f.start(labels[rows])
        tile(rows, whole)
        f.branch(labels[0])
    f.start(labels[0])
    return after[0] if fetch else ""
