"""How long streams pause when a part of a server is killed or stopped.

    python -m benchmarks.recovery [--cases rank,spare,stopped,engine] [--rounds 3] [--markdown docs/performance.md]

A server of `--model` over two tensor ranks streams 32 requests of 128 tokens in and 128 out. When half of all tokens
have come, the victim gets its signal. From then on: when any stream goes on after the longest silence (first), when
each has (all), whether each ended with the text it has without a fault. What the engine did is read from /health.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import report

OUT = Path(__file__).resolve().parent / "out"
STREAMS, PROMPT, TOKENS = 32, 128, 128
CASES: dict[str, tuple[list[str], str, signal.Signals, float]] = {
    # name: options of the server, role of the victim, signal, goal for the first stream in seconds
    "rank": ([], "worker", signal.SIGKILL, 3.0),
    "spare": (["--spare-workers", "1"], "worker", signal.SIGKILL, 1.5),
    "stopped": ([], "worker", signal.SIGSTOP, 5.5),
    "engine": ([], "engine", signal.SIGKILL, 6.0),
}
TITLES = {
    "rank": "a rank killed, no spare", "spare": "a rank killed, one spare", "stopped": "a rank stopped",
    "engine": "the engine process killed",
}  # fmt: skip


class Server:
    """`planaria serve` in a process of its own."""

    def __init__(self, model: str, more: list[str]) -> None:
        command = [
            sys.executable, "-m", "planaria", "serve", model, "--port", "0", "-tp", "2", "--max-model-len", "1024",
            "--kv-cache-memory", "256MiB", *more,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.split(" at ")[1].split()[0]

    def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx2.get(self.url + "/admin/processes", timeout=30).json()["processes"]
        return found

    def victim(self, role: str) -> int:
        """The last of that role."""
        return [process["pid"] for process in self.processes() if process["role"] == role][-1]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


async def streams(
    server: Server, model: str, prompts: list[list[int]], harm: Any = None
) -> tuple[list[str], list[Any]]:
    """Texts, and (seconds, stream) of every piece. `harm` is called once, when half of all tokens have come."""
    texts, pieces = [""] * len(prompts), []
    half = [len(prompts) * TOKENS // 2]

    async def one(client: httpx2.AsyncClient, i: int) -> None:
        body = {
            "model": model, "prompt": prompts[i], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        async with client.stream("POST", server.url + "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                pieces.append((time.monotonic(), i))
                texts[i] += choice["text"]
                half[0] -= 1
                if not half[0] and harm is not None:
                    harm()

    async with httpx2.AsyncClient(timeout=300, limits=httpx2.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client, i) for i in range(len(prompts))))
    return texts, pieces


def pause(pieces: list[tuple[float, int]], struck: float) -> dict[str, float]:
    """Seconds from the blow to the first piece after the longest silence, and to the last stream's first after it."""
    after = sorted(piece for piece in pieces if piece[0] >= struck)
    times = [struck, *(at for at, _ in after)]
    _, end = max((b - a, b) for a, b in itertools.pairwise(times))
    seen: dict[int, float] = {}
    for at, stream in after:
        if at >= end:
            seen.setdefault(stream, at - struck)
    return {"first": end - struck, "all": max(seen.values())}


def run(case: str, model: str, rounds: int) -> list[dict[str, Any]]:
    options, role, how, _ = CASES[case]
    found = []
    server = Server(model, options)
    try:
        for number in range(rounds):
            draw = random.Random(number)
            prompts = [[draw.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(STREAMS)]
            expected, _ = asyncio.run(streams(server, model, prompts))
            victim, struck = server.victim(role), []

            def harm(pid: int = victim, at: list[float] = struck) -> None:
                at.append(time.monotonic())
                os.kill(pid, how)

            texts, pieces = asyncio.run(streams(server, model, prompts, harm))
            health = httpx2.get(server.url + "/health").json()
            fault = next((value for value in health.values() if isinstance(value, dict)), {})
            found.append({
                **pause(pieces, struck[0]), "same": sum(a == b for a, b in zip(texts, expected, strict=True)),
                "parts": fault.get("seconds", {}), "tokens": fault.get("replayed_tokens"),
            })  # fmt: skip
            print(f"{TITLES[case]}, round {number + 1}: {found[-1]}", file=sys.stderr)
    finally:
        server.close()
    return found


def tables(result: dict[str, Any]) -> list[report.Table]:
    rows, parts = [], []
    for case, rounds in result["cases"].items():
        goal = CASES[case][3]
        first = [r["first"] for r in rounds]
        met = "yes" if statistics.median(first) <= goal else "no"
        same = sum(r["same"] for r in rounds)
        rows.append([
            TITLES[case], report.spread(first, 2), f"{goal:g}", met, report.spread([r["all"] for r in rounds], 2),
            f"{same} of {STREAMS * len(rounds)}",
        ])  # fmt: skip
        names = list(dict.fromkeys(name for r in rounds for name in r["parts"]))
        medians = {name: statistics.median(r["parts"].get(name, 0.0) for r in rounds) for name in names}
        parts.append([TITLES[case], ", ".join(f"{name} {value:.2f}" for name, value in medians.items()) or "-"])
    columns = ["", "first stream goes on, s", "goal", "met", "all go on, s", "the same text as without"]
    return [
        report.Table("Pauses", columns, rows),
        report.Table("Where the time goes (seconds as the engine tells; medians)", ["", "parts"], parts),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    result: dict[str, Any] = {"cases": {}}
    for case in options.cases.split(","):
        result["cases"][case] = run(case, options.model, options.rounds)
    OUT.mkdir(exist_ok=True)
    (OUT / "recovery.json").write_text(json.dumps(result, indent=1))
    made = tables(result)
    when = time.strftime("%Y-%m-%d %H:%M")
    shape = f"{STREAMS} streams of {PROMPT} + {TOKENS} tokens, two tensor ranks, {options.rounds} rounds"
    note = f"{when}; {shape}; median (low-high)."
    print(report.as_text(made, [note]))
    if options.markdown:
        report.write_between(options.markdown, "recovery", report.as_markdown(made, [note]))


if __name__ == "__main__":
    main()
