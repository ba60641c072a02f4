"""Low-rank products of rows with adapters: the native operation against its definition, and its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from planaria.kernels.ops import Batch
from tests.model.tensors import CpuOps, TorchOps
from tests.model.test_cpu_ops import LEVELS, batch_of, close, draw, run

SLOTS, RANK = 3, 20  # a rank that fills no panel
SIZES = [((range(40), range(40, 72), range(72, 91)), 48), ((range(64),), 33)]  # parts meet inside of a panel


def pairs_of(parts: tuple[range, ...], k: int, slot: int) -> list[Any]:
    """Of slot 1 the first part has nothing."""
    drawn = [
        (draw(RANK - slot, k, seed=7 * slot + i) / k**0.5, draw(len(part), RANK - slot, seed=9 * slot + i) / 4)
        for i, part in enumerate(parts)
    ]
    pairs: list[Any] = [tuple(m.numpy() for m in pair) for pair in drawn]
    return [None, *pairs[1:]] if slot == 1 and len(parts) > 1 else pairs


def results(ops: Any, parts: tuple[range, ...], k: int, batch: Batch, *, slots: int = SLOTS) -> torch.Tensor:
    """Of a product of the activation dtype and one into the residual, both with adapters."""
    n = parts[-1].stop
    weight, table, back = (draw(n, k, seed=1) / k**0.5, draw(50, k, seed=3), draw(k, n, seed=6) / n**0.5)
    packed, embedding, norm, out = ops.pack(weight), ops.pack(table), ops.vector(torch.ones(k)), ops.pack(back)
    first, second = ops.lora_table(parts, RANK, SLOTS), ops.lora_table([range(k)], RANK, SLOTS)
    for slot in range(slots):
        ops.put_lora(first, slot, pairs_of(parts, k, slot))
        ops.put_lora(second, slot, pairs_of((range(k),), n, slot))

    def forward(ops: Any) -> Any:
        h = ops.embed(embedding)
        y = ops.linear(ops.rms_norm(h, norm, 1e-5), packed, lora=first)
        return ops.take(ops.linear(y, out, h, reduce=True, lora=second))

    return run(ops, forward, batch)


def adapted(rows: int, of: int = 4) -> Batch:
    """Rows of which each `of`-th has no adapter."""
    batch = batch_of(list(range(rows)))
    batch.loras[:rows] = np.arange(rows) * 7 // 3 % of - 1
    return batch


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_adapters_are_those_of_the_definition(isa: str, dtype: str) -> None:
    for parts, k in SIZES:
        ops, reference = CpuOps(dtype, 2, isa=isa), TorchOps("cpu", dtype)
        for rows in (1, 7, 50):
            batch = adapted(rows)
            ours, theirs = results(ops, parts, k, batch), results(reference, parts, k, batch)
            close(ours, theirs, dtype)
            assert not torch.allclose(theirs[0], results(reference, parts, k, batch, slots=0)[0]) or batch.loras[0] < 0
        ops.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_s_bits_depend_on_no_other_s_adapter(dtype: str) -> None:
    """Alone, among others, with more threads; without an adapter the bits are those of before."""
    (parts, k), found = SIZES[0], []
    for threads in (1, 2, 3):
        ops = CpuOps(dtype, threads)
        every = results(ops, parts, k, adapted(50))
        plain = results(ops, parts, k, batch_of(list(range(50))))
        for row in (0, 1, 2, 3, 31, 49):
            batch = batch_of([row])
            batch.loras[0] = adapted(50).loras[row]
            assert torch.equal(results(ops, parts, k, batch)[0], every[row])
            assert torch.equal(plain[row], every[row]) == (batch.loras[0] < 0)
        found.append(every)
        ops.close()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_another_adapter_in_a_slot_leaves_nothing_of_the_one_before() -> None:
    ops = CpuOps("float32", 1)
    table = ops.lora_table([range(40)], RANK, 1)
    weight, embedding, norm = ops.pack(draw(40, 32)), ops.pack(draw(50, 32, seed=2)), ops.vector(torch.ones(32))

    def forward(ops: Any) -> Any:
        return ops.take(ops.linear(ops.rms_norm(ops.embed(embedding), norm, 1e-5), weight, lora=table))

    batch = batch_of([3, 4])
    run_it = ops.compile(forward, batch)
    batch.loras[:2] = 0, -1
    seen = []
    for pairs in (None, 0, 2, 0, None):
        ops.put_lora(table, 0, [None] if pairs is None else pairs_of((range(40),), 32, pairs))
        seen.append(run_it().clone())
    assert torch.equal(seen[0], seen[4]) and torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][0], seen[2][0])
    assert all(torch.equal(seen[0][1], each[1]) for each in seen)
    ops.close()
