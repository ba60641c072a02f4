"""What a collector of traces gets of requests and recoveries, and that nothing is there where none is asked for."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from planaria.errors import ConfigError
from planaria.server.config import ServerConfig
from planaria.wire import Recovery

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.trace import set_span_in_context

from planaria.core.resize import DECODE, PREFILL
from planaria.server.engine import Engine
from planaria.server.stream import Stream
from planaria.server.traces import Traces
from planaria.types import SamplingParams
from planaria.wire import Submit
from tests.collector import Collector, attributes

C = "/v1/completions"
BODY = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


def test_each_engine_that_a_sequence_was_in_is_a_span() -> None:
    stream = Stream(Submit("a", [1], SamplingParams(), 0, max_tokens=2))
    with Collector() as collector:
        traces = Traces(collector.url, 1.0)
        with traces._tracer.start_as_current_span("request") as span:
            for moves, kind in enumerate((PREFILL, DECODE)):
                engine = Engine(moves)
                engine.kind, stream.moves = kind, moves
                stream.stays.append((10.0 + moves, engine))
                traces._stays(set_span_in_context(span), stream, 0, 13.0)
        traces.close()
        (request,) = collector.named("request")
        children = collector.children(request)
    times = {name: (c.start_time_unix_nano // 10**9, c.end_time_unix_nano // 10**9) for name, c in children.items()}
    assert times == {"engine 0 prefill": (10, 11), "engine 1 decode": (11, 13)}, "and none while it was in one alone"


async def test_a_request_is_a_span_with_queue_prefill_and_decode(start):
    with Collector() as collector:
        async with start(otlp_traces_endpoint=collector.url) as server, server.http() as http:
            asked = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}
            answer = await http.post(C, json=BODY, headers=asked)
            assert answer.status_code == 200, answer.text
            await http.get("/health")
            await http.post(C, json={**BODY, "n": 0})
        spans = collector.named("POST " + C)
    assert collector.services == {"planaria"} and not collector.named("GET /health")
    span, refused = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    said = attributes(span)
    assert said["planaria.request_id"] == "mine" and said["http.response.status_code"] == 200
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 4)
    children = collector.children(span)
    assert list(children) == ["queue", "prefill", "decode"]
    times = [(c.start_time_unix_nano, c.end_time_unix_nano) for c in children.values()]
    assert times[0][1] == times[1][0] and times[1][1] == times[2][0]
    assert span.start_time_unix_nano <= times[0][0] and times[-1][1] <= span.end_time_unix_nano
    assert {c.trace_id.hex() for c in children.values()} == {TRACE}
    said = attributes(refused)
    assert (said["http.response.status_code"], said["planaria.param"]) == (400, "n") and said["error.type"]
    assert refused.trace_id.hex() != TRACE and not collector.children(refused)


@pytest.mark.parametrize("header", ["", f"00-{TRACE}-{SPAN}-00", "nonsense"])
async def test_what_isnt_sampled_is_not_recorded(start, header):
    with Collector() as collector:
        options = {"otlp_traces_endpoint": collector.url, "otlp_traces_sampling_ratio": 0.0}
        async with start(**options) as server, server.http() as http:
            answer = await http.post(C, json=BODY, headers={"traceparent": header} if header else {})
            assert answer.status_code == 200 and "traceparent" not in answer.headers
            sampled = await http.post(C, json=BODY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        assert [span.trace_id.hex() for span in collector.named("POST " + C)] == [TRACE]
    assert TRACE in sampled.headers["traceparent"]


@pytest.mark.parametrize("tokens", [9, 0])  # 0: their KV was found
async def test_a_recovery_is_one_trace_with_its_parts(start, tokens):
    parts = {"detect": 0.01, "fence": 0.02, "replace": 0.4, "regroup": 0.1, "load": 1.0}
    over = Recovery(1, [1], "step", "killed", seconds={**parts, "total": 1.53}, requests=2, tokens=tokens)
    with Collector() as collector:
        async with start(otlp_traces_endpoint=collector.url, otlp_traces_sampling_ratio=0.0) as server:
            server.engine.on_recovery(Recovery(1, [1], "step", "killed"))
            server.engine.on_recovery(over)
            seconds = {**over.seconds, "first token": 0.1, "replay": 0.5}
            server.engine.on_recovery(Recovery(1, [1], "step", "killed", seconds=seconds))
        (span,) = collector.named("recovery")
        children = collector.children(span)
    assert list(children) == [*parts, "replay"]
    for name, seconds in {**parts, "replay": 0.5}.items():
        lasted = (children[name].end_time_unix_nano - children[name].start_time_unix_nano) / 1e9
        assert lasted == pytest.approx(seconds, abs=1e-3), name
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(2.03, abs=1e-2)
    said = attributes(span)
    assert (said["planaria.cause"], said["planaria.replayed_tokens"]) == ("killed", tokens)


def test_nothing_of_it_is_imported_where_nothing_is_traced():
    code = "import sys, planaria.server.serve; assert 'opentelemetry.sdk' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_library_logs_goes_where_ours_goes_and_adds_nothing_to_it():
    from planaria.server.traces import Traces

    Traces("http://127.0.0.1:9", 1.0).close()
    assert logging.getLogger("opentelemetry").handlers is not logging.getLogger("planaria").handlers


def test_addresses_that_cant_be_are_refused():
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        ServerConfig(otlp_traces_endpoint="localhost:4317").verify()
    with pytest.raises(ConfigError, match="--otlp-traces-sampling-ratio"):
        ServerConfig(otlp_traces_sampling_ratio=2.0).verify()
