"""What a recording is made with: a tape, its buffers, the scratch memory that its operations want."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu import layout, packed
from planaria.kernels.cpu.build import KindKernels
from planaria.kernels.cpu.fields import MeetOp, Operation, ReduceOp
from planaria.kernels.cpu.micro import DENSE
from planaria.kernels.cpu.pack import Packed, up
from planaria.kernels.cpu.tape import Act, Between, Buffer, Tape, buffer
from planaria.kernels.cpu.target import Target
from planaria.kernels.ops import Batch
from planaria.mesh.all2all import All2All
from planaria.mesh.comm import Comm, NativeComm


class Addressed(Protocol):
    """What has memory that kernels read: weights, norms, caches."""

    @property
    def address(self) -> int: ...


@dataclass(frozen=True)
class Vector:
    """A norm's weight, float32, padded with zeros to 16."""

    values: npt.NDArray[np.float32]
    length: int

    @property
    def address(self) -> int:
        return int(self.values.ctypes.data)


@dataclass(frozen=True)
class Rope:
    """cos, sin float32 [positions, half]."""

    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]

    @property
    def fields(self) -> dict[str, Thing]:
        """Of an operation that rotates."""
        return {"cos": self.cos, "sin": self.sin, "half": self.cos.shape[1]}


Thing = int | float | Buffer | Act | Addressed | npt.NDArray[Any] | None


