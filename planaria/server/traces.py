"""Traces, by OpenTelemetry (the extra `otel`): a span for each request with its queue, prefill and decode, and a trace
of its own for each recovery. Imported only where spans have somewhere to go.

The rule: nothing is measured for it. A request's children are made when it ends, from times that are known anyway; a
request that isn't recorded has no span at all, and costs a look at a header and a random number.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from random import random
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import planaria
from planaria.executor.recovery import is_replayed
from planaria.server.faults import PARTS
from planaria.server.root_messages import TracedRecovery
from planaria.wire import Recovery

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from planaria.server.gate import RequestInfo
    from planaria.server.generation import Generation
    from planaria.server.stream import Stream

PATH = "/v1/traces"  # where a collector takes spans
PATIENCE = 5.0  # seconds that it may take to do so
KEPT = 16  # recoveries that requests which end later are linked to
_W3C = TraceContextTextMapPropagator()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Traces:
    """endpoint: a collector's address for OTLP over HTTP; ratio: of requests that are recorded, where their client
    doesn't say which. What the collector doesn't take is dropped, with a line in the log."""

    def __init__(self, endpoint: str, ratio: float) -> None:
        self.ratio = ratio
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        said = {"service.name": "planaria", "service.version": planaria.__version__}
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource(said).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=PATIENCE)))
        self._tracer = self._provider.get_tracer("planaria", planaria.__version__)
        self._replaying: dict[int, tuple[Span, int]] = {}  # engine -> of a recovery, and when requests went on
        self.recovered: deque[TracedRecovery] = deque(maxlen=KEPT)
        self.on_recovered: Callable[[], None] = lambda: None
        library, own = logging.getLogger("opentelemetry"), logging.getLogger("planaria")
        library.handlers, library.propagate = list(own.handlers), False

    def close(self) -> None:
        """Send what is left."""
        for span, _ in self._replaying.values():
            span.end()
        self._provider.shutdown()

    # -- requests

    def begin(self, info: RequestInfo, headers: Mapping[bytes, bytes]) -> None:
        """A request has come. It is recorded if its client's span is, or else by chance."""
        given = headers.get(b"traceparent")
        context = None
        if given is not None:
            state = headers.get(b"tracestate", b"")
            context = _W3C.extract({"traceparent": given.decode("latin-1"), "tracestate": state.decode("latin-1")})
            parent = get_current_span(context).get_span_context()
            if parent.is_valid and not parent.trace_flags.sampled:
                return
            context = context if parent.is_valid else None
        if context is None and random() >= self.ratio:
            return
        info.span = self._tracer.start_span(
            f"{info.method} {info.path[:100]}", context, kind=SpanKind.SERVER,
            attributes={
                "http.request.method": info.method, "url.path": info.path[:200], "planaria.request_id": info.id,
            },
        )  # fmt: skip

    def generated(self, generation: Generation) -> None:
        """Of a recorded request that generates: what became of it, in time."""
        info, now = generation.info, time.perf_counter()
        span, zero = info.span, time.time_ns() - time.perf_counter_ns()
        assert span is not None
        sequences = [sequence for stream in generation.streams for sequence in stream.sequences]
        first, queued = generation.first_token, min((s.queued for s in sequences if s.tokens), default=None)
        begun = now if queued is None or first is None else min(generation.submitted + queued, first)
        ends = [("queue", generation.submitted, begun)]
        if first is not None:
            ends += [("prefill", begun, first), ("decode", first, now)]
        parent = set_span_in_context(span)
        for name, start, end in ends:
            child = self._tracer.start_span(name, parent, start_time=zero + _ns(start))
            child.end(zero + _ns(end))
        for sequence in sequences:
            self._stays(parent, sequence, zero, now)
        span.set_attributes({
            "gen_ai.request.model": generation.service.model_names[0],
            "gen_ai.usage.input_tokens": sum(s.prompt_tokens for s in generation.streams),
            "gen_ai.usage.output_tokens": sum(s.completion_tokens for s in generation.streams),
            "gen_ai.response.finish_reasons": [str(s.finish) for s in sequences],
        })  # fmt: skip
        engines = {s.engine.index for s in sequences if hasattr(s, "engine")}
        for told in self.recovered:
            if told.when > zero + _ns(info.arrival) and (told.engine in engines or any(s.moves for s in sequences)):
                context = SpanContext(int(told.trace, 16), int(told.span, 16), True, TraceFlags(TraceFlags.SAMPLED))
                span.add_link(context, {"planaria.engine": told.engine})

    def _stays(self, parent: Context, sequence: Stream, zero: int, now: float) -> None:
        """A span for each engine that a sequence was in, where it was in several."""
        ends = [*(start for start, _ in sequence.stays[1:]), now]
        for (start, engine), end in zip(sequence.stays, ends, strict=True) if sequence.moves else ():
            child = self._tracer.start_span(
                f"engine {engine.index} {engine.kind}".rstrip(), parent, start_time=zero + _ns(start),
                attributes={"planaria.engine": engine.index, "planaria.choice": sequence.choice},
            )  # fmt: skip
            child.end(zero + _ns(end))

    def end(self, info: RequestInfo) -> None:
        """A recorded request has been answered."""
        span = info.span
        assert span is not None
        span.set_attribute("http.response.status_code", info.status)
        if info.error is not None:
            code, param, message = info.error
            span.set_attributes({"error.type": code or str(info.status), "planaria.param": param or ""})
            if info.status >= 500 or info.status < 400:
                span.set_status(StatusCode.ERROR, message)
        span.end()

    # -- recoveries

    def hear(self, message: Recovery) -> None:
        """Requests go on after a fault (or in another layout), or all of them have their next token."""
        if is_replayed(message):
            self._replayed(message.engine, message.seconds)
        elif message.seconds:
            self._over(message)

    def follow(self, recorded: Iterable[TracedRecovery]) -> None:
        """Of another process, which records them."""
        self.recovered = deque(recorded, KEPT)

    def _over(self, message: Recovery) -> None:
        self._replayed(message.engine, {})  # of one whose sequences were hit again
        seconds, now = message.seconds, time.time_ns()
        at = now - _ns(seconds.get("total", 0.0))
        span = self._tracer.start_span(
            "recovery" if message.kind == "fault" else "layout", start_time=at,
            attributes={
                "planaria.engine": message.engine, "planaria.ranks": message.ranks, "planaria.cause": message.cause,
                "planaria.phase": message.phase, "planaria.epoch": message.epoch, "planaria.layout": message.layout,
                "planaria.requests": message.requests, "planaria.replayed_tokens": message.tokens,
            },
        )  # fmt: skip
        parent = set_span_in_context(span)
        for name in PARTS:
            if name in seconds:
                child = self._tracer.start_span(name, parent, start_time=at)
                at += _ns(seconds[name])
                child.end(at)
        context = span.get_span_context()
        trace, own = format_trace_id(context.trace_id), format_span_id(context.span_id)
        self.recovered.append(TracedRecovery(message.engine, now, trace, own))
        self.on_recovered()
        self._replaying[message.engine] = span, now
        if not message.requests:  # nobody's next token will be told
            self._replayed(message.engine, {})

    def _replayed(self, engine: int, seconds: Mapping[str, float]) -> None:
        span, since = self._replaying.pop(engine, (None, 0))
        if span is None:
            return
        end = max(since + _ns(seconds.get("replay", 0.0)), since)
        if "replay" in seconds:
            child = self._tracer.start_span("replay", set_span_in_context(span), start_time=since)
            child.end(end)
        span.end(end)
