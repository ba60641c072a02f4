"""What memory the engines of a node take together, when weights are there once.

    python -m benchmarks.memory [--models smollm2,FOLDER] [--goals 2,1.3] [--engines 1,4] [--tp 1] [--markdown PAGE]

For each number of engines a server is started, and each engine answers a few requests. Then all memory of its
processes: the file of shared weights; and everything else, proportionally (each page is counted once, dealt over the
processes that have it), but for files of KV. What ranks within an engine's process have of KV is of those few tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import proc, report
from benchmarks.deployment import Server
from benchmarks.recovery import Load, streams

OUT = Path(__file__).resolve().parent / "out"
MIB = 1 << 20
FILES = "/memfd:planaria-weights", "/memfd:planaria-kv"
REQUESTS = Load(8, 32)  # for each engine


def weights(root: int) -> int:
    """Bytes of the file that a server has for them."""
    for fd in Path(f"/proc/{root}/fd").iterdir():
        if FILES[0] in str(fd.readlink()):
            return fd.stat().st_blocks * 512
    return 0


def everything_else(root: int) -> int:
    """Bytes of a tree of processes, but for mappings of these files."""
    found = 0
    for pid in proc.tree(root):
        counts = True
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            fields = line.split()
            if line.startswith("Pss:"):
                found += (int(fields[1]) << 10) * counts
            elif "-" in fields[0] and not fields[0].endswith(":"):
                counts = len(fields) < 6 or fields[5] not in FILES
    return found


def measure(model: str, engines: int, tp: int) -> dict[str, Any]:
    options = ["--kv-cache-memory", "64MiB", "--max-model-len", "1024", "-tp", str(tp), "-dp", str(engines)]
    with Server(model, *options) as server:
        root = server.process.pid
        asyncio.run(streams(server, REQUESTS.prompts(0) * engines, 8))
        return {"engines": engines, "weights": weights(root), "else": everything_else(root)}


def rows(model: str, found: list[dict[str, Any]], goal: str) -> list[list[str]]:
    totals = [each["weights"] + each["else"] for each in found]
    return [
        [
            Path(model).name, str(each["engines"]), f"{each['weights'] / MIB:,.0f}", f"{each['else'] / MIB:,.0f}",
            f"{total / MIB:,.0f}", f"{total / totals[0]:.2f}", f"<= {goal}",
        ]
        for each, total in zip(found, totals, strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="smollm2")
    parser.add_argument("--goals", default="2", help="of each model, over the first number of engines")
    parser.add_argument("--engines", default="1,4")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="write the table between this page's markers")
    options = parser.parse_args()
    made: list[list[str]] = []
    found: dict[str, list[dict[str, Any]]] = {}
    for model, goal in zip(options.models.split(","), options.goals.split(","), strict=True):
        found[model] = [measure(model, int(engines), options.tp) for engines in options.engines.split(",")]
        made += rows(model, found[model], goal)
    OUT.mkdir(exist_ok=True)
    (OUT / "memory.json").write_text(json.dumps(found, indent=1))
    head = ["", "engines", "shared weights, MiB", "all else but KV", "together", "over the first", "goal"]
    page = [report.Table("Memory of the engines of one node", head, made)]
    line = f"{time.strftime('%Y-%m-%d %H:%M')}; after a few requests to each engine."
    print(report.as_text(page, [line]))
    if options.markdown:
        report.write_between(options.markdown, "memory", report.as_markdown(page, [line]))


if __name__ == "__main__":
    main()
