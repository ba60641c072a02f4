"""Kernels whose tensor group is reached from Python, between pieces of a recording: several threads, any timing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from planaria.mesh.comm import Array, Solo
from tests.model.tensors import CpuOps
from tests.model.test_cpu_ops import batch_of, draw


class Twin(Solo):
    """The first of two ranks that hold the same."""

    size = 2

    def all_reduce(self, x: Array) -> None:
        x *= 2

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        return np.concatenate([x, x], 1)


def logits(threads: int, runs: int) -> list[torch.Tensor]:
    """Of the same step over and over. The last piece of its recording, after the gather, has no operation."""
    width, hidden, vocab = 64, 96, 48
    ops = CpuOps("float32", threads, tp=Twin())
    table, norm = ops.pack(draw(40, width, seed=3)), ops.vector(torch.ones(width))
    up, down, head = (
        ops.pack(draw(n, k, seed=n + k) / 9) for n, k in ((hidden, width), (width, hidden), (vocab, width))
    )

    def forward(ops: Any) -> Any:
        h = ops.embed(table)
        for _ in range(4):
            h = ops.linear(ops.linear(ops.rms_norm(h, norm, 1e-5), up), down, residual=h, reduce=True)
        return ops.logits(ops.rms_norm(ops.take(h), norm, 1e-5), head, range(vocab), 2 * vocab)

    step = ops.compile(forward, batch_of(list(range(3))))
    found = [step().clone() for _ in range(runs)]
    ops.close()
    return found


def test_the_same_bits_every_time() -> None:
    (expected,) = logits(1, 1)
    assert expected.shape == (3, 96) and expected.isfinite().all()
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(logits(2, 100)), daemon=True)
    thread.start()
    thread.join(60)
    assert len(found) == 100, "threads wait for one another"
    for got in found:
        assert torch.equal(got, expected)
