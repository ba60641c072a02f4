"""Kills and stops at random under load, for minutes: does every request end right, does nothing grow?

    python -m benchmarks.soak [--seconds 600] [--every 5] [--spare-workers 0] [--markdown docs/performance.md]
    python -m benchmarks.soak --trace FILE.csv [--rate 0.5] [--length-scale 0.1] --seconds 3600 --every 20 ...

A server over two tensor ranks streams requests without a break, and every `--every` seconds a rank is killed, a rank is
stopped, or the engine's process is killed (later, where no token has come since the blow before: on a machine so slow
that nothing ever came back there would be nothing to see). Each answer is compared with the one before any fault (with
`--batch-invariant`, so that it must be the same to the last token). In the first half only the last rank is hit: the
engine and rank 0 live through every recovery, and what they fail to give back adds up. In the second half anything is.
What all processes hold is read before each blow.

With `--trace` everything is at once: requests come as they came to a real service (`planaria bench serve --trace` reads
the same files), lengths times `--length-scale`, `--rate` a second on average; among them grammars, several answers, log
probabilities and penalties; drafts (`ngram`), a tier on disk and a journal are on; a response runs in the background at
any time; clients leave in the middle; a second engine comes and goes; a neighbour computes for ten seconds of each
minute. Then pictures of what is held are written beside the page.
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import plot, proc, report
from benchmarks.deployment import Footprint, Server, footprint, patient_client, wait_healthy
from planaria.cli.traces import Trace, read_trace

OUT = Path(__file__).resolve().parent / "out"
STREAMS, KINDS_OF_REQUEST = 16, 24
FAULTS = {"a rank killed": ("worker", signal.SIGKILL), "a rank stopped": ("worker", signal.SIGSTOP),
          "the engine killed": ("engine", signal.SIGKILL)}  # fmt: skip
RESIZED = "an engine comes or goes"  # under --trace
EXTRAS: list[dict[str, Any]] = [
    {}, {"temperature": 0.9}, {"structured_outputs": {"regex": "([a-z]{2,9} ){999}"}}, {"n": 2, "temperature": 0.8},
    {"logprobs": 3}, {"presence_penalty": 0.5, "frequency_penalty": 0.5},
]  # fmt: skip
ROLES = "server", "engine", "worker 0"
AT_ONCE = 64  # requests that are open at most: those of a trace that come while so many are wait
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
    left_early: int = 0  # requests whose client left in the middle
    responses: int = 0  # in the background
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


def traced_bodies(server: Server, vocabulary: int, trace: Trace) -> list[dict[str, Any]]:
    """Requests as long as the trace's first ones, of each kind of `EXTRAS`; every third shares its beginning."""
    draw = random.Random(7)
    common = [draw.randrange(10, vocabulary) for _ in range(48)]
    made = []
    for i, wanted in enumerate(trace.arrivals[: 4 * KINDS_OF_REQUEST]):
        prompt = [draw.randrange(10, vocabulary) for _ in range(wanted.input_len)]
        more = EXTRAS[i % len(EXTRAS)]
        made.append(server.body(prompt if i % 3 else common + prompt, wanted.output_len, **more, seed=i))
    return made


async def answer(
    server: Server, client: httpx2.AsyncClient, body: dict[str, Any], pauses: list[float],
    token: Callable[[float], None],
) -> list[list[int]]:  # fmt: skip
    """All tokens of each answer to a request; `token` hears when one comes. Raises what a client could see."""
    tokens: list[list[int]] = [[] for _ in range(body.get("n", 1))]
    longest, last = 0.0, time.monotonic()
    async for choice in server.stream(client, body):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        token(now)
        tokens[choice["index"]] += choice["token_ids"]
    pauses.append(longest)
    return tokens


def sample(server: Server, seconds: float, faults: int) -> Sample | None:
    """None where a process ended meanwhile."""
    total = Footprint()
    by_role: dict[str, tuple[int, Footprint]] = {}
    with contextlib.suppress(OSError):
        for process in server.processes():
            held = footprint(process.pid)
            total += held
            name = f"{process.role} {process.rank}" if process.rank >= 0 else process.role
            by_role.setdefault(name, (process.pid, held))  # of the engine that is there longer
        return Sample(seconds, faults, total, by_role)
    return None


