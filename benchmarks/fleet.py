"""Two engines behind one server: their throughput beside one engine with all the cores, and what a stream notices of
resizes.

    python -m benchmarks.fleet [--parts throughput,scale] [--rounds 3] [--vllm-python P] [--markdown docs/fleet.md]

throughput: the same requests of 128 tokens in and 128 out, 32 and 256 at once (128 per engine), to a server with one
engine, one with two, and vLLM's with two; the servers take turns. scale: streams of 128 + 96 tokens, 8 at a time, each
followed by the next, to a server that meanwhile goes from one engine to two and back, once by waiting and once by
moving what runs; the longest time between two tokens of any stream, with and without that.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import environments, proc, report
from benchmarks.convert import bf16_folder
from benchmarks.deployment import Server, patient_client

OUT = Path(__file__).resolve().parent / "out"
PROMPT, TOKENS = 128, 128
LOADS = {"32": 32, "256": 256}  # requests at once
OURS = ["--dtype", "bfloat16", "--max-model-len", "1024", "--kv-cache-memory", "1GiB"]
STREAMS, STREAM_TOKENS = 8, 96
LONGEST_GAP = 0.5  # seconds


class Vllm:
    """vLLM's server with so many engines, a core each."""

    def __init__(self, python: Path, model: str, size: int, *more: str) -> None:
        environments.write_vllm_stub(python)
        variables, warnings = environments.vllm_variables(python)
        for line in warnings:
            print(f"vllm: {line}", file=sys.stderr)
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        own = {**variables, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(size)))}
        OUT.mkdir(exist_ok=True)
        with (OUT / "vllm-fleet.log").open("w") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port",
                 str(port), "--dtype", "bfloat16", "--served-model-name", model, "--max-model-len", "1024",
                 "--max-num-seqs", "256", "--no-enable-prefix-caching", "--data-parallel-size", str(size), *more],
                stdout=log, stderr=log, env={**os.environ, **own}, cwd=OUT,
            )  # fmt: skip
        self.model, self.url = model, f"http://127.0.0.1:{port}"
        until = time.monotonic() + 1200
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                self.close()
                raise RuntimeError(f"vLLM's server did not come up; see {OUT / 'vllm-fleet.log'}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return httpx2.get(self.url + "/v1/models", timeout=5).status_code == 200
        except httpx2.HTTPError:
            return False

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            proc.kill(self.process.pid)
            self.process.wait()


def prompts(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(count)]


async def rate(url: str, model: str, seed: int, count: int) -> float:
    """Output tokens per second of so many requests at once."""

    async def one(client: httpx2.AsyncClient, prompt: list[int]) -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await client.post(url + "/v1/completions", json=body)
        made: int = answer.json()["usage"]["completion_tokens"]
        assert made == TOKENS, answer.text
        return made

    async with patient_client() as client:
        began = time.perf_counter()
        made = await asyncio.gather(*(one(client, prompt) for prompt in prompts(seed, count)))
        return sum(made) / (time.perf_counter() - began)


def throughput(model: str, rounds: int, vllm: Path | None) -> dict[str, dict[str, list[float]]]:
    """{server: {load: [tokens per second]}}; the servers take turns."""
    servers: dict[str, Server | Vllm] = {}
    found: dict[str, dict[str, list[float]]] = {}
    try:
        servers["one engine"] = Server(model, *OURS)
        servers["two engines"] = Server(model, *OURS, "-dp", "2")
        if vllm is not None:
            servers["vLLM, two engines"] = Vllm(vllm, model, 2)
        for server in servers.values():
            asyncio.run(rate(server.url, server.model, 0, 4))
        for number, (load, count) in itertools.product(range(rounds), LOADS.items()):
            for name, server in servers.items():
                measured = asyncio.run(rate(server.url, server.model, 1 + number, count))
                found.setdefault(name, {}).setdefault(load, []).append(measured)
                print(f"{name}, {count} at once: {measured:.0f} tokens a second", file=sys.stderr)
    finally:
        for server in servers.values():
            server.close()
    return found


class Streams:
    """`STREAMS` streams at a time, until told to stop."""

    def __init__(self, server: Server) -> None:
        self.server, self.stop = server, False
        self.gaps: list[tuple[float, float]] = []  # (when it ended, seconds) between two tokens of a stream
        self.ended = self.tokens = 0
        self.failed: list[str] = []

    async def run(self) -> None:
        async with patient_client() as client:
            await asyncio.gather(*(self._one_after_the_other(client, i) for i in range(STREAMS)))

    async def _one_after_the_other(self, client: httpx2.AsyncClient, seed: int) -> None:
        draw = random.Random(seed)
        while not self.stop:
            prompt = [draw.randrange(1000, 40000) for _ in range(PROMPT)]
            last, came = 0.0, 0
            try:
                async for choice in self.server.stream(client, self.server.body(prompt, STREAM_TOKENS)):
                    now = time.monotonic()
                    if came:
                        self.gaps.append((now, now - last))
                    last, came = now, came + len(choice["token_ids"])
                if came != STREAM_TOKENS:
                    self.failed.append(f"{came} of {STREAM_TOKENS} tokens")
            except (RuntimeError, httpx2.HTTPError) as e:
                self.failed.append(str(e))
            self.ended, self.tokens = self.ended + 1, self.tokens + came

    def longest(self, begin: float, end: float) -> float:
        return max((gap for at, gap in self.gaps if begin <= at <= end), default=0.0)


async def scaled(server: Server, rest: float) -> dict[str, Any]:
    """One engine to two and back, twice: waiting for what runs, and moving it."""
    streams = Streams(server)
    running = asyncio.create_task(streams.run())
    steps = []

    async def step(name: str, size: int, drain: float) -> None:
        begin = time.monotonic()
        body = {"new_data_parallel_size": size, "drain_timeout": drain}
        async with patient_client() as client:
            answer = (await client.post(server.url + "/scale_elastic_ep", json=body)).json()
        took = time.monotonic() - begin
        await asyncio.sleep(rest)
        steps.append({
            "name": name, "seconds": took, "phases": answer.get("phases", {}), "moved": answer.get("moved", 0),
            "error": answer.get("error"), "gap": streams.longest(begin, time.monotonic()),
        })  # fmt: skip
        print(steps[-1], file=sys.stderr)

    begin = time.monotonic()
    await asyncio.sleep(2 * rest)
    quiet = streams.longest(begin, time.monotonic())
    for down, drain in (("2 to 1, waiting", 60.0), ("2 to 1, moving", 0.0)):
        await step("1 to 2", 2, 0.0)
        await step(down, 1, drain)
    streams.stop = True
    await running
    return {"quiet": quiet, "steps": steps, "ended": streams.ended, "failed": streams.failed}


def scale(model: str, rest: float) -> dict[str, Any]:
    with Server(model, *OURS) as server:
        asyncio.run(rate(server.url, server.model, 0, 4))
        return asyncio.run(scaled(server, rest))


def tables(result: dict[str, Any]) -> list[report.Table]:
    made = []
    if (found := result.get("throughput")) is not None:
        one = found["one engine"]
        peer = next((rates for name, rates in found.items() if name.startswith("vLLM")), None)

        def over(rates: dict[str, list[float]], other: dict[str, list[float]] | None, load: str) -> str:
            return f"{statistics.median(rates[load]) / statistics.median(other[load]):.2f}" if other else "-"

        made.append(report.Table(
            "Output tokens per second of one server on the same cores",
            ["", *(f"{count} at once" for count in LOADS.values())],
            [[name, *(report.spread(rates[load], 0) for load in LOADS)] for name, rates in found.items()],
        ))  # fmt: skip
        two = found["two engines"]
        rows = [
            ["two engines / one", ">= 0.8; >= 0.95", *(over(two, one, load) for load in LOADS)],
            ["two engines / vLLM's two", ">= 1.3", *(over(two, peer, load) for load in LOADS)],
        ]
        made.append(report.Table("Ratios", ["", "goal", *(f"{count} at once" for count in LOADS.values())], rows))
    if (found := result.get("scale")) is not None:
        rows = [["no resize", "-", "-", "-", f"{found['quiet']:.2f}"]]
        for step in found["steps"]:
            phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in step["phases"].items())
            rows.append([
                step["name"], f"{step['seconds']:.2f}", phases or str(step["error"]), str(step["moved"]),
                f"{step['gap']:.2f}",
            ])  # fmt: skip
        longest = max(step["gap"] for step in found["steps"])
        failed = len(found["failed"])
        rows.append([
            f"{found['ended']} streams", "", f"failed: {failed} ({'met' if not failed else 'not met'})", "",
            f"{longest:.2f} (goal < {LONGEST_GAP:g}: {'met' if longest < LONGEST_GAP else 'not met'})",
        ])  # fmt: skip
        made.append(report.Table(
            f"Resizes while {STREAMS} streams run", ["", "seconds", "phases", "requests moved", "longest gap, s"], rows
        ))  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", default="throughput,scale")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=4.0, help="seconds between two resizes")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM, to run beside")
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    model = str(bf16_folder(options.model))
    result: dict[str, Any] = {}
    if "throughput" in options.parts.split(","):
        result["throughput"] = throughput(model, options.rounds, options.vllm_python)
    if "scale" in options.parts.split(","):
        result["scale"] = scale(model, options.rest)
    OUT.mkdir(exist_ok=True)
    (OUT / "fleet.json").write_text(json.dumps(result, indent=1))
    made = tables(result)
    cores = len(os.sched_getaffinity(0))
    note = (
        f"{time.strftime('%Y-%m-%d %H:%M')}; {options.model} in bf16, {cores} cores, requests of {PROMPT} + {TOKENS} "
        f"tokens, {options.rounds} rounds; median (low-high)."
    )
    print(report.as_text(made, [note]))
    if options.markdown:
        report.write_between(options.markdown, "fleet", report.as_markdown(made, [note]))


if __name__ == "__main__":
    main()
