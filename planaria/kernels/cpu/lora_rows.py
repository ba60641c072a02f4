"""The table of a weight's adapters, and what is recorded for them (lora.py runs it).

A is kept as panels of its rank's columns, B as panels of the weight's rows, both dense (pack.py): two small products.
All slots have the table's rank, filled up with zeros, so one recording serves whatever is put into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.fields import LoraOp
from planaria.kernels.cpu.memory import Arena
from planaria.kernels.cpu.pack import Packed, pack, up
from planaria.kernels.cpu.recorder import Recorder
from planaria.kernels.cpu.tape import Act
from planaria.kernels.cpu.target import Target

LoraPair = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # A [r, K], B [N, r]


class LoraRows:
    """See `Ops.lora_table`. table int64 [slots, parts, 2]: addresses of A and B, 0: none."""

    def __init__(self, parts: Sequence[range], rank: int, slots: int, target: Target, arena: Arena) -> None:
        self.parts, self.rank, self.target, self._arena = tuple(parts), up(rank, 16), target, arena
        self.table: npt.NDArray[np.int64] = np.zeros((slots, len(self.parts), 2), np.int64)
        first = [part.start // 16 for part in self.parts]  # panels of the output, the first and the last may be shared
        count = [up(part.stop, 16) // 16 - start for part, start in zip(self.parts, first, strict=True)]
        self.places = np.array([first, count], np.int64).T.copy()
        self._held: dict[tuple[int, int], tuple[Packed, Packed]] = {}

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        for number, (part, pair) in enumerate(zip(self.parts, pairs, strict=True)):
            for packed in self._held.pop((slot, number), ()):
                self._arena.give_back(packed.data)
                self._arena.give_back(packed.bias.view(np.uint8))
            self.table[slot, number] = 0
            if pair is None:
                continue
            a = np.zeros((self.rank, pair[0].shape[1]), np.float32)
            a[: len(pair[0])] = pair[0]
            before = part.start % 16  # rows of the first panel that are another part's
            b = np.zeros((before + len(part), self.rank), np.float32)
            b[before:, : pair[1].shape[1]] = pair[1]
            held = self._held[slot, number] = tuple(pack(m, None, self.target, self._arena) for m in (a, b))  # type: ignore[assignment]
            self.table[slot, number] = [packed.address for packed in held]


def record_lora(recorder: Recorder, x: Act, out: Act, lora: LoraRows | None) -> Act:
    """Adds each row's own product to `out`, a product of `x` with the table's weight."""
    if lora is None:
        return out
    target, steps = recorder.target, up(x.columns, 16) // recorder.target.pair
    inner = recorder.new(x.rows, len(lora.parts) * lora.rank)
    recorder.own(lora)
    recorder.wants(layout.BIG + layout.PIECE_ROWS * layout.FUSED_PANELS * 64)
    recorder.add(
        LoraOp, x=x, out=out, inner=inner, slots=recorder.batch.loras, table=lora.table, parts=len(lora.parts),
        places=lora.places, length=steps, stride=steps * 64, panels=lora.rank // 16,
        b_length=lora.rank // target.pair, b_stride=lora.rank // target.pair * 64, columns=up(out.columns, 16) // 16,
        narrow=out.dtype != "float32", rows=x.rows,
    )  # fmt: skip
    return out
