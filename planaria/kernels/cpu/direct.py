"""The kernels one operation at a time, on memory that each call names: for code that can't be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.env import cache_dir
from planaria.kernels.cpu import fields, layout
from planaria.kernels.cpu.caches import MAX_HEAD_DIM, PagedKV
from planaria.kernels.cpu.memory import Region
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.cpu.pack import Packed, up
from planaria.kernels.cpu.recorded import RecordedOps
from planaria.kernels.cpu.recorder import Recorder, Rope, Vector
from planaria.kernels.cpu.tape import Act, Buffer
from planaria.kernels.ops import Batch

NOWHERE = 64  # an address, in place of which each call has one
Words = npt.NDArray[np.int64]  # [operations, words of each]


def takes(head_dim: int, block_size: int) -> bool:
    """Can such keys and values be in caches of the kernels?"""
    return head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM and block_size % 16 == 0


class DirectOps(CpuOps):
    """One caller at a time."""

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype, 1, cache_dir() / "kernels")
        self._rows = Batch(1, 1, 1, 1)  # counts those of a product
        self._scratch = Region(1)
        self._tickets = Region(2 * layout.TICKET_BYTES, huge=False)

    def product(self, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None) -> DirectProduct:
        """weight [N, K], K a multiple of 16, bias [N]."""
        packed, recorder = self.pack(weight, bias), self._recorder(self._rows)
        RecordedOps(recorder).linear(self._named(packed.columns), packed)
        return DirectProduct(packed, self.target.pair, self._rows, *self._runner(recorder))

    def attention(
        self, batch: Batch, kv: PagedKV, heads: int, scale: float, window: int | None, cap: float, sinks: Vector | None
    ) -> DirectAttention:
        """Of one layer in steps that `batch` holds; heads: of queries. See `Operations.attend`."""
        groups, dim, recorder = kv.num_kv_heads, kv.head_dim, self._recorder(batch)
        unturned, recorded = np.zeros((1, 0), np.float32), RecordedOps(recorder)
        recorded.rope_store(self._named(2 * groups * dim), kv, Rope(unturned, unturned), 0, groups, dim)
        recorded.attend(self._named(heads * dim), kv, heads, groups, dim, scale, window, cap, sinks)
        return DirectAttention(*self._runner(recorder))

    def _named(self, columns: int) -> Act:
        """An activation in memory that each call names."""
        ld = up(columns, 16) * self.target.item
        return Act(Buffer(0, address=NOWHERE), layout.ROWS_TOKENS, columns, ld, self.dtype)

    def _recorder(self, batch: Batch) -> Recorder:
        return Recorder(batch, self.target, self.tp, None, self._most, self._kinds, self.tp)

    def _runner(self, recorder: Recorder) -> tuple[Words, Callable[[], None]]:
        """What is recorded, and a function that carries it out."""
        rows, owners, size = recorder.tape.encode(self._tickets), recorder.owners, up(recorder.scratch, 4096)
        words = {
            layout.TAPE: int(rows.ctypes.data), layout.OPS: len(rows), layout.TICKETS: self._tickets.address,
            layout.ZEROS: int(self._zeros.ctypes.data), layout.COUNTS: int(recorder.batch.counts.ctypes.data),
            layout.SCRATCH_BYTES: size,
        }  # fmt: skip

        def run() -> None:
            if size * self.threads > self._scratch.size:
                self._scratch = Region(size * self.threads)
            words[layout.SCRATCH] = self._scratch.address
            self._team.run(words, owners)

        return rows, run


class DirectProduct:
    """x W^T + bias. columns: of the rows of the result in memory, a multiple of 16."""

    def __init__(self, weight: Packed, pair: int, batch: Batch, words: Words, run: Callable[[], None]) -> None:
        self.weight, self.columns = weight, weight.panels * 16
        self._pair, self._counts, self._words, self._run = pair, batch.counts, words, run

    def __call__(self, x: int, out: int, rows: int) -> None:
        """Addresses of so many rows, one after the other."""
        self._counts[layout.ROWS_TOKENS] = rows
        words = self._words
        words[0, fields.LinearOp.x], words[0, fields.LinearOp.out] = x, out
        self._run()

    @property
    def words(self) -> npt.NDArray[np.int32]:
        """Of the weight [N / 16, bytes of a row / 4, 16]."""
        w = self.weight
        return w.data[: w.nbytes].view(np.int32).reshape(w.panels, w.length, 16)

    def unpacked(self) -> npt.NDArray[Any]:
        """The weight [N, K], float32, or bfloat16 as its bits."""
        rows = np.ascontiguousarray(self.words.swapaxes(1, 2)).view(np.float32 if self._pair == 1 else np.uint16)
        return rows.reshape(self.columns, -1)[: self.weight.rows, : self.weight.columns]


class DirectAttention:
    """Of one layer: new keys and values into its cache, then what queries see."""

    def __init__(self, words: Words, run: Callable[[], None]) -> None:
        self._words, self._run = words, run

    def __call__(self, new: int, queries: int, out: int) -> None:
        """Addresses of the step's rows: keys and values [T, 2 * groups * dim]; queries and their result
        [T, heads * dim]."""
        words = self._words
        words[0, fields.RopeOp.x] = new
        words[1, fields.AttendOp.q], words[1, fields.AttendOp.out] = queries, out
        self._run()
