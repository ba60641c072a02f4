"""The native CPU operations one by one against plain torch, at sizes and instruction levels that models don't reach.

Activations come in through an embedding: row i of the table is what token i carries.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from planaria.config.machine import usable_cores
from planaria.kernels.blocks import KINDS
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.build import host_isa, load, target_for
from planaria.kernels.cpu.fields import ROW_WORDS, EmbedOp
from planaria.kernels.cpu.memory import Region
from planaria.kernels.cpu.rounded import in_planes
from planaria.kernels.cpu.target import ISAS
from planaria.kernels.cpu.team import Team
from planaria.kernels.numbers import to_float32
from planaria.kernels.ops import Batch, Quantized
from tests.model.tensors import CpuOps, TorchOps, dequantise, quantise, random_blocks

LEVELS = ISAS[ISAS.index(host_isa()) :]
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # packed weights meet rows that are rounded to 15 bits
EIGHT_BITS = 1e-2  # but those of Q4_0, where they have 8 bits twice (adr/0106): how exactly, test_cpu_kernels says


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(tokens: list[int], size: int = 64) -> Batch:
    """One sequence whose positions are all asked for."""
    batch = Batch(max(size, len(tokens)), 4, 8, max(size, len(tokens)))
    n = len(tokens)
    batch.tokens[:n], batch.positions[:n], batch.slots[:n] = tokens, np.arange(n), np.arange(n)
    batch.seq_start[:2], batch.seq_len[0] = (0, n), n
    batch.sample_index[:n] = np.arange(n)
    batch.counts[:3] = n, 1, n
    return batch


def run(ops: Any, forward: Callable[[Any], Any], batch: Batch) -> torch.Tensor:
    return ops.compile(forward, batch)().clone().float()


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: str, least: float = 0.0) -> None:
    """least: the tolerance, where the type's is smaller."""
    scale = theirs.float().abs().max().clamp(min=1.0)
    assert ((ours - theirs.float()).abs().max() / scale).item() < max(TOLERANCE[dtype], least)


def weight_of(kind: str, n: int, k: int) -> torch.Tensor | Quantized:
    plain = draw(n, k, seed=n + k) / k**0.5
    return plain if kind == "plain" else quantise(plain, kind)


@pytest.mark.parametrize(
    ("kind", "isa", "dtype"),
    [
        pytest.param(kind, isa, dtype, marks=() if (i + j + k) % 2 == 0 else pytest.mark.long)
        for i, kind in enumerate(("plain", "q8_0", "q4_1", "q4_0"))
        for j, isa in enumerate(LEVELS)
        for k, dtype in enumerate(TOLERANCE)
    ],
)
def test_products(kind: str, isa: str, dtype: str) -> None:
    """linear with bias, with residual, and float32 logits: rows from 1 to 40, widths that fill no panel."""
    sizes = ((1, 1), (17, 33), (48, 64), (97, 130)) if kind == "plain" else ((1, 32), (16, 64), (33, 96), (100, 160))
    twice = kind != "plain" and in_planes(target_for(dtype, isa), KINDS[kind])
    for n, k in sizes:
        ops = CpuOps(dtype, 2, isa=isa)
        weight = random_blocks(kind, n, k) if kind == "q4_0" else weight_of(kind, n, k)
        plain = weight if isinstance(weight, torch.Tensor) else dequantise(weight)
        table, bias, norm = draw(40, k, seed=3), draw(n, seed=4), 1 + 0.1 * draw(k, seed=5)
        packed, embedding, scale = ops.pack(weight, bias), ops.pack(table), ops.vector(norm)
        head, back = ops.pack(weight), ops.pack(draw(k, n, seed=6))
        reference = TorchOps("cpu", dtype)
        theirs = [reference.pack(plain, bias), reference.pack(table), reference.vector(norm), reference.pack(plain),
                  reference.pack(draw(k, n, seed=6))]  # fmt: skip

        def linear(ops: Any, w: Any) -> Any:
            h = ops.embed(w[1])
            y = ops.linear(ops.rms_norm(h, w[2], 1e-5), w[0])
            return ops.take(ops.linear(y, w[4], residual=h))

        def logits(ops: Any, w: Any) -> Any:
            return ops.logits(ops.rms_norm(ops.take(ops.embed(w[1])), w[2], 1e-5), w[3])

        ours = [packed, embedding, scale, head, back]
        for rows in (1, 2, 5, 13, 40):
            batch = batch_of(list(range(rows)))
            for forward in (linear, logits):
                got = run(ops, functools.partial(forward, w=ours), batch)
                expected = run(reference, functools.partial(forward, w=theirs), batch)
                assert got.shape == expected.shape
                close(got, expected, dtype, EIGHT_BITS if twice else 0.0)
        ops.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "q8_0", "q4_1"])
