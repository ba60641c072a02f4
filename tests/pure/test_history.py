"""What a dashboard is told of the last minutes: percentiles out of buckets, prompt tokens when they are computed."""

from __future__ import annotations

import pytest

from planaria.server.faults import FaultLog
from planaria.server.history import WINDOW, History, Sample
from planaria.server.metrics import Metrics, quantile
from planaria.wire import EngineStats

BOUNDS = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(("counts", "part", "value"), [
    ([0, 0, 0, 0], 0.5, None), ([10, 0, 0, 0], 0.5, 0.5), ([5, 5, 0, 0], 0.5, 1.0), ([5, 0, 5, 0], 0.9, 3.6),
    ([0, 10, 0, 0], 0.99, 1.99), ([0, 0, 0, 3], 0.5, 4.0),
])  # fmt: skip
def test_percentiles_of_buckets(counts: list[int], part: float, value: float | None) -> None:
    found = quantile(BOUNDS, counts, part)
    assert found == value if value is None else found == pytest.approx(value)


def test_a_sample_is_of_the_last_while() -> None:
    faults = FaultLog(lambda: [0])
    metrics, history = Metrics(list, lambda: "m", faults), History()

    def keep(at: float, **stats: int) -> Sample:
        history.keep(at, EngineStats(**stats), metrics, faults)
        return history.samples[-1]

    assert keep(0.0).first_50 is None
    metrics.prompt_tokens = 7  # of who has a first token; the engine has computed more
    for _ in range(100):
        metrics.ttft.observe(0.03)
        metrics.itl.observe(0.012)
        metrics.queue.observe(0.3)
    sample = keep(1.0, prompt_tokens=512)
    assert sample.computed_prompt_tokens == 512
    assert sample.first_50 == pytest.approx(0.03) and sample.between_99 == pytest.approx(0.02485)
    assert sample.queued_90 is not None and 0.25 < sample.queued_90 < 0.5
    for _ in range(100):
        metrics.ttft.observe(3.0)
    assert keep(2.0).first_90 == pytest.approx(2.5 + 0.8 * 2.5)
    for at in range(WINDOW):
        sample = keep(3.0 + at)
    assert sample.first_50 is sample.queued_99 is None  # of those nothing is left
