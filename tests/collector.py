"""A collector of traces: OTLP over HTTP, as OpenTelemetry's exporter speaks it."""

from __future__ import annotations

import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """`url` while the block is entered; `spans`: by name, what has come until now."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.all: list[Any] = []
        self.services: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/traces"
                for part in body.resource_spans:
                    outer.services |= {
                        a.value.string_value for a in part.resource.attributes if a.key == "service.name"
                    }
                    for scope in part.scope_spans:
                        for span in scope.spans:
                            outer._came.put(span)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()

    def gather(self) -> list[Any]:
        """All that has come, without waiting."""
        while not self._came.empty():
            self.all.append(self._came.get())
        return self.all

    def named(self, name: str) -> list[Any]:
        return [span for span in self.gather() if span.name == name]

    def children(self, parent: Any) -> dict[str, Any]:
        """Of a span, in the order of their beginnings."""
        found = [span for span in self.gather() if span.parent_span_id == parent.span_id]
        return {span.name: span for span in sorted(found, key=lambda span: span.start_time_unix_nano)}


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        found[attribute.key] = getattr(attribute.value, kind) if kind else None
    return found
