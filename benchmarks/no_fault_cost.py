"""What being ready for faults costs while there are none: the journal, epochs, heartbeats and deadlines.

    python -m benchmarks.no_fault_cost [--markdown docs/performance.md]

Differences of a percent drown in the noise of two runs, so costs are counted: each part's shipping code is timed by
itself, and what it takes in a step is held against the time of a step, measured in the same run with 32 streams of a
real server over two tensor ranks. Per step:
- journal: `EngineQueue.deliver` for 32 deltas, less a look-up and a call of the sink, which it would take anyway
- epochs: looks at the link's fence word, by the engine and by a rank, two each, and the core's look at a result's epoch
- deadlines: `Pace.took`, once, with the count of the plan's tokens
- heartbeats: a rank's pulse (the thread that wakes up, its CPU time), and the engine's look at all pulses, each second
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.deployment import Server
from benchmarks.recovery import TOKENS, Load, streams
from planaria.executor.health import Health, Pace
from planaria.executor.link.segment import FENCE
from planaria.executor.link.shm import ShmLink
from planaria.executor.watch import planned_tokens
from planaria.protocol import Row, StepPlan
from planaria.server.engine import Engine
from planaria.server.stream import Stream
from planaria.types import Delta, SamplingParams
from planaria.wire import Submit
from planaria.worker import main as worker

LOAD = Load(32, 128)
OUT = Path(__file__).resolve().parent / "out"
GOAL = 1.0  # % of a step
REPEAT, STEPS, BEATS = 9, 400, 1000
LOOKS = 2.0  # a second: of the engine, at most


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Of one call, where `run` makes so many: the median of some runs."""
    times = []
    for _ in range(REPEAT):
        since = time.perf_counter()
        run()
        times.append(time.perf_counter() - since)
    return 1e6 * statistics.median(times) / calls


async def journal() -> float:
    """A step of 32 tokens on its way to 32 sinks."""
    deltas = [[Delta(f"r{i}", step, [7], None) for i in range(LOAD.streams)] for step in range(STEPS)]
    sinks: dict[str, Callable[..., None]] = {f"r{i}": lambda *what: None for i in range(LOAD.streams)}

    def plain() -> None:
        for step in deltas:
            for delta in step:
                sinks[delta.request_id](delta)

    def shipping() -> None:
        engine = Engine(0)
        for id, sink in sinks.items():
            engine.submit(Stream(Submit(id, [1, 2, 3], SamplingParams(), 7, STEPS), sink))
        for step in deltas:
            for delta in step:
                engine.deliver(delta)

    return microseconds(shipping, STEPS) - microseconds(plain, STEPS)


def epochs() -> float:
    link = ShmLink(2)
    words, epoch = link.segment.words, link.epoch

    def looks() -> None:
        for _ in range(STEPS):
            for _ in range(5):
                if words[FENCE] != epoch:
                    raise AssertionError

    try:
        return microseconds(looks, STEPS)
    finally:
        link.close()


def deadlines() -> float:
    pace = Pace(300.0)
    plan = StepPlan(0, 1, (tuple(Row(i, 100, 1, (5,), True, None) for i in range(2)),), ((),), 0)

    def took() -> None:
        for _ in range(STEPS):
            pace.took(planned_tokens(plan), 0.05)

    return microseconds(took, STEPS)


class Beaten:
    """A port that counts beats."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended, self.beats = ended, 0
        self.word = memoryview(bytearray(8)).cast("I")

    def beat(self) -> None:
        self.word[0] = self.beats = self.beats + 1
        if self.beats == BEATS:
            self.ended.set()


def pulse() -> float:
    """CPU time of a beat, in microseconds."""
    used = [0.0]

    def beat() -> None:
        ended = threading.Event()
        worker.Life()._pulse(Beaten(ended), ended)  # type: ignore[arg-type]
        used[0] = time.thread_time()

    every, worker.PULSE = worker.PULSE, 0.0005
    try:
        thread = threading.Thread(target=beat)
        thread.start()
        thread.join()
    finally:
        worker.PULSE = every
    return 1e6 * used[0] / BEATS


def look() -> float:
    link, health = ShmLink(2), Health(10.0)
    try:

        def looks() -> None:
            for _ in range(STEPS):
                health.look(link.pulses(), time.monotonic(), lambda pid: False, [7, 8])

        return microseconds(looks, STEPS)
    finally:
        link.close()


def step_seconds(model: str, rounds: int) -> list[float]:
    """Of a step in which each of 32 streams gets a token: the median between two of a stream's tokens."""
    options = ["--max-model-len", str(LOAD.max_length), "--kv-cache-memory", str(LOAD.kv_bytes(model))]
    found = []
    with Server(model, "-tp", "2", *options) as server:
        for number in range(rounds + 1):
            came = asyncio.run(streams(server, LOAD.prompts(number), TOKENS)).pieces
            first = [at for at, stream in came if stream == 0]
            gaps = [b - a for a, b in zip(first[TOKENS // 2 :], first[TOKENS // 2 + 1 :], strict=False)]
            found.append(statistics.median(gaps))
    return found[1:]


def measure(model: str, rounds: int) -> dict[str, Any]:
    """Microseconds per step by part, and seconds of a step."""
    steps = step_seconds(model, rounds)
    step = statistics.median(steps)
    return {
        "steps": steps,
        "parts": {
            "journal": asyncio.run(journal()), "epochs": epochs(), "deadlines": deadlines(),
            "heartbeats": step * (pulse() / worker.PULSE + look() * LOOKS),
        },
    }  # fmt: skip


def tables(result: dict[str, Any]) -> list[report.Table]:
    step = 1e6 * statistics.median(result["steps"])
    rows = [[name, f"{cost:.2f}", f"{100 * cost / step:.4f}"] for name, cost in result["parts"].items()]
    total = sum(result["parts"].values())
    rows.append(["all", f"{total:.2f}", f"{100 * total / step:.4f}"])
    share = 100 * total / step
    return [
        report.Table("Being ready for faults, without any", ["", "us a step", "% of a step"], rows),
        report.Table("Goal", ["", "goal", "measured", "met"],
                     [["% of a step", f"< {GOAL:g}", f"{share:.3f}", "yes" if share < GOAL else "no"]]),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    result = measure(options.model, options.rounds)
    OUT.mkdir(exist_ok=True)
    (OUT / "no_fault_cost.json").write_text(json.dumps(result, indent=1))
    made = tables(result)
    milliseconds = [1e3 * step for step in result["steps"]]
    note = (
        f"{time.strftime('%Y-%m-%d %H:%M')}; {LOAD.streams} streams, two tensor ranks, a step takes "
        f"{report.spread(milliseconds, 1)} ms."
    )
    print(report.as_text(made, [note]))
    if options.markdown:
        report.write_between(options.markdown, "no_fault_cost", report.as_markdown(made, [note]))
    share = sum(result["parts"].values()) / (1e6 * statistics.median(result["steps"]))
    sys.exit(0 if 100 * share < GOAL else 1)


if __name__ == "__main__":
    main()
