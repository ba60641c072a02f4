"""Numbers of the responses that a server keeps, for /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from planaria.server.response_store import ResponseStore


class ResponseMetrics(Collector):
    """Nothing is said of a store that is empty. name: of the model."""

    def __init__(self, store: ResponseStore, name: Callable[[], str]) -> None:
        self._store, self._name = store, name

    def collect(self) -> Iterable[Metric]:
        numbers, model = self._store.numbers, self._name()
        if not numbers:
            return
        running, over, size, unwritten = numbers
        counts = GaugeMetricFamily("planaria:responses", "Responses that are kept.", labels=["model_name", "state"])
        counts.add_metric([model, "running"], running)
        counts.add_metric([model, "over"], over)
        yield counts
        for name, text, number in (
            ("responses_bytes", "What they take, about.", size),
            ("journal_unwritten", "Responses that the journal can't write now.", unwritten),
        ):
            family = GaugeMetricFamily(f"planaria:{name}", text, labels=["model_name"])
            family.add_metric([model], number)
            yield family