class Harm:
    """Strikes every `every` seconds for `seconds`, or `blows` times however long that takes. `resize`: an engine comes
    or goes now and then, too."""

    def __init__(
        self, server: Server, seconds: float, every: float, seed: int, blows: int | None = None, resize: bool = False
    ) -> None:
        self.server, self.seconds, self.every, self.blows = server, seconds, every, blows
        self.draw, self.whom = random.Random(seed), random.Random(seed)
        self.faults = dict.fromkeys([*FAULTS, *([RESIZED] if resize else [])], 0)
        self.samples: list[Sample] = []
        self.came = asyncio.Event()  # a token, since the last blow
        self.struck = 0.0
        self.engines = 1

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
            name = self.draw.choice([f for f in self.faults if f != "the engine killed" or not first_half])
            if name == RESIZED:
                await self._resize()
            else:
                self._strike(name, first_half)

    def _strike(self, name: str, last: bool) -> None:
        role, how = FAULTS[name]
        # none, while an engine comes up: then that is what is hit
        found = self.server.victims(role) or self.server.victims("engine")
        if found:
            self.faults[name] += 1
            self.struck = time.monotonic()
            self.came.clear()
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[-1] if last else self.whom.choice(found), how)

    async def _resize(self) -> None:
        """To two engines, or back to one. An engine that a blow hit before may make the server decline."""
        wanted = {"new_data_parallel_size": 3 - self.engines, "drain_timeout": 60}
        path = self.server.url + "/scale_elastic_ep"
        answered = await asyncio.to_thread(self.server.http.post, path, json=wanted, timeout=300)
        if answered.status_code == 200:
            self.faults[RESIZED] += 1
            self.engines = 3 - self.engines

    async def _look(self, began: float) -> None:
        if await asyncio.to_thread(self._healthy):
            found = sample(self.server, time.monotonic() - began, sum(self.faults.values()))
            if found is not None:
                self.samples.append(found)


