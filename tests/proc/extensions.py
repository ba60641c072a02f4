"""Of workers. A module of its own, which takes none of the time that each rank would need for what tests import."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from benchmarks.micro_batch_trace import COMPUTE, Span, traced


class Held:
    """They say what they hold."""

    model: Any

    def expert_bytes(self) -> list[int]:
        """Of each expert of the first layer that this rank holds, and of all it holds."""
        memory, held = self.model._ops.memory, self.model.blocks[0].held
        return [*(sum(memory(part).nbytes for part in held[each]) for each in sorted(held)), self.model._expert_bytes()]


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
