"""Kills and stops at random under load, for minutes: does every request end right, does nothing grow?

    python -m benchmarks.soak [--seconds 600] [--every 5] [--spare-workers 0] [--markdown docs/performance.md]

A server over two tensor ranks streams requests without a break, and every `--every` seconds a rank is killed, a rank is
stopped, or the engine's process is killed (later, where no token has come since the blow before: on a machine so slow
that nothing ever came back there would be nothing to see). Each answer is compared with the one before any fault (with
`--batch-invariant`, so that it must be the same to the last token). In the first half only the last rank is hit: the
engine and rank 0 live through every recovery, and what they fail to give back adds up. In the second half anything is.
What all processes hold is read before each blow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import proc, report
from benchmarks.deployment import Footprint, Server, footprint, patient_client, wait_healthy

OUT = Path(__file__).resolve().parent / "out"
STREAMS, KINDS_OF_REQUEST = 16, 24
FAULTS = {"a rank killed": ("worker", signal.SIGKILL), "a rank stopped": ("worker", signal.SIGSTOP),
          "the engine killed": ("engine", signal.SIGKILL)}  # fmt: skip
ON_ITS_WAY = 1.0  # seconds
MEMORY_SLACK = 16 << 20  # bytes that allocators may keep
COUNT_SLACK = 2  # descriptors, segments or threads that may just be coming or going


@dataclass
class Sample:
    """What was held at a moment at which nothing was being recovered. `by_role`: "worker 0" and so on."""

    seconds: float
    faults: int  # before it
    total: Footprint
    by_role: dict[str, tuple[int, Footprint]] = field(default_factory=dict)  # pid, and what it holds


@dataclass
class Soak:
    """What came of a run."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    recoveries: dict[str, float] = field(default_factory=dict)  # as /metrics counts them
    pauses: list[float] = field(default_factory=list)  # the longest silence of each request
    samples: list[Sample] = field(default_factory=list)
    exit_code: int = 0
    left: list[int] = field(default_factory=list)  # pids that outlived the server


