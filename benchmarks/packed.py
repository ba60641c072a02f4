"""GGUF's packed kinds beside llama.cpp, the same files, in one run: how near each is to the unpacked weights in
float32, how fast, how much memory its weights take.

    python -m benchmarks.packed --llama-cpp-python P [--kinds Q4_K_M,Q6_K] [--only kl|speed] [--billion] [--isa generic]
        [--threads 2] [--cpu-time] [--scenarios single,prompt,batch]
    python -m benchmarks.packed --billion --only start|shares [--rounds 3] [--llama-cpp-python P]

SmolLM2 is packed anew by llama.cpp's quantiser. kl: the mean Kullback-Leibler divergence of next tokens over 1,000
positions of docs/ARCHITECTURE.md. speed: both engines in turn, medians. --cpu-time: tokens for each second of CPU time
(with --threads 1) over short runs, the best turn, for a machine that others keep busy. --billion: a random model of
1.07 billion weights in Q4_K_M, written here with the gguf package. --isa generic: our kernels for AVX2 (give an
environment in which llama.cpp was built for AVX2 too). start: seconds from the command `planaria serve` to its first
token, after a first start. shares: what one stream reads of weights a second, of what the machine can read in the same
rounds, packed and unpacked, and what llama.cpp does. Files are made once, in benchmarks/out/packed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks import proc
from benchmarks.deployment import Server
from benchmarks.drivers import ROOT, Driver, Spec
from benchmarks.machine import read_bandwidth
from benchmarks.replace import first_token
from planaria.checkpoint import Checkpoint, resolve_checkpoint
from planaria.kernels.blocks import KINDS
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.ops import Batch
from planaria.layers.build import build
from planaria.loader import WeightSource
from planaria.models import model_config

OUT = Path(__file__).resolve().parent / "out" / "packed"
PEER = Path(__file__).resolve().parent / "peers" / "llama_cpp_packed.py"
MADE = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q3_K_M", "Q2_K", "IQ4_NL", "IQ4_XS")
POSITIONS, PASS = 1000, 250
SCENARIOS = {"single": [[128, 64]], "prompt": [[1024, 1]], "batch": [[128, 64]] * 32}
SHORT = {"single": [[8, 32]], "prompt": [[1024, 1]], "batch": [[32, 16]] * 32}  # by CPU time, and of shares
Array = npt.NDArray[Any]
Shapes = dict[str, list[list[int]]]
Row = dict[str, Any]


def made(kind: str, python: Path, source: str) -> Path:
    """SmolLM2 in a kind."""
    path = OUT / f"smollm2-{kind}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        subprocess.run([python, PEER, "quantise", source, part, kind], check=True)
        part.rename(path)
    return path


def billion() -> Path:
    """A Llama of 16 layers with random weights, its matrices in the kinds of a Q4_K_M file; SmolLM2's tokenizer."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    path = OUT / "random-1b-Q4_K_M.gguf"
    if path.exists():
        return path
    hidden, inner, layers, keys, vocab = 2048, 8192, 16, 512, 49152
    sizes = {
        "llama.block_count": layers, "llama.embedding_length": hidden, "llama.feed_forward_length": inner,
        "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8, "llama.rope.dimension_count": 64,
        "general.file_type": 15,
    }  # fmt: skip
    writer, rng = GGUFWriter(path.with_suffix(".part"), "llama"), np.random.default_rng(0)
    for field in GGUFReader(resolve_checkpoint("smollm2").files[0]).fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inside = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, sizes.get(field.name, field.contents()), field.types[0], inside)

    def add(name: str, rows: int, columns: int, kind: str) -> None:
        form = KINDS[kind]
        data = rng.integers(0, 256, (rows, columns // form.elements, form.nbytes), np.uint8)
        places = {"q6_k": {208: 3e-5}, "q4_k": {0: 1e-4, 2: 7.5e-4}}[kind]
        for at, value in places.items():
            data[..., at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=GGMLQuantizationType[kind.upper()])

    add("token_embd.weight", vocab, hidden, "q6_k")
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(layers):
        more = "q6_k" if i < layers // 8 or i >= 7 * layers // 8 or i % 3 == 2 else "q4_k"  # as llama.cpp's
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(hidden, np.float32))
        for name, rows, columns, kind in (
            ("attn_q", hidden, hidden, "q4_k"), ("attn_k", keys, hidden, "q4_k"), ("attn_v", keys, hidden, more),
            ("attn_output", hidden, hidden, "q4_k"), ("ffn_gate", inner, hidden, "q4_k"),
            ("ffn_up", inner, hidden, "q4_k"), ("ffn_down", hidden, inner, more),
        ):  # fmt: skip
            add(f"blk.{i}.{name}.weight", rows, columns, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)
    return path


def logits(checkpoint: Checkpoint, quantization: str, dtype: str, isa: str | None, ids: Array) -> tuple[Array, int]:
    """Of each position, and the bytes of the weights."""
    ops = CpuOps(dtype, 2, isa=isa)
    config = model_config(checkpoint.config, checkpoint.generation_config)
    with WeightSource(checkpoint) as source:
        model = build(config, source, ops, quantization=quantization, max_positions=len(ids))
    blocks = -(-len(ids) // 16)
    batch = Batch(PASS, 1, blocks, PASS)
    model.make_kv(blocks, 16)
    run, found = ops.compile(model.forward, batch), []
    batch.block_table[0] = np.arange(blocks)
    for first in range(0, len(ids), PASS):
        at = np.arange(first, min(first + PASS, len(ids)))
        n = len(at)
        batch.tokens[:n], batch.positions[:n], batch.slots[:n], batch.sample_index[:n] = ids[at], at, at, range(n)
        batch.seq_start[:2], batch.seq_len[0], batch.counts[:3] = (0, n), first + n, (n, 1, n)
        found.append(np.array(run()))
    ops.close()
    return np.concatenate(found), model.weight_bytes


def divergence(reference: Array, found: Array) -> float:
    """Mean over positions of KL(reference || found), nats."""

    def logs(values: Array) -> Array:
        wide = values.astype(np.float64)
        wide -= wide.max()
        return np.asarray(wide - np.log(np.exp(wide).sum()))

    pairs = ((logs(a), logs(b)) for a, b in zip(reference, found, strict=True))
    return statistics.fmean(float((np.exp(a) * (a - b)).sum()) for a, b in pairs)


def closeness(path: Path, python: Path, isa: str | None) -> Row:
    checkpoint = resolve_checkpoint(str(path))
    tokenizer = Tokenizer.from_file(f"{checkpoint.tokenizer_dir}/tokenizer.json")
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text).ids[:POSITIONS], np.int32)
    reference, _ = logits(checkpoint, "none", "float32", isa, ids)
    row: Row = {}
    for dtype in ("bfloat16", "float32"):
        found, size = logits(checkpoint, "keep", dtype, isa, ids)
        row |= {dtype: divergence(reference, found), "MB": size / 1e6}
    np.save(OUT / "ids.npy", ids)
    subprocess.run([python, PEER, "logits", path, OUT / "ids.npy", OUT / "logits.npy"], check=True)
    row["llama.cpp"] = divergence(reference, np.load(OUT / "logits.npy"))
    return row | {"file MB": path.stat().st_size / 1e6}


