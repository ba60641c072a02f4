"""What a server remembers of its last minutes, a sample a second: for the dashboard. Bounded.

Each count has one source, which is that of /metrics and /health: the engines for prompt tokens as they are computed,
`Metrics` for tokens as clients see them and for times, `FaultLog` for what was computed again.
"""

from __future__ import annotations

from collections import deque

import msgspec

from planaria.server.faults import FaultLog
from planaria.server.metrics import Metrics, quantile
from planaria.wire import EngineStats

KEPT = 900  # samples
EVERY = 1.0  # seconds
WINDOW = 30  # samples whose requests percentiles are of
PARTS = (0.5, 0.9, 0.99)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """time: seconds since the epoch of clocks; tokens and requests count from the server's start, rates are the
    reader's to work out. first, between, queued: seconds to a first token, between two steps of a sequence, until an
    engine had room, below which so many percent are of the last `WINDOW` samples; None where there was none."""

    time: float
    computed_prompt_tokens: int
    generation_tokens: int
    replayed_tokens: int
    kv_usage: float  # 0..1
    running: int
    waiting: int
    first_50: float | None = None
    first_90: float | None = None
    first_99: float | None = None
    between_50: float | None = None
    between_90: float | None = None
    between_99: float | None = None
    queued_50: float | None = None
    queued_90: float | None = None
    queued_99: float | None = None


class History:
    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._next = 0.0
        self._counts: deque[list[list[int]]] = deque(maxlen=WINDOW + 1)  # buckets of each of the three

    def due(self, now: float) -> bool:
        """Once in EVERY seconds. now: monotonic."""
        if now < self._next:
            return False
        self._next = now + EVERY
        return True

    def keep(self, wall: float, stats: EngineStats, metrics: Metrics, faults: FaultLog) -> None:
        """Another sample. wall: time.time()."""
        histograms = (metrics.ttft, metrics.itl, metrics.queue)
        self._counts.append([list(histogram.counts) for histogram in histograms])
        times = []
        for histogram, now, before in zip(histograms, self._counts[-1], self._counts[0], strict=True):
            counts = [max(0, count - had) for count, had in zip(now, before, strict=True)]
            times += [quantile(histogram.bounds, counts, part) for part in PARTS]
        self.samples.append(Sample(
            wall, stats.prompt_tokens, metrics.generation_tokens, faults.replayed_tokens, stats.kv_usage,
            stats.running, stats.waiting, *times,
        ))  # fmt: skip
