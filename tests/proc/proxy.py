"""A proxy as vLLM has one for tests (toy_proxy_server.py): each request goes to a server that computes its prompt, with
`max_tokens` 1, and then, with the `kv_transfer_params` of that answer, to one that goes on."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import httpx2

NOBODY: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class Proxy:
    """prefill, decode: addresses. `between` may do anything to what one says before the other hears it; `params`: what
    was handed over."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self.params: list[dict[str, Any]] = []
        self.between = lambda params: params
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                proxy.handle(self, body)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def handle(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        first = {**body, "kv_transfer_params": NOBODY, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        answer = httpx2.post(self.prefill + handler.path, json=first, timeout=60)
        answer.raise_for_status()
        params = answer.json().get("kv_transfer_params")
        if params:
            self.params.append(params)
            body["kv_transfer_params"] = self.between(params)
        with httpx2.stream("POST", self.decode + handler.path, json=body, timeout=60) as response:
            handler.send_response(response.status_code)
            handler.send_header("content-type", response.headers["content-type"])
            handler.end_headers()
            for chunk in response.iter_bytes():
                handler.wfile.write(chunk)

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
