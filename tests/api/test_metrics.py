"""/metrics has the names dashboards look for, and the numbers are right."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from planaria.cli.look import console, summary
from planaria.core.stats import DraftStats
from planaria.server import history
from planaria.server.metrics import Histogram
from planaria.wire import EngineStats, Recovery

C = "/v1/completions"

GAUGES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "planaria:recovering",
    "planaria:epoch", "planaria:engine_ready", "planaria:engine_load_tokens", "planaria:fleet_imbalance",
    "planaria:expert_balancedness", "planaria:expert_rearrangement_age_seconds", "planaria:kv_tier_blocks",
    "planaria:kv_tier_writable", "planaria:kv_cache_tokens", "planaria:kv_transfer_held_blocks",
}  # fmt: skip
COUNTERS = {
    "vllm:prompt_tokens", "vllm:generation_tokens", "planaria:computed_prompt_tokens",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
    "vllm:request_success", "vllm:num_preemptions", "planaria:faults", "planaria:recoveries",
    "planaria:replayed_tokens", "planaria:recovery_seconds", "planaria:recovery_part_seconds",
    "planaria:layout_changes", "planaria:requests_taken",
    "planaria:expert_rearrangements", "planaria:expert_moved_bytes", "planaria:recovery_expert_moved_bytes",
    "planaria:recovery_expert_needed_bytes", "planaria:recovery_experts_read", "planaria:kv_tier_queries",
    "planaria:kv_tier_hits", "planaria:kv_tier_saved_blocks", "planaria:kv_tier_saved_bytes",
    "planaria:kv_tier_loaded_bytes", "planaria:kv_tier_given_up", "planaria:kv_tier_errors",
    "planaria:kv_tier_missing", "planaria:kv_transfer_transfers", "planaria:kv_transfer_blocks",
    "planaria:kv_transfer_bytes", "planaria:kv_transfer_seconds", "planaria:kv_transfer_failed",
    "planaria:kv_transfer_lent", "planaria:kv_transfer_expired", "planaria:kv_transfer_taken_back",
}  # fmt: skip
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
}  # fmt: skip


async def scrape(http):
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {f.name: f for f in text_string_to_metric_families(answer.text)}
    values = {}
    for family in families.values():
        for s in family.samples:
            assert s.labels["model_name"] == "smollm2"
            extra = [v for k, v in s.labels.items() if k in ("finished_reason", "le", "part", "phase")]
            values["/".join([s.name, *extra])] = s.value
    return families, values


async def test_names_and_numbers(server):
    engine = server.engine
    async with server.http() as http:
        families, values = await scrape(http)
        kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
        for kind, names in kinds.items():
            assert {f.name for f in families.values() if f.type == kind} == names
        assert values["vllm:prompt_tokens_total"] == 0 and values["vllm:num_preemptions_total"] == 0
        body = {"prompt": [[5] * 10, [6] * 7], "n": 2, "max_tokens": 8, "ignore_eos": True}
        assert (await http.post(C, json=body)).status_code == 200
        await http.post(C, json={**body, "prompt": [9, 9], "n": 1, "stream": True})
        _, values = await scrape(http)
        assert values["vllm:prompt_tokens_total"] == 10 * 2 + 7 * 2 + 2
        assert values["vllm:generation_tokens_total"] == 5 * 8
        assert values["vllm:request_success_total/length"] == 5 and values["vllm:request_success_total/stop"] == 0
        assert values["vllm:time_to_first_token_seconds_count"] == 5
        assert values["vllm:inter_token_latency_seconds_count"] == 5 * 7
        assert values["vllm:e2e_request_latency_seconds_count"] == 5
        assert values["vllm:e2e_request_latency_seconds_bucket/+Inf"] == 5
        assert values["vllm:request_queue_time_seconds_count"] == 5
        assert 0 < values["vllm:time_to_first_token_seconds_sum"] < values["vllm:e2e_request_latency_seconds_sum"]
        assert values["vllm:prefix_cache_queries_total"] == 10 * 2 + 7 * 2 + 2
        assert values["vllm:prefix_cache_hits_total"] == 16 and values["vllm:num_preemptions_total"] == 3
        engine.gate.clear()
        task = asyncio.create_task(http.post(C, json={**body, "prompt": [4], "n": 3}))
        await engine.until(lambda: len(engine.open) == 3)
        _, values = await scrape(http)
        assert values["vllm:num_requests_running"] == 3 and values["vllm:kv_cache_usage_perc"] == pytest.approx(0.03)
        task.cancel()
        await engine.until(lambda: not engine.open)
        _, values = await scrape(http)
        assert values["vllm:request_success_total/abort"] == 3 and values["vllm:num_requests_running"] == 0


async def test_openmetrics_for_who_asks(server):
    async with server.http() as http:
        answer = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")


def test_histogram():
    h = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5, 100):
        h.observe(value)
    assert h.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 5)] and h.total == 105.5


async def test_who_drafts_is_told_and_how_often_it_was_right(server):
    """By /metrics, /health, and in the lines of a start."""
    server.engine.facts = msgspec.structs.replace(server.engine.facts, drafts=("eagle head", 3))
    server.engine.stats = EngineStats(drafts=DraftStats(checks=5, drafted=12, accepted=(4, 2, 1)))
    async with server.http() as http:
        _, values = await scrape(http)
        assert (await http.get("/health")).json()["drafts"] == "eagle head"
    name = "vllm:spec_decode_num"
    told = [values[f"{name}_{what}_total"] for what in ("drafts", "draft_tokens", "accepted_tokens")]
    assert told == [5, 12, 7]
    async with server.http() as http:
        text = (await http.get("/metrics")).text
    places = [line for line in text.splitlines() if line.startswith(f"{name}_accepted_tokens_per_pos_total")]
    assert [line.rsplit(" ", 1)[1] for line in places] == ["4.0", "2.0", "1.0"]
    assert [f'position="{place}"' in line for place, line in enumerate(places)] == [True] * 3
    with console.capture() as shown:
        console.print(summary(server.engine.facts))
    assert "eagle head, up to 3 tokens of a sequence in a step" in " ".join(shown.get().split())


async def test_the_dashboard_shows_the_same_numbers(server, monkeypatch):
    """Also where an engine's own are others: what it computed for nobody, or computed again in another process. Prompt
    tokens are two numbers: as they are computed, which the page shows, and with a first token."""
    monkeypatch.setattr(history, "EVERY", 0.0)
    async with server.http() as http:
        await http.post(C, json={"prompt": [5] * 10, "n": 2, "max_tokens": 8, "ignore_eos": True})
        server.engine.on_recovery(Recovery(0, [], "step", "killed", seconds={"total": 1.0}, tokens=14))
        server.engine.stats = EngineStats(prompt_tokens=99, generation_tokens=99)
        _, values = await scrape(http)
        health = (await http.get("/health")).json()
        async with asyncio.timeout(60):
            sample: dict[str, float] = {}
            while sample.get("replayed_tokens") != 14:
                body = (await http.get("/admin/dashboard")).json()
                sample = dict(zip(body["columns"], (body["samples"] or [[]])[-1], strict=False))
    assert sample["generation_tokens"] == values["vllm:generation_tokens_total"] == 16
    assert sample["computed_prompt_tokens"] == values["planaria:computed_prompt_tokens_total"] == 99
    assert values["vllm:prompt_tokens_total"] == 20
    assert values["planaria:replayed_tokens_total"] == health["last_fault"]["replayed_tokens"] == 14
