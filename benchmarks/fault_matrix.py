"""Every part of a deployment made to fail in every way at every moment, with real processes.

    python -m benchmarks.fault_matrix [--only mp-tp2/rank1 ...] [--resume] [--hash] [--no-page]

What is played is in `tests/faults`: 8 streams, half of them greedy and half sampled, against a small random model over
two ranks. Each cell's tokens are compared with those of a run without a fault on the same deployment. Results are saved
after each cell (benchmarks/out/fault_matrix.json), so that `--resume` goes on where a run ended; then
docs/fault-matrix.md is written from them. `--only` takes beginnings of cells' names. Exit code 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.faults import cells
from tests.faults.cells import Cell
from tests.faults.deployment import Deployment, write_model
from tests.faults.makers import make
from tests.faults.play import Result, play

OUT = Path(__file__).resolve().parent / "out" / "fault_matrix.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "fault-matrix.md"
NAMES = {"rank0": "rank 0", "rank1": "rank 1", "link": "link between nodes"}
FAULT_NAMES = {
    "kill": "SIGKILL", "stop": "SIGSTOP", "exit": "exit 0", "slow": "slow 100 x", "cut": "link cut",
    "full": "shared memory full",
}  # fmt: skip
PHASE_NAMES = {"recovery": "during recovery"}
COLUMNS = ["what fails", "how", "when", "outcome", "requests lost", "tokens lost", "detect, s", "next token, s"]
OUTCOMES = (cells.RECOVERED, cells.WENT_ON, cells.NAMED, cells.ENDED, cells.ALONE)

Found = dict[str, dict[str, Any]]


def run(names: list[str], found: Found, real: bool, model: Path) -> None:
    """Play the cells, save each."""
    by_deployment: dict[str, list[Cell]] = collections.defaultdict(list)
    for name in names:
        cell = Cell.of(name)
        by_deployment[cell.deployment].append(cell)
    done = 0
    for kind, mine in by_deployment.items():
        deployment: Deployment | None = None
        try:
            for cell in mine:
                done += 1
                try:
                    deployment = deployment or make(kind, model, real=real)
                    result = play(cell, deployment).plain()
                except Exception as e:  # a deployment that can't be made here
                    result = Result(str(cell), cells.FAILED, False, note=f"{type(e).__name__}: {e}").plain()
                found[str(cell)] = {**result, "when": time.strftime("%Y-%m-%d %H:%M"), "real": real}
                OUT.parent.mkdir(exist_ok=True)
                OUT.write_text(json.dumps(found, indent=1))
                mark = "ok  " if result["right"] else "BAD "
                print(f"{done}/{len(names)} {mark}{cell}: {line_of(result)}", file=sys.stderr, flush=True)
        finally:
            if deployment is not None:
                deployment.close()


def line_of(result: dict[str, Any]) -> str:
    parts = [result["outcome"], f"lost {result['lost']}/{result['tokens']}"]
    parts += [f"detect {seconds_of(result, 'detect')}", f"next {seconds_of(result, 'next_token')}"]
    return ", ".join([*parts, f"{result['seconds']:.1f} s", clean(result["note"])])


def seconds_of(result: dict[str, Any], what: str) -> str:
    value = result[what]
    return "-" if value is None else f"{value:.2f}"


def tables(found: Found) -> list[report.Table]:
    made = []
    for kind in cells.WHO:
        rows = []
        for cell in cells.ordered(kind):
            result = found.get(str(cell))
            if result is not None:
                rows.append(row_of(cell, result))
        if rows:
            made.append(report.Table(kind, COLUMNS, rows))
    return made


def row_of(cell: Cell, result: dict[str, Any]) -> list[str]:
    outcome = result["outcome"] if result["right"] else f"**{result['outcome']}**: {clean(result['note'])}"
    return [
        NAMES.get(cell.who, cell.who), FAULT_NAMES.get(cell.fault, cell.fault), PHASE_NAMES.get(cell.phase, cell.phase),
        outcome, str(result["lost"]), str(result["tokens"]), seconds_of(result, "detect"),
        seconds_of(result, "next_token"),
    ]  # fmt: skip


def clean(note: str) -> str:
    """One short line that a table can hold."""
    return " ".join(note.split())[:160].replace("|", "/")


def summary(found: Found) -> report.Table:
    rows = []
    for kind in cells.WHO:
        results = [result for name, result in found.items() if Cell.of(name).deployment == kind]
        if not results:
            continue
        count = collections.Counter(result["outcome"] for result in results if result["right"])
        good = [result for result in results if result["outcome"] == cells.RECOVERED]
        detect = [result["detect"] for result in good if result["detect"] is not None]
        pause = [result["next_token"] for result in good if result["next_token"] is not None]
        bad = sum(not result["right"] for result in results)
        missing = sum(not cells.senseless(cell) for cell in cells.all_cells(kind)) - len(results)
        rows.append([
            kind, str(len(results)), *(str(count[name]) for name in OUTCOMES), f"**{bad}**" if bad else "0",
            str(missing), f"{statistics.median(detect):.2f}" if detect else "-",
            f"{statistics.median(pause):.2f}" if pause else "-",
        ])  # fmt: skip
    head = [
        "deployment", "cells", *OUTCOMES, "failed", "not run", "detect, s (median)", "next token, s (median)",
    ]  # fmt: skip
    return report.Table("Summary", head, rows)


def left_out() -> report.Table:
    """Cells that make no sense, by reason; a cut of what is no link aside."""
    reasons: dict[str, set[str]] = collections.defaultdict(set)
    for kind in cells.WHO:
        for cell in cells.all_cells(kind):
            why = cells.senseless(cell)
            if why:
                reasons[why].add(f"{kind}/{cell.who}/{cell.fault}")
    rows = [[why, str(len(names)), ", ".join(sorted(names)[:4]) + (" ..." if len(names) > 4 else "")]
            for why, names in reasons.items()]  # fmt: skip
    return report.Table("Left out", ["why", "kinds", "such as"], rows)


def write_page(found: Found, page: Path = PAGE) -> None:
    whens = sorted(result["when"] for result in found.values())
    note = f"Run from {whens[0]} to {whens[-1]}." if whens else "Not run."
    if without := sum(not result["real"] for result in found.values()):
        note += f" In {without} of {len(found)} cells ranks computed no model (`--hash`)."
    report.write_between(page, "fault-matrix", report.as_markdown([summary(found), *tables(found), left_out()], [note]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="beginnings of cells' names")
    parser.add_argument("--resume", action="store_true", help="keep what was found, play what is missing")
    parser.add_argument("--hash", action="store_true", help="ranks without a model")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    found: Found = json.loads(OUT.read_text()) if OUT.exists() and (options.resume or options.only) else {}
    names = [
        str(cell) for kind in cells.WHO for cell in cells.all_cells(kind)
        if not cells.senseless(cell) and (not options.only or str(cell).startswith(tuple(options.only)))
    ]  # fmt: skip
    if options.resume:
        names = [name for name in names if name not in found]
    with tempfile.TemporaryDirectory(prefix="faults-model-") as folder:
        try:
            run(names, found, not options.hash, write_model(Path(folder), real=not options.hash))
        finally:
            if not options.no_page:
                write_page(found)
    print(report.as_text([summary(found)], []))
    return 1 if any(not result["right"] for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