def speed(path: Path, python: Path, isa: str | None, rounds: int, threads: int, shapes: Shapes, cpu_time: bool) -> Row:
    """Tokens a second of both engines, in turn."""
    settings = {"threads": threads, "max_num_seqs": 32, "kv_bytes": 1 << 29, "max_model_len": 2048}
    ours = {"kernels": "native", "isa": isa}
    specs = [
        Spec("planaria", Path(sys.executable), "planaria_driver.py", str(path), "", 0, settings | ours),
        Spec("llama.cpp", python, "llama_cpp_driver.py", str(path), "", 0, settings),
    ]
    row: Row = {}
    began = time.monotonic()
    engines = []
    for spec in specs:
        engines.append(Driver(spec, OUT))
        row[f"{spec.name} start s"], began = time.monotonic() - began, time.monotonic()
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds):
        for scenario, wanted in shapes.items():
            for engine in engines:
                with engine.awake():
                    before = proc.cpu_seconds(engine.pid)
                    sample = engine.run(turn, wanted)
                    used = proc.cpu_seconds(engine.pid) - before
                took = tokens(scenario, sample) / used if cpu_time else rate(scenario, sample)
                times.setdefault((engine.spec.name, scenario), []).append(took)
    for engine in engines:
        engine.close()
    for scenario in shapes:
        both = [(max if cpu_time else statistics.median)(times[spec.name, scenario]) for spec in specs]
        row |= {f"{scenario} tok/s": both[0], f"{scenario} llama.cpp": both[1], f"{scenario} ratio": both[0] / both[1]}
    return row


