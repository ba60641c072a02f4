"""A fleet of engines in simulated time, to compare ways of routing over hours of traffic in minutes.

An engine computes prompts one after another, less what is in its cache of prefixes, and gives each running request a
token per step, which takes longer the more of them there are. A request begins when its tokens fit into the KV. Engines
tell of themselves when a request begins or ends, as real ones do with every step. All randomness has a seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from planaria.cli.traces import TracedRequest
from planaria.core.router import Router
from planaria.wire import EngineStats


class Machine(NamedTuple):
    """What an engine runs on: `prefill` tokens a second, seconds of a `step` and of each request in it, KV tokens."""

    prefill: float
    step: float
    per_request: float
    capacity: int


SMALL = Machine(2_000.0, 0.15, 0.003, 100_000)
LARGE = Machine(8_000.0, 0.02, 0.0005, 400_000)


class Request(NamedTuple):
    """`prompt` may be anything with a length that can be cut: a range stands for tokens that nobody shares."""

    at: float
    prompt: Sequence[int]
    output_len: int
    blocks: tuple[int, ...] = ()


class Policy(Protocol):
    """Who takes a request; hears what a real router hears."""

    def choose(self, number: int, request: Request) -> int: ...
    def began(self, number: int) -> None: ...
    def ended(self, number: int, tokens: int) -> None: ...
    def said(self, engine: int, stats: EngineStats) -> None: ...


class Blind:
    """A policy that hears nothing."""

    def __init__(self, engines: int, capacity: int, seed: int = 0) -> None:
        self.engines, self.source = engines, random.Random(seed)

    def began(self, number: int) -> None: ...
    def ended(self, number: int, tokens: int) -> None: ...
    def said(self, engine: int, stats: EngineStats) -> None: ...


class RoundRobin(Blind):
    def choose(self, number: int, request: Request) -> int:
        return number % self.engines


class Random(Blind):
    def choose(self, number: int, request: Request) -> int:
        return self.source.randrange(self.engines)


class FewestRequests(Blind):
    """Looks at all engines; counts requests, not tokens."""

    def __init__(self, engines: int, capacity: int, seed: int = 0) -> None:
        super().__init__(engines, capacity, seed)
        self.open, self.where = [0] * engines, dict[int, int]()

    def choose(self, number: int, request: Request) -> int:
        least = min(self.open)
        engine = self.where[number] = self.source.choice([i for i, n in enumerate(self.open) if n == least])
        self.open[engine] += 1
        return engine

    def ended(self, number: int, tokens: int) -> None:
        self.open[self.where.pop(number)] -= 1


class Routed(Blind):
    """The router."""

    def __init__(self, engines: int, capacity: int, seed: int = 0) -> None:
        super().__init__(engines, capacity, seed)
        self.router = Router(seed)
        for engine in range(engines):
            self.router.join(engine, capacity)

    def choose(self, number: int, request: Request) -> int:
        engine = self.router.choose(request.prompt, 4096)
        assert isinstance(engine, int)
        self.router.sent(str(number), engine, len(request.prompt), 4096)
        return engine

    def began(self, number: int) -> None:
        self.router.progressed(str(number), 1)

    def ended(self, number: int, tokens: int) -> None:
        self.router.progressed(str(number), tokens - 1)
        self.router.ended(str(number))

    def said(self, engine: int, stats: EngineStats) -> None:
        self.router.snapshot(engine, stats)


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "router": Routed, "fewest requests": FewestRequests, "round robin": RoundRobin, "random": Random
}  # fmt: skip


@dataclass
class Engine:
    """`used`: tokens of KV of requests that began (their outputs too); `load`: that of all it has."""

    waiting: deque[tuple[int, Request]] = field(default_factory=deque)
    running: int = 0
    used: int = 0
    load: int = 0
    free_at: float = 0.0  # when the prompts before are computed
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)  # blocks, the least recently used first


class Window(NamedTuple):
    """A stretch of simulated time: mean over its samples of the highest load over the mean one; of the mean load."""

    start: float
    imbalance: float
    load: float


@dataclass
class Outcome:
    windows: list[Window]
    first_tokens: list[float]  # seconds from arrival
    cached: float  # share of prompt tokens that were in a cache

    def first_token(self, q: float) -> float:
        ordered = sorted(self.first_tokens)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def simulate(
    requests: Iterator[Request], policy: Policy, engines: int, machine: Machine, *, window: float = 3600.0,
    sample: float = 10.0, block_len: int = 512,
) -> Outcome:  # fmt: skip
    """Until all requests have ended. Windows begin at 0; one in which nothing ran is left out."""
    fleet = [Engine() for _ in range(engines)]
    events: list[tuple[float, int, int, Request, int]] = []  # time, number, engine, request, (0 began, 1 ended)
    firsts: list[float] = []
    sums: dict[int, list[float]] = {}
    asked = hits = number = 0
    now, next_sample = 0.0, 0.0

    def admit(index: int) -> None:
        nonlocal hits
        engine = fleet[index]
        while engine.waiting:
            who, request = engine.waiting[0]
            need = len(request.prompt) + request.output_len
            if engine.running and engine.used + need > machine.capacity:
                return
            engine.waiting.popleft()
            engine.used += need
            engine.running += 1
            found = _cached(engine, request, block_len, machine.capacity)
            hits += found
            engine.free_at = max(now, engine.free_at) + (len(request.prompt) - found) / machine.prefill
            heapq.heappush(events, (engine.free_at, who, index, request, 0))

    def tell(index: int) -> None:
        engine = fleet[index]
        usage = min(1.0, engine.used / machine.capacity)
        policy.said(index, EngineStats(running=engine.running, waiting=len(engine.waiting), kv_usage=usage))

    coming = next(requests, None)
    while coming is not None or events:
        now = min(coming.at if coming is not None else math.inf, events[0][0] if events else math.inf)
        while next_sample <= now:
            loads = [engine.load for engine in fleet]
            mean = sum(loads) / engines
            if mean > 0:
                entry = sums.setdefault(int(next_sample // window), [0.0, 0.0, 0.0])
                entry[0] += 1
                entry[1] += max(loads) / mean
                entry[2] += mean
            next_sample += sample
        if coming is not None and coming.at <= now:
            asked += len(coming.prompt)
            index = policy.choose(number, coming)
            fleet[index].waiting.append((number, coming))
            fleet[index].load += len(coming.prompt) + coming.output_len
            admit(index)
            number += 1
            coming = next(requests, None)
            continue
        _, who, index, request, ended = heapq.heappop(events)
        engine = fleet[index]
        if ended:
            need = len(request.prompt) + request.output_len
            engine.running -= 1
            engine.used -= need
            engine.load -= need
            policy.ended(who, request.output_len)
            admit(index)
        else:
            firsts.append(now - request.at)
            policy.began(who)
            end = now + (request.output_len - 1) * (machine.step + machine.per_request * engine.running)
            heapq.heappush(events, (end, who, index, request, 1))
        tell(index)
    windows = [Window(i * window, total / count, mean / count) for i, (count, total, mean) in sorted(sums.items())]
    return Outcome(windows, firsts, hits / asked if asked else 0.0)


def _cached(engine: Engine, request: Request, block_len: int, capacity: int) -> int:
    """Tokens of its longest prefix that is in the cache; its blocks are in there from now on."""
    found = 0
    for block in request.blocks:
        if block not in engine.cache:
            break
        found += block_len
    for block in reversed(request.blocks):
        engine.cache[block] = None
        engine.cache.move_to_end(block)
    while len(engine.cache) > capacity // block_len:
        engine.cache.popitem(last=False)
    return min(found, len(request.prompt) - 1)


# -- traffic


def day(at: float) -> float:
    """The rate at a time of day, over the mean one."""
    return 1.0 - 0.5 * math.cos(2 * math.pi * at / 86_400)


def repeated(arrivals: list[TracedRequest], hours: float, rate: float) -> Iterator[Request]:
    """A trace again and again, at `rate` requests a second on the mean and with the rate of the day."""
    own = len(arrivals) / arrivals[-1].at
    at = before = 0.0
    number = 0
    while True:
        for arrival in arrivals:
            at += max(0.0, arrival.at - before) * own / (rate * day(at))
            before = arrival.at
            if at >= 3600 * hours:
                return
            number += 1
            yield Request(at, _unshared(number, arrival.input_len), arrival.output_len)
        before = 0.0


def bursts(hours: float, rate: float, seed: int = 0) -> Iterator[Request]:
    """Made-up traffic: the rate of the day, with bursts of about a minute at four times that; widely spread lengths."""
    source = random.Random(seed)
    at, number, until, busy = 0.0, 0, 0.0, False
    while True:
        if at >= until:
            busy = not busy
            until = at + source.expovariate(1 / 60 if busy else 1 / 600)
        at += source.expovariate(rate * day(at) * (3.0 if busy else 0.8))
        if at >= 3600 * hours:
            return
        number += 1
        prompt = min(14_000, max(2, round(source.lognormvariate(6.3, 1.2))))
        yield Request(at, _unshared(number, prompt), min(1000, max(1, round(source.lognormvariate(5.0, 0.8)))))


def shared(arrivals: list[TracedRequest], block_len: int, speed_up: float) -> Iterator[Request]:
    """A trace with prefixes: tokens of a block are its id."""
    for arrival in arrivals:
        tokens: list[int] = []
        for block in arrival.blocks:
            tokens += [block] * block_len
        yield Request(arrival.at / speed_up, tokens[: arrival.input_len], arrival.output_len, arrival.blocks)


def _unshared(number: int, length: int) -> range:
    return range(number * 20_000, number * 20_000 + length)
