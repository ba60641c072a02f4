"""This checkout's throughput beside that of an earlier one, in turns: `planaria bench throughput` of both.

    git worktree add /tmp/before 5e47275    # before KV outlived its rank; it needs torch, and numba for its sampler
    python -m benchmarks.versions /tmp/before [--streams 1,32] [--ranks 1,2] [--rounds 3] [--markdown PAGE]

Each round is A B B A, two pairs: the same model, prompts and options, each in processes of its own, with the packages
of this Python. One stream's rate is the median of five answers, that of many is of one each: KV that nobody has written
before is part of it. CPU is that of all processes, start included: on a machine with other work it says more. Each run
says what part of the machine other programs had meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report

OUT = Path(__file__).resolve().parent / "out"
NOW = Path(__file__).resolve().parents[1]
TOKENS = 128  # of a prompt, and of its answer
GOAL = 0.99  # of the rate before
LIMIT = 600.0  # seconds of a run


def run(tree: Path, model: str, ranks: int, streams: int, tokens: int = TOKENS) -> tuple[float, float, float]:
    """Output tokens a second, seconds of CPU, and what others had of all cores. What it compiles is kept apart from the
    other version's."""
    cache = OUT / "versions" / ("now" if tree == NOW else "before")
    cache.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "planaria", "bench", "throughput", model, "-tp", str(ranks), "--num-prompts",
        str(streams), "--input-len", str(TOKENS), "--output-len", str(tokens), "--repeat", "1" if streams > 1 else "5",
        "--json",
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(tree), "PLANARIA_CACHE": str(cache)}
    since, before, busy = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN), busy_seconds()
    done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rate = json.loads(done.stdout.splitlines()[-1])["output_tokens_per_s"]["median"]
    cpu, there = sum(after[:2]) - sum(before[:2]), (time.monotonic() - since) * (os.cpu_count() or 1)
    return rate, cpu, max(0.0, busy_seconds() - busy - cpu) / there


def busy_seconds() -> float:
    """Of all cores, since the machine's start."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def measure(before: Path, model: str, ranks: list[int], streams: list[int], rounds: int) -> list[dict[str, Any]]:
    """Of each case the runs of both, pair by pair."""
    for tree in (NOW, before):
        run(tree, model, ranks[0], 1, 8)  # compiles
    cases = []
    for size in ranks:
        for count in streams:
            runs: dict[Path, list[tuple[float, ...]]] = {NOW: [], before: []}
            for tree in [NOW, before, before, NOW] * rounds:
                rate, cpu, others = found = run(tree, model, size, count)
                runs[tree].append(found)
                said = f"{rate:.1f} tokens/s, {cpu:.2f} s of CPU, others {others:.0%}"
                print(f"{size} ranks, {count} streams, {tree}: {said}", flush=True)
            cases.append({"ranks": size, "streams": count, "now": runs[NOW], "before": runs[before]})
    return cases


def tables(found: list[dict[str, Any]]) -> tuple[list[report.Table], bool]:
    """And whether all are met."""
    rows, all_met = [], True
    for case in found:
        (now, now_cpu, others), (before, before_cpu, more) = (zip(*case[s], strict=True) for s in ("now", "before"))
        pairs, cpu = ([a / b for a, b in zip(*both, strict=True)] for both in ((now, before), (before_cpu, now_cpu)))
        met = statistics.median(pairs) >= GOAL
        all_met &= met
        rows.append([
            str(case["ranks"]), str(case["streams"]), report.spread(list(before), 1), report.spread(list(now), 1),
            report.spread(pairs, 3), report.spread(cpu, 3), f"{statistics.median(others + more):.0%}",
            "yes" if met else "no",
        ])  # fmt: skip
    head = ["ranks", "streams", "before", "now", "now / before", "the same by CPU", "others", f">= {GOAL:g}"]
    return [report.Table(f"Output tokens a second, {TOKENS} + {TOKENS} tokens", head, rows)], all_met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=lambda name: Path(name).resolve(), help="a checkout of the earlier version")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write the table between this page's markers")
    args = parser.parse_args()
    ranks, streams = ([int(each) for each in text.split(",")] for text in (args.ranks, args.streams))
    found = measure(args.before, args.model, ranks, streams, args.rounds)
    OUT.mkdir(exist_ok=True)
    (OUT / "versions.json").write_text(json.dumps(found, indent=1) + "\n")
    made, met = tables(found)
    note = f"{time.strftime('%Y-%m-%d %H:%M')}; {2 * args.rounds} pairs, in turns; median (low-high)."
    print(report.as_text(made, [note]))
    if args.markdown:
        report.write_between(args.markdown, "versions", report.as_markdown(made, [note]))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
