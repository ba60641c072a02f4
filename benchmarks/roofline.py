"""Where a step's time goes, operation by operation, beside what the machine could do: a roofline.

    python -m benchmarks.roofline [--model smollm2] [--dtype bfloat16] [--isa generic] [--repeat 5]
        [--steps one,many,prompt]

Steps: a token after 128, of 32 sequences after 64, a prompt's second 512. One thread, CPU time, the least of the
repetitions. The limits are measured in the same run: reading 256 MiB with vector loads, and multiply-adds of a float32
product whose weights stay in the caches. "of the limit" is the longer of the time to read an operation's weights, or
keys and values, and the time of its multiply-adds, as a share of the time it took. Products of packed weights multiply
integers, of which an instruction takes twice as many: they may exceed 100%.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.machine import _sum
from planaria.checkpoint import resolve_checkpoint
from planaria.kernels.cpu import fields, layout
from planaria.kernels.cpu.fields import AttendOp, LinearOp
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.cpu.team import Team
from planaria.kernels.ops import Batch
from planaria.layers.build import build
from planaria.loader import WeightSource
from planaria.models import model_config

STEPS = {"one": (1, 1, 128), "many": (32, 1, 64), "prompt": (1, 512, 512)}
BLOCK = 16
NAMES = {kind.code: name for name, kind in vars(fields).items() if name.endswith("Op")}
Step = tuple[int, int, int]  # sequences, tokens of each, tokens before them


def least(repeat: int, run: Callable[[], object]) -> float:
    """Seconds of this thread's CPU time."""
    times = []
    for _ in range(repeat):
        before = time.thread_time()
        run()
        times.append(time.thread_time() - before)
    return min(times)


def rows_of(words: dict[int, int]) -> npt.NDArray[np.int64]:
    """A tape's rows."""
    shape = words[layout.OPS], fields.ROW_WORDS
    memory = (ctypes.c_int64 * (shape[0] * shape[1])).from_address(words[layout.TAPE])
    return np.ctypeslib.as_array(memory).reshape(shape)


def profiled(run: Callable[[], object], repeat: int) -> list[tuple[npt.NDArray[np.int64], float]]:
    """Each operation's row, and its seconds: the least of so many runs."""
    whole, rows, taken = Team.run, list[npt.NDArray[np.int64]](), list[list[float]]()

    def apart(team: Team, words: dict[int, int], owners: object) -> None:
        rows[:], each = rows_of(words).copy(), list[float]()
        for i in range(len(rows)):
            alone = words | {
                layout.TAPE: words[layout.TAPE] + i * fields.ROW_WORDS * 8, layout.OPS: 1,
                layout.TICKETS: words[layout.TICKETS] + i * layout.TICKET_BYTES,
            }  # fmt: skip
            each.append(least(1, functools.partial(whole, team, alone, owners)))
        taken.append(each)

    with mock.patch.object(Team, "run", apart):
        for _ in range(repeat):
            run()
    return list(zip(rows, np.min(taken, 0).tolist(), strict=True))


def bandwidth() -> float:
    """Bytes a second, read by one thread."""
    values = np.ones(1 << 25, np.int64)
    _sum(values[:64])
    return values.nbytes / least(7, lambda: _sum(values))


def multiply_adds(isa: str | None, rows: int = 480, columns: int = 96, length: int = 1024) -> float:
    """A second, of one thread, in float32."""
    ops, batch = CpuOps("float32", 1, isa=isa), Batch(rows, 1, 1, rows)
    weight, table = (ops.pack(np.ones((n, length), np.float32)) for n in (columns, 16))
    norm = ops.vector(np.ones(length, np.float32))
    run = ops.compile(lambda o: o.scores(o.rms_norm(o.embed(table), norm, 1e-5), weight), batch)
    batch.counts[:3] = rows, 1, rows
    seconds = profiled(run, 7)[-1][1]
    ops.close()
    return rows * columns * length / seconds


