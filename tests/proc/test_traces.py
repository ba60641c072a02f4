"""A rank is killed under streams: the collector gets one trace of the recovery, and their requests point to it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.proc.servers import Server, needs_smollm2, wait_until
from tests.proc.test_engine_death import HASH, health, run

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from tests.collector import Collector, attributes
from tests.tiers import representatives

pytestmark = needs_smollm2


def several(processes: int, collector: Collector) -> tuple[str, ...]:
    return ("--api-server-count", str(processes), "--otlp-traces-endpoint", collector.url)


@pytest.mark.parametrize("processes", representatives((1, 2), 2))
def test_a_recovery_is_one_trace(processes: int) -> None:
    """Of several API processes, too, which the root tells of it."""
    with Collector() as collector:
        with Server("smollm2", *HASH, "-tp", "2", *several(processes, collector)) as server:

            def harm(tokens: int) -> None:
                if tokens == 150:
                    os.kill(server.rank_pids()[-1], signal.SIGKILL)

            outcomes = run(server, harm)
            wait_until("it has replayed", lambda: "replay" in (health(server)["last_fault"] or {}).get("seconds", {}))
            seconds = health(server)["last_fault"]["seconds"]
        (recovery,) = collector.named("recovery")
        requests = collector.named("POST /v1/completions")
        children = collector.children(recovery)
        assert list(children) == ["detect", "fence", "replace", "regroup", "load", "replay"]
        for name, child in children.items():
            lasted = (child.end_time_unix_nano - child.start_time_unix_nano) / 1e9
            assert lasted == pytest.approx(seconds[name], abs=2e-3), name
            assert child.trace_id == recovery.trace_id
        said = attributes(recovery)
        assert said["planaria.cause"] == "its process was killed by signal 9" and said["planaria.requests"] > 0
        assert len(requests) == len(outcomes)
        assert {link.trace_id for span in requests for link in span.links} == {recovery.trace_id}
        for span in requests:
            assert list(collector.children(span)) == ["queue", "prefill", "decode"]
