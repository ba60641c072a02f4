"""Waiting for a cluster that is too small now and may grow. Pure: when to say something, and what.

A rule that is broken is refused at once and never waited for; that is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from planaria.errors import CapacityError
from planaria.topology import Layout

FIRST = 10.0  # seconds until the first line
LOOK = "see `ray status` and `ray list nodes`; a node that should be there may need its address set: $PLANARIA_HOST_IP"


def report_times(limit: float, first: float = FIRST) -> Iterator[float]:
    """Seconds at which to report: `first`, then doubling, the last at `limit` if not later than that."""
    at = first
    while at < limit:
        yield at
        at *= 2


class Waiting:
    """One wait. `lines(elapsed, why)` is called at every look; it gives what is to be logged now."""

    def __init__(self, what: str, limit: float, first: float = FIRST) -> None:
        self.what, self.limit = what, limit
        self._times = report_times(limit, first)
        self._next = next(self._times, None)

    def lines(self, elapsed: float, why: str) -> list[str]:
        """At most one line, however many times have gone by since the last look."""
        if self._next is None or elapsed < self._next:
            return []
        while self._next is not None and self._next <= elapsed:
            self._next = next(self._times, None)
        return [f"waiting for {self.what} for {elapsed:.0f} s (limit {self.limit:.0f} s): {why}; {LOOK}"]

    def over(self, elapsed: float) -> bool:
        return elapsed >= self.limit


def too_small(layout: Layout, resource: str, needed: int, found: int, why: str, elapsed: float) -> CapacityError:
    """The error that ends a wait in vain."""
    fix = "add nodes" if needed == 1 else "add nodes, or lower --tensor-parallel-size or --pipeline-parallel-size"
    what = f"{layout} needs {needed} x {resource} on Ray, {found} are available after {elapsed:.0f} s"
    return CapacityError(f"{what}: {why}; {fix}; {LOOK}")
