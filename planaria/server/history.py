"""What a server remembers of its last minutes, a sample a second: for the dashboard. Bounded.

Each count has one source, which is that of /metrics and /health: `Metrics` for tokens as clients see them, `FaultLog`
for what was computed again.
"""

from __future__ import annotations

from collections import deque

import msgspec

from planaria.server.faults import FaultLog
from planaria.server.metrics import Metrics
from planaria.wire import EngineStats

KEPT = 900  # samples
EVERY = 1.0  # seconds


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """time: seconds since the epoch of clocks; tokens and requests count from the server's start, rates are the
    reader's to work out."""

    time: float
    prompt_tokens: int
    generation_tokens: int
    replayed_tokens: int
    kv_usage: float  # 0..1
    running: int
    waiting: int


class History:
    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Once in EVERY seconds. now: monotonic."""
        if now < self._next:
            return False
        self._next = now + EVERY
        return True

    def keep(self, wall: float, stats: EngineStats, metrics: Metrics, faults: FaultLog) -> None:
        """Another sample. wall: time.time()."""
        self.samples.append(Sample(
            wall, metrics.prompt_tokens, metrics.generation_tokens, faults.replayed_tokens, stats.kv_usage,
            stats.running, stats.waiting,
        ))  # fmt: skip
