"""What happened to an engine and its ranks, for /health and /metrics: counts, and the last fault in full."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from planaria.wire import Recovery


class FaultLog:
    """Hears every `Recovery`. `part` is "engine" where no rank is named: the engine's own process ended."""

    def __init__(self) -> None:
        self.faults = {"rank": 0, "engine": 0}
        self.recoveries = {"rank": 0, "engine": 0}
        self.epoch = 0  # that is in force
        self.replayed_tokens = 0
        self.seconds = 0.0
        self.since: float | None = None  # time.monotonic() of the fault that is being dealt with
        self.last: Recovery | None = None
        self.when = ""  # of the last one, UTC

    def hear(self, message: Recovery) -> None:
        """A fault that was noticed, or (with `seconds`) one that is over."""
        part = "rank" if message.ranks else "engine"
        self.last = message
        if not message.seconds:
            self.faults[part] += 1
            self.when = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            self.since = self.since if self.since is not None else time.monotonic()
            return
        self.recoveries[part] += 1
        self.epoch = message.epoch
        self.replayed_tokens += message.tokens
        self.seconds += message.seconds.get("total", 0.0)
        self.since = None

    @property
    def recovering(self) -> bool:
        return self.since is not None

    def why(self) -> str:
        """What is being done, in a line; "" if nothing."""
        if self.since is None or self.last is None:
            return ""
        return f"recovering for {time.monotonic() - self.since:.1f} s: {whose(self.last)}: {self.last.cause}"

    def last_fault(self) -> dict[str, object] | None:
        """For /health. Seconds by part, empty while it is being dealt with."""
        fault = self.last
        if fault is None:
            return None
        return {
            "when": self.when,
            "part": "rank" if fault.ranks else "engine",
            "ranks": fault.ranks,
            "phase": fault.phase,
            "cause": fault.cause,
            "recovered": not self.recovering,
            "epoch": fault.epoch,
            "layout": fault.layout,
            "seconds": {part: round(seconds, 3) for part, seconds in fault.seconds.items()},
            "requests": fault.requests,
            "replayed_tokens": fault.tokens,
        }


def whose(fault: Recovery) -> str:
    """Who failed, in what."""
    ranks = ", ".join(map(str, fault.ranks))
    return f"{f'rank {ranks}' if ranks else 'the engine process'} failed in {fault.phase or 'its work'}"
