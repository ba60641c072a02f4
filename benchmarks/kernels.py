"""The CPU kernels on a random model of SmolLM2-135M's shapes, beside what the machine can do.

    python benchmarks/kernels.py [--threads N] [--repeat N] [--cases bf16-1,q4-1,...] [--torch] [--json FILE]

Each figure is the median of several steps of the whole tape (embedding to logits); 30 layers of weights pass
through the caches each step. The machine's limits are measured in the same run: the bandwidth of reading 1 GiB with
the same threads, and F.linear and oneDNN with weights packed once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.ops import Batch, Quantized

HIDDEN, INTER, LAYERS, VOCAB, HEADS, KV_HEADS, DIM = 576, 1536, 30, 49152, 9, 3, 64
SHAPES = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INTER, HIDDEN), (HIDDEN, INTER)]
LAYER_WEIGHTS = sum(n * k for n, k in SHAPES)
BITS = {"bf16": 16.0, "f32": 32.0, "q4_1": 5.0, "q4_0": 4.5, "q8_0": 8.5}


def times_ms(step: Callable[[], object], repeat: int) -> list[float]:
    """Sorted."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(t * 1e3 for t in times)


def median_ms(step: Callable[[], object], repeat: int) -> float:
    return statistics.median(times_ms(step, repeat))


