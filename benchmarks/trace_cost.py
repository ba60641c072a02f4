"""What traces cost a server: CPU time of its process for a request, without them and with every request recorded, in
turns; and how long it takes to decide that one isn't. From these, what recording 1% costs.

    python -m benchmarks.trace_cost [--requests 400] [--rounds 5] [--tokens 32]

The engine computes nothing (`--null-worker`): beside a model the share is smaller still.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import timeit

import httpx2
import psutil

from planaria.server.gate import RequestInfo
from planaria.server.traces import Traces
from tests.collector import Collector
from tests.proc.servers import Server

NULL = ["--null-worker", "--max-model-len", "512", "--log-level", "warning"]


def spent(server: Server, requests: int, tokens: int) -> float:
    """Microseconds of CPU for each."""
    body = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    process = psutil.Process(server.pid)
    with httpx2.Client(base_url=server.url, timeout=120) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        before = sum(process.cpu_times()[:2])
        for answer in pool.map(lambda _: client.post("/v1/completions", json=body), range(requests)):
            answer.raise_for_status()
        return float(sum(process.cpu_times()[:2]) - before) / requests * 1e6


def undecided() -> float:
    """Microseconds to decide that a request is not recorded."""
    traces = Traces("http://127.0.0.1:9", 0.0)
    info, headers = RequestInfo("a", "a", "POST", "/v1/completions"), {b"host": b"a"}
    rounds = timeit.repeat(lambda: traces.begin(info, headers), number=100_000, repeat=5)
    traces.close()
    return min(rounds) / 100_000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("requests", 400), ("rounds", 5), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with (
        Collector() as collector, Server("smollm2", *NULL) as off,
        Server("smollm2", *NULL, "--otlp-traces-endpoint", collector.url) as on,
    ):  # fmt: skip
        for server in (off, on):
            spent(server, 50, args.tokens)
        rounds = [[spent(s, args.requests, args.tokens) for s in (off, on)] for _ in range(args.rounds)]
    without, every = (statistics.median(column) for column in zip(*rounds, strict=True))
    recorded, not_recorded = every - without, undecided()
    share = (recorded * 0.01 + not_recorded) / without
    print("| | us of CPU for a request |\n|---|---|")
    print(f"| without traces | {without:,.0f} |\n| every request recorded | {every:,.0f} |")
    print(f"| to decide that one isn't | {not_recorded:.2f} |\n| so 1% recorded costs | {share:.2%} of a request |")


if __name__ == "__main__":
    main()
