"""From samples to tables: medians (lowest-highest), ratios, goals; as text, or as Markdown between a page's markers.

python -m benchmarks.report benchmarks/out/compare_peers.json [--markdown docs/performance.md]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass
class Metric:
    """`digits` behind the point; `more` says whether more is better."""

    label: str
    digits: int
    more: bool
    samples: Callable[[dict[str, Any], str], list[float]]


def decode_rate(sample: dict[str, Any]) -> float:
    """Tokens per second after the first step that brought any."""
    events = sample["events"]
    return float(sum(n for _, n in events[1:]) / (events[-1][0] - events[0][0]))


def first_ms(sample: dict[str, Any]) -> float:
    return float(1e3 * sample["events"][0][0])


def output_rate(sample: dict[str, Any]) -> float:
    return float(sum(n for _, n in sample["events"]) / sample["seconds"])


def _of(scenario: str, value: Callable[[dict[str, Any]], float]) -> Callable[[dict[str, Any], str], list[float]]:
    def samples(result: dict[str, Any], engine: str) -> list[float]:
        found = result["scenarios"].get(scenario, {}).get("samples", {})
        return [value(sample) for sample in found.get(engine, [])]

    return samples


def _kept(*path: str, scale: float = 1.0) -> Callable[[dict[str, Any], str], list[float]]:
    """A value of the engine's entry, a list or one number."""

    def samples(result: dict[str, Any], engine: str) -> list[float]:
        value: Any = result["engines"].get(engine, {})
        for name in path:
            value = (value or {}).get(name)
        if value is None:
            return []
        return [scale * v for v in (value if isinstance(value, list) else [value])]

    return samples


def _starts(first: bool) -> Callable[[dict[str, Any], str], list[float]]:
    def samples(result: dict[str, Any], engine: str) -> list[float]:
        starts: list[float] = result["engines"].get(engine, {}).get("starts", [])
        return starts[:1] if first else starts[1:]

    return samples


def bandwidth(result: dict[str, Any]) -> list[float]:
    """GB/s with all threads, the median of each round of single streams, or of the run's start if there were none."""
    return [statistics.median(r["read_all_threads"]) for r in _bandwidth_rounds(result)]


