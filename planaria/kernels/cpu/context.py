"""What is recorded where context ranks share a sequence's tokens (striped.py runs it).

Where ranks share memory, each writes its columns, or its parts, to a place that all see, and they meet: nothing is
added up, nothing copied twice. A place is written again only after another meeting, or sum, of all: those of a layer
are the columns, the parts, and the sum of the product that follows attention. Elsewhere what a rank has is summed up
with the zeros of the others.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.fields import GatherOp, MergeOp, TakeOp
from planaria.kernels.cpu.recorder import Recorder, Vector
from planaria.kernels.cpu.tape import Act
from planaria.kernels.numbers import to_bfloat16, to_float32
from planaria.kernels.ops import Columns
from planaria.models.shard import ContextGroup

Spans = tuple[tuple[int, int, int], ...]


def part_columns(dim: int) -> int:
    """Numbers of a head's part: sums of values, then the state of its softmax."""
    return dim + layout.PART_STATE


class ContextOps:
    """A part of `RecordedOps`."""

    recorder: Recorder

    def gather(self, x: Act, group: ContextGroup, own: Columns) -> Act:
        recorder, item = self.recorder, self.recorder.target.item
        recorder.expect(x, "gather")
        rows = recorder.step_rows
        if recorder.native_cp is None:
            whole = recorder.new(rows, own.width)
            self._sum_up(x, whole, own.pieces, group.number * own.most, group.count * own.most)
            return whole
        memory, ld = recorder.region(f"{own.most} {own.name}", rows, group.count * own.most * item)
        whole = recorder.outside(memory, rows, own.width, ld, group.number * own.most * item, recorder.target.dtype)
        (_, to1, size1), (from2, to2, size2), (from3, to3, _) = (*own.pieces, *[(0, 0, 0)] * 3)[:3]
        recorder.add(
            GatherOp, x=x, out=whole, rows=x.rows, to1=to1 * item, size1=size1 * item, from2=from2 * item,
            to2=to2 * item, size2=size2 * item, from3=from3 * item, to3=to3 * item,
        )  # fmt: skip
        recorder.meet()
        return whole

    def new_part(self, rows: int, group: ContextGroup, dim: int) -> Act:
        """What attention with the group's heads over this rank's tokens is written to."""
        recorder, width = self.recorder, part_columns(dim)
        columns = len(group.heads) * width
        if recorder.native_cp is None:
            return recorder.new(rows, columns, "float32")
        size, most = group.stripes.size, group.most_heads * width * 4
        memory, ld = recorder.region("parts", rows, group.count * size * most)
        return recorder.outside(memory, rows, columns, ld, (group.number * size + group.stripes.rank) * most)

    def merge(self, parts: Act, group: ContextGroup, heads: range, dim: int, sinks: Vector | None = None) -> Act:
        recorder, width, size = self.recorder, part_columns(dim), group.stripes.size
        most = group.most_heads * width
        if recorder.native_cp is None:
            whole = recorder.new(parts.rows, size * most, "float32")
            pieces = ((0, group.stripes.rank * most, parts.columns),)
            self._sum_up(parts, whole, pieces, group.number * size * most, group.count * size * most)
        else:
            memory, ld = recorder.region("parts", parts.rows, group.count * size * most * 4)
            whole = recorder.outside(memory, parts.rows, size * most, ld, group.number * size * most * 4)
            recorder.meet()
        recorder.wants(layout.BIG + (size + 1) * width * 4)
        out = recorder.new(layout.ROWS_TOKENS, len(heads) * dim)
        recorder.add(
            MergeOp, parts=whole, out=out, ranks=size, part_bytes=most * 4, first=heads.start, heads=len(heads),
            dim=dim, sinks=sinks,
        )  # fmt: skip
        return out

    def take_from_all(self, x: Act) -> Act:
        """`take` of a step whose tokens are shared: on the ranks with the first share all of the rows, on others
        none."""
        recorder, index, kind = self.recorder, self.recorder.batch.sample_index, layout.STEP_SAMPLES
        if recorder.native_cp is None:
            every = recorder.new(kind, x.columns, x.dtype)
        else:
            memory, ld = recorder.region("taken", kind, x.ld)
            every = recorder.outside(memory, kind, x.columns, ld, dtype=x.dtype)
        recorder.add(TakeOp, x=x, ld=x.ld, out=every, index=index, rows=kind)
        if recorder.native_cp is None:
            self._sum_samples(every)
        else:
            recorder.meet()
        return dataclasses.replace(every, rows=layout.ROWS_SAMPLES)

    def _sum_samples(self, every: Act) -> None:
        recorder, batch = self.recorder, self.recorder.batch

        def between(rows: npt.NDArray[np.float32]) -> None:
            here = batch.sample_index[: len(rows)] - batch.counts[layout.FIRST]
            rows[(here < 0) | (here >= batch.counts[layout.ROWS_TOKENS]) | (recorder.tp.rank > 0)] = 0
            recorder.cp.all_reduce(rows)

        recorder.cut(between, every)

    def _sum_up(self, x: Act, whole: Act, pieces: Spans, first: int, columns: int) -> None:
        """whole: those from column `first` on of a row that all tensor ranks write `columns` of, this one its
        `pieces`."""
        cp, narrow, counts = self.recorder.cp, x.dtype != "float32", self.recorder.batch.counts
        at = layout.FIRST if x.rows == layout.ROWS_TOKENS else None

        def between(own: npt.NDArray[np.generic], every: npt.NDArray[np.generic]) -> None:
            row = np.zeros((len(every), columns), np.float32)
            values = to_float32(own) if narrow else own
            mine = row[0 if at is None else counts[at] :][: len(own)]
            for start, to, count in pieces:
                mine[:, first + to : first + to + count] = values[:, start : start + count]
            cp.all_reduce(row)
            found = row[:, first : first + whole.columns]
            every[:, : whole.columns] = to_bfloat16(found) if narrow else found

        self.recorder.cut(between, x, whole)
