"""How long from the start of `planaria serve` until the first token of a request, with empty caches and later.

    python -m benchmarks.starts [--model smollm2] [--first 3] [--later 7] [--llama-cpp-python P] [--markdown PAGE]

In turns with llama.cpp, in its own process, where there is one: from the start of Python to its first token. Beside the
seconds: CPU of all processes until then, by which a busy machine can be told from a slow start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import planaria
from benchmarks import proc, report
from benchmarks.deployment import Server
from planaria.checkpoint import resolve_checkpoint

OUT = Path(__file__).resolve().parent / "out"
PROMPT = list(range(1000, 1016))
FIRST, LATER, TIMES = 3.0, 1.0, 1.3  # seconds; or so many times llama.cpp's, where that is more
LLAMA = """
import sys, llama_cpp
llama = llama_cpp.Llama(sys.argv[1], n_threads=2, verbose=False)
next(llama.generate(eval(sys.argv[2]), temp=0.0))
print(flush=True)
"""


def start(model: str, cache: str | None) -> tuple[float, float]:
    """Seconds to the first token, and CPU seconds. cache: a folder for what is compiled; None: that of everybody."""
    before = os.environ.get("PLANARIA_CACHE")
    if cache is not None:
        os.environ["PLANARIA_CACHE"] = cache
    began = time.perf_counter()
    try:
        with Server(model) as server:
            body = server.body(PROMPT, 1)
            with server.http.stream("POST", server.url + "/v1/completions", json=body) as answer:
                next(line for line in answer.iter_lines() if line.startswith("data: {"))
            return time.perf_counter() - began, proc.cpu_seconds(server.process.pid)
    finally:
        if cache is not None:
            del os.environ["PLANARIA_CACHE"]
            os.environ.update({"PLANARIA_CACHE": before} if before is not None else {})


def start_peer(python: Path, file: str) -> float:
    began = time.perf_counter()
    command = [str(python), "-c", LLAMA, file, repr(PROMPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{python} has given no token")
        return time.perf_counter() - began


def compiled() -> str:
    """Is the package's bytecode there, as after an installation?"""
    there = Path(cache_from_source(str(planaria.__file__))).exists()
    return "bytecode is there" if there else "each start compiles the package: python -m compileall planaria"


def tables(result: dict[str, Any]) -> list[report.Table]:
    rows, goals = [], []
    peer = result["llama.cpp"]
    for name, goal in (("first", FIRST), ("later", LATER)):
        if found := result[name]:
            seconds, cpu = (list(values) for values in zip(*found, strict=True))
            rows.append([f"{name} start", report.spread(seconds, 2), report.spread(cpu, 2)])
            if name == "later" and peer:
                goal = max(goal, TIMES * statistics.median(peer))
            middle = statistics.median(seconds)
            met = "yes" if middle <= goal else "no"
            goals.append([f"{name} start to first token, s", f"<= {goal:.2f}", f"{middle:.2f}", met])
    if peer:
        rows.append(["llama.cpp in process", report.spread(peer, 2), ""])
    return [
        report.Table("Start to first token", ["", "s", "CPU until then, s"], rows),
        report.Table("Goals", ["", "goal", "measured", "met"], goals),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--first", type=int, default=3, help="starts with empty caches")
    parser.add_argument("--later", type=int, default=7, help="others")
    parser.add_argument("--llama-cpp-python", type=Path, help="python of the environment with llama-cpp-python")
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    result: dict[str, Any] = {"first": [], "later": [], "llama.cpp": []}
    for _ in range(options.first):
        with tempfile.TemporaryDirectory() as cache:
            result["first"].append(start(options.model, cache))
        print(f"first start: {result['first'][-1]}", file=sys.stderr)
    start(options.model, None)  # that caches are filled, and files in memory
    for _ in range(options.later):
        result["later"].append(start(options.model, None))
        print(f"later start: {result['later'][-1]}", file=sys.stderr)
        if options.llama_cpp_python is not None:
            file = resolve_checkpoint(options.model).path
            result["llama.cpp"].append(start_peer(options.llama_cpp_python.absolute(), file))
    OUT.mkdir(exist_ok=True)
    (OUT / "starts.json").write_text(json.dumps(result, indent=1))
    note = f"{time.strftime('%Y-%m-%d %H:%M')}; {options.model}; median (low-high); {compiled()}."
    made = tables(result)
    print(report.as_text(made, [note]))
    if options.markdown:
        report.write_between(options.markdown, "starts", report.as_markdown(made, [note]))


if __name__ == "__main__":
    main()
