"""Four ways in which two ranks attend with a prompt's chunk to a context that each has half of (docs/adr/0053).

    python -m benchmarks.context_ways [--chunk 512] [--rounds 7] [--markdown docs/performance.md]

Queries: all queries are brought to each rank's keys and parts are merged, which is what `-pcp 2` does. Gather: keys are
brought to each rank's queries, dealt in a zigzag. Ring: the same, a rank's keys at a time, with parts merged. In place:
the zigzag without bringing keys, which only one node's memory allows. bfloat16, two processes of one thread, one layer
of attention from its q, k, v on. Blocks are on the ranks in turn, so that keys are copied by whole blocks; new ones are
written straight to where they live. All four must give the same numbers.

Time: until the layer is done on both. Processor: of the rank that needs more. Moved: to a rank, from the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import machine, report
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.build import load, target_for
from planaria.kernels.cpu.caches import PagedKV
from planaria.kernels.cpu.context import part_columns
from planaria.kernels.cpu.fields import MergeOp
from planaria.kernels.cpu.memory import MappedRegion
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.cpu.shared import SharedComm
from planaria.kernels.numbers import to_bfloat16, to_float32
from planaria.kernels.ops import Batch, Columns
from planaria.kernels.share import BatchShare
from planaria.mesh.comm import Solo
from planaria.mesh.segment import create_segment
from planaria.models.shard import ContextGroup, Shard
from planaria.topology.stripes import Stripes

OUT = Path(__file__).resolve().parent / "out"
MODELS = {"SmolLM2, 9 heads over 3 of 64": (9, 3, 64), "Qwen2.5-1.5B, 12 heads over 2 of 128": (12, 2, 128)}
CONTEXTS = (512, 2048, 4096)
WAYS = ("queries", "gather", "ring", "in place")
BLOCK = 16


@dataclass
class Case:
    """A rank's part: `kv` has blocks of rank 0, of rank 1, and copies that each of them makes."""

    ops: CpuOps
    comm: SharedComm
    rank: int
    heads: int
    kv_heads: int
    dim: int
    context: int
    chunk: int

    def __post_init__(self) -> None:
        self.width = (self.heads + 2 * self.kv_heads) * self.dim
        self.n, size = self.context // BLOCK // 2, self.ops.kv_block_bytes(BLOCK, self.kv_heads, self.dim)
        self.memory = self.comm.place(f"{self.heads} heads, {self.context}", 4 * self.n * size)
        part = self.n * size
        self.kv = self.cache(0)
        self.home, self.other, self.copy = (
            self.memory[at * part : (at + 1) * part] for at in (self.rank, 1 - self.rank, 2 + self.rank)
        )
        values = np.random.default_rng(self.rank).standard_normal(part // 2, np.float32)
        self.home[:] = to_bfloat16(values).view(np.uint8)
        rows = np.random.default_rng(2).standard_normal((self.chunk, self.width), np.float32)
        self.rows: npt.NDArray[Any] = to_bfloat16(rows)
        self.rope = self.ops.rope_table(*np.ones((2, self.context, self.dim // 2), np.float32) * [[[1]], [[0]]])
        self.positions = np.arange(self.context - self.chunk, self.context)

    def cache(self, first: int) -> PagedKV:
        size = self.ops.kv_block_bytes(BLOCK, self.kv_heads, self.dim)
        region = MappedRegion(self.memory[first * size :].data)
        return PagedKV(region, BLOCK, self.kv_heads, self.dim, size)

    def zigzag(self) -> npt.NDArray[np.int64]:
        """Rows of the chunk that are this rank's."""
        pieces = np.arange(self.chunk).reshape(4, -1)
        return np.concatenate([pieces[self.rank], pieces[3 - self.rank]])

    def own(self, ops: Any, rows: npt.NDArray[Any]) -> Any:
        return ops.recorder.outside(
            rows.view(np.uint8), layout.ROWS_TOKENS, self.width, 2 * self.width, dtype="bfloat16"
        )

    def sizes(self) -> tuple[int, int, int, float]:
        return self.heads, self.kv_heads, self.dim, self.dim**-0.5

    def queries(self) -> Callable[[], Any]:
        stripes = Stripes(2, self.rank, BLOCK)
        heads, kv_heads = range(self.heads), range(self.kv_heads)
        group = ContextGroup(stripes, heads, kv_heads, True, 0, 1, self.heads, self.kv_heads, shares=True)
        columns = Columns.of_heads(group, Shard(heads, kv_heads, range(0), range(0), range(1)), self.dim)
        step, kv = Batch(self.chunk, 1, self.n, 1), self.cache(self.rank * self.n)
        step.counts[:2] = self.chunk, 1
        step.positions[:] = self.positions
        step.slots[:] = np.where(stripes.here(self.positions), stripes.local(self.positions), -1)
        step.seq_start[:], step.seq_len[:], step.block_table[0] = [0, self.chunk], self.context, range(self.n)
        share = BatchShare(step, self.rank, 2)
        share.deal()
        rows = self.rows[slice(*share.bounds()[self.rank :][:2])].copy()

        def forward(ops: Any) -> Any:
            qkv = ops.gather(self.own(ops, rows), group, columns)
            q = ops.rope_store(qkv, kv, self.rope, *self.sizes()[:3])
            return ops.merge(ops.attend_part(q, kv, *self.sizes(), group), group, columns.heads, self.dim)

        return self.ops.compile(forward, share)

    def dealt(self, table: npt.NDArray[np.int64]) -> tuple[Batch, npt.NDArray[Any]]:
        """A step of this rank's pieces of the zigzag, each a sequence, and its q, k, v."""
        mine, piece = self.zigzag(), self.chunk // 4
        batch = Batch(len(mine), 2, len(table), 1)
        batch.counts[:2] = len(mine), 2
        batch.positions[:] = at = self.positions[mine]
        batch.slots[:] = (at // BLOCK % 2 * self.n + at // BLOCK // 2) * BLOCK + at % BLOCK
        batch.seq_start[:], batch.seq_len[:] = [0, piece, 2 * piece], [at[piece - 1] + 1, at[-1] + 1]
        batch.block_table[0] = table
        return batch, self.rows[mine]

    def bring(self) -> None:
        self.copy[:] = self.other

    def over_all(self, copied: bool) -> Callable[[], Any]:
        block = np.arange(2 * self.n)
        here = block % 2 == self.rank if copied else True
        batch, rows = self.dealt(np.where(here, block % 2, 2 + self.rank) * self.n + block // 2)

        def forward(ops: Any) -> Any:
            q = ops.rope_store(self.own(ops, rows), self.kv, self.rope, *self.sizes()[:3])
            ops.recorder.meet()
            if copied:
                ops.recorder.cut(self.bring)
            return ops.attend(q, self.kv, *self.sizes())

        return self.ops.compile(forward, batch)

    def ring(self) -> Callable[[], Any]:
        batch, rows = self.dealt(np.arange(self.n))
        caches = {self.rank: self.cache(self.rank * self.n), 1 - self.rank: self.cache((2 + self.rank) * self.n)}
        columns = self.heads * part_columns(self.dim)
        memory = np.zeros(len(rows) * 2 * columns * 4, np.uint8)

        def forward(ops: Any) -> Any:
            recorder = ops.recorder
            q = ops.rope_store(self.own(ops, rows), self.kv, self.rope, *self.sizes()[:3])
            recorder.meet()
            for of, kv in caches.items():
                if of != self.rank:
                    recorder.cut(self.bring)
                part = recorder.outside(memory, layout.ROWS_TOKENS, columns, 8 * columns, of * columns * 4)
                ops._attend_heads(q, kv, part, *self.sizes(), None, 0.0, stripes=Stripes(2, of, BLOCK))
            parts = recorder.outside(memory, layout.ROWS_TOKENS, 2 * columns, 8 * columns)
            recorder.wants(layout.BIG + 3 * part_columns(self.dim) * 4)
            out = recorder.new(layout.ROWS_TOKENS, self.heads * self.dim)
            recorder.add(
                MergeOp, parts=parts, out=out, ranks=2, part_bytes=columns * 4, first=0, heads=self.heads,
                dim=self.dim, sinks=None,
            )  # fmt: skip
            return out

        return self.ops.compile(forward, batch)

    def moved(self) -> dict[str, int]:
        """Bytes."""
        rows, keys = self.chunk // 2, 2 * self.kv_heads * self.dim * 2  # of a token
        kept = self.context // 2 * keys
        parts = rows * self.heads * part_columns(self.dim) * 4
        new = self.chunk // 4 * keys  # those that don't live where they are computed
        return {
            "queries": rows * self.width * 2 + parts,
            "gather": kept + new, "ring": kept + new, "in place": new,
        }  # fmt: skip


def rank_main(rank: int, fd: int, chunk: int, rounds: int, calls: int, out: Any) -> None:
    ops = CpuOps("bfloat16", 1)
    comm = SharedComm(fd, rank, range(2), load(target_for("bfloat16")))
    ops.join(Solo(), None, comm)
    for model, sizes in MODELS.items():
        for context in CONTEXTS:
            case = Case(ops, comm, rank, *sizes, context, chunk)
            runs = {
                "queries": case.queries(), "gather": case.over_all(True), "ring": case.ring(),
                "in place": case.over_all(False),
            }  # fmt: skip
            passed: dict[str, list[float]] = {way: [] for way in WAYS}
            spent: dict[str, list[float]] = {way: [] for way in WAYS}
            results = {}
            for number in range(rounds + 1):
                for way in WAYS[:: 1 if number % 2 else -1]:
                    comm.meet()
                    since, used = time.perf_counter(), time.thread_time()
                    for _ in range(calls):
                        found = runs[way]()
                    used, since = time.thread_time() - used, time.perf_counter() - since
                    results[way] = to_float32(found)
                    if number:  # the first is for warming up
                        spent[way].append(used / calls * 1e3)
                        passed[way].append(since / calls * 1e3)
            out.put((rank, model, context, passed, spent, results, case.zigzag(), case.moved()))
            comm.meet()
    ops.close()
    comm.close()


def whole(of: list[Any], way: str) -> npt.NDArray[np.float32]:
    """What both ranks computed, by rows of the chunk."""
    results = [each[5][way] for each in of]
    if way == "queries":
        return np.concatenate(results)
    every = np.empty((2 * len(results[0]), results[0].shape[1]), np.float32)
    for each, rows in zip(of, results, strict=True):
        every[each[6]] = rows
    return every


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    context, fd = multiprocessing.get_context("fork"), create_segment()
    out = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, fd, options.chunk, options.rounds, options.calls, out))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    lines = []
    for _ in range(len(MODELS) * len(CONTEXTS)):
        both = sorted((out.get(timeout=300) for _ in range(2)), key=lambda each: each[0])
        expected = whole(both, "in place")
        for way in WAYS:
            apart = float(np.abs(whole(both, way) - expected).max() / np.abs(expected).max())
            if apart > 0.02:
                raise SystemExit(f"{way}: other numbers than in place, by {apart:.2g} of the largest")
            lines.append({
                "model": both[0][1], "context": both[0][2], "way": way, "apart": apart, "moved": both[0][7][way],
                "ms": statistics.median(max(pair) for pair in zip(*(each[3][way] for each in both), strict=True)),
                "cpu": max(statistics.median(each[4][way]) for each in both),
            })  # fmt: skip
    for each in ranks:
        each.join()
    return lines


def page(lines: list[dict[str, Any]], chunk: int) -> str:
    head = f"{time.strftime('%Y-%m-%d %H:%M')}, {machine.cpu_name()}, {os.cpu_count()} cores, "
    rows = [
        f"| {each['model']} | {each['context']:,} | {each['way']} | {each['ms']:.2f} | {each['cpu']:.2f} "
        f"| {each['moved'] / 1e6:.2f} |"
        for each in lines
    ]
    return "\n".join(
        [
            f"{head}load {os.getloadavg()[0]:.1f}; a chunk of {chunk} tokens, medians.",
            "",
            "| model | context | way | ms a layer | processor, ms | moved, MB |",
            "|---|--:|---|--:|--:|--:|",
            *rows,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunk", type=int, default=512, help="tokens, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=4, help="layers of a round")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = measure(options)
    OUT.mkdir(exist_ok=True)
    (OUT / "context_ways.json").write_text(json.dumps(lines, indent=1))
    text = page(lines, options.chunk)
    print(text)
    if options.markdown:
        report.write_between(options.markdown, "context-ways", text)


if __name__ == "__main__":
    main()
