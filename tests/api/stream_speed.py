"""How many streamed chunks a server writes per second of its CPU time: `python tests/api/stream_speed.py`.

The server runs in a process of its own with the fake engine at full speed; this process only reads raw bytes. What
the fake engine itself costs is measured by a run without a server and taken off.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time

import psutil

from tests.api.test_lifecycle import Process

STREAMS, TOKENS = 32, 2000
FACTS = {"max_model_len": 4096, "num_blocks": 100_000}


def engine_cost() -> float:
    """Seconds of CPU the fake engine takes for the same tokens, alone."""
    from planaria.checkpoint import resolve_checkpoint
    from planaria.server.stream import Stream
    from planaria.server.tokenise import load_tokenizer
    from planaria.types import SamplingParams
    from planaria.wire import Submit
    from tests.api.fake_engine import FakeEngine

    async def run() -> float:
        engine = FakeEngine(load_tokenizer(resolve_checkpoint("smollm2")), **FACTS)
        params = SamplingParams(ignore_eos=True, max_tokens=TOKENS, temperature=0)
        engine.draw = lambda message, position: engine.palette[position % 20]
        for i in range(STREAMS):
            engine.submit(Stream(Submit(f"s{i}", [5], params, 0, TOKENS)))
        started = time.process_time()
        while engine.open:
            engine.step()
        return time.process_time() - started

    return asyncio.run(run())


def main() -> None:
    alone = engine_cost()
    body = {"prompt": [5], "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    messages = [{"role": "user", "content": "x"}]
    for path, extra in (("/v1/completions", {}), ("/v1/chat/completions", {"messages": messages})):
        with Process(facts=FACTS, log_level="ERROR", fast=True) as p:
            host, port = p.url.rsplit("/", 1)[1].split(":")
            fields = body if not extra else {k: v for k, v in body.items() if k != "prompt"} | extra
            data = json.dumps(fields).encode()
            request = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
                path.encode(), len(data), data,
            )  # fmt: skip
            socks = [socket.create_connection((host, int(port))) for _ in range(STREAMS)]
            server = psutil.Process(p.process.pid)
            before = sum(server.cpu_times()[:2])
            started = time.perf_counter()
            for s in socks:
                s.sendall(request)
            events = asyncio.run(read_all(socks))
            wall = time.perf_counter() - started
            cpu = sum(server.cpu_times()[:2]) - before
            print(
                f"{path}: {events} events, {wall:.2f} s, server CPU {cpu:.2f} s ({alone:.2f} s of it the fake engine): "
                f"{events / (cpu - alone):,.0f} events per core-second"
            )


async def read_all(socks) -> int:
    async def read(sock) -> int:
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        found = 0
        while chunk := await reader.read(1 << 20):
            found += chunk.count(b"data: {")
        writer.close()
        return found

    return sum(await asyncio.gather(*map(read, socks)))


if __name__ == "__main__":
    sys.exit(main())
