"""A recorded forward pass: rows of numbers, and the buffers they name until addresses are given out.

The rule: a buffer's memory is another's once nothing on the tape uses it any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planaria.kernels.cpu.layout import ATTEND, FORESIGHT_BYTES, LINEAR, ROW_WORDS, SILU
from planaria.kernels.cpu.memory import ALIGN, Region


@dataclass(eq=False)
class Buffer:
    """Memory of one activation; `offset` is set by `Tape.place`. One with an `address` has its memory elsewhere."""

    size: int
    offset: int = -1
    address: int = 0


@dataclass
class Row:
    """One operation. A field is a number or the address of a buffer."""

    code: int
    fields: dict[int, int | Buffer]

    def buffers(self) -> list[Buffer]:
        return [v for v in self.fields.values() if isinstance(v, Buffer)]


@dataclass
class Tape:
    rows: list[Row] = field(default_factory=list)

    def add(self, code: int, *fields: int | Buffer) -> Row:
        """Append an operation whose words 1, 2, ... are `fields`."""
        row = Row(code, dict(enumerate(fields, 1)))
        self.rows.append(row)
        return row

    def fuse(self, result: Buffer) -> None:
        """Join a linear operation and the gated activation that alone reads it: no product goes to memory."""
        uses: dict[int, int] = {}
        for row in self.rows:
            for buffer in row.buffers():
                uses[id(buffer)] = uses.get(id(buffer), 0) + 1
        kept: list[Row] = []
        for row in self.rows:
            before = kept[-1] if kept else None
            if (
                before is not None
                and row.code == SILU
                and before.code == LINEAR
                and before.fields[8] is row.fields[1]
                and before.fields[8] is not result
                and uses[id(row.fields[1])] == 2
                and before.fields[13] == 0
                and int(row.fields[5]) % 16 == 0  # type: ignore[arg-type]
            ):
                before.fields.update(
                    {8: row.fields[3], 9: row.fields[4], 13: int(row.fields[5]) // 16}  # type: ignore[arg-type]
                )
                continue
            kept.append(row)
        self.rows = kept

    def place(self, result: Buffer) -> int:
        """Give every buffer an offset, first fit by lifetime; the bytes needed."""
        last: dict[int, int] = {}
        for index, row in enumerate(self.rows):
            for buffer in row.buffers():
                last[id(buffer)] = index
        last[id(result)] = len(self.rows)
        alive: list[Buffer] = []
        total = 0
        for index, row in enumerate(self.rows):
            for buffer in row.buffers():
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
            line[0] = row.code
            for word, value in row.fields.items():
                if isinstance(value, Buffer):
                    line[word] = value.address or memory.address + value.offset
                else:
                    line[word] = value
        self._foresee(out)
        return out

    def _foresee(self, rows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
        """Tell each linear operation the attention that follows soon enough for its keys to stay in the cache."""
        following, distance = 0, 0
        for index in range(len(rows) - 1, -1, -1):
            if rows[index, 0] == ATTEND:
                following, distance = int(rows.ctypes.data) + index * ROW_WORDS * 8, 0
            elif rows[index, 0] == LINEAR:
                distance += int(rows[index, 3] * rows[index, 15])  # bytes of its weight
                rows[index, 16] = following if distance <= FORESIGHT_BYTES else 0


def buffer(rows: int, row_bytes: int) -> Buffer:
    """A buffer of whole cache lines."""
    return Buffer(-(-rows * row_bytes // ALIGN) * ALIGN)
