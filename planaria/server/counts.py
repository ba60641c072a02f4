"""What one server process has counted and has open, and the sum over several: `Counts` to and from a `Service`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planaria.server.metrics import E2E, ITL, TTFT, Histogram, Metrics
from planaria.server.root_messages import Counts
from planaria.server.service import Service

_EMPTY = [([0] * (len(bounds) + 1), 0.0) for bounds in (TTFT, ITL, E2E, TTFT)]


def _histograms(metrics: Metrics) -> tuple[Histogram, ...]:
    return metrics.ttft, metrics.itl, metrics.e2e, metrics.queue


def counts_of(service: Service) -> Counts:
    """Of this process."""
    metrics, client = service.metrics, service.client
    engines = client.engines()
    return Counts(
        requests=service.requests,
        open={engine.index: (engine.open, engine.load) for engine in engines},
        taken={engine.index: engine.taken for engine in engines},
        moved=max(client.last_progress, service.busy_since) if service.open else 0.0,
        prompt_tokens=metrics.prompt_tokens,
        generation_tokens=metrics.generation_tokens,
        success={str(reason): count for reason, count in metrics.success.items()},
        times=[(histogram.counts, histogram.total) for histogram in _histograms(metrics)],
        responses=service.responses.numbers,
    )


def added(parts: Sequence[Counts]) -> Counts:
    """The sum; of `moved` the earliest of those that have something open."""
    opened: dict[int, tuple[int, int]] = {}
    success, taken = Counter[str](), Counter[int]()
    for part in parts:
        for index, (open, load) in part.open.items():
            before = opened.get(index, (0, 0))
            opened[index] = (before[0] + open, before[1] + load)
        success.update(part.success)
        taken.update(part.taken)
    columns = zip(*(part.times or _EMPTY for part in parts), strict=True)
    return Counts(
        requests=sum(part.requests for part in parts),
        open=opened,
        taken=dict(taken),
        moved=min((part.moved for part in parts if part.moved), default=0.0),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        generation_tokens=sum(part.generation_tokens for part in parts),
        success=dict(success),
        times=[
            ([sum(counts) for counts in zip(*(counts for counts, _ in column), strict=True)],
             sum(total for _, total in column))
            for column in columns
        ],
        responses=next((part.responses for part in parts if part.responses), []),  # one keeps them
    )  # fmt: skip


def put(counts: Counts, service: Service) -> None:
    """Have this process answer for all of them."""
    metrics = service.metrics
    service.elsewhere, service.responses.elsewhere = counts.requests, counts.responses
    metrics.prompt_tokens, metrics.generation_tokens = counts.prompt_tokens, counts.generation_tokens
    metrics.success.update(counts.success)
    for histogram, (buckets, total) in zip(_histograms(metrics), counts.times, strict=True):
        histogram.counts, histogram.total = buckets, total