def quantised(kind: str, n: int, k: int, generator: torch.Generator) -> Quantized:
    size, head = {"q4_1": (20, 4), "q4_0": (18, 2), "q8_0": (34, 2)}[kind]
    data = torch.randint(0, 256, (n, k // 32, size), dtype=torch.uint8, generator=generator)
    span = {"q4_1": 8, "q4_0": 8, "q8_0": 128}[kind]
    scale = torch.rand(n, k // 32, generator=generator) * (0.06 / span) + 0.01 / span
    heads = [scale] if head == 2 else [scale, -7.5 * scale]
    data[..., :head] = torch.stack(heads, -1).half().view(torch.uint8)
    return Quantized(kind, data.view(n, -1).numpy(), (n, k))


def build(ops: Any, layers: str, head: str, blocks: int, tokens: int = 2048) -> Callable[[Any], Any]:
    g = torch.Generator().manual_seed(0)

    def weight(kind: str, n: int, k: int) -> Any:
        if kind in ("bf16", "f32"):
            return ops.pack((torch.randn(n, k, generator=g) * 0.04).numpy())
        return ops.pack(quantised(kind, n, k, g))

    angle = torch.arange(tokens)[:, None] * torch.logspace(0, -4, DIM // 2)
    rope = ops.rope_table(torch.cos(angle).numpy(), torch.sin(angle).numpy())
    table = weight(head, VOCAB, HIDDEN)
    stack = [
        (
            [weight(layers, n, k) for n, k in SHAPES],
            ops.vector(np.ones(HIDDEN, np.float32)),
            ops.vector(np.ones(HIDDEN, np.float32)),
            ops.kv_layer(blocks, 16, KV_HEADS, DIM),
        )
        for _ in range(LAYERS)
    ]
    last = ops.vector(np.ones(HIDDEN, np.float32))

    def forward(o: Any) -> Any:
        x = o.embed(table)
        for (qkv, out, gate_up, down), norm1, norm2, kv in stack:
            q = o.rope_store(o.linear(o.rms_norm(x, norm1, 1e-5), qkv), kv, rope, HEADS, KV_HEADS, DIM)
            x = o.linear(o.attend(q, kv, HEADS, KV_HEADS, DIM, DIM**-0.5), out, residual=x)
            x = o.linear(o.gated(o.linear(o.rms_norm(x, norm2, 1e-5), gate_up)), down, residual=x)
        return o.logits(o.rms_norm(o.take(x), last, 1e-5), table)

    return forward


def fill(batch: Batch, sequences: int, context: int, new: int, samples: int) -> None:
    """`sequences` of `new` tokens each after `context` tokens in the cache; blocks dealt round robin."""
    per = (context + new + 15) // 16
    rng = np.random.default_rng(0)
    t = 0
    for s in range(sequences):
        batch.block_table[s, :per] = np.arange(per) * sequences + s
        batch.seq_start[s], batch.seq_len[s], batch.seq_row[s] = t, context + new, s
        for p in range(context, context + new):
            batch.tokens[t], batch.positions[t] = rng.integers(VOCAB), p
            batch.slots[t] = int(batch.block_table[s, p // 16]) * 16 + p % 16
            t += 1
    batch.seq_start[sequences] = t
    batch.sample_index[:samples] = np.arange(t - samples, t)
    batch.counts[:3] = t, sequences, samples


CASES = {  # name: layers, head, sequences, context, new tokens, samples
    "bf16-1": ("bf16", "bf16", 1, 200, 1, 1),
    "bf16-8": ("bf16", "bf16", 8, 200, 1, 8),
    "bf16-32": ("bf16", "bf16", 32, 200, 1, 32),
    "bf16-64": ("bf16", "bf16", 64, 200, 1, 64),
    "bf16-128p": ("bf16", "bf16", 1, 0, 128, 1),
    "bf16-512p": ("bf16", "bf16", 1, 0, 512, 1),
    "bf16-1024p": ("bf16", "bf16", 1, 0, 1024, 1),
    "q4-1": ("q4_1", "q8_0", 1, 200, 1, 1),
    "q4-8": ("q4_1", "q8_0", 8, 200, 1, 8),
    "q4-32": ("q4_1", "q8_0", 32, 200, 1, 32),
    "q4-1024p": ("q4_1", "q8_0", 1, 0, 1024, 1),
    "q8-1": ("q8_0", "q8_0", 1, 200, 1, 1),
    "q8-32": ("q8_0", "q8_0", 32, 200, 1, 32),
    "q8-1024p": ("q8_0", "q8_0", 1, 0, 1024, 1),
    "q4_0-1": ("q4_0", "q4_0", 1, 200, 1, 1),
    "f32-1": ("f32", "f32", 1, 200, 1, 1),
    "f32-32": ("f32", "f32", 32, 200, 1, 32),
    "f32-1024p": ("f32", "f32", 1, 0, 1024, 1),
}


def bandwidth(threads: int, repeat: int) -> float:
    """GB/s of reading 1 GiB (a sum of int64 in torch, one slice a thread)."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    torch.set_num_threads(threads)
    return data.numel() * 8 / (median_ms(lambda: data.sum(), repeat) * 1e-3) / 1e9


def linear_ms(rows: int, packed: bool, threads: int, repeat: int) -> float:
    """All linear layers and the head for `rows` rows through torch, weights cold."""
    torch.set_num_threads(threads)
    steps = []
    for n, k in [*SHAPES * LAYERS, (VOCAB, HIDDEN)]:
        x, w = torch.randn(rows, k).bfloat16(), torch.randn(n, k).bfloat16()
        if packed:
            p = torch.ops.mkldnn._reorder_linear_weight(w, rows)
            steps.append(lambda x=x, p=p: torch.ops.mkldnn._linear_pointwise(x, p, None, "none", [], ""))
        else:
            steps.append(lambda x=x, w=w: torch.nn.functional.linear(x, w))
    with torch.inference_mode():
        return median_ms(lambda: [s() for s in steps], repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--cases", default="")
    parser.add_argument("--torch", action="store_true", help="measure F.linear and oneDNN too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache-dir", type=Path)
    args = parser.parse_args()
    limit = bandwidth(args.threads, 7)
    report: dict[str, Any] = {"threads": args.threads, "read_gb_s": round(limit, 1), "cases": {}}
    print(f"{args.threads} threads; reading 1 GiB: {limit:.1f} GB/s")
    print(f"{'case':12} {'ms':>8} {'best':>8} {'read MB':>8} {'GB/s':>6} {'of limit':>8} {'GFLOP/s':>8}")
    wanted = args.cases.split(",") if args.cases else list(CASES)
    made: dict[tuple[str, str, str], tuple[CpuOps, Any]] = {}
    for name in wanted:
        layers, head, sequences, context, new, samples = CASES[name]
        dtype = "float32" if layers == "f32" else "bfloat16"
        start = time.perf_counter()
        if (dtype, layers, head) not in made:
            for ops, _ in made.values():
                ops.close()
            made.clear()
            ops = CpuOps(dtype, args.threads, args.cache_dir)
            made[dtype, layers, head] = ops, build(ops, layers, head, 64 * 17)
            print(f"  ({layers}/{head}: kernels and weights in {time.perf_counter() - start:.1f} s)")
        ops, forward = made[dtype, layers, head]
        batch = Batch(max(64, sequences * new), 64, 128, 64)
        fill(batch, sequences, context, new, samples)
        run = ops.compile(forward, batch)
        repeat = args.repeat if sequences * new < 100 else max(3, args.repeat // 4)
        took = times_ms(run, repeat)
        ms = statistics.median(took)
        assert bool(np.isfinite(run()).all())
        read = (LAYER_WEIGHTS * LAYERS * BITS[layers] + VOCAB * HIDDEN * BITS[head]) / 8e6
        flops = 2 * (LAYER_WEIGHTS * LAYERS * sequences * new + VOCAB * HIDDEN * samples)
        rate = read / ms
        print(
            f"{name:12} {ms:8.2f} {took[0]:8.2f} {read:8.0f} {rate:6.1f} {rate / limit:8.0%} {flops / ms / 1e6:8.0f}",
            flush=True,
        )
        report["cases"][name] = {
            "ms": round(ms, 3),
            "best_ms": round(took[0], 3),
            "gb_s": round(rate, 2),
            "gflop_s": round(flops / ms / 1e6, 1),
        }
    for ops, _ in made.values():
        ops.close()
    if args.torch:
        for rows in (1, 32, 1024):
            for packed in (False, True):
                what = "oneDNN, packed once" if packed else "F.linear"
                ms = linear_ms(rows, packed, args.threads, 3 if rows > 100 else 5)
                print(f"{what}: linear layers alone, {rows} rows {ms:8.2f} ms", flush=True)
                report[f"{what} {rows}"] = round(ms, 2)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
