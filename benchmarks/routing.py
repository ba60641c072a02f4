"""What routing a request costs as the fleet grows, and how even the engines' loads stay over three days of traffic.

    python -m benchmarks.routing [--trace CSV] [--prefix-trace JSONL] [--hours 72] [--markdown docs/scale.md]

*Cost*: a real router in this process, full of open requests; all it does for one request (choice, begin, end, and a
snapshot of its engine). *Balance*: simulated engines (see fleet_simulation.py), the same arrivals for every policy.
Without the traces, arrivals are made up. The picture is written beside the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import plot, report
from benchmarks.fleet_simulation import LARGE, POLICIES, SMALL, Outcome, Request, bursts, repeated, shared, simulate
from planaria.cli.traces import read_trace
from planaria.core.router import Router
from planaria.wire import EngineStats

OUT = Path(__file__).resolve().parent / "out"
SIZES = (1, 10, 100, 1_000, 10_000)
PROMPTS = (128, 1_024, 8_192)
ENGINES, RATE = 16, 6.0
PREFIX_SPEED_UP = 2.0


def cost(engines: int, prompt_len: int, rounds: int) -> list[float]:
    """Microseconds of CPU for each of `rounds` requests; eight others are open on every engine; some share prefixes."""
    router = Router(0, memory=1 << 16)
    for engine in range(engines):
        router.join(engine, 100_000)
    for number in range(8 * engines):
        router.sent(f"open {number}", number % engines, 1_000 + number % 7, 256)
        router.progressed(f"open {number}", 1)
    stats, found = EngineStats(running=8, kv_usage=0.08), []
    for number in range(rounds):
        start = (number // 3 if number % 3 else number) * 10_000
        tokens, name = list(range(start, start + prompt_len)), str(number)
        since = time.process_time_ns()
        chosen = router.choose(tokens, 256)
        assert chosen is not None
        router.sent(name, chosen, prompt_len, 256)
        router.progressed(name, 1)
        router.snapshot(chosen, stats)
        router.ended(name)
        found.append((time.process_time_ns() - since) / 1000)
    return found


def balance(traffic: Callable[[], Iterator[Request]], hours: float) -> dict[str, Any]:
    """By policy: imbalance of each hour and each day, and time to first token."""
    found: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        outcome = simulate(traffic(), policy(ENGINES, SMALL.capacity), ENGINES, SMALL)
        by_hour = [window.imbalance for window in outcome.windows if window.start < 3600 * hours]
        days = [statistics.mean(by_hour[i : i + 24]) for i in range(0, len(by_hour), 24)]
        found[name] = _figures(outcome) | {"hours": by_hour, "days": days}
        print(f"balance, {name}: {[round(day, 2) for day in days]}", file=sys.stderr)
    return found


def prefixes(path: Path) -> dict[str, Any]:
    """`policies`: share of prompt tokens found in a cache, and time to first token; `most`: that share with one cache
    for all, without a limit."""
    trace, found = read_trace(path), {}
    for name, policy in POLICIES.items():
        traffic = shared(trace.arrivals, trace.block_len, PREFIX_SPEED_UP)
        outcome = simulate(
            traffic, policy(ENGINES, LARGE.capacity), ENGINES, LARGE, window=60.0, block_len=trace.block_len
        )
        found[name] = _figures(outcome)
    seen: set[int] = set()
    most = 0
    for arrival in trace.arrivals:
        known = sum(1 for _ in itertools.takewhile(seen.__contains__, arrival.blocks))
        most += min(known * trace.block_len, arrival.input_len - 1)
        seen.update(arrival.blocks)
    return {"policies": found, "most": most / sum(arrival.input_len for arrival in trace.arrivals)}


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests": len(outcome.first_tokens), "cached": outcome.cached, "p50": outcome.first_token(0.5),
        "p99": outcome.first_token(0.99), "imbalance": statistics.mean(w.imbalance for w in outcome.windows),
    }  # fmt: skip


def tables(result: dict[str, Any]) -> list[report.Table]:
    head = ["engines", *(f"{length:,}-token prompt" for length in PROMPTS)]
    rows = [
        [f"{int(size):,}", *(f"{taken['p50']:.0f} ({taken['p99']:.0f})" for taken in entry.values())]
        for size, entry in result["cost"].items()
    ]
    made = [report.Table("Routing a request, microseconds of CPU, median (99th percentile)", head, rows)]
    days = max(len(entry["days"]) for entry in result["balance"].values())
    made.append(report.Table(
        f"The highest load of {ENGINES} engines over the mean one, {result['hours']:g} simulated hours",
        ["", *(f"day {day + 1}" for day in range(days)), "worst hour", "first token, s, median", "99%"],
        [
            [name, *(f"{day:.2f}" for day in entry["days"]), f"{max(entry['hours']):.2f}", f"{entry['p50']:.2f}",
             f"{entry['p99']:.2f}"]
            for name, entry in result["balance"].items()
        ],
    ))  # fmt: skip
    if "prefixes" in result:
        made.append(report.Table(
            f"Requests that share prefixes, {ENGINES} engines",
            ["", "prompt tokens found in a cache", "first token, s, median", "99%", "highest load over mean"],
            [
                [name, f"{100 * entry['cached']:.0f}%", f"{entry['p50']:.2f}", f"{entry['p99']:.2f}",
                 f"{entry['imbalance']:.2f}"]
                for name, entry in result["prefixes"]["policies"].items()
            ],
        ))  # fmt: skip
    return made


def notes(result: dict[str, Any]) -> list[str]:
    requests = result["balance"]["router"]["requests"]
    line = (
        f"{result['when']}. Balance: {requests:,} requests, {result['traffic']}, half as many at night and half "
        "as many more by day."
    )
    if "prefixes" in result:
        line += (
            f" Prefixes: {result['prefix_trace']}, {PREFIX_SPEED_UP:g} times as fast; one cache for all, without a "
            f"limit, would hold {100 * result['prefixes']['most']:.0f}% of the prompt tokens."
        )
    return [line]


def write(result: dict[str, Any], page: Path) -> None:
    """Tables and pictures between the page's markers; the pictures themselves beside it."""
    content = report.as_markdown(tables(result), notes(result))
    for name, picture in pictures(result).items():
        (page.parent / name).write_text(picture)
        content += f"\n\n![{name.removesuffix('.svg').replace('-', ': ')}]({name})"
    report.write_between(page, "routing", content)


