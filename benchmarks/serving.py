"""Engines as a service: from the server's process start to the first token, then idle CPU and memory of all its
processes. Only the standard library talks to them, so that the client costs the same for each."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import proc
from benchmarks.drivers import START_LIMIT, DriverError
from benchmarks.peers.peer_protocol import random_prompts

STOP_LIMIT = 60.0


@dataclass
class Service:
    """A server to start. `command` ends up listening on 127.0.0.1; its ready line or /health says when."""

    name: str
    command: list[str]
    port: int | None  # None: read from the line "... at http://host:port"
    variables: dict[str, str] = field(default_factory=dict)
    working_folder: Path | None = None


def measure(
    service: Service, model: str, *, fill: list[list[int]], kv_bytes: int, idle_seconds: float, logs: Path
) -> dict[str, Any]:
    """{"first_token": s, "idle_percent": %, "pss": bytes, "pss_less_kv": bytes, "processes": n}. Raises DriverError."""
    log = (logs / f"{service.name}-serve.log").open("w+b")
    since = time.perf_counter()
    process = subprocess.Popen(
        service.command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **service.variables},
        cwd=service.working_folder,
    )  # fmt: skip
    try:
        port = _wait(process, service, Path(log.name))
        _complete(port, model, random_prompts(0, [16], 30_000)[0], 1)
        first_token = time.perf_counter() - since
        prompts = random_prompts(1, [shape[0] for shape in fill], 30_000)
        with ThreadPoolExecutor(len(fill)) as pool:
            list(pool.map(lambda pair: _complete(port, model, pair[0], pair[1][1]), zip(prompts, fill, strict=True)))
        proc.settle(process.pid)
        idle = proc.idle_percent(process.pid, idle_seconds)
        pss = proc.pss_bytes(process.pid)
        return {
            "first_token": first_token, "idle_percent": idle, "pss": pss, "pss_less_kv": pss - kv_bytes,
            "processes": len(proc.tree(process.pid)),
        }  # fmt: skip
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            proc.kill(process.pid)
            process.wait()
        log.close()


def _wait(process: subprocess.Popen[bytes], service: Service, log: Path) -> int:
    """The port, as soon as the server answers. Polls every 20 ms: no server tells in the same way when it is ready."""
    until = time.monotonic() + START_LIMIT
    port = service.port
    while time.monotonic() < until:
        if process.poll() is not None:
            raise DriverError(f"{service.name}: the server ended with exit code {process.returncode}; see {log}")
        if port is None:
            found = re.search(r" at https?://[^\s:]+:(\d+)", log.read_text(errors="replace"))
            port = int(found[1]) if found else None
        elif _ready(port):
            return port
        time.sleep(0.02)
    raise DriverError(f"{service.name}: the server wasn't ready in {START_LIMIT:.0f} s; see {log}")


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _complete(port: int, model: str, prompt: list[int], tokens: int) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_LIMIT)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise DriverError(f"port {port}: {answer.status}: {text[:300]!r}")
        made = json.loads(text)["usage"]["completion_tokens"]
        if made != tokens:
            raise DriverError(f"port {port}: asked for {tokens} tokens, got {made}")
    finally:
        connection.close()
