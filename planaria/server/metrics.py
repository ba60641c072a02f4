"""/metrics: what dashboards made for vLLM look for, under the same names, from a registry of our own.

A request here is one sequence (a request with n > 1 is n of them). Queue lengths, KV usage and the prefix cache are
each engine's, read when asked, under its number; times and token counts are the server's, as its clients see them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from planaria.core.stats import DraftStats
from planaria.server.faults import FaultLog
from planaria.types import FinishReason
from planaria.wire import EngineState, EngineStats, ExpertStats, StoreStats, TierStats, TransferStats

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
E2E = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


_Number = Callable[[EngineState], float]
_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("vllm:num_requests_running", "Sequences being computed.", lambda e: e.stats.running),
    ("vllm:num_requests_waiting", "Sequences waiting for room.", lambda e: e.stats.waiting),
    ("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", lambda e: e.stats.kv_usage),
    ("planaria:kv_cache_tokens", "Tokens that the KV cache has room for.", lambda e: e.stats.kv_tokens),
    ("planaria:epoch", "Epoch of an engine's ranks; begins with 0 in another process.", lambda e: e.stats.epoch),
    ("planaria:engine_ready", "1 while an engine can admit.", lambda e: e.state == "ready"),
    ("planaria:engine_load_tokens", "In KV, and still to be computed for what is open.", lambda e: e.load),
)
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda e: e.stats.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda e: e.stats.prefix_hits),
    ("vllm:num_preemptions", "Times a sequence gave its KV blocks to another.", lambda e: e.stats.preemptions),
    ("planaria:requests_taken", "Sequences that came from another engine.", lambda e: e.taken),
)
# Of engines that balance their experts.
_EXPERTS: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[ExpertStats], float]], ...] = (
    (
        GaugeMetricFamily, "expert_balancedness", "Mean over maximum of the load of the ranks that share experts.",
        lambda experts: experts.balancedness,
    ),
    (
        GaugeMetricFamily, "expert_rearrangement_age_seconds", "Since experts were rearranged; none: they never were.",
        lambda experts: time.time() - experts.rearranged_at,
    ),
    (
        CounterMetricFamily, "expert_rearrangements", "Times that experts were rearranged.",
        lambda experts: experts.rearrangements,
    ),
    (
        CounterMetricFamily, "expert_moved_bytes", "Weights that ranks sent one another for it.",
        lambda experts: experts.bytes_moved,
    ),
)  # fmt: skip


# Of engines that keep KV blocks outside of the cache; and of each of their stores.
_Kind = type[GaugeMetricFamily | CounterMetricFamily]
_TIER: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("queries", "Tokens for whose KV stores were asked.", lambda tier: tier.queries),
    ("hits", "Tokens whose KV came from stores.", lambda tier: tier.hits),
    ("given_up", "Times that computing was faster than a store.", lambda tier: tier.given_up),
    ("missing", "Times that not all came, as a rank lacked it or had it damaged.", lambda tier: tier.missing),
)
_STORE: tuple[tuple[_Kind, str, str, Callable[[StoreStats], float]], ...] = (
    (GaugeMetricFamily, "blocks", "KV blocks in a store that all ranks can bring back.", lambda store: store.stored),
    (GaugeMetricFamily, "writable", "1 while blocks are written.", lambda store: not store.why),
    (CounterMetricFamily, "saved_blocks", "KV blocks written.", lambda store: store.saved),
    (CounterMetricFamily, "saved_bytes", "Of all ranks.", lambda store: store.saved_bytes),
    (CounterMetricFamily, "loaded_bytes", "Of all ranks.", lambda store: store.loaded_bytes),
)


# Of engines of two kinds.
_TRANSFERS: tuple[
    tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[TransferStats], float]], ...
] = (
    (CounterMetricFamily, "transfers", "Times that KV was asked of another engine.", lambda t: t.transfers),
    (CounterMetricFamily, "blocks", "KV blocks that came from another engine.", lambda t: t.blocks),
    (CounterMetricFamily, "bytes", "Of all ranks.", lambda t: t.received_bytes),
    (CounterMetricFamily, "seconds", "Until all ranks had theirs.", lambda t: t.seconds),
    (CounterMetricFamily, "lent", "Prompts whose KV was lent to another engine.", lambda t: t.lent),
    (CounterMetricFamily, "expired", "Leases that nobody gave back in time.", lambda t: t.expired),
    (CounterMetricFamily, "taken_back", "Leases whose memory running requests needed.", lambda t: t.taken_back),
    (GaugeMetricFamily, "held_blocks", "KV blocks that are lent now.", lambda t: t.held),
)


def imbalance(engines: Iterable[EngineState]) -> float:
    """The highest load over the mean, of the engines that get new work; 1 is even, and 1 too when nothing is open."""
    loads = [engine.load for engine in engines if engine.state == "ready" and not engine.leaving]
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def of_engines(engines: Iterable[EngineState], model: str) -> Iterator[Metric]:
    """What each engine says of itself."""
    for kind, numbers in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, text, number in numbers:
            family = kind(name, text, labels=["model_name", "engine"])
            for engine in engines:
                family.add_metric([model, str(engine.index)], number(engine))
            yield family
    yield from _of_tiers({str(e.index): e.stats.tier for e in engines if e.stats.tier is not None}, model)
    yield from _of_transfers([(str(e.index), e.stats.transfers) for e in engines if e.stats.transfers], model)


def _of_transfers(engines: list[tuple[str, TransferStats]], model: str) -> Iterator[Metric]:
    for kind, name, text, number in _TRANSFERS:
        family = kind(f"planaria:kv_transfer_{name}", text, labels=["model_name", "engine"])
        for index, stats in engines:
            family.add_metric([model, index], number(stats))
        yield family
    failed = CounterMetricFamily(
        "planaria:kv_transfer_failed", "Transfers of which not all came, so that it was computed.",
        labels=["model_name", "engine", "reason"],
    )  # fmt: skip
    for index, stats in engines:
        for reason, count in stats.failed.items():
            failed.add_metric([model, index, reason], count)
    yield failed


def _of_tiers(tiers: Mapping[str, TierStats], model: str) -> Iterator[Metric]:
    """tiers: by engine."""
    labels = ["model_name", "engine"]
    for name, text, number in _TIER:
        family = CounterMetricFamily(f"planaria:kv_tier_{name}", text, labels=labels)
        for engine, tier in tiers.items():
            family.add_metric([model, engine], number(tier))
        yield family
    labels += ["store"]
    stores = [([model, engine, name], found) for engine, tier in tiers.items() for name, found in tier.stores.items()]
    for kind, name, text, of in _STORE:
        each = kind(f"planaria:kv_tier_{name}", text, labels=labels)
        for at, store in stores:
            each.add_metric(at, of(store))
        yield each
    text = "Blocks that could not be written or brought back."
    errors = CounterMetricFamily("planaria:kv_tier_errors", text, labels=[*labels, "kind"])
    for at, store in stores:
        for why, count in store.errors.items():
            errors.add_metric([*at, why], count)
    yield errors


class Histogram:
    """Counts by bucket. Written by one thread; a tenth of the cost of a library histogram, which locks."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        found: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            found.append((bound, running))
        return found


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Below what lies this part of what was counted, a bucket's spread evenly in it; None: there is nothing."""
    left = part * sum(counts)
    if not left:
        return None
    for bucket, count in enumerate(counts):
        if left <= count:
            low = bounds[bucket - 1] if bucket else 0.0
            return low + (bounds[min(bucket, len(bounds) - 1)] - low) * left / count
        left -= count
    return bounds[-1]


