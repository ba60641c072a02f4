"""A recorded forward pass: rows of numbers, and the buffers they name until addresses are given out.

The rule: a buffer's memory is another's once nothing on the tape uses it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planaria.kernels.cpu.fields import CODE, ROW_WORDS, AttendOp, ExchangeOp, GatedOp, LinearOp, Operation
from planaria.kernels.cpu.layout import FORESIGHT_BYTES
from planaria.kernels.cpu.memory import ALIGN, Region


@dataclass(eq=False)
class Buffer:
    """Memory of one activation; `offset` is set by `Tape.place`. One with an `address` has its memory elsewhere."""

    size: int
    offset: int = -1
    address: int = 0


@dataclass(frozen=True)
class Act:
    """An activation [rows, columns]: `ld` bytes a row, padded to 16 columns; Batch.counts[rows] says how many."""

    buffer: Buffer
    rows: int
    columns: int
    ld: int
    dtype: str  # float32 | bfloat16


Between = Callable[..., None]  # what Python does with the present rows of some activations: float32 or bfloat16 tensors


@dataclass
class TapeRow:
    """One operation. A field is a number or the address of a buffer. between: what Python does in its place, with
    these activations."""

    op: type[Operation]
    fields: dict[str, int | Buffer]
    acts: tuple[Act, ...] = ()
    between: Between | None = None
    buffers: list[Buffer] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = [v for v in self.fields.values() if isinstance(v, Buffer)] + [act.buffer for act in self.acts]


@dataclass
class Tape:
    rows: list[TapeRow] = field(default_factory=list)

    def add(self, op: type[Operation], **fields: int | Buffer) -> None:
        """Append an operation. Raises ValueError unless all its fields are given."""
        if not op.takes(tuple(fields)):
            raise ValueError(f"{op.__name__} with the fields {', '.join(fields)}; it has {', '.join(op.words())}")
        self.rows.append(TapeRow(op, fields))

    def cut(self, acts: tuple[Act, ...], between: Between) -> None:
        """Stop the recording here, for Python to read and write these."""
        self.rows.append(TapeRow(ExchangeOp, {}, acts, between))

    def fuse(self, results: Sequence[Buffer]) -> None:
        """Join a linear operation and the gated activation that alone reads it: no product goes to memory."""
        uses: dict[int, int] = {}
        for row in self.rows:
            for buffer in row.buffers:
                uses[id(buffer)] = uses.get(id(buffer), 0) + 1
        kept: list[TapeRow] = []
        for row in self.rows:
            before = kept[-1] if kept else None
            if before is not None and row.op is GatedOp and before.op is LinearOp:
                product, half = before.fields["out"], row.fields["half"]
                alone = (
                    product is row.fields["x"]
                    and not any(product is result for result in results)
                    and uses[id(product)] == 2
                )
                if alone and before.fields["half"] == 0 and isinstance(half, int) and half % 16 == 0:
                    gated = {name: row.fields[name] for name in ("out", "ldo", "act")} | {"half": half // 16}
                    kept[-1] = TapeRow(before.op, before.fields | gated)
                    continue
            kept.append(row)
        self.rows = kept

    def place(self, results: Sequence[Buffer]) -> int:
        """Give every buffer an offset, first fit by lifetime; the bytes needed."""
        last: dict[int, int] = {}
        for index, row in enumerate(self.rows):
            for buffer in row.buffers:
                last[id(buffer)] = index
        last |= {id(result): len(self.rows) for result in results}
        alive: list[Buffer] = []
        total = 0
        for index, row in enumerate(self.rows):
            for buffer in row.buffers:
                if buffer.offset >= 0 or buffer.address:
                    continue
                offset = 0
                for other in sorted(alive, key=lambda b: b.offset):
                    if offset + buffer.size <= other.offset:
                        break
                    offset = max(offset, other.offset + other.size)
                buffer.offset = offset
                alive.append(buffer)
                total = max(total, offset + buffer.size)
            alive = [b for b in alive if last[id(b)] > index]
        return total

    def encode(self, memory: Region) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """The rows as int64 [rows, ROW_WORDS], with addresses in `memory`."""
        out = np.zeros((len(self.rows), ROW_WORDS), np.int64)
        for line, row in zip(out, self.rows, strict=True):
            line[CODE] = row.op.code
            words = row.op.words()
            for name, value in row.fields.items():
                there = value.address or memory.address + value.offset if isinstance(value, Buffer) else value
                line[words[name]] = there
        self._foresee(out)
        return out

    def _foresee(self, rows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
        """Tell each linear operation the attention that follows soon enough for its keys to stay in the cache."""
        following, distance = 0, 0
        for line in rows[::-1]:
            if line[CODE] == AttendOp.code:
                following, distance = int(line.ctypes.data), 0
            elif line[CODE] == LinearOp.code:
                distance += int(line[LinearOp.stride] * line[LinearOp.panels])  # bytes of its weight
                line[LinearOp.attend] = following if distance <= FORESIGHT_BYTES else 0


def buffer(rows: int, row_bytes: int) -> Buffer:
    """A buffer of whole cache lines."""
    return Buffer(-(-rows * row_bytes // ALIGN) * ALIGN)
