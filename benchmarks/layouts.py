"""What several ranks of one thread gain or lose on one node, beside one process with as many threads.

    python -m benchmarks.layouts [--vllm-python P] [--layouts tp2,pp2] [--rounds 5] [--markdown docs/performance.md]

One process of two threads, TP=2, PP=2 over mp and, where its python is given, vLLM's CPU build with PP=2. All are
loaded, then take turns at one stream (128 tokens in, 128 out), 32 at once (the same) and a prompt of 1,024, round
after round, in bfloat16; vLLM is stopped while others run, since it spins for a while after work. Ratios are of the
same round. The time of a start is that of a second process of a kind, from its beginning to its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import environments, machine, proc, report
from benchmarks.convert import bf16_folder
from benchmarks.drivers import Driver, DriverError, Spec, running

OUT = Path(__file__).resolve().parent / "out"
BASE = "2 threads"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2, "threads": 1},
    "pp2": {"pipeline_parallel_size": 2, "threads": 1},
}
SHAPES = {"single": [[128, 128]], "batch": [[128, 128]] * 32, "ttft": [[1024, 1]]}
TITLES = {
    "single": "one stream, tok/s", "batch": "32 at once, output tok/s", "ttft": "first token of 1,024, ms",
}  # fmt: skip
GOALS = [("tp2", BASE, "single", 0.9), ("tp2", BASE, "batch", 0.9), ("pp2", "vllm pp2", "single", 1.5),
         ("tp2", "vllm pp2", "single", 1.5)]  # fmt: skip
START = ("tp2", 6.0)  # seconds to the first token


def specs(options: argparse.Namespace) -> list[Spec]:
    folder = str(bf16_folder(options.model))
    common = {"max_model_len": 2048, "max_num_seqs": 64, "kv_bytes": 512 << 20, "kernels": "auto"}
    python = Path(sys.executable)
    found = [Spec(BASE, python, "planaria_driver.py", folder, "bf16", 0, {**common, "threads": 2})]
    for name in options.layouts.split(","):
        settings = {**common, "threads": 1, "options": LAYOUTS[name]}
        found.append(Spec(name, python, "planaria_driver.py", folder, "bf16", 0, settings))
    if options.vllm_python:
        variables, warnings = environments.vllm_variables(options.vllm_python)
        for warning in warnings:
            print(f"vllm: {warning}", file=sys.stderr)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        settings = {**common, "threads": 1, "options": {"pipeline_parallel_size": 2}}
        found.append(Spec("vllm pp2", options.vllm_python, "vllm_driver.py", folder, "bf16", 0, settings, variables))
    return found


def value(scenario: str, sample: dict[str, Any]) -> float:
    if scenario == "ttft":
        return report.first_ms(sample)
    return report.decode_rate(sample) if scenario == "single" else report.output_rate(sample)


def measure(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    result: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M"), "cpu": machine.cpu_name(), "failed": {}, "starts": {},
        "samples": {name: {} for name in SHAPES},
    }  # fmt: skip
    foreign = []
    with ExitStack() as stack:
        drivers: list[Driver] = []
        for spec in specs(options):
            try:
                if spec.name != "vllm pp2":  # the first start of a kind may compile kernels
                    with running(spec, logs):
                        pass
                driver = stack.enter_context(running(spec, logs))
            except DriverError as e:
                print(e, file=sys.stderr)
                result["failed"][spec.name] = str(e)
                continue
            result["starts"][spec.name] = driver.started["first_token"]
            drivers.append(driver)
            if spec.name != "vllm pp2":
                proc.resume(driver.pid)  # at rest it takes no time, and its ranks watch one another
        for scenario, shapes in SHAPES.items():
            samples = result["samples"][scenario]
            for number in range(options.rounds + 1):
                for driver in drivers:
                    if driver.spec.name == "vllm pp2":
                        proc.resume(driver.pid)
                    watch = proc.Foreign(driver.pid)
                    one = driver.run(1000 * number + len(shapes), shapes)
                    foreign.append(watch.percent())
                    if driver.spec.name == "vllm pp2":
                        proc.pause(driver.pid)
                    if number:  # the first round warms up
                        samples.setdefault(driver.spec.name, []).append(value(scenario, one))
    result["foreign"] = statistics.median(foreign)
    return result


def ratios(result: dict[str, Any], ours: str, other: str, scenario: str) -> list[float]:
    found = result["samples"][scenario]
    return [a / b for a, b in zip(found.get(ours, []), found.get(other, []), strict=False)]


def tables(result: dict[str, Any]) -> list[report.Table]:
    names = list(result["starts"])
    rows = []
    for scenario, title in TITLES.items():
        found = result["samples"][scenario]
        rows.append([title, *(report.spread(found.get(name, []), 0 if scenario == "ttft" else 1) for name in names)])
        rows.append(
            [f"  over {BASE}, round by round", *(report.spread(ratios(result, n, BASE, scenario), 2) for n in names)]
        )
    rows.append(["start to first token, s", *(f"{result['starts'][name]:.1f}" for name in names)])
    reached = []
    for ours, other, scenario, wanted in GOALS:
        if pairs := ratios(result, ours, other, scenario):
            ratio = statistics.median(pairs)
            label = f"{TITLES[scenario]}: {ours} / {other}"
            reached.append([label, f">= {wanted:g}", f"{ratio:.2f}", "yes" if ratio >= wanted else "no"])
    name, wanted = START
    if name in result["starts"]:
        took = result["starts"][name]
        reached.append([f"start to first token, s: {name}", f"<= {wanted:g}", f"{took:.1f}",
                        "yes" if took <= wanted else "no"])  # fmt: skip
    return [
        report.Table("Layouts", ["", *names], rows), report.Table("Goals", ["", "goal", "measured", "met"], reached)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=OUT / "layouts.json")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--measured", type=Path, help="tables of an earlier run's JSON instead of measuring")
    options = parser.parse_args()
    if options.vllm_python:
        options.vllm_python = options.vllm_python.absolute()
    if options.measured:
        result = json.loads(options.measured.read_text())
    else:
        logs = OUT / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        result = measure(options, logs)
        options.json.write_text(json.dumps(result, indent=1))
    lines = [
        f"{result['when']}, {result['cpu']}, {os.cpu_count()} cores; median (lowest-highest) of the rounds; other "
        f"programs used {result['foreign']:.0f}% of a core in the median turn."
    ]
    print(report.as_text(tables(result), lines))
    if options.markdown:
        report.write_between(options.markdown, "layouts", report.as_markdown(tables(result), lines))


if __name__ == "__main__":
    main()
