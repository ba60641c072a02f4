"""What the parallel layer does, row by row, and the tests that show each: `python -m tests.rows` prints the table.

A test says which rows it shows by `@pytest.mark.row("P1", "X8")`. Files are read, not imported. A row that no test
shows says so in the table, and `tests/pure/test_rows.py` fails.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "rows.md"

PARTS = {
    "P": "Parallel configuration",
    "X": "Executors",
    "R": "Ray",
    "D": "Data-parallel engines on Ray",
    "E": "Expert load balancing",
}

ROWS = {
    "P1": "tensor, pipeline and prefill context degrees; ranks are numbered tensor first, pipeline last",
    "P2": "data-parallel size, local size, rank, first rank of a node, index in the fleet",
    "P3": "where engines of several nodes meet; ports are bound before anybody is told of them",
    "P4": "who starts engines: processes or Ray",
    "P5": "external balancing (a server for each engine) and hybrid balancing (a server for each node)",
    "P6": "experts spread over all ranks instead of sliced by each",
    "P7": "load balancing of experts, and what it needs",
    "P8": "where experts are placed: linear, or round robin",
    "P9": "how tokens get to their experts: six exchanges by one registry",
    "P10": "ranks that load weights at a time, of an engine and of a node",
    "P11": "the plain all-reduce in place of the fast one",
    "P12": "steps in micro-batches that overlap, above thresholds",
    "P13": "over what engines synchronise",
    "P14": "Ray workers under nsight",
    "P15": "a user's runtime environment and placement group on Ray",
    "P16": "which back end runs ranks when none is named",
    "P17": "classes of the user's in place of the worker, of what drafts, and beside the worker",
    "P18": "several nodes without Ray, and each node's part",
    "P19": "decode context parallel",
    "P20": "interleave of tokens over context ranks",
    "P21": "several API processes over the same engines",
    "P22": "offline data parallel told by the environment",
    "P23": "sequence parallel experts: no token is computed twice",
    "P24": "a hash of what shapes the computation; ranks that differ are refused by field",
    "P25": "agreement of engines: who isn't done, and the least KV memory",
    "P26": "ranks that an outer launcher starts, of one engine or several; what it starts again goes on",
    "P27": "steps planned ahead",
    "X1": "one rank in the same process, nothing serialised",
    "X2": "a process for each rank, on one node or several",
    "X3": "an actor for each rank, queues for control",
    "X4": "steps through a compiled graph of Ray's",
    "X5": "an outer launcher's processes",
    "X6": "a launcher or a worker by import path",
    "X7": "results are futures with a time-out, of one rank or joined over all",
    "X8": "how many steps are in flight",
    "X9": "a method on every rank, ordered with steps, answers in rank order",
    "X10": "a failure anywhere is told with rank, phase and traceback; a callback when the engine gives up",
    "X11": "shutdown can be repeated, and leaves nothing",
    "R1": "Ray is an extra, imported where it is used",
    "R2": "a cluster that is there is joined, else one is started",
    "R3": "a device for each bundle, on the node that was planned",
    "R4": "whose placement group is used, and what is left alone in it",
    "R5": "a cluster that is too small now is waited for, one that breaks a rule isn't",
    "R6": "a tensor group over several nodes is warned of; a driver that must be inside is",
    "R7": "the order of bundles, or the user's own",
    "R8": "names of actors",
    "R9": "workers begin light, and get local rank and devices once all are known",
    "R10": "a fraction of a device for a worker",
    "R11": "four classes of environment variables, one order of precedence",
    "R12": "addresses of nodes, and a check that each reaches each",
    "R13": "an actor's end is seen, whatever it was",
    "R14": "token authentication stays on",
    "D1": "an actor and a placement group for each engine, all or none",
    "D2": "how engines are packed on nodes: strict, fill, span",
    "D3": "which node comes first, and what is said when there is too little room",
    "D4": "placement groups of the user's for engines",
    "D5": "engines near and far behind the same client, each with an id of its own where KV is handed over",
    "D6": "growing",
    "D7": "shrinking loses nothing",
    "D8": "both, dense and with shared experts",
    "D9": "balancing by tokens and KV",
    "E1": "steps of load that are kept",
    "E2": "steps between rearrangements",
    "E3": "replicas of hot experts",
    "E4": "how even load is, logged where asked",
    "E5": "experts move beside running steps",
    "E6": "the policy: hierarchical where groups divide nodes",
}

NOT_YET: set[str] = set()  # rows that nothing does
OTHERWISE = {  # than in vLLM: what takes the place of a part of a row, and the decision that says why
    "P1": ("keys stay where they live, and no zigzag is needed", 53),
    "P3": ("who listens at a port that nobody named has bound it before it is told, so none is tried again", 15),
    "P5": ("pods of one engine relay to the first one's server", 57),
    "P11": ("the fast sum is in rank order, so batch-invariant mode keeps it", 12),
    "P13": ("engines that share nothing never meet, lanes have one plan", 17),
    "P25": ("who must agree is one engine; a rank always says bytes", 69),
    "X4": ("a plan says nothing that some stage could be spared, and all get the same", 59),
}


def row_key(row: str) -> tuple[int, int]:
    return list(PARTS).index(row[0]), int(row[1:])


@cache
def shown() -> dict[str, list[str]]:
    """By row: its tests, as path::name. Raises ValueError for a row that doesn't exist."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text()
        if "mark.row(" not in source:
            continue
        where = path.relative_to(TESTS.parent).as_posix()
        for name, rows in _marked(ast.parse(source)):
            for row in rows:
                if row not in ROWS:
                    raise ValueError(f"{where}::{name} is marked with row {row}, which tests/rows.py doesn't have")
                found.setdefault(row, []).append(f"{where}::{name}")
    return found


def _marked(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.row":
                    yield node.name, [ast.literal_eval(arg) for arg in mark.args]


def page() -> str:
    tests = shown()
    lines = [
        "# Row by row", "",
        "What the parallel layer does, in the words of its options, and the tests that show each. This page is made",
        "from markers in the tests (`python -m tests.rows --write`); `pytest tests/pure/test_rows.py` fails where it",
        "isn't current, and where a row has no test. Where something else takes the place of what vLLM does, the row",
        "says what, and the decision why nothing is lost.",
    ]  # fmt: skip
    for letter, title in PARTS.items():
        lines += ["", f"## {letter}. {title}", "", "| row | | shown by |", "|---|---|---|"]
        for row in sorted((row for row in ROWS if row[0] == letter), key=row_key):
            by = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in tests.get(row, ())) or "**no test**"
            lines.append(f"| {row} | {ROWS[row]}{_otherwise(row)} | {by} |")
    return "\n".join(lines) + "\n"


def _otherwise(row: str) -> str:
    """Raises ValueError where there is no such decision."""
    if row not in OTHERWISE:
        return ""
    words, number = OTHERWISE[row]
    (decision,) = (PAGE.parent / "adr").glob(f"{number:04}-*.md")
    return f". Otherwise than in vLLM: {words} ([why](adr/{decision.name}))"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
