"""TorchOps against the formulas, written out one element at a time where that is readable."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.kernels.ops import Batch
from tests.model.tensors import TorchOps, dequantise, quantise

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def fill(batch: Batch, sequences: list[tuple[int, int, list[int]]], samples: list[int]) -> None:
    """Sequences as (tokens already in the cache, new tokens, blocks), in rows 0, 1, ..."""
    at = 0
    for i, (old, new, blocks) in enumerate(sequences):
        batch.seq_start[i : i + 2] = at, at + new
        batch.seq_len[i], batch.seq_row[i] = old + new, i
        batch.block_table[i, : len(blocks)] = blocks
        for position in range(old, old + new):
            batch.tokens[at] = (7 * at + 3) % 11
            batch.positions[at] = position
            batch.slots[at] = blocks[position // BLOCK] * BLOCK + position % BLOCK
            at += 1
    batch.counts[:3] = at, len(sequences), len(samples)
    batch.sample_index[: len(samples)] = samples


def run(forward: Callable[[Any], Tensor], batch: Batch, ops: TorchOps | None = None) -> Tensor:
    return (ops or TorchOps()).compile(forward, batch)().clone()


def one_sequence(tokens: int = 5) -> Batch:
    batch = Batch(32, 4, 8, 8)
    fill(batch, [(0, tokens, [3, 1])], [tokens - 1])
    return batch


def test_embed_take_and_logits() -> None:
    ops, batch = TorchOps(), one_sequence()
    table = torch.randn(11, 16)
    packed = ops.pack(table)
    found = run(lambda o: o.logits(o.take(o.embed(packed)), packed), batch, ops)
    torch.testing.assert_close(found, (table @ table[(7 * 4 + 3) % 11])[None])


def test_no_samples_gives_no_rows_and_arrays_are_read_at_each_run() -> None:
    ops, batch = TorchOps(), one_sequence()
    table = ops.pack(torch.randn(11, 16))
    step = ops.compile(lambda o: o.logits(o.take(o.embed(table)), table), batch)
    assert step().shape == (1, 11)
    batch.counts[2] = 0
    assert step().shape == (0, 11)
    batch.counts[2], batch.sample_index[:2] = 2, (0, 1)
    assert step().shape == (2, 11)


def test_an_operation_outside_a_step_says_so() -> None:
    ops = TorchOps()
    with pytest.raises(RuntimeError, match="compile"):
        ops.take(torch.zeros(1, 1))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_the_residual(bias: bool) -> None:
    ops = TorchOps()
    x, w, b, h = torch.randn(5, 16), torch.randn(9, 16), torch.randn(9), torch.randn(5, 9)
    packed = ops.pack(w, b if bias else None)
    want = x @ w.T + (b if bias else 0)
    torch.testing.assert_close(ops.linear(x, packed), want)
    residual = h.clone()
    assert ops.linear(x, packed, residual) is residual
    torch.testing.assert_close(residual, h + want)


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_a_packed_weight_counts_as_its_values(kind: str) -> None:
    packed = quantise(torch.randn(9, 64), kind)
    x = torch.randn(3, 64)
    torch.testing.assert_close(TorchOps().linear(x, TorchOps().pack(packed)), x @ dequantise(packed).T)


def test_rms_norm_and_gated() -> None:
    ops = TorchOps()
    x, weight = torch.randn(4, 10), torch.randn(10)
    want = [[v / math.sqrt(sum(u * u for u in row) / 10 + 1e-3) for v in row] for row in x.tolist()]
    torch.testing.assert_close(ops.rms_norm(x, ops.vector(weight), 1e-3), torch.tensor(want) * weight)
    gated = [[g / (1 + math.exp(-g)) * u for g, u in zip(row[:5], row[5:], strict=True)] for row in x.tolist()]
    torch.testing.assert_close(ops.gated(x), torch.tensor(gated))


@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store_rotates_by_position_and_stores_at_the_slots(rotated: int, normed: bool) -> None:
    ops, batch = TorchOps(), Batch(32, 4, 8, 8)
    fill(batch, [(2, 3, [5, 0]), (6, 2, [1, 4])], [])
    angles = torch.rand(16, rotated // 2) * 6
    rope = ops.rope_table(angles.cos(), angles.sin())
    kv = ops.kv_layer(8, BLOCK, KV_HEADS, DIM)
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * DIM)
    q_norm, k_norm = (torch.rand(DIM), torch.rand(DIM)) if normed else (None, None)
    q = run(lambda o: o.rope_store(qkv, kv, rope, HEADS, KV_HEADS, DIM, q_norm, k_norm, 1e-5), batch, ops).view(
        5, HEADS, DIM
    )
    heads = qkv.view(5, -1, DIM)
    half = rotated // 2
    for token, (position, slot) in enumerate([(2, 22), (3, 23), (4, 0), (6, 18), (7, 19)]):
        for head in range(HEADS + KV_HEADS):
            x = heads[token, head]
            norm = q_norm if head < HEADS else k_norm
            if norm is not None:
                x = x / torch.sqrt((x * x).mean() + 1e-5) * norm
            turned = torch.polar(torch.ones(half), angles[position]) * torch.complex(x[:half], x[half:rotated])
            want = torch.cat([turned.real, turned.imag, x[rotated:]])
            got = q[token, head] if head < HEADS else kv.keys[slot, head - HEADS]
            torch.testing.assert_close(got, want)
        assert torch.equal(kv.values[slot], heads[token, HEADS + KV_HEADS :])
    assert int((kv.values.abs().sum((1, 2)) > 0).sum()) == 5  # nothing else was written


def attention_by_hand(q: Tensor, kv: Any, sequences: list[Any], scale: float, window: int | None) -> Tensor:
    rows = []
    for old, new, blocks in sequences:
        for position in range(old, old + new):
            first = 0 if window is None else max(0, position - window + 1)
            slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, position + 1)]
            out = []
            for head in range(HEADS):
                query, group = q[len(rows), head], head // (HEADS // KV_HEADS)
                scores = torch.stack([query @ kv.keys[s, group] for s in slots]) * scale
                weights = scores.softmax(0)
                out.append(sum(w * kv.values[s, group] for w, s in zip(weights, slots, strict=True)))
            rows.append(torch.stack(out))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention_over_scattered_blocks_of_mixed_sequences(window: int | None) -> None:
    ops, batch = TorchOps(), Batch(64, 8, 16, 8)
    blocks = list(range(32))
    random.Random(1).shuffle(blocks)
    # decode rows of different lengths, a whole prompt, two chunks of the same size, and a chunk of another
    spans = [(10, 1), (0, 1), (0, 7), (3, 4), (8, 4), (5, 2), (16, 1)]
    sequences = [(old, new, [blocks.pop() for _ in range(-(-(old + new) // BLOCK))]) for old, new in spans]
    fill(batch, sequences, [])
    kv = ops.kv_layer(32, BLOCK, KV_HEADS, DIM)
    kv.keys.normal_()
    kv.values.normal_()
    q = torch.randn(20, HEADS, DIM)
    found = run(lambda o: o.attend(q.flatten(1), kv, HEADS, KV_HEADS, DIM, 0.3, window), batch, ops)
    torch.testing.assert_close(found.view(20, HEADS, DIM), attention_by_hand(q, kv, sequences, 0.3, window))


def test_what_is_in_no_ones_cache_does_not_leak_in() -> None:
    ops, batch = TorchOps(), Batch(64, 8, 16, 8)
    sequences = [(1, 1, [3]), (10, 1, [0, 5, 2])]
    fill(batch, sequences, [])
    batch.block_table[0, 1:] = 7  # left over from another sequence
    kv = ops.kv_layer(8, BLOCK, KV_HEADS, DIM)
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    for old, new, blocks in sequences:
        for p in range(old + new):
            slot = blocks[p // BLOCK] * BLOCK + p % BLOCK
            kv.keys[slot].normal_()
            kv.values[slot].normal_()
    q = torch.randn(2, HEADS, DIM)
    found = run(lambda o: o.attend(q.flatten(1), kv, HEADS, KV_HEADS, DIM, 0.3), batch, ops)
    torch.testing.assert_close(found.view(2, HEADS, DIM), attention_by_hand(q, kv, sequences, 0.3, None))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_cache_bytes_are_what_is_allocated(dtype: str, size: int) -> None:
    ops = TorchOps("cpu", dtype)
    kv = ops.kv_layer(3, BLOCK, KV_HEADS, DIM)
    assert kv.keys.nbytes + kv.values.nbytes == 3 * ops.kv_block_bytes(BLOCK, KV_HEADS, DIM)
    assert ops.kv_block_bytes(BLOCK, KV_HEADS, DIM) == 2 * BLOCK * KV_HEADS * DIM * size


def test_bfloat16_keeps_the_residual_and_the_logits_in_float32() -> None:
    ops, batch = TorchOps("cpu", "bfloat16"), one_sequence()
    table, square = ops.pack(torch.randn(11, 16)), ops.pack(torch.randn(16, 16))

    def forward(o: Any) -> Tensor:
        h = o.embed(table)
        x = o.rms_norm(h, o.vector(torch.ones(16)), 1e-6)
        assert (h.dtype, x.dtype, o.linear(x, square).dtype) == (
            torch.float32,
            torch.bfloat16,
            torch.bfloat16,
        )
        assert o.linear(x, square, h).dtype == torch.float32
        logits: Tensor = o.logits(x, table)
        assert logits.dtype == torch.float32
        return logits

    found = run(forward, batch, ops)
    assert not torch.equal(found, found.bfloat16().float())