def start(path: Path, rounds: int) -> Row:
    """Seconds, medians of the starts after the first."""
    found: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        began = time.monotonic()
        with Server(str(path), "--max-model-len", "2048") as server:
            ready = time.monotonic() - began
            asyncio.run(first_token(server, [1000] * 16))
            found.append((ready, time.monotonic() - began))
    first, *later = found
    ready, token = (statistics.median(times) for times in zip(*later, strict=True))
    return {"first start s": first[0], "start s": ready, "start and token s": token}


def shares(path: Path, python: Path | None, isa: str | None, rounds: int, threads: int) -> Row:
    """Of the bandwidth of the same round, medians; llama.cpp's too, where there is one."""
    row: Row = {}
    settings = {"threads": threads, "max_num_seqs": 4, "kv_bytes": 1 << 28, "max_model_len": 512}
    kinds, specs = {"float32": "none", "bfloat16": "none", "packed": "auto"}, []
    for name, weights in kinds.items():
        dtype = name if weights == "none" else "bfloat16"
        ours = {"kernels": "native", "isa": isa, "dtype": dtype, "options": {"quantization": weights}}
        specs.append(Spec(name, Path(sys.executable), "planaria_driver.py", str(path), "", 0, settings | ours))
    if python is not None:
        specs.append(Spec("llama.cpp", python, "llama_cpp_driver.py", str(path), "", 0, settings))
    for spec in specs:
        engine, limits, rates = Driver(spec, OUT), list[float](), list[float]()
        size = engine.started["about"].get("weight_bytes", path.stat().st_size) / 1e9
        for turn in range(rounds):
            limits.append(statistics.median(read_bandwidth(threads)))
            with engine.awake():
                rates.append(rate("single", engine.run(turn, SHORT["single"])) * size)
        engine.close()
        of_limit = statistics.median(a / b for a, b in zip(rates, limits, strict=True))
        row |= {f"{spec.name} GB/s": statistics.median(rates), f"{spec.name} of the limit": of_limit}
    return row | {"limit GB/s": statistics.median(limits)}


def tokens(scenario: str, sample: dict[str, Any]) -> int:
    """Of the prompt, or all that came."""
    return SCENARIOS[scenario][0][0] if scenario == "prompt" else sum(n for _, n in sample["events"])


def rate(scenario: str, sample: dict[str, Any]) -> float:
    """single: tokens a second after the first; prompt: of the prompt; batch: all that came."""
    seconds, events = sample["seconds"], sample["events"]
    first = events[0] if scenario == "single" else [0.0, 0]
    return float((tokens(scenario, sample) - first[1]) / (seconds - first[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp-python", type=Path)
    parser.add_argument("--kinds", default=",".join(MADE))
    parser.add_argument("--only", choices=["kl", "speed", "start", "shares"])
    parser.add_argument("--billion", action="store_true")
    parser.add_argument("--isa")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    args = parser.parse_args()
    shapes = {name: (SHORT if args.cpu_time else SCENARIOS)[name] for name in args.scenarios.split(",")}
    OUT.mkdir(parents=True, exist_ok=True)
    alone = args.only in ("start", "shares")
    if not alone and args.llama_cpp_python is None:
        parser.error("--llama-cpp-python is needed")
    python = (args.llama_cpp_python or Path(sys.executable)).absolute()
    source = resolve_checkpoint("smollm2").files[0]
    if args.billion:
        files = [billion()]
    else:
        files = [Path(source)] if alone else [made(kind, python, source) for kind in args.kinds.split(",")]
    rows: dict[str, Row] = {}
    for path in files:
        row = {} if args.only not in ("kl", None) or args.billion else closeness(path, python, args.isa)
        if args.only == "start":
            row = start(path, args.rounds)
        elif args.only == "shares":
            row = shares(path, args.llama_cpp_python, args.isa, args.rounds, args.threads)
        elif args.only != "kl":
            row |= speed(path, python, args.isa, args.rounds, args.threads, shapes, args.cpu_time)
        if not rows:
            print("| file | " + " | ".join(row) + " |\n|---|" + "--:|" * len(row))
        rows[path.stem] = row
        print(f"| {path.stem} | " + " | ".join(f"{value:.3g}" for value in row.values()) + " |", flush=True)
    (OUT / "packed.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
