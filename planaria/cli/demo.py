"""`make demo`: the whole path, as a user would go it. Starts `planaria serve`, asks over HTTP, stops it."""

from __future__ import annotations

import asyncio
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
from planaria.cli.bench_serve import ClientTiming, ask
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
            _write(line)
            if " at http" in line:
                return process, line.rsplit(" at ", 1)[1].split()[0]
    finally:
        limit.cancel()
    code = process.wait()
    if code == -signal.SIGKILL:
        raise EngineDead(f"the server was not ready in {START_LIMIT:.0f} s")
    raise EngineDead(f"the server ended with exit code {code} before it was ready")


async def answer(address: str, model: str) -> ClientTiming:
    """To the question, on standard output as it comes."""
    body = {
        "model": model, "messages": [{"role": "user", "content": QUESTION}], "stream": True, "seed": 0,
        "repetition_penalty": 1.1, "max_tokens": 128, "stream_options": {"include_usage": True},
    }  # fmt: skip
    timing = ClientTiming()
    async with httpx2.AsyncClient(timeout=120) as client:
        await ask(client, f"{address}/v1/chat/completions", json.dumps(body).encode(), timing, _write)
    _write("\n")
    if timing.error is not None:
        raise EngineDead(timing.error)
    return timing


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def run(model: str, engine: dict[str, Any]) -> None:
    began = time.perf_counter()
    if model in ALIASES:
        have(model)
    process, address = start(model, engine)
    try:
        console.print(f"\n{QUESTION}", style="bold")
        timing = asyncio.run(answer(address, model))
        rest = timing.seconds - timing.ttft
        console.print(
            f"\n{timing.tokens} tokens: the first after {timing.ttft * 1000:.0f} ms, then "
            f"{(timing.tokens - 1) / rest:,.1f} tokens/s; {time.perf_counter() - began - rest:.1f} s from start to the "
            "first token", soft_wrap=True,
        )  # fmt: skip
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        console.print(f"server stopped (exit code {code})", style="dim")
        if code:
            os._exit(1)