class Play:
    """A soak that runs: requests, each compared with its answer before any fault, until the harm is over."""

    def __init__(self, server: Server, client: httpx2.AsyncClient, harm: Harm, requests: list[dict[str, Any]]) -> None:
        self.server, self.client, self.harm, self.requests = server, client, harm, requests
        self.soak, self.over = Soak(), asyncio.Event()
        self.expected: list[list[list[int]]] = []
        self.room = asyncio.Semaphore(AT_ONCE)

    async def learn(self) -> None:
        """What is right: all answers before any fault."""
        asked = (answer(self.server, self.client, body, [], self.harm.token) for body in self.requests)
        self.expected = await asyncio.gather(*asked)

    async def ask(self, i: int) -> bool:
        """Request `i` once; whether it was answered."""
        self.soak.requests += 1
        try:
            got = await answer(self.server, self.client, self.requests[i], self.soak.pauses, self.harm.token)
        except Exception as e:  # whatever a client could see
            self.soak.failed.append(f"request {i}: {type(e).__name__}: {e}")
            return False
        self.soak.tokens += sum(map(len, got))
        for a, b in zip(got, self.expected[i], strict=True):
            if a != b:
                at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
                self.soak.differing.append(f"request {i}: token {at} of {len(a)}, {len(b)} expected")
        return True

    async def streams(self, seed: float) -> None:
        """One request after the other; ends with one that failed."""
        draw = random.Random(seed)
        while not self.over.is_set() and await self.ask(draw.randrange(len(self.requests))):
            pass

    async def arrivals(self, times: list[float]) -> None:
        """Requests when they came, round after round."""
        began, running = time.monotonic(), set()

        async def one(i: int) -> None:
            try:
                await self.ask(i)
            finally:
                self.room.release()

        for number in range(sys.maxsize):
            lap, k = divmod(number, len(times))
            due = began + lap * times[-1] + times[k]
            await self._pause(due - time.monotonic())
            await self.room.acquire()
            if self.over.is_set():
                break
            running.add(task := asyncio.create_task(one(number % len(self.requests))))
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def background(self) -> None:
        """A response in the background after the other, each with the same text, and not kept beyond its reading."""
        body = {"model": self.server.model, "input": "Count from one to fifty in words.", "background": True}
        body |= {"max_output_tokens": 100, "temperature": 0}
        first: str | None = None
        while not self.over.is_set():
            try:
                made = (await self.client.post(self.server.url + "/v1/responses", json=body)).json()
                while made["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(1.0)  # a client that polls
                    made = (await self.client.get(f"{self.server.url}/v1/responses/{made['id']}")).json()
                text = made["output"][-1]["content"][0]["text"]
                (await self.client.delete(f"{self.server.url}/v1/responses/{made['id']}")).raise_for_status()
            except Exception as e:
                self.soak.failed.append(f"response: {type(e).__name__}: {e}")
                return
            self.soak.responses += 1
            first = first or text
            if text != first:
                self.soak.differing.append(f"response: {text!r}, {first!r} expected")

    async def leave(self) -> None:
        """Clients that go away after three tokens."""
        for number in range(sys.maxsize):
            await self._pause(5.0)
            if self.over.is_set():
                return
            i = number % len(self.requests)
            events = self.server.stream(self.client, self.requests[i])
            try:
                for _ in range(3):
                    await anext(events, None)
                await events.aclose()  # type: ignore[attr-defined]
            except Exception as e:  # whatever a client could see
                self.soak.failed.append(f"request {i}, whose client leaves: {type(e).__name__}: {e}")
            else:
                self.soak.left_early += 1

    async def neighbour(self) -> None:
        """Computes for ten seconds of each minute."""
        while not self.over.is_set():
            burning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                await self._pause(10.0)
            finally:
                burning.kill()
                burning.wait()
            await self._pause(50.0)

    async def _pause(self, seconds: float) -> None:
        """So long, or until it is over."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.over.wait(), max(0.0, seconds))

    async def strike(self) -> None:
        try:
            await self.harm.run()
        finally:
            self.over.set()


async def drive(
    server: Server, harm: Harm, requests: list[dict[str, Any]], streams: int, times: list[float] | None
) -> Soak:
    """`streams` at once without a break, or, with `times`, everything at once."""
    async with patient_client() as client:
        play = Play(server, client, harm, requests)
        await play.learn()
        began = time.monotonic()
        work: list[Coroutine[Any, Any, None]]
        if times is None:
            work = [play.streams(harm.seconds + i) for i in range(streams)]
        else:
            work = [play.arrivals(times), play.background(), play.leave(), play.neighbour()]
        await asyncio.gather(play.strike(), *work)
    play.soak.seconds = time.monotonic() - began
    play.soak.faults, play.soak.samples = harm.faults, harm.samples
    return play.soak


def run(
    model: str, seconds: float, every: float, *, options: Sequence[str] = (), vocabulary: int = 40_000,
    tokens: int = 96, streams: int = STREAMS, seed: int = 1, blows: int | None = None, trace: Trace | None = None,
) -> Soak:  # fmt: skip
    """One soak; with `blows` it takes as long as these do, with `trace` everything is at once.

    Raises RuntimeError where the server can't start, or isn't healthy in the end."""
    server = Server(model, "-tp", "2", "--batch-invariant", *options)
    try:
        harm = Harm(server, seconds, every, seed, blows, resize=trace is not None)
        requests = traced_bodies(server, vocabulary, trace) if trace else bodies(server, vocabulary, tokens)
        times = [arrival.at for arrival in trace.arrivals] if trace else None
        soak = asyncio.run(drive(server, harm, requests, streams, times))
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
    ((usual, _),) = Counter(s.total.processes for s in soak.samples).most_common(1)  # a second engine comes and goes
    same = [s for s in soak.samples if s.total.processes == usual]
    series: dict[str, list[tuple[Sample, Footprint]]] = {"all processes": [(s, s.total) for s in same[1:]]}
    for role in ROLES:
        lived = [s for s in same if role in s.by_role and s.faults]
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
    more = [
        ["clients that left in the middle", f"{soak.left_early:,}"],
        ["responses in the background", f"{soak.responses:,}"],
    ]
    rows = [
        ["requests", f"{soak.requests:,}"], ["their tokens", f"{soak.tokens:,}"], *(more if soak.left_early else []),
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


def pictures(soak: Soak) -> dict[str, str]:
    """SVG by name: what each role holds over the run, and the longest pauses in order of the requests."""
    made = {}
    for what in ("memory", "descriptors", "segments", "threads"):
        scale = 1 << 20 if what == "memory" else 1
        series = {"all": [(s.seconds / 60, asdict(s.total)[what] / scale) for s in soak.samples]}
        for role in ROLES:
            series[role] = [
                (s.seconds / 60, asdict(s.by_role[role][1])[what] / scale) for s in soak.samples if role in s.by_role
            ]  # fmt: skip
        unit = "MiB" if what == "memory" else what
        series = {name: line for name, line in series.items() if line}
        made[what] = plot.lines(f"{what} held, looked at before each blow", "minutes", unit, series)
    paused = [(float(i), pause) for i, pause in enumerate(soak.pauses)]
    made["pauses"] = plot.lines("longest silence of each request", "request", "seconds", {"pause": paused})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--spare-workers", type=int, default=0)
    parser.add_argument("--recovery-limit", type=int, default=5, help="raise it where others use the machine, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    parser.add_argument("--trace", type=Path, help="everything at once, requests as they came to a service")
    parser.add_argument("--rate", type=float, default=0.5, help="of the trace's requests a second, on average")
    parser.add_argument("--length-scale", type=float, default=0.1, help="of the trace's lengths")
    options = parser.parse_args()
    more = [
        "--max-model-len", "1024", "--kv-cache-memory", "256MiB", "--spare-workers", str(options.spare_workers),
        "--recovery-limit", str(options.recovery_limit),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        trace, name, load = None, "soak", f"{STREAMS} streams"
        if options.trace:
            name, load = "soak-trace", f"{options.trace.stem} at {options.rate:g} requests a second"
            count = max(2, round(options.seconds * options.rate))
            trace = scaled_trace(read_trace(options.trace, count), options.rate, options.length_scale)
            more += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}']
            more += ["--kv-tier", f"{folder}/tier,1GiB", "--journal", f"{folder}/journal"]
        soak = run(options.model, options.seconds, options.every, options=more, seed=options.seed, trace=trace)
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps(asdict(soak), indent=1))
    made = tables(soak)
    note = (
        f"{time.strftime('%Y-%m-%d %H:%M')}; {soak.seconds:.0f} s, {load}, a fault every "
        f"{options.every:g} s, two tensor ranks, {options.spare_workers} spares, recovery limit "
        f"{options.recovery_limit}."
    )
    print(report.as_text(made, [note]))
    wrong = verdict(soak)
    print("\n".join(wrong[:20]))
    if options.markdown:
        drawn = pictures(soak) if options.trace else {}
        for what, svg in drawn.items():
            (options.markdown.parent / f"soak-{what}.svg").write_text(svg)
        shown = "".join(f"\n![{what}](soak-{what}.svg)\n" for what in drawn)
        report.write_between(options.markdown, name, report.as_markdown(made, [note]) + shown)
    sys.exit(1 if wrong else 0)


def scaled_trace(whole: Trace, rate: float, lengths: float) -> Trace:
    """`rate` requests a second on average, lengths times `lengths` and cut to what the server takes."""
    whole = whole.scaled(lengths)
    slower = len(whole.arrivals) / rate / whole.arrivals[-1].at
    made = []
    for arrival in whole.arrivals:
        prompt, output = min(arrival.input_len, 600), min(arrival.output_len, 200)
        made.append(arrival._replace(at=arrival.at * slower, input_len=prompt, output_len=output))
    return Trace(made, whole.block_len)


if __name__ == "__main__":
    main()