def bodies(server: Server, vocabulary: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of several lengths; half of them are drawn, some share their beginning."""
    draw = random.Random(7)
    common = [draw.randrange(10, vocabulary) for _ in range(48)]
    made = []
    for i in range(KINDS_OF_REQUEST):
        prompt = [draw.randrange(10, vocabulary) for _ in range(draw.randrange(8, 80))]
        options = {"temperature": 0.9, "seed": i} if i % 2 else {}
        made.append(server.body(common + prompt if i % 3 else prompt, tokens - i % 7, **options))
    return made


async def answer(
    server: Server, client: httpx2.AsyncClient, body: dict[str, Any], pauses: list[float],
    token: Callable[[float], None],
) -> list[int]:  # fmt: skip
    """All tokens of one request; `token` hears when each comes. Raises what a client could see."""
    tokens: list[int] = []
    longest, last = 0.0, time.monotonic()
    async for choice in server.stream(client, body):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        token(now)
        tokens += choice["token_ids"]
    pauses.append(longest)
    return tokens


def sample(server: Server, seconds: float, faults: int) -> Sample | None:
    """None where a process ended meanwhile."""
    total, by_role = Footprint(), {}
    with contextlib.suppress(OSError):
        for process in server.processes():
            held = footprint(process.pid)
            total += held
            by_role[f"{process.role} {process.rank}" if process.rank >= 0 else process.role] = process.pid, held
        return Sample(seconds, faults, total, by_role)
    return None


class Harm:
    """Strikes every `every` seconds for `seconds`, or `blows` times however long that takes."""

    def __init__(self, server: Server, seconds: float, every: float, seed: int, blows: int | None = None) -> None:
        self.server, self.seconds, self.every, self.blows = server, seconds, every, blows
        self.draw, self.whom = random.Random(seed), random.Random(seed)
        self.faults = dict.fromkeys(FAULTS, 0)
        self.samples: list[Sample] = []
        self.came = asyncio.Event()  # a token, since the last blow
        self.struck = 0.0

    def token(self, now: float) -> None:
        """One has come; it may have been on its way before the blow."""
        if now - self.struck > ON_ITS_WAY:
            self.came.set()

    def _healthy(self) -> bool:
        health = self.server.health()
        return bool(health["ready"] and not health["recovering"])

    async def run(self) -> None:
        began, struck = time.monotonic(), 0

        def done() -> float:
            """What part of it is over."""
            return (time.monotonic() - began) / self.seconds if self.blows is None else struck / self.blows

        await self._look(began)
        while done() < 1:
            await asyncio.sleep(self.every)  # the rate of faults is what is asked for
            await self.came.wait()
            await self._look(began)
            first_half, struck = done() < 0.5, struck + 1
            name = self.draw.choice(list(FAULTS)[: 2 if first_half else 3])
            role, how = FAULTS[name]
            # none, while an engine comes up: then that is what is hit
            found = self.server.victims(role) or self.server.victims("engine")
            if found:
                self.faults[name] += 1
                self.struck = time.monotonic()
                self.came.clear()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found[-1] if first_half else self.whom.choice(found), how)

    async def _look(self, began: float) -> None:
        if await asyncio.to_thread(self._healthy):
            found = sample(self.server, time.monotonic() - began, sum(self.faults.values()))
            if found is not None:
                self.samples.append(found)


async def drive(server: Server, options: Harm, vocabulary: int, tokens: int, streams: int) -> Soak:
    soak, over = Soak(), asyncio.Event()
    requests = bodies(server, vocabulary, tokens)
    async with patient_client() as client:
        expected = await asyncio.gather(*(answer(server, client, body, [], options.token) for body in requests))
        draw = random.Random(options.seconds)

        async def place() -> None:
            while not over.is_set():
                i = draw.randrange(len(requests))
                soak.requests += 1
                try:
                    got = await answer(server, client, requests[i], soak.pauses, options.token)
                except Exception as e:  # whatever a client could see
                    soak.failed.append(f"{type(e).__name__}: {e}")
                    return
                soak.tokens += len(got)
                if got != expected[i]:
                    at = next((k for k, (a, b) in enumerate(zip(got, expected[i], strict=False)) if a != b), len(got))
                    soak.differing.append(f"request {i}: token {at} of {len(got)}, {len(expected[i])} expected")

        async def strike() -> None:
            try:
                await options.run()
            finally:
                over.set()

        began = time.monotonic()
        await asyncio.gather(strike(), *(place() for _ in range(streams)))
    soak.seconds = time.monotonic() - began
    soak.faults, soak.samples = options.faults, options.samples
    return soak


def run(
    model: str, seconds: float, every: float, *, options: Sequence[str] = (), vocabulary: int = 40_000,
    tokens: int = 96, streams: int = STREAMS, seed: int = 1, blows: int | None = None,
) -> Soak:  # fmt: skip
    """One soak; with `blows` it takes as long as these do.

    Raises RuntimeError where the server can't start, or isn't healthy in the end."""
    server = Server(model, "-tp", "2", "--batch-invariant", *options)
    try:
        soak = asyncio.run(drive(server, Harm(server, seconds, every, seed, blows), vocabulary, tokens, streams))
        wait_healthy(server)
        for line in server.http.get(server.url + "/metrics").text.splitlines():
            if line.startswith("planaria:recoveries_total"):
                part, value = line.split('part="')[1].split('"')[0], float(line.split()[-1])
                soak.recoveries[part] = value
        last = sample(server, soak.seconds, sum(soak.faults.values()))
        if last is not None:
            soak.samples.append(last)
        pids = proc.tree(server.process.pid)
    finally:
        soak_exit = server.close()
    soak.exit_code = soak_exit
    soak.left = [pid for pid in pids if proc.tree(pid)]
    return soak


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last third."""
    part = max(1, len(values) // 3)
    return statistics.median(values[:part]), statistics.median(values[-part:])


@dataclass
class Growth:
    """Of one quantity of some processes, from the first third of the looks to the last. `most`: what is still flat."""

    whose: str
    what: str
    first: float
    last: float
    faults: int  # between them
    most: float

    @property
    def flat(self) -> bool:
        return self.last - self.first <= self.most


def growths(soak: Soak) -> list[Growth]:
    """All processes over the whole run; the server; and those that lived through the first half: engine and rank 0."""
    found = []
    series: dict[str, list[tuple[Sample, Footprint]]] = {"all processes": [(s, s.total) for s in soak.samples[1:]]}
    for role in ("server", "engine", "worker 0"):
        lived = [s for s in soak.samples if role in s.by_role and s.faults]
        pid = lived[0].by_role[role][0] if lived else 0
        series[role] = [(s, s.by_role[role][1]) for s in lived if s.by_role[role][0] == pid]
    for whose, looks in series.items():
        if len(looks) < 6:
            continue
        part = max(1, len(looks) // 3)
        faults = looks[-part][0].faults - looks[part - 1][0].faults
        for what in ("memory", "descriptors", "segments", "threads"):
            first, last = thirds([float(asdict(held)[what]) for _, held in looks])
            most = max(MEMORY_SLACK, 0.05 * first) if what == "memory" else COUNT_SLACK
            found.append(Growth(whose, what, first, last, faults, most))
    return found


def verdict(soak: Soak) -> list[str]:
    """What is not as it should be."""
    wrong = [f"failed: {failure}" for failure in soak.failed] + [f"differs: {it}" for it in soak.differing]
    wrong += [f"{g.whose}: {g.what} grew from {g.first:g} to {g.last:g}" for g in growths(soak) if not g.flat]
    if soak.exit_code:
        wrong.append(f"the server ended with exit code {soak.exit_code}")
    if soak.left:
        wrong.append(f"processes {soak.left} outlived the server")
    return wrong


def tables(soak: Soak) -> list[report.Table]:
    total = sum(soak.faults.values())
    rows = [
        ["requests", f"{soak.requests:,}"], ["their tokens", f"{soak.tokens:,}"],
        ["requests that failed", str(len(soak.failed))],
        ["requests with another token than without faults", str(len(soak.differing))],
        [f"faults: {', '.join(f'{name} {n}' for name, n in soak.faults.items())}", str(total)],
        [f"recoveries: {', '.join(f'{part} {n:.0f}' for part, n in soak.recoveries.items())}",
         f"{sum(soak.recoveries.values()):.0f}"],
        ["longest pause of a request, s (median, highest)",
         f"{statistics.median(soak.pauses):.2f}, {max(soak.pauses):.2f}"],
    ]  # fmt: skip
    held = []
    for g in growths(soak):
        scale = 1 << 20 if g.what == "memory" else 1
        held.append([
            g.whose, f"{g.what}{', MiB' if scale > 1 else ''}", f"{g.first / scale:,.0f}", f"{g.last / scale:,.0f}",
            str(g.faults), "yes" if g.flat else "no",
        ])  # fmt: skip
    return [
        report.Table("Requests and faults", ["", ""], rows),
        report.Table(
            "What is held: medians of the first and of the last third of the looks",
            ["of", "", "first", "last", "faults between", "flat"], held,
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--spare-workers", type=int, default=0)
    parser.add_argument("--recovery-limit", type=int, default=5, help="raise it where others use the machine, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    more = [
        "--max-model-len", "1024", "--kv-cache-memory", "256MiB", "--spare-workers", str(options.spare_workers),
        "--recovery-limit", str(options.recovery_limit),
    ]  # fmt: skip
    soak = run(options.model, options.seconds, options.every, options=more, seed=options.seed)
    OUT.mkdir(exist_ok=True)
    (OUT / "soak.json").write_text(json.dumps(asdict(soak), indent=1))
    made = tables(soak)
    note = (
        f"{time.strftime('%Y-%m-%d %H:%M')}; {soak.seconds:.0f} s, {STREAMS} streams, a fault every "
        f"{options.every:g} s, two tensor ranks, {options.spare_workers} spares, recovery limit "
        f"{options.recovery_limit}."
    )
    print(report.as_text(made, [note]))
    wrong = verdict(soak)
    print("\n".join(wrong[:20]))
    if options.markdown:
        report.write_between(options.markdown, "soak", report.as_markdown(made, [note]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
