"""Where a recorded pass stops for Python to reach the other ranks: sums and columns of a group that has no native
port, tokens that go to the experts of other lanes (planaria.mesh.all2all).

Each function gives what is done there, for `Tape.cut`; the buffers it names keep their memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu.layout import ROWS_ALL as ALL
from planaria.kernels.cpu.layout import ROWS_TOKENS as OWN
from planaria.kernels.cpu.tape import Act, Between, Buffer, View
from planaria.mesh.all2all import All2All
from planaria.mesh.comm import Comm

Counts = npt.NDArray[np.int64]


def reducing(tp: Comm, part: Act, target: Act, counts: Counts) -> Between:
    """See `Recorder.reduce`."""

    def between(view: View) -> Callable[[], None]:
        parts, sums = (view(x.buffer, x.ld, x.rows) for x in (part, target))

        def run() -> None:
            rows = int(counts[part.rows])
            tp.all_reduce(parts[:rows])
            if part is not target:
                sums[:rows] += parts[:rows]

        return run

    return between


def gathering(tp: Comm, part: Act, whole: Act, vocab: range, counts: Counts) -> Between:
    """See `Recorder.gather`."""

    def between(view: View) -> Callable[[], None]:
        own, every = (view(x.buffer, x.ld, x.rows)[:, : x.columns] for x in (part, whole))

        def run() -> None:
            rows = int(counts[part.rows])
            every[:rows] = tp.gather_columns(own[:rows].contiguous(), vocab, whole.columns)

        return run

    return between


def dispatching(
    lanes: All2All, given: list[Buffer], taken: list[Buffer], kinds: list[tuple[int, str]], counts: Counts
) -> Between:  # fmt: skip
    """Rows of this lane's tokens go to all lanes. kinds: bytes of a row and dtype of each."""

    def between(view: View) -> Callable[[], None]:
        parts = [view(buffer, ld, OWN, dtype) for buffer, (ld, dtype) in zip(given, kinds, strict=True)]
        into = [view(buffer, ld, ALL, dtype) for buffer, (ld, dtype) in zip(taken, kinds, strict=True)]

        def run() -> None:
            rows, total = int(counts[OWN]), int(counts[ALL])
            lanes.dispatch([part[:rows] for part in parts], [whole[:total] for whole in into])

        return run

    return between


def combining(lanes: All2All, y: Act, sums: Act, residual: Act, counts: Counts) -> Between:
    """The sums of this lane's tokens are added to the residual."""

    def between(view: View) -> Callable[[], None]:
        whole, own, target = (view(x.buffer, x.ld, x.rows) for x in (y, sums, residual))

        def run() -> None:
            rows, total = int(counts[OWN]), int(counts[ALL])
            lanes.combine(whole[:total], own[:rows])
            target[:rows] += own[:rows]

        return run

    return between