def _bandwidth_rounds(result: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result["scenarios"].get("bandwidth") or [result["machine"]]
    return found


def share_of_limit(result: dict[str, Any], engine: str) -> list[float]:
    """% of the bandwidth limit that one stream's decoding reaches, counting the weights' bytes alone."""
    rates = DECODE.samples(result, engine)
    limit = statistics.median(bandwidth(result)) * 1e9 / result["engines"][engine]["bytes_per_token"]
    return [100 * rate / limit for rate in rates]


DECODE = Metric("single stream, decode, tok/s", 1, True, _of("single", decode_rate))
SHARE = Metric("  of the bandwidth limit, %", 0, True, share_of_limit)
TTFT_128 = Metric("first token of a 128-token prompt, ms", 0, False, _of("single", first_ms))
TTFT_1024 = Metric("first token of a 1,024-token prompt, ms", 0, False, _of("ttft_1024", first_ms))
BATCH = Metric("32 at once, output tok/s", 0, True, _of("batch_32", output_rate))
MIXED = Metric("64 mixed, output tok/s", 0, True, _of("mixed_64", output_rate))
FIRST_START = Metric("first start to first token, s", 1, False, _starts(True))
START = Metric("later start to first token, s", 1, False, _starts(False))
SERVER_START = Metric("server start to first token over HTTP, s", 1, False, _kept("served", "first_token"))
IDLE = Metric("idle CPU, in process, % of a core", 2, False, _kept("idle_percent"))
SERVER_IDLE = Metric("idle CPU, server, % of a core", 2, False, _kept("served", "idle_percent"))
MEMORY = Metric("memory less KV, in process, MiB", 0, False, _kept("pss_less_kv", scale=1 / MIB))
SERVER_MEMORY = Metric("memory less KV, server, MiB", 0, False, _kept("served", "pss_less_kv", scale=1 / MIB))
METRICS = [
    DECODE, SHARE, TTFT_128, TTFT_1024, BATCH, MIXED, FIRST_START, START, SERVER_START, IDLE, SERVER_IDLE, MEMORY,
    SERVER_MEMORY,
]  # fmt: skip

RATIOS = [  # ours, peer, metric, at least / at most
    ("planaria-bf16", "vllm", DECODE, ">=", 1.75),
    ("planaria-q4_1", "llama.cpp", DECODE, ">=", 1.4),
    ("planaria-bf16", "vllm", BATCH, ">=", 1.3),
    ("planaria-bf16", "vllm", TTFT_1024, "<=", 0.85),
]
ABSOLUTE = [
    ("planaria-bf16", SHARE, ">=", 85.0),
    ("planaria-bf16", FIRST_START, "<=", 8.0), ("planaria-q4_1", FIRST_START, "<=", 8.0),
    ("planaria-bf16", START, "<=", 4.0), ("planaria-q4_1", START, "<=", 4.0),
    ("planaria-bf16", SERVER_IDLE, "<=", 1.0), ("planaria-bf16", SERVER_MEMORY, "<=", 950.0),
]  # fmt: skip


def spread(values: list[float], digits: int) -> str:
    """Median (lowest-highest)."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def _ratio(result: dict[str, Any], metric: Metric, ours: str, peer: str) -> float | None:
    a, b = metric.samples(result, ours), metric.samples(result, peer)
    return statistics.median(a) / statistics.median(b) if a and b and statistics.median(b) else None


def tables(result: dict[str, Any]) -> list[Table]:
    """All tables of a run."""
    return [t for t in (limits(result), *by_weights(result), parts(result), install(result), goals(result)) if t.rows]


def limits(result: dict[str, Any]) -> Table:
    machine, threads = result["machine"], result["threads"]
    rows = [
        ["read, 1 thread, GB/s", spread(machine["read_1_thread"], 1)],
        [f"read, {threads} threads, GB/s", spread(bandwidth(result), 1)],
        ["  best repetition, GB/s", f"{max(max(r['read_all_threads']) for r in _bandwidth_rounds(result)):.1f}"],
    ]
    if "bf16_gflops" in machine:
        rows.append([f"bf16 product, {threads} threads, GFLOP/s", spread(machine["bf16_gflops"], 0)])
    middle = statistics.median(bandwidth(result))
    classes = {e["weights"]: e["bytes_per_token"] for e in result["engines"].values()}
    for weights, size in classes.items():
        rows.append([f"so one stream of {weights} ({size / 1e6:.0f} MB a token), tok/s", f"{middle * 1e9 / size:,.0f}"])
    return Table(f"Limits of this machine ({machine['cpu']}, {threads} threads)", ["", "median (low-high)"], rows)


def by_weights(result: dict[str, Any]) -> list[Table]:
    """One table for each kind of weights: engines in columns, then ours over each peer."""
    made = []
    for weights in dict.fromkeys(e["weights"] for e in result["engines"].values()):
        names = [name for name, e in result["engines"].items() if e["weights"] == weights]
        ours = next((n for n in names if n.startswith("planaria")), None)
        peers = [n for n in names if n != ours] if ours else []
        rows = []
        for metric in METRICS:
            cells = [spread(metric.samples(result, name), metric.digits) for name in names]
            if all(cell == "-" for cell in cells):
                continue
            for peer in peers:
                ratio = _ratio(result, metric, str(ours), peer)
                cells.append("-" if ratio is None else f"{ratio:.2f}")
            rows.append([metric.label, *cells])
        titles = [f"{n} {result['engines'][n].get('about', {}).get('version', '')}".strip() for n in names]
        made.append(Table(f"Weights {weights}", ["", *titles, *(f"ours / {p}" for p in peers)], rows))
    return made


def parts(result: dict[str, Any]) -> Table:
    """Where this engine's start-up time goes: the first start, and the median of the later ones."""
    rows = []
    for name, engine in result["engines"].items():
        starts = engine.get("parts", [])
        if not name.startswith("planaria") or not starts:
            continue
        for part in starts[0]:
            later = [s[part] for s in starts[1:] if part in s]
            rows.append([f"{name}: {part.strip()}", f"{starts[0][part]:.2f}", f"{spread(later, 2)}"])
    return Table("Parts of the start, s", ["", "first start", "later starts"], rows)


def install(result: dict[str, Any]) -> Table:
    found = result.get("install", {})
    ours = found.get("planaria")
    rows = []
    for name, size in found.items():
        share = f"{ours['bytes'] / size['bytes']:.2f} / {ours['packages'] / size['packages']:.2f}" if ours else "-"
        rows.append([name, f"{size['bytes'] / 1e6:,.0f}", str(size["packages"]), "" if size is ours else share])
    return Table("Installed", ["", "MB", "packages", "ours / it"], rows)


def goals(result: dict[str, Any]) -> Table:
    """What was asked for and what was reached; only what this run measured."""
    rows = []

    def row(label: str, value: float | None, sign: str, wanted: float, digits: int) -> None:
        if value is not None:
            met = value >= wanted if sign == ">=" else value <= wanted
            rows.append([label, f"{sign} {wanted:g}", f"{value:,.{digits}f}", "yes" if met else "no"])

    for ours, peer, metric, sign, wanted in RATIOS:
        row(f"{metric.label.strip()}: {ours} / {peer}", _ratio(result, metric, ours, peer), sign, wanted, 2)
    for name, metric, sign, wanted in ABSOLUTE:
        values = metric.samples(result, name) if name in result["engines"] else []
        value = statistics.median(values) if values else None
        row(f"{metric.label.strip()}: {name}", value, sign, wanted, metric.digits)
    found = result.get("install", {})
    if "planaria" in found and "vllm" in found:
        for what in ("bytes", "packages"):
            row(f"installed {what}: planaria / vllm", found["planaria"][what] / found["vllm"][what], "<=", 1 / 3, 2)
    return Table("Goals", ["", "goal", "measured", "met"], rows)


def notes(result: dict[str, Any]) -> list[str]:
    """What a reader must know beside the tables."""
    lines = [
        f"{result['when']}, model {result['model']}, {result['threads']} threads, KV {result['kv_bytes'] >> 20} MiB in "
        "each engine that has a pool; median (lowest-highest) of the rounds.",
    ]
    disturbed = [
        sample["foreign"]
        for scenario in result["scenarios"].values()
        if isinstance(scenario, dict)
        for samples in scenario["samples"].values()
        for sample in samples
    ]
    if disturbed:
        lines.append(
            f"Other programs used {statistics.median(disturbed):.0f}% of a core in the median round, "
            f"{max(disturbed):.0f}% in the worst."
        )
    if result.get("tiny"):
        lines.append("A tiny run: it shows that everything works; its figures mean nothing.")
    lines += [f"Not measured: {name}: {why.splitlines()[0]}" for name, why in result.get("failed", {}).items()]
    return lines


def as_text(made: list[Table], lines: list[str]) -> str:
    """For a terminal."""
    out = []
    for table in made:
        widths = [max(len(row[i]) for row in [table.head, *table.rows]) for i in range(len(table.head))]
        out.append(f"\n{table.title}")
        for row in [table.head, *table.rows]:
            cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            out.append("  ".join(cells).rstrip())
    return "\n".join([*out, "", *lines])


def as_markdown(made: list[Table], lines: list[str]) -> str:
    """For a document."""
    out = list(lines)
    for table in made:
        out += ["", f"**{table.title}**", "", f"| {' | '.join(table.head)} |"]
        out.append("|" + "|".join("---" if i == 0 else "--:" for i in range(len(table.head))) + "|")
        out += [f"| {' | '.join(cell.strip() for cell in row)} |" for row in table.rows]
    return "\n".join(out).strip()


def text(result: dict[str, Any]) -> str:
    return as_text(tables(result), notes(result))


def markdown(result: dict[str, Any]) -> str:
    return as_markdown(tables(result), notes(result))


def write_between(path: Path, name: str, content: str) -> None:
    """Replace what is between `<!-- begin NAME -->` and `<!-- end NAME -->`. Raises ValueError if they aren't there."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    old = path.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1:
        raise ValueError(f"{path}: needs the lines {begin} and {end}, once each")
    head, tail = old.split(begin)[0], old.split(end)[1]
    path.write_text(f"{head}{begin}\n{content}\n{end}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    result = json.loads(options.samples.read_text())
    print(text(result))
    if options.markdown:
        write_between(options.markdown, "compare_peers", markdown(result))


if __name__ == "__main__":
    main()
