"""What planning costs as the fleet grows: placing every rank, and the whole command.

    python -m benchmarks.placement [--rounds 5] [--markdown docs/scale.md]

Nodes of eight devices, an engine of eight ranks on each (`span`: of sixteen, on two). *Planning*: seconds of CPU from
the cluster and the layout to a place for every rank; *no room*: until it is known that one engine more does not fit,
why, and what would; *one more*: a fleet that has all nodes but one gets its last engine, and nobody moves. *The
command*: `planaria plan --cluster FILE` from its start to the last line of its table.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import plot, report
from planaria.topology import Cluster, Infeasible, Layout, Node, pack, place

OUT = Path(__file__).resolve().parent / "out"
SIZES = (1, 10, 100, 1_000, 10_000)
DEVICES = 8


def cluster_of(nodes: int) -> Cluster:
    made = [Node.of(f"node{i}", DEVICES, f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}") for i in range(nodes)]
    return Cluster(tuple(made), "node0")


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Median seconds of CPU."""
    taken = []
    for _ in range(rounds):
        since = time.process_time()
        work()
        taken.append(time.process_time() - since)
    return statistics.median(taken)


def planning(nodes: int, rounds: int) -> dict[str, float]:
    cluster, full = cluster_of(nodes), Layout(dp=nodes, tp=DEVICES)

    def no_room() -> None:
        try:
            pack(cluster, Layout(dp=nodes + 1, tp=DEVICES))
        except Infeasible as e:
            assert e.nearest is not None and e.nearest.size == full.size
            return
        raise AssertionError("it fits")

    found = {
        "place": seconds(lambda: place(cluster, full), rounds),
        "strict": seconds(lambda: pack(cluster, full, "strict"), rounds),
        "fill": seconds(lambda: pack(cluster, full, "fill"), rounds),
        "no room": seconds(no_room, rounds),
    }
    if nodes > 1:
        wide = Layout(dp=nodes // 2, pp=2, tp=DEVICES)
        found["span"] = seconds(lambda: pack(cluster, wide, "span"), rounds)
        before = pack(cluster, Layout(dp=nodes - 1, tp=DEVICES))
        found["one more"] = seconds(lambda: pack(cluster, full, keep=before), rounds)
    return found


def command(nodes: int, folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of CPU and on the clock of `planaria plan`, its table written to a file."""
    path = folder / "cluster.json"
    path.write_text(json.dumps({"nodes": [
        {"id": node.id, "address": node.addresses[0], "devices": [{"index": d.id} for d in node.devices]}
        for node in cluster_of(nodes).nodes
    ]}))  # fmt: skip
    words = ["plan", "-tp", str(DEVICES), "-dp", str(nodes), "--cluster", str(path)]
    cpu, clock = [], []
    for _ in range(rounds):
        used, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with (folder / "table").open("w") as out:
            subprocess.run([sys.executable, "-m", "planaria", *words], stdout=out, check=True)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        clock.append(time.monotonic() - since)
        cpu.append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
        assert len((folder / "table").read_text().splitlines()) == 2 + nodes * DEVICES
    return {"cpu": statistics.median(cpu), "clock": statistics.median(clock)}


PARTS = ("place", "strict", "fill", "span", "no room", "one more")


def tables(result: dict[str, Any]) -> list[report.Table]:
    planned = [
        [f"{int(nodes):,}", *(f"{1000 * entry[part]:.1f}" if part in entry else "-" for part in PARTS)]
        for nodes, entry in result["planning"].items()
    ]
    ran = [
        [f"{int(nodes):,}", f"{int(nodes) * DEVICES:,}", f"{entry['cpu']:.2f}", f"{entry['clock']:.2f}"]
        for nodes, entry in result["command"].items()
    ]
    return [
        report.Table("Planning, milliseconds of CPU, median", ["nodes", *PARTS], planned),
        report.Table("The command, seconds, median", ["nodes", "ranks", "CPU", "clock"], ran),
    ]


def picture(result: dict[str, Any]) -> str:
    series = {
        part: [(float(nodes), 1000 * entry[part]) for nodes, entry in result["planning"].items() if part in entry]
        for part in ("strict", "span", "no room", "one more")
    }
    series["the command"] = [(float(nodes), 1000 * entry["cpu"]) for nodes, entry in result["command"].items()]
    return plot.lines("Planning", "nodes", "milliseconds of CPU", series, log=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path, help="write between this page's markers, and a picture")
    options = parser.parse_args()
    result: dict[str, Any] = {"planning": {}, "command": {}}
    with tempfile.TemporaryDirectory() as folder:
        for nodes in SIZES:
            result["planning"][str(nodes)] = planning(nodes, options.rounds)
            result["command"][str(nodes)] = command(nodes, Path(folder), options.rounds)
            print(f"{nodes} nodes: {result['planning'][str(nodes)]}", file=sys.stderr)
    OUT.mkdir(exist_ok=True)
    (OUT / "placement.json").write_text(json.dumps(result, indent=1))
    lines = [f"{time.strftime('%Y-%m-%d %H:%M')}, {options.rounds} rounds."]
    print(report.as_text(tables(result), lines))
    if options.markdown:
        name = "scale-planning.svg"
        (options.markdown.parent / name).write_text(picture(result))
        content = report.as_markdown(tables(result), lines)
        report.write_between(options.markdown, "planning", f"{content}\n\n![{name}]({name})")


if __name__ == "__main__":
    main()