def work(row: npt.NDArray[np.int64], step: Step, samples: int, item: int) -> tuple[str, float, float]:
    """An operation's name, bytes of weights or keys and values that it reads, multiply-adds."""
    sequences, tokens, before = step
    name = NAMES[int(row[fields.CODE])]
    if name == "LinearOp":
        n = samples if row[LinearOp.rows] == layout.ROWS_SAMPLES else sequences * tokens
        each = 32 if row[LinearOp.kernels] else 4 // item
        panels, length = int(row[LinearOp.panels]), int(row[LinearOp.length]) * each
        return f"{length} x {16 * panels}", float(panels * row[LinearOp.stride]), float(16 * panels * length * n)
    if name == "AttendOp":
        dim, context = int(row[AttendOp.dim]), before + (tokens + 1) / 2
        read = sequences * (before + tokens) * int(row[AttendOp.groups]) * 2 * dim * item
        return "attention", read, 2 * sequences * tokens * context * int(row[AttendOp.heads]) * dim
    return "other", 0.0, 0.0


def prepared(model: Any, ops: CpuOps, step: Step) -> Callable[[], object]:
    """A run of that step, on caches of zeros."""
    sequences, tokens, before = step
    total, blocks = sequences * tokens, -(-(before + tokens) // BLOCK)
    batch = Batch(total, sequences, blocks, sequences)
    model.make_kv(sequences * blocks, BLOCK)
    run = ops.compile(model.forward, batch)
    at = np.arange(before, before + tokens)
    batch.block_table[:sequences, :blocks] = np.arange(sequences * blocks).reshape(sequences, blocks)
    batch.tokens[:total], batch.positions[:total] = np.arange(total) % 1000, np.tile(at, sequences)
    batch.slots[:total] = (batch.block_table[:sequences, at // BLOCK] * BLOCK + at % BLOCK).reshape(-1)
    batch.sample_index[:sequences] = np.arange(sequences) * tokens + tokens - 1
    batch.seq_start[: sequences + 1], batch.seq_len[:sequences] = np.arange(sequences + 1) * tokens, before + tokens
    batch.counts[:3] = total, sequences, sequences
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--isa")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", default=",".join(STEPS))
    args = parser.parse_args()
    checkpoint, ops = resolve_checkpoint(args.model), CpuOps(args.dtype, 1, isa=args.isa)
    with WeightSource(checkpoint) as source:
        config = model_config(checkpoint.config, checkpoint.generation_config)
        model = build(config, source, ops, quantization="keep", max_positions=2048)
    read, rate = bandwidth(), multiply_adds(args.isa)
    print(f"{args.model}, {args.dtype}; reads {read / 1e9:.1f} GB/s, {rate / 1e9:.1f} multiply-adds/ns in float32")
    for title in args.steps.split(","):
        step, found = STEPS[title], dict[str, list[float]]()
        for row, seconds in profiled(prepared(model, ops, step), args.repeat):
            name, size, adds = work(row, step, step[0], ops.target.item)
            limit = max(size / read, adds / rate)
            found[name] = [a + b for a, b in zip(found.get(name, [0.0] * 4), (seconds, size, adds, limit), strict=True)]
        found["all"] = [sum(values) for values in zip(*found.values(), strict=True)]
        print(f"\n| {title} | ms | share | GB/s | multiply-adds/ns | of the limit |\n|---|--:|--:|--:|--:|--:|")
        for name, (seconds, size, adds, limit) in sorted(found.items(), key=lambda item: -item[1][0]):
            shares = f"{seconds / found['all'][0]:.0%} | {size / seconds / 1e9:.1f} | {adds / seconds / 1e9:.1f}"
            print(f"| {name} | {seconds * 1e3:.2f} | {shares} | {limit / seconds:.0%} |")
    ops.close()


if __name__ == "__main__":
    main()
