"""What a front end costs by itself: requests and streamed chunks per second of its processes' CPU time, with engines
that compute (next to) nothing.

    python -m benchmarks.front_end [--rounds 3] [--vllm-python P] [--markdown docs/fleet.md]

Planaria: `--null-worker`, with one API process and with two. vLLM has no such worker: its engine gets a model of one
layer, 64 wide, with random weights and the same tokenizer, and its engine's process is left out of the account like
ours. The client only counts bytes that pass by; it shares the cores with the servers, so rates by the clock are lower
bounds, those by CPU time are what is compared. Servers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import report
from benchmarks.convert import bf16_folder
from benchmarks.deployment import Server
from benchmarks.fleet import Vllm

OUT = Path(__file__).resolve().parent / "out"
STREAMS, TOKENS = 32, 256
REQUESTS = 320  # of one token each, STREAMS at a time
GOAL = 3.0
NULL = ["--null-worker", "--max-model-len", "2048"]


class Connection(asyncio.Protocol):
    """Sends requests one after the other; counts events."""

    def __init__(self) -> None:
        self.events = 0
        self.tail = b""
        self.end = b""
        self.whole = b""
        self.done: asyncio.Future[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes, end: bytes) -> asyncio.Future[None]:
        """Until `end` has come."""
        self.done = asyncio.get_running_loop().create_future()
        self.tail, self.end = b"", end
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self.events += (self.tail[-6:] + data).count(b"data: {")
        self.tail = (self.tail + data)[-64:]
        if self.end in self.tail + data and not self.done.done():
            if b" 200 " not in data[:16] and not self.events and b"usage" not in data:
                self.done.set_exception(RuntimeError(data.decode(errors="replace")[:500]))
            else:
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if hasattr(self, "done") and not self.done.done():
            self.done.set_exception(RuntimeError(f"the connection was lost: {error}"))


def request(model: str, number: int, tokens: int, stream: bool) -> bytes:
    body = {
        "model": model, "prompt": [number + 100] * 8, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": stream,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(data) + data


async def connect(url: str) -> list[Connection]:
    at, loop = urlsplit(url), asyncio.get_running_loop()
    assert at.hostname is not None and at.port is not None
    return [(await loop.create_connection(Connection, at.hostname, at.port))[1] for _ in range(STREAMS)]


async def streamed(url: str, model: str) -> int:
    """All streams at once; how many events came."""
    connections = await connect(url)
    await asyncio.gather(*(c.ask(request(model, i, TOKENS, True), b"[DONE]") for i, c in enumerate(connections)))
    for connection in connections:
        connection.transport.abort()
    return sum(connection.events for connection in connections)


async def short(url: str, model: str) -> int:
    """Requests of one token, not streamed; how many."""

    async def some(connection: Connection, first: int) -> None:
        for number in range(REQUESTS // STREAMS):
            await connection.ask(request(model, first + number, 1, False), b"}")

    connections = await connect(url)
    await asyncio.gather(*(some(connection, i * 100) for i, connection in enumerate(connections)))
    for connection in connections:
        connection.transport.abort()
    return REQUESTS


def front_end(server: Server | Vllm) -> list[int]:
    """Its pids: all that is not the engine's."""
    if isinstance(server, Vllm):
        return [server.process.pid]  # its children are engines
    return [process.pid for process in server.processes() if process.role in ("server", "api")]


def cpu(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return total


def measure(server: Server | Vllm) -> dict[str, float]:
    pids, found = front_end(server), dict[str, float]()
    for name, work in (("requests", short), ("chunks", streamed)):
        before, began = cpu(pids), time.perf_counter()
        count = asyncio.run(work(server.url, server.model))
        wall, spent = time.perf_counter() - began, cpu(pids) - before
        found |= {f"{name}/s": count / wall, f"{name}/core-s": count / spent}
        if name == "chunks":
            found |= {"tokens/s": STREAMS * TOKENS / wall, "tokens/core-s": STREAMS * TOKENS / spent}
    return found


def tiny_model(folder: Path) -> str:
    """The tokenizer of smollm2 and a model of nearly nothing, for vLLM."""
    source = bf16_folder("smollm2")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


COLUMNS = ("requests/s", "requests/core-s", "chunks/s", "chunks/core-s", "tokens/s", "tokens/core-s")


def table(result: dict[str, list[dict[str, float]]]) -> report.Table:
    rows = []
    peer = result.get("vLLM")
    for name, rounds in result.items():
        row = [name, *(report.spread([found[column] for found in rounds], 0) for column in COLUMNS)]
        if peer is not None:
            ratio = statistics.median(r["chunks/core-s"] for r in rounds) / statistics.median(
                r["chunks/core-s"] for r in peer
            )
            row.append(f"{ratio:.1f}")
        rows.append(row)
    last = [f"chunks/core-s over vLLM's (goal {GOAL:g})"] if peer is not None else []
    return report.Table("A front end by itself", ["", *COLUMNS, *last], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM, to run beside")
    parser.add_argument("--markdown", type=Path, help="write the table between this page's markers")
    options = parser.parse_args()
    servers: dict[str, Server | Vllm] = {}
    result: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            if options.vllm_python is not None:
                servers["vLLM"] = Vllm(
                    options.vllm_python, tiny_model(Path(folder)), 1, "--load-format", "dummy", "--enforce-eager"
                )
            servers["one API process"] = Server("smollm2", *NULL)
            servers["two API processes"] = Server("smollm2", *NULL, "--api-server-count", "2")
            for server in servers.values():
                measure(server)  # warm
            for _ in range(options.rounds):
                for name, server in servers.items():
                    result.setdefault(name, []).append(measure(server))
                    print(name, {key: round(value) for key, value in result[name][-1].items()}, file=sys.stderr)
        finally:
            for server in servers.values():
                server.close()
    OUT.mkdir(exist_ok=True)
    (OUT / "front_end.json").write_text(json.dumps(result, indent=1))
    cores = len(os.sched_getaffinity(0))
    note = (
        f"{time.strftime('%Y-%m-%d %H:%M')}; {cores} cores, shared with the engine and the client; {STREAMS} streams "
        f"of {TOKENS} tokens at once, {REQUESTS} requests of one token, {options.rounds} rounds; median (low-high). A "
        "chunk is an event of a stream; a server that falls behind may put several tokens into one."
    )
    print(report.as_text([table(result)], [note]))
    if options.markdown:
        report.write_between(options.markdown, "front end", report.as_markdown([table(result)], [note]))


if __name__ == "__main__":
    main()
