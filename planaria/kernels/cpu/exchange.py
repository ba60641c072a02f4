"""Where a recorded pass stops for Python to exchange tokens with the ranks of other lanes (planaria.mesh.all2all).

An EXCHANGE operation is never run natively: the recording is cut there. Its fields name the buffers that it reads and
writes, so that they keep their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.experts import Routing
from planaria.kernels.cpu.tape import Buffer, buffer
from planaria.mesh.all2all import All2All

if TYPE_CHECKING:
    from planaria.kernels.cpu.ops import Act

View = Callable[..., torch.Tensor]  # (buffer, bytes of a row, kind of rows, dtype): all rows that there can be
Between = Callable[[View], Callable[[], None]]  # what Python does there, once memory is given out

ALL, OWN = layout.ROWS_ALL, layout.ROWS_TOKENS


def routing_of_all(own: Routing, most: int) -> Routing:
    """For the tokens of all lanes."""
    return Routing(buffer(most, 4 * own.k), buffer(most, 4 * own.k), ALL, own.k)


def dispatching(
    exchange: All2All, x: Act, own: Routing, x_all: Act, all: Routing, counts: npt.NDArray[np.int64]
) -> tuple[list[Buffer], Between]:  # fmt: skip
    """The fields of its operation, and what is done."""
    kinds = [(x.ld, x.dtype), (4 * own.k, "float32"), (4 * own.k, "float32")]  # slots travel as the bits they are

    def between(view: View) -> Callable[[], None]:
        parts = [view(b, ld, OWN, dtype) for b, (ld, dtype) in zip(given, kinds, strict=True)]
        into = [view(b, ld, ALL, dtype) for b, (ld, dtype) in zip(taken, kinds, strict=True)]

        def run() -> None:
            rows, total = int(counts[OWN]), int(counts[ALL])
            exchange.dispatch([part[:rows] for part in parts], [whole[:total] for whole in into])

        return run

    given, taken = [x.buffer, own.slots, own.weights], [x_all.buffer, all.slots, all.weights]
    return [*given, *taken], between


def combining(
    exchange: All2All, y: Act, sums: Act, residual: Act, counts: npt.NDArray[np.int64]
) -> tuple[list[Buffer], Between]:  # fmt: skip
    """As `dispatching`; the sums of this lane's tokens are added to the residual."""

    def between(view: View) -> Callable[[], None]:
        whole, own = view(y.buffer, y.ld, ALL), view(sums.buffer, sums.ld, OWN)
        target = view(residual.buffer, residual.ld, OWN)

        def run() -> None:
            rows, total = int(counts[OWN]), int(counts[ALL])
            exchange.combine(whole[:total], own[:rows])
            target[:rows] += own[:rows]

        return run

    return [y.buffer, sums.buffer, residual.buffer], between