def test_a_row_does_not_depend_on_its_batch(dtype: str, kind: str) -> None:
    """The same bits alone, among 2 to 50 rows, and with 1, 2 and 3 threads."""
    n, k = 112, 96
    results = []
    for threads in (1, 2, 3):
        ops = CpuOps(dtype, threads)
        weight, table = ops.pack(weight_of(kind, n, k)), ops.pack(draw(50, k, seed=3))
        norm = ops.vector(torch.ones(k))

        def forward(ops: Any, table: Any = table, weight: Any = weight, norm: Any = norm) -> Any:
            return ops.logits(ops.rms_norm(ops.take(ops.embed(table)), norm, 1e-5), weight)

        results += [run(ops, forward, batch_of(list(range(rows)))) for rows in (1, 2, 3, 7, 8, 9, 16, 31, 50)]
        ops.close()
    for result in results:
        assert torch.equal(result, results[8][: len(result)])


ATTENTION = [
    # heads, kv heads, head_dim, window, rotary dimensions
    (4, 4, 32, None, 32), (9, 3, 64, None, 64), (6, 1, 80, 5, 80), (4, 2, 128, 17, 64), (2, 1, 256, None, 256),
]  # fmt: skip


def numbers_in(kv: Any) -> torch.Tensor:
    """[heads, blocks, tokens, numbers of keys and values], as `items` says where they are."""
    found = []
    for rows, items in zip(kv.blocks(), kv.items(), strict=True):
        bits = rows.view(f"u{rows.shape[1] // items.size}")
        every = to_float32(bits) if bits.itemsize == 2 else bits.view(np.float32)
        found.append(torch.from_numpy(every[:, items].swapaxes(0, 1).copy()))
    return torch.cat(found, -1)


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads, kv_heads, dim, window, rotary", ATTENTION)
def test_attention(dtype: str, heads: int, kv_heads: int, dim: int, window: int | None, rotary: int, size: int) -> None:
    """Chunks and single tokens of several sequences, over block boundaries, with and without a window."""
    blocks, width, hidden = 32, (heads + 2 * kv_heads) * dim, 48
    table, qkv, norms = draw(200, hidden, seed=1), draw(width, hidden, seed=2) / 7, 1 + 0.1 * draw(2, dim, seed=3)
    angle = torch.arange(128).float()[:, None] * 10000 ** (-torch.arange(rotary // 2).float() / (rotary // 2))
    steps = [{0: 37, 1: 1, 2: 16}, {0: 1, 1: 30, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 20, 2: 17}]
    outputs, stored = [], []
    for ops in (CpuOps(dtype, 2), TorchOps("cpu", dtype)):
        t, w, rope = ops.pack(table), ops.pack(qkv), ops.rope_table(angle.cos(), angle.sin())
        q_norm, k_norm, one = ops.vector(norms[0]), ops.vector(norms[1]), ops.vector(torch.ones(hidden))
        kv = ops.kv_layer(blocks, size, kv_heads, dim)
        back = ops.pack(draw(hidden, heads * dim, seed=4) / 20)

        def forward(
            ops: Any, t: Any = t, w: Any = w, rope: Any = rope, q_norm: Any = q_norm, k_norm: Any = k_norm,
            one: Any = one, kv: Any = kv, back: Any = back,
        ) -> Any:  # fmt: skip
            x = ops.rms_norm(ops.embed(t), one, 1e-6)
            q = ops.rope_store(ops.linear(x, w), kv, rope, heads, kv_heads, dim, q_norm, k_norm, 1e-6)
            a = ops.attend(q, kv, heads, kv_heads, dim, dim**-0.5, window)
            return ops.logits(ops.take(a), back)

        batch = Batch(128, 4, 8, 128)
        batch.block_table[:3] = np.random.default_rng(0).permutation(blocks)[:24].reshape(3, 8)
        program, lengths, found = ops.compile(forward, batch), [0, 0, 0], []
        for step in steps:
            at = 0
            for i, (sequence, count) in enumerate(step.items()):
                positions = np.arange(lengths[sequence], lengths[sequence] + count)
                span = slice(at, at + count)
                batch.tokens[span] = (positions * 7 + sequence * 31) % 200
                batch.positions[span] = positions
                batch.slots[span] = batch.block_table[sequence, positions // size] * size + positions % size
                batch.seq_start[i : i + 2] = at, at + count
                lengths[sequence] += count
                batch.seq_len[i], batch.seq_row[i] = lengths[sequence], sequence
                at += count
            batch.sample_index[:at] = np.arange(at)
            batch.counts[:3] = at, len(step), at
            found.append(program().clone().float())
        outputs.append(found)
        used = batch.block_table[0, : lengths[0] // size].tolist()
        stored.append(numbers_in(kv)[:, used])
        ops.close()
    for ours, theirs in zip(*outputs, strict=True):
        close(ours, theirs, dtype)
    assert stored[0].any()
    close(*stored, dtype)


def test_embedding_reads_packed_rows() -> None:
    """The table may be the packed output head: each row as it would be unpacked, to the bit."""
    for kind in ("q8_0", "q4_1"):
        packed = quantise(draw(70, 64), kind)
        ops = CpuOps("bfloat16", 1)
        table, norm = ops.pack(packed), ops.vector(torch.ones(64))
        eye = ops.pack(torch.eye(64))
        tokens = [0, 69, 15, 16, 17, 33]

        def forward(ops: Any, table: Any = table, norm: Any = norm, eye: Any = eye) -> Any:
            return ops.logits(ops.rms_norm(ops.take(ops.embed(table)), norm, 0.0), eye)

        got = run(ops, forward, batch_of(tokens))
        rows = dequantise(packed)[tokens]
        close(got, rows / rows.pow(2).mean(-1, keepdim=True).sqrt(), "bfloat16")
        ops.close()


def test_silu_and_gates() -> None:
    for dtype in ("float32", "bfloat16"):
        results = []
        for ops in (CpuOps(dtype, 2), TorchOps("cpu", dtype)):
            table, up, down = ops.pack(draw(30, 32)), ops.pack(draw(2 * 48, 32) / 5), ops.pack(draw(32, 48) / 5)
            norm = ops.vector(torch.ones(32))

            def forward(ops: Any, table: Any = table, up: Any = up, down: Any = down, norm: Any = norm) -> Any:
                h = ops.embed(table)
                return ops.take(ops.linear(ops.gated(ops.linear(ops.rms_norm(h, norm, 1e-5), up)), down, residual=h))

            results.append(run(ops, forward, batch_of(list(range(30)))))
            ops.close()
        close(results[0], results[1], dtype)


def test_nothing_to_sample() -> None:
    ops = CpuOps("float32", 2)
    table = ops.pack(draw(8, 32))
    batch = batch_of([1, 2, 3])
    program = ops.compile(lambda o: o.logits(o.take(o.embed(table)), table), batch)
    batch.counts[2] = 0
    assert program().shape == (0, 8)
    ops.close()


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    ops = CpuOps("float32", 4)
    assert len(set(threading.enumerate()) - before) == 3
    table = ops.pack(draw(8, 32))
    program = ops.compile(lambda o: o.logits(o.take(o.embed(table)), table), batch_of([1]))
    ops.close()
    ops.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(RuntimeError, match="closed"):
        program()
    del ops
    for _ in range(20):
        CpuOps("float32", 3)  # dropped without close
    assert not {t for t in set(threading.enumerate()) - before if t.is_alive()}


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
def test_threads_that_are_as_many_as_cores_have_one_each_while_they_compute() -> None:
    """Else the system puts two on one when anything else runs. Who calls has all of them again afterwards."""
    cores, before = os.sched_getaffinity(0), set(threading.enumerate())
    team = Team(load(target_for("float32")), len(cores))
    memory, rows = Region(layout.TICKET_BYTES, huge=False), np.zeros((1, ROW_WORDS), np.int64)
    rows[0, 0] = EmbedOp.code  # of no tokens
    counts = np.zeros(7, np.int64)
    words = {layout.TAPE: int(rows.ctypes.data), layout.OPS: 1, layout.TICKETS: memory.address,
             layout.COUNTS: int(counts.ctypes.data)}  # fmt: skip
    try:
        team.run(words, rows)
        assert os.sched_getaffinity(0) == cores
        helpers = [thread.native_id for thread in set(threading.enumerate()) - before]
        kept = [os.sched_getaffinity(helper) for helper in helpers if helper is not None]
        assert sorted(map(tuple, kept)) == [(core,) for core in sorted(cores)[1:]]
        size = int(team.control[layout.CORES_BYTES])
        ctypes.memset(int(team.control[layout.CORES]) + len(cores) * size, 0, size)  # nobody can be on none
        team.run(words, rows)
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, cores)
        team.close()


def test_threads_come_and_go_between_runs() -> None:
    """What was compiled goes on with them, with the same numbers."""
    before = set(threading.enumerate())
    ops = CpuOps("float32", 2)
    table = ops.pack(draw(48, 64))
    program = ops.compile(lambda o: o.logits(o.take(o.embed(table)), table), batch_of([1, 5, 7]))
    expected = program().clone()
    for threads in (1, 2, 1):
        ops.use_threads(threads)
        assert ops.threads == threads and len(set(threading.enumerate()) - before) == threads - 1
        for _ in range(20):
            assert torch.equal(program(), expected)
    ops.use_threads(10_000)  # more than there is memory for
    assert ops.threads <= 10_000 and torch.equal(program(), expected)
    ops.close()
