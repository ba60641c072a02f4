"""Of workers. A module of its own, which takes none of the time that each rank would need for what tests import."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.micro_batch_trace import COMPUTE, Span, traced


class Held:
    """They say what they hold."""

    model: Any

    def expert_bytes(self) -> list[int]:
        """Of each expert of the first layer that this rank holds, and of all it holds."""
        memory, held = self.model._ops.memory, self.model.blocks[0].held
        return [*(sum(memory(part).nbytes for part in held[each]) for each in sorted(held)), self.model._expert_bytes()]


class Mapped:
    """They say how much of their weights nobody else has."""

    model: Any

    def own_bytes(self) -> int:
        with open("/proc/self/maps") as f:
            ends = [line.split()[0].split("-") for line in f if "/memfd:planaria-" in line]
        spans = [range(*(int(end, 16) for end in pair)) for pair in ends]
        return sum(size for at, size in _memory(self.model) if not any(at in span for span in spans))


def _memory(model: Any) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of its matrices."""
    if hasattr(model, "net"):
        yield from ((tensor.data_ptr(), tensor.nbytes) for tensor in (*model.net.parameters(), *model.net.buffers()))
        return
    experts = [weight for block in model.blocks for pair in block.held.values() for weight in pair]
    for weight in (*(linear.weight for linear in model.linears), *experts):
        for each in weight if isinstance(weight, tuple) else (weight,):
            array = model._ops.memory(each)
            yield int(array.ctypes.data), int(array.nbytes)


class MicroBatched:
    """They say what they did, and one dies where it is told to."""

    rank: int
    micro_batches: Any
    spans: list[Span]

    def look_on(self) -> None:
        """From now on."""
        self.spans = traced(self.micro_batches)

    def done(self) -> tuple[list[int], list[str]]:
        """Places of the micro-batches that computed, in order, and threads that belong to micro-batches."""
        threads = [t.name for t in threading.enumerate() if t.name.startswith("planaria-micro-batch")]
        return [span.place for span in self.spans if span.what == COMPUTE], threads

    def die(self, rank: int, place: int) -> None:
        """In the third exchange of the micro-batch at this place, the others' in flight or not."""
        if rank != self.rank:
            return
        exchange = self.micro_batches.parts[place].exchange.exchange
        combine, left = exchange.combine, [3]

        def dies(y: Any, out: Any) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            combine(y, out)

        exchange.combine = dies
