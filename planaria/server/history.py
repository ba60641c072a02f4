"""What a server remembers of its last minutes, a sample a second: for the dashboard. Bounded."""

from __future__ import annotations

from collections import deque

import msgspec

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

    def look(self, now: float, wall: float, stats: EngineStats) -> None:
        """Called often; keeps one sample in EVERY seconds. now: monotonic, wall: time.time()."""
        if now >= self._next:
            self._next = now + EVERY
            self.samples.append(Sample(
                wall, stats.prompt_tokens, stats.generation_tokens, stats.replayed_tokens, stats.kv_usage,
                stats.running, stats.waiting,
            ))  # fmt: skip