class Recorder:
    """One forward pass while it is recorded. tp, lanes: the ranks that have the other parts, and the way to those of
    other lanes. most: threads that the recording must have scratch memory for. kinds: kernels of a packed kind, by its
    number. cp: tensor ranks of all shares of a step, else the same as tp."""

    def __init__(
        self, batch: Batch, target: Target, tp: Comm, lanes: All2All | None, most: int,
        kinds: Callable[[int], KindKernels], cp: Comm,
    ) -> None:  # fmt: skip
        self.batch, self.target, self.tp, self.lanes, self.most, self._kinds = batch, target, tp, lanes, most, kinds
        self.cp, self.step_rows = cp, layout.ROWS_TOKENS if batch.step is batch else layout.ROWS_STEP
        self.native_tp, self.native_cp = (cast(NativeComm, comm) if comm.port else None for comm in (tp, cp))
        self.tape = Tape()
        self._tables: dict[int, npt.NDArray[np.int64] | None] = {DENSE: None}
        self.owners: list[object] = [batch]  # what the tape names by address
        self.external: dict[int, npt.NDArray[Any]] = {}  # memory of buffers that are not the recording's, by address
        self.regions: dict[str, int] = {}  # of memory that all ranks see: bytes of a row
        self.scratch = layout.BIG  # bytes, of a thread
        self.open = True

    def check(self) -> None:
        """Raises RuntimeError when the recording has ended."""
        if not self.open:
            raise RuntimeError("an operation was called outside compile(); pass the forward function to it")

    def add(self, op: type[Operation], **things: Thing) -> None:
        """Append an operation. An activation also gives the bytes of its rows (x: ldx) where the operation has such a
        field; a float its bits; an array or what else has an address that, and is kept; None 0."""
        self.check()
        words, fields = op.words(), dict[str, int | Buffer]()
        for name, thing in things.items():
            if isinstance(thing, int | Buffer):
                fields[name] = thing
            elif isinstance(thing, float):
                fields[name] = float_bits(thing)
            elif isinstance(thing, Act):
                fields[name] = thing.buffer
                if f"ld{name[0]}" in words:
                    fields[f"ld{name[0]}"] = thing.ld
            elif thing is None:
                fields[name] = 0
            else:
                self.own(thing)
                fields[name] = int(thing.ctypes.data) if isinstance(thing, np.ndarray) else thing.address
        self.tape.add(op, **fields)

    def cut(self, between: Between, *acts: Act) -> None:
        """Have Python do that with these, at this place of the recording."""
        self.check()
        self.tape.cut(acts, between)

    def own(self, *things: object) -> None:
        """Keep them as long as the recording."""
        self.owners += things

    def wants(self, scratch: int) -> None:
        """Bytes of scratch memory of each thread."""
        self.scratch = max(self.scratch, scratch)

    def rows(self, kind: int) -> int:
        """How many there can be of a kind of rows."""
        if kind == layout.ROWS_ALL:
            assert self.lanes is not None
            return self.batch.max_tokens * self.lanes.lanes
        if kind == layout.ROWS_STEP:
            return self.batch.step.max_tokens
        return self.batch.max_tokens if kind == layout.ROWS_TOKENS else self.batch.max_samples

    def positions(self, x: Act) -> npt.NDArray[np.int32]:
        """Of the tokens of these rows."""
        return (self.batch.step if x.rows == layout.ROWS_STEP else self.batch).positions

    def new(self, rows: int, columns: int, dtype: str | None = None) -> Act:
        """An activation; dtype: default the kernels' own."""
        self.check()
        dtype = dtype or self.target.dtype
        ld = up(columns, 16) * (4 if dtype == "float32" else 2)
        return Act(buffer(self.rows(rows), ld), rows, columns, ld, dtype)

    def outside(
        self, memory: npt.NDArray[Any], rows: int, columns: int, ld: int, first: int = 0, dtype: str = "float32"
    ) -> Act:  # fmt: skip
        """An activation in memory of others, `first` bytes into it."""
        address = int(memory.ctypes.data)
        self.external[address] = memory
        return Act(Buffer(memory.nbytes, address=address + first), rows, columns, ld, dtype)

    def region(self, name: str, rows: int, row_bytes: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Memory that all ranks of a native group see, for rows of a kind, and the bytes of one: one and the same
        wherever the recording asks for that name, and another for each micro-batch."""
        assert self.native_cp is not None
        ld = up(row_bytes, 64)
        had = self.regions.setdefault(name, ld)
        if had != ld:
            raise ValueError(f"rows of {row_bytes} bytes for {name}, which has rows of {had}")
        return self.native_cp.place(f"{name}, {self.batch.place}", self.rows(rows) * ld), ld

    def expect(self, x: Act, what: str, dtype: str | None = None) -> None:
        """Raises ValueError unless x is of a dtype, default the kernels' own."""
        dtype = dtype or self.target.dtype
        if x.dtype != dtype:
            raise ValueError(f"{what}: {x.dtype} where {dtype} is wanted")

    def reduce(self, part: Act, target: Act) -> Act:
        """The sum of the ranks' parts, added to the target; where the part is the target, in its place."""
        if self.native_tp is None:

            def between(parts: npt.NDArray[np.float32], sums: npt.NDArray[np.float32]) -> None:
                self.tp.all_reduce(parts)
                if part is not target:
                    sums += parts

            self.cut(between, part, target)
        else:
            add = int(part is not target)
            self.add(ReduceOp, port=self.tp.port, part=part, target=target, ld=part.ld, rows=part.rows, add=add)
        return target

    def gathered(self, rows: int, vocab: range, size: int) -> tuple[Act, Act]:
        """Float32 columns `vocab` of `size`, for this rank's part, and the whole. What is between them is recorded by
        `gather`."""
        if vocab.start % 16:
            raise ValueError(f"logits from token {vocab.start}, which is no multiple of 16")
        if self.native_cp is None:
            return self.new(rows, len(vocab), "float32"), self.new(rows, size, "float32")
        # Each rank writes its columns of one array that all see. The reductions of the next step keep it as it is
        # until rank 0, which takes part in them, is done with it.
        memory, ld = self.region("logits", rows, size * 4)
        return (
            self.outside(memory, rows, len(vocab), ld, 4 * vocab.start), self.outside(memory, rows, size, ld)
        )  # fmt: skip

    def gather(self, part: Act, whole: Act, vocab: range) -> Act:
        """The whole, once all ranks have written their parts."""
        if self.native_cp is None:

            def between(own: npt.NDArray[np.float32], every: npt.NDArray[np.float32]) -> None:
                columns = np.ascontiguousarray(own[:, : part.columns])
                every[:, : whole.columns] = self.tp.gather_columns(columns, vocab, whole.columns)

            self.cut(between, part, whole)
        else:
            self.meet()
        return whole

    def meet(self) -> None:
        """Nobody of a native group goes on before all have come."""
        self.add(MeetOp, port=self.cp.port)

    def kernels(self, kind: int) -> npt.NDArray[np.int64] | None:
        """Table of a packed kind's kernels."""
        if kind not in self._tables:
            self._tables[kind] = self._kinds(kind).table
        return self._tables[kind]

    def product_bytes(self, w: Packed) -> int:
        """Of a thread's scratch memory: its tiles, those of a fused activation, its rows if they are not taken as they
        are."""
        fused = 2 * layout.ROW_BLOCK * layout.FUSED_PANELS * 16 * self.target.item
        table, line = self.kernels(w.kind), w.length * (8 if self.target.widens else 0)
        if table is not None:
            line = w.length * int(table[packed.ROUNDED_BYTES])
        return self.tile_bytes(w) + fused + layout.ROW_BLOCK * line

    def tile_bytes(self, w: Packed) -> int:
        """Scratch memory of a product's tiles, before that of a fused activation."""
        if w.kind == DENSE:
            return up(layout.BIG, 64)
        return up(layout.FETCH + 8 * (layout.WHOLE_ROWS // self.target.tile_rows) * w.length, 64)

    def wants_product(self, w: Packed) -> None:
        """Scratch memory of a product with this weight."""
        self.own(w)
        self.wants(self.product_bytes(w))


def float_bits(value: float) -> int:
    """float32 bits as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