class Metrics(Collector):
    """All numbers of one server. What can be called is asked at each scrape; stats: of all engines together, those that
    have left too."""

    def __init__(
        self, engines: Callable[[], list[EngineState]], name: Callable[[], str], faults: FaultLog,
        stats: Callable[[], EngineStats] = EngineStats,
    ) -> None:  # fmt: skip
        self._engines, self._name, self._faults, self._stats = engines, name, faults, stats
        self.ttft, self.queue = Histogram(TTFT), Histogram(TTFT)
        self.itl = Histogram(ITL)
        self.e2e = Histogram(E2E)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.success: dict[str, int] = {str(reason): 0 for reason in FinishReason}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        label, value = ["model_name"], [self._name()]
        yield from of_engines(self._engines(), value[0])
        yield from self._experts(value[0])
        for name, text, number in (
            ("vllm:prompt_tokens", "Prompt tokens of sequences that gave a first token.", self.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self.generation_tokens),
            ("planaria:computed_prompt_tokens", "Prompt tokens, as they are computed.", self._stats().prompt_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=label)
            counter.add_metric(value, number)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences ended.", labels=["model_name", "finished_reason"]
        )
        for reason, number in self.success.items():
            success.add_metric([*value, reason], number)
        yield success
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From the request's arrival to its first token.", self.ttft),
            ("request_queue_time_seconds", "Until an engine first gave a sequence room.", self.queue),
            ("inter_token_latency_seconds", "Between two steps of a sequence.", self.itl),
            ("e2e_request_latency_seconds", "From the request's arrival to its last token.", self.e2e),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=label)
            family.add_metric(value, histogram.buckets(), histogram.total)
            yield family

        yield from self._drafts(value[0])
        yield from self._recovery(value[0])

    def _drafts(self, model: str) -> Iterable[Metric]:
        """Of engines whose rows draft."""
        engines = [(str(e.index), e.stats.drafts) for e in self._engines() if e.stats.drafts is not None]
        numbers: tuple[tuple[str, str, Callable[[DraftStats], float]], ...] = (
            ("drafts", "Times that a step checked drafts of a sequence.", lambda drafts: drafts.checks),
            ("draft_tokens", "Tokens that were drafted, and checked.", lambda drafts: drafts.drafted),
            ("accepted_tokens", "Drafts that were right.", lambda drafts: sum(drafts.accepted)),
        )
        for name, text, number in numbers if engines else ():
            family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=["model_name", "engine"])
            for engine, drafts in engines:
                family.add_metric([model, engine], number(drafts))
            yield family
        if engines:
            places = CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that were right, by their place.",
                labels=["model_name", "engine", "position"],
            )  # fmt: skip
            for engine, drafts in engines:
                for place, count in enumerate(drafts.accepted):
                    places.add_metric([model, engine, str(place)], count)
            yield places

    def _experts(self, model: str) -> Iterable[Metric]:
        engines = [(str(e.index), e.stats.experts) for e in self._engines()]
        for kind, name, text, number in _EXPERTS:
            family = kind(f"planaria:{name}", text, labels=["model_name", "engine"])
            for engine, experts in engines:
                if experts is not None and (experts.rearranged_at or "age" not in name):
                    family.add_metric([model, engine], number(experts))
            yield family

    def _recovery(self, model: str) -> Iterable[Metric]:
        faults, travel = self._faults, self._faults.travel
        for name, text, by_part in (
            ("faults", "Losses of ranks, and of the engine's process.", faults.faults),
            ("recoveries", "Losses after which requests went on.", faults.recoveries),
        ):
            parts = CounterMetricFamily(f"planaria:{name}", text, labels=["model_name", "part"])
            for part, number in by_part.items():
                parts.add_metric([model, part], number)
            yield parts
        for name, text, total in (
            ("replayed_tokens", "Tokens computed again after a fault.", float(faults.replayed_tokens)),
            ("layout_changes", "Changes of an engine's layout that no fault asked for.", float(faults.layout_changes)),
            ("recovery_seconds", "From faults until requests went on.", faults.seconds),
            ("recovery_expert_moved_bytes", "Experts that ranks sent one another to begin an epoch.", travel["moved"]),
            ("recovery_expert_needed_bytes", "Of experts that had to move, wherever they go.", travel["needed"]),
            ("recovery_experts_read", "Experts that were read from the checkpoint to begin an epoch.", travel["read"]),
        ):
            counter = CounterMetricFamily(f"planaria:{name}", text, labels=["model_name"])
            counter.add_metric([model], total)
            yield counter
        gauge = GaugeMetricFamily(
            "planaria:fleet_imbalance", "The highest load of an engine over the mean.", labels=["model_name"]
        )
        gauge.add_metric([model], imbalance(self._engines()))
        yield gauge
        spent = CounterMetricFamily(
            "planaria:recovery_part_seconds", "Of recoveries, by part; replay: until every sequence had another token.",
            labels=["model_name", "phase"],
        )  # fmt: skip
        for name, total in faults.parts.items():
            spent.add_metric([model, name], total)
        yield spent
        gauge = GaugeMetricFamily("planaria:recovering", "1 while a fault is being dealt with.", labels=["model_name"])
        gauge.add_metric([model], int(faults.recovering))
        yield gauge


class Together(Collector):
    """Numbers of several registries, each family once. They differ in a label."""

    def __init__(self, registries: Iterable[Collector]) -> None:
        self.registries = registries

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for registry in self.registries:
            for family in registry.collect():
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples += family.samples
        return families.values()


def exposition(registry: Collector, accept: str) -> tuple[bytes, str]:
    """Body and content type for what the scraper accepts."""
    if "application/openmetrics-text" in accept:
        return bytes(generate_openmetrics(registry)), OPENMETRICS  # type: ignore[no-untyped-call]
    return bytes(generate_latest(registry)), CONTENT_TYPE_LATEST
