"""Faults that nobody wrote for this project: the network between nodes, the machine, its disks and clock, Ray's own.

    python -m benchmarks.outside [--only NAME ...] [--resume] [--list] [--no-page]

Real servers stream 8 requests, half of them greedy and half sampled, while each fault acts, and 8 more after it
(tests/faults/outside*.py); every token is compared with that of a run without a fault. Results are saved after each
fault (benchmarks/out/outside.json), so that `--resume` plays what is missing; then docs/outside-faults.md is written.
`--only` takes beginnings of names. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.faults import outside_disk, outside_machine, outside_network, outside_ray
from tests.faults.outside import ALL, SKIPPED, Stage, play

OUT = Path(__file__).resolve().parent / "out" / "outside.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "outside-faults.md"
TITLES = {
    outside_network: "Network", outside_machine: "Machine", outside_disk: "Disks and files", outside_ray: "Ray",
}  # fmt: skip
COLUMNS = ["fault", "what was done", "outcome", "epochs", "engines", "requests", "seconds", "seen"]

Found = dict[str, dict[str, Any]]


def run(names: list[str], found: Found) -> None:
    """Play them, save each."""
    stage = Stage(Path(tempfile.mkdtemp(prefix="outside-")))
    try:
        for number, name in enumerate(names, 1):
            result = asdict(play(ALL[name], stage))
            found[name] = {**result, "when": time.strftime("%Y-%m-%d %H:%M")}
            OUT.parent.mkdir(exist_ok=True)
            OUT.write_text(json.dumps(found, indent=1))
            mark = "ok " if result["right"] else "BAD"
            print(f"{number}/{len(names)} {mark} {' '.join(row_of(name, found))}", file=sys.stderr, flush=True)
    finally:
        stage.close()


def row_of(name: str, found: Found) -> list[str]:
    result = found[name]
    note = " ".join(result["note"].split())[:200].replace("|", "/")
    outcome = result["outcome"] if result["right"] else f"**{result['outcome']}**"
    return [
        name, ALL[name].what, outcome, str(result["epochs"]), str(result["engines"]), str(result["requests"]),
        f"{result['seconds']:.1f}", note,
    ]  # fmt: skip


def tables(found: Found) -> list[report.Table]:
    """By what is harmed."""
    made = []
    for module, title in TITLES.items():
        names = [name for name, it in ALL.items() if name in found and it.act.__module__ == module.__name__]
        rows = [row_of(name, found) for name in names]
        if rows:
            made.append(report.Table(title, COLUMNS, rows))
    return made


def note_of(found: Found) -> str:
    whens = sorted(result["when"] for result in found.values())
    bad = sum(not result["right"] for result in found.values())
    skipped = sum(result["outcome"] == SKIPPED for result in found.values())
    return (
        f"{whens[0]} to {whens[-1]}: {len(found)} of {len(ALL)} faults, {bad} failed, {skipped} not possible here, "
        f"{sum(result['requests'] for result in found.values())} requests compared."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="beginnings of names")
    parser.add_argument("--resume", action="store_true", help="keep what was found, play what is missing")
    parser.add_argument("--list", action="store_true", help="name them all, play none")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:20} {it.what}" for name, it in ALL.items()))
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    found: Found = json.loads(OUT.read_text()) if OUT.exists() and (options.resume or options.only) else {}
    found = {name: result for name, result in found.items() if name in ALL}
    names = [name for name in ALL if not options.only or name.startswith(tuple(options.only))]
    if options.resume:
        names = [name for name in names if name not in found]
    run(names, found)
    made, notes = tables(found), [note_of(found)] if found else ["Nothing was played."]
    if not options.no_page:
        report.write_between(PAGE, "outside-faults", report.as_markdown(made, notes))
    print(report.as_text(made, notes))
    return 1 if any(not found[name]["right"] for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