def pictures(result: dict[str, Any]) -> dict[str, str]:
    """SVG by file name."""
    by_length = {
        f"{length:,} tokens": [(float(size), entry[str(length)]["p50"]) for size, entry in result["cost"].items()]
        for length in PROMPTS
    }
    by_policy = {
        name: [(hour + 0.5, value) for hour, value in enumerate(entry["hours"])]
        for name, entry in result["balance"].items()
    }
    return {
        "scale-routing.svg": plot.lines(
            "Routing a request, by length of its prompt", "engines", "microseconds of CPU", by_length, log=True
        ),
        "scale-balance.svg": plot.lines(
            "How even the loads are", "hours", "highest load over mean", by_policy, lowest=1.0
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="arrivals and lengths, repeated; without it they are made up")
    parser.add_argument("--prefix-trace", type=Path, help="lines of JSON with hash_ids; without: not measured")
    parser.add_argument("--hours", type=float, default=72.0)
    parser.add_argument("--rounds", type=int, default=2000, help="requests of each measurement of the cost")
    parser.add_argument("--markdown", type=Path, help="write between this page's markers, and pictures")
    options = parser.parse_args()
    result: dict[str, Any] = {"hours": options.hours, "cost": {}}
    for size in SIZES:
        entry = result["cost"][str(size)] = {}
        for length in PROMPTS:
            taken = sorted(cost(size, length, options.rounds))
            entry[str(length)] = {"p50": taken[len(taken) // 2], "p99": taken[int(0.99 * len(taken))]}
        print(f"cost, {size} engines: {entry}", file=sys.stderr)
    arrivals = read_trace(options.trace).arrivals if options.trace else []
    result["balance"] = balance(
        lambda: repeated(arrivals, options.hours, RATE) if arrivals else bursts(options.hours, RATE), options.hours
    )
    if options.prefix_trace:
        result["prefixes"] = prefixes(options.prefix_trace)
    result["when"] = time.strftime("%Y-%m-%d %H:%M")
    result["traffic"] = f"those of {options.trace.name}, again and again" if arrivals else "made-up bursts"
    result["prefix_trace"] = options.prefix_trace.name if options.prefix_trace else None
    OUT.mkdir(exist_ok=True)
    (OUT / "routing.json").write_text(json.dumps(result, indent=1))
    print(report.as_text(tables(result), notes(result)))
    if options.markdown:
        write(result, options.markdown)


if __name__ == "__main__":
    main()
