"""Writes LLVM IR functions as text. It owns syntax only (names, loops, loads); micro.py and vector.py say what.

Every argument of a kernel is an i64 (an address, a size, or float32 bits), so that all of them are called alike.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

F32 = "<16 x float>"
I32 = "<16 x i32>"


class Function:
    """One function under construction. Values are IR names or literals, kept as strings."""

    def __init__(self, name: str, args: Sequence[str], returns: str = "void") -> None:
        self.name, self.args, self.returns = name, list(args), returns
        self.lines: list[str] = ["entry:"]
        self.block = "entry"
        self._next = 0

    def text(self) -> str:
        """The finished definition."""
        return self.defined("nounwind noinline")

    def defined(self, attributes: str, linkage: str = "") -> str:
        head = ", ".join(f"i64 %{a}" for a in self.args)
        body = "\n".join(self.lines)
        return f"define {linkage}{self.returns} @{self.name}({head}) {attributes} {{\n{body}\n}}\n"

    def name_new(self) -> str:
        self._next += 1
        return f"%t{self._next}"

    def op(self, rhs: str) -> str:
        """Append `%new = rhs`; the new name."""
        name = self.name_new()
        self.lines.append(f"  {name} = {rhs}")
        return name

    def do(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def label(self) -> str:
        self._next += 1
        return f"b{self._next}"

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def branch(self, label: str) -> None:
        self.do(f"br label %{label}")

    def ret(self) -> None:
        self.do("ret void")

    def end(self) -> str:
        """Return; the finished definition."""
        self.ret()
        return self.text()

    def opaque(self, kind: str, value: str) -> str:
        """A vector as it is, of which LLVM knows nothing, so that it isn't computed again, or later. On x86."""
        return self.op(f'call {kind} asm sideeffect "", "=v,0"({kind} {value})')

    # integers and addresses
    def add(self, a: str, b: str | int) -> str:
        return a if b == 0 else self.op(f"add i64 {a}, {b}")

    def mul(self, a: str, b: str | int) -> str:
        return self.op(f"mul i64 {a}, {b}")

    def shl(self, a: str, b: int) -> str:
        return self.op(f"shl i64 {a}, {b}")

    def ptr(self, address: str) -> str:
        return self.op(f"inttoptr i64 {address} to ptr")

    def at(self, pointer: str, offset: str | int) -> str:
        """pointer + offset bytes."""
        return pointer if offset == 0 else self.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def load(self, kind: str, pointer: str, align: int = 1) -> str:
        return self.op(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: str, pointer: str, align: int = 1) -> None:
        self.do(f"store {kind} {value}, ptr {pointer}, align {align}")

    def float_of(self, bits: str) -> str:
        """A float from the float32 bits in the low half of an i64 argument."""
        low = self.op(f"trunc i64 {bits} to i32")
        return self.op(f"bitcast i32 {low} to float")

    # vectors of 16
    def splat(self, kind: str, scalar: str, lanes: int = 16) -> str:
        one = self.op(f"insertelement <{lanes} x {kind}> poison, {kind} {scalar}, i64 0")
        return self.op(
            f"shufflevector <{lanes} x {kind}> {one}, <{lanes} x {kind}> poison, <{lanes} x i32> zeroinitializer"
        )

    def const_i32(self, values: int | Sequence[int]) -> str:
        seq = [values] * 16 if isinstance(values, int) else list(values)
        return "<" + ", ".join(f"i32 {v}" for v in seq) + ">"

    def const_f32(self, value: float) -> str:
        return "<" + ", ".join(f"float {literal(value)}" for _ in range(16)) + ">"

    def floats(self, array: str, i: str) -> str:
        """Elements i to i + 15 of an array of float32."""
        return self.load(F32, self.at(array, self.shl(i, 2)), 4)

    def put_floats(self, value: str, array: str, i: str) -> None:
        self.store(F32, value, self.at(array, self.shl(i, 2)), 4)

    def load_some(self, pointer: str, mask: str, kind: str = "float") -> str:
        """Lanes outside the mask are 0 and are not read."""
        vector, short = f"<16 x {kind}>", "f32" if kind == "float" else kind
        rest = f"ptr {pointer}, i32 1, <16 x i1> {mask}, {vector} zeroinitializer"
        return self.op(f"call {vector} @llvm.masked.load.v16{short}.p0({rest})")

    def select(self, mask: str, yes: str, no: str = "zeroinitializer") -> str:
        return self.op(f"select <16 x i1> {mask}, {F32} {yes}, {F32} {no}")

    def vec(self, code: str, a: str, b: str) -> str:
        """A binary float operation on 16 lanes: fadd, fsub, fmul, fdiv."""
        return self.op(f"{code} {F32} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        return self.op(f"call {F32} @llvm.fma.v16f32({F32} {a}, {F32} {b}, {F32} {c})")

    def loop(
        self,
        begin: str | int,
        end: str | int,
        step: int,
        carried: Sequence[tuple[str, str]],
        body: Callable[[str, list[str]], Sequence[str]],
    ) -> list[str]:
        """for i in range(begin, end, step), carrying values; their values after the loop.

        `carried` is (type, initial value) pairs; `body` gets i and the values and returns the next values.
        """
        head, inside, done = self.label(), self.label(), self.label()
        before = self.block
        self.branch(head)
        self.start(head)
        index = self.name_new()
        names = [self.name_new() for _ in carried]
        place = len(self.lines)
        test = self.op(f"icmp slt i64 {index}, {end}")
        self.do(f"br i1 {test}, label %{inside}, label %{done}")
        self.start(inside)
        results = list(body(index, list(names)))
        following = self.op(f"add nsw i64 {index}, {step}")
        tail = self.block
        self.branch(head)
        phis = [f"  {index} = phi i64 [ {begin}, %{before} ], [ {following}, %{tail} ]"]
        for (kind, initial), name, result in zip(carried, names, results, strict=True):
            phis.append(f"  {name} = phi {kind} [ {initial}, %{before} ], [ {result}, %{tail} ]")
        self.lines[place:place] = phis
        self.start(done)
        return names

    def each(self, end: str | int, step: int, body: Callable[[str], None]) -> None:
        """for i in range(0, end, step): body(i)."""

        def carried_nothing(i: str, _: list[str]) -> list[str]:
            body(i)
            return []

        self.loop(0, end, step, [], carried_nothing)

    def when(self, condition: str, then: Callable[[], None]) -> None:
        """if condition: then()."""
        inside, done = self.label(), self.label()
        self.do(f"br i1 {condition}, label %{inside}, label %{done}")
        self.start(inside)
        then()
        self.branch(done)
        self.start(done)


def literal(value: float) -> str:
    """A float32 constant as LLVM wants it: the bits of the same value as a double."""

    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
