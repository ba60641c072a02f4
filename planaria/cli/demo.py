"""`make demo`: the whole path, as a user would go it. Starts `planaria serve`, asks over HTTP, stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import httpx2

from planaria.checkpoint.resolve import ALIASES
from planaria.cli.look import console
from planaria.cli.models import have
from planaria.cli.options import typed
from planaria.errors import EngineDead

QUESTION = "What is the capital of France, and what is it known for?"
START_LIMIT = 120.0  # seconds


def start(model: str, engine: dict[str, Any]) -> tuple[subprocess.Popen[str], str]:
    """The server's process and its address, when it is ready. Its log goes to our standard error."""
    command = [sys.executable, "-m", "planaria", "serve", model, "--port", "0", "--log-level", "warning"]
    command += typed(engine)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    limit = threading.Timer(START_LIMIT, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if " at http" in line:
                return process, line.split(" at ", 1)[1].split()[0]
    finally:
        limit.cancel()
    code = process.wait()
    if code == -signal.SIGKILL:
        raise EngineDead(f"the server was not ready in {START_LIMIT:.0f} s")
    raise EngineDead(f"the server ended with exit code {code} before it was ready")


def ask(address: str, model: str, question: str) -> tuple[int, float, float]:
    """Stream an answer to standard output. Returns (tokens, seconds to the first, seconds of the rest)."""
    body = {
        "model": model, "messages": [{"role": "user", "content": question}], "stream": True,
        "seed": 0, "repetition_penalty": 1.1, "max_tokens": 128, "stream_options": {"include_usage": True},
    }  # fmt: skip
    since = time.perf_counter()
    first = last = 0.0
    tokens = 0
    with httpx2.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=120) as answer:
        if answer.status_code != 200:
            raise EngineDead(f"the server answered {answer.status_code}: {answer.read().decode(errors='replace')}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise EngineDead(event["error"]["message"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                if text and not first:
                    first = time.perf_counter() - since
                sys.stdout.write(text)
                sys.stdout.flush()
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            last = time.perf_counter() - since
    sys.stdout.write("\n")
    return tokens, first, last - first


def run(model: str, engine: dict[str, Any]) -> None:
    began = time.perf_counter()
    if model in ALIASES:
        have(model)
    process, address = start(model, engine)
    try:
        console.print(f"\n[bold]{QUESTION}[/bold]")
        tokens, first, rest = ask(address, model, QUESTION)
        console.print(
            f"\n{tokens} tokens: the first after {first * 1000:.0f} ms, then {(tokens - 1) / rest:,.1f} tokens/s; "
            f"{time.perf_counter() - began - rest:.1f} s from start to the first token"
        )
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        console.print(f"server stopped (exit code {code})", style="dim")
        if code:
            os._exit(1)
