"""Is a rank ever given up that is only slow? And is one that isn't coming back still found?

    python -m benchmarks.false_alarms [--minutes 10] [--oversubscription 4] [--markdown docs/performance.md]

A server over two tensor ranks answers prompts of 8,000 tokens, first on a quiet machine, so that it learns how fast
steps are, then while `--oversubscription` times as many processes as there are cores compute without end. No recovery
may happen. Then, under the same load, a rank is stopped and one is killed: both must be found, and nobody is blamed
while others start and load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import proc, report
from benchmarks.deployment import Server, patient_client, wait_healthy

OUT = Path(__file__).resolve().parent / "out"
PROMPT, TOKENS, STREAMS = 8000, 32, 3
FOUND = {"stopped": 10.0, "killed": 5.0}  # seconds within which it must be noticed even so
BURN = "import sys\nx = 1.0\nwhile True:\n    x = x * 1.0000001 % 7.0"


class Burners:
    """Processes that compute without end."""

    def __init__(self, count: int) -> None:
        self.processes = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


async def load(server: Server, seconds: float, prompt: int) -> tuple[list[float], list[str]]:
    """Streams of long prompts, one after the other in each place. Seconds of each request; what went wrong."""
    draw, end = random.Random(int(seconds)), time.monotonic() + seconds
    took: list[float] = []
    failures: list[str] = []

    async def place() -> None:
        while time.monotonic() < end:
            since = time.monotonic()
            body = server.body([draw.randrange(1000, 40000) for _ in range(prompt)], TOKENS)
            try:
                tokens = [token async for choice in server.stream(client, body) for token in choice["token_ids"]]
                if len(tokens) != TOKENS:
                    failures.append(f"{len(tokens)} tokens")
            except Exception as e:  # whatever a client could see
                failures.append(f"{type(e).__name__}: {e}")
            took.append(time.monotonic() - since)

    async with patient_client() as client:
        await asyncio.gather(*(place() for _ in range(STREAMS)))
    return took, failures


def find(server: Server, how: signal.Signals) -> float:
    """Seconds until the server writes down that the last rank is lost, after a signal. Raises RuntimeError."""
    struck = time.time()
    os.kill(server.victims("worker")[-1], how)
    before = (server.health()["last_fault"] or {}).get("when")
    while (fault := server.health()["last_fault"]) is None or fault["when"] == before:
        if time.time() - struck > 60:
            raise RuntimeError(f"{how.name}: not noticed within 60 s")
        time.sleep(0.1)
    wait_healthy(server)
    return datetime.fromisoformat(fault["when"]).timestamp() - struck


def run(model: str, minutes: float, times: int, options: list[str], prompt: int = PROMPT) -> dict[str, Any]:
    """What happened. `epoch`, `restarts` and `failures` are 0 where nobody was blamed."""
    cores = len(os.sched_getaffinity(0))
    with Server(model, "-tp", "2", *options) as server:
        quiet, failures = asyncio.run(load(server, min(20.0, 6 * minutes), prompt))
        burners = Burners(times * cores)
        try:
            others = proc.Foreign(server.process.pid)
            busy, more = asyncio.run(load(server, 60 * minutes, prompt))
            health = server.health()
            result: dict[str, Any] = {
                "epoch": health["epoch"], "restarts": health["engine_restarts"], "last_fault": health["last_fault"],
                "failures": failures + more, "quiet": quiet, "busy": busy, "minutes": minutes, "times": times,
                "others": others.percent(), "cores": cores, "prompt": prompt,
            }  # fmt: skip
            if not health["epoch"] and not health["engine_restarts"]:
                result["found"] = {name: find(server, how) for name, how in
                                   (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL))}  # fmt: skip
                result["more"] = server.health()["epoch"] - len(result["found"])
            return result
        finally:
            burners.close()


def tables(result: dict[str, Any]) -> list[report.Table]:
    alarms = result["epoch"] + result["restarts"]
    rows = [
        ["recoveries while nothing failed", str(alarms), "0", "yes" if not alarms else "no"],
        ["requests that failed", str(len(result["failures"])), "0", "yes" if not result["failures"] else "no"],
    ]
    if "more" in result:
        met = "no" if result["more"] else "yes"
        rows.append(["recoveries while those two came back, beside theirs", str(result["more"]), "0", met])
    for name, seconds in result.get("found", {}).items():
        goal = FOUND[name]
        met = "yes" if seconds <= goal else "no"
        rows.append([f"a rank {name}: noticed after, s", f"{seconds:.2f}", f"{goal:g}", met])
    return [
        report.Table("Blame under load", ["", "", "goal", "met"], rows),
        report.Table(
            "Requests", ["", "number", "seconds each"],
            [["on a quiet machine", str(len(result["quiet"])), report.spread(result["quiet"], 1)],
             ["under load", str(len(result["busy"])), report.spread(result["busy"], 1)]],
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--oversubscription", type=int, default=4, help="burning processes for each core")
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    result = run(options.model, options.minutes, options.oversubscription, [])
    OUT.mkdir(exist_ok=True)
    (OUT / "false_alarms.json").write_text(json.dumps(result, indent=1))
    made = tables(result)
    when = time.strftime("%Y-%m-%d %H:%M")
    note = (
        f"{when}; {result['minutes']:g} minutes, {STREAMS} streams of {result['prompt']} + {TOKENS} tokens, two tensor "
        f"ranks, {result['times'] * result['cores']} burning processes on {result['cores']} cores (other programs used "
        f"{result['others']:.0f}% of a core)."
    )
    print(report.as_text(made, [note]))
    if result["failures"] or result["last_fault"]:
        print(result["failures"][:5], result["last_fault"])
    if options.markdown:
        report.write_between(options.markdown, "false_alarms", report.as_markdown(made, [note]))
    sys.exit(1 if result["failures"] or result["epoch"] or result["restarts"] else 0)


if __name__ == "__main__":
    main()
