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
        store, model = self._store, self._name()
        if not store.known and store.journal is None:
            return
        counts = GaugeMetricFamily("planaria:responses", "Responses that are kept.", labels=["model_name", "state"])
        counts.add_metric([model, "running"], len(store.unfinished))
        counts.add_metric([model, "over"], len(store.known) - len(store.unfinished))
        yield counts
        for name, text, number in (
            ("responses_bytes", "What they take, about.", store.size),
            ("journal_unwritten", "Responses that the journal can't write now.", len(store.failing)),
        ):
            family = GaugeMetricFamily(f"planaria:{name}", text, labels=["model_name"])
            family.add_metric([model], number)
            yield family
