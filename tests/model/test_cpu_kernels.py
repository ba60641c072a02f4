"""The native CPU kernels against a few lines of plain torch, and the promises around them: bits that do not depend
on the batch or on threads, threads that end, a cache that is only a cache."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from planaria.errors import ConfigError
from planaria.kernels import objects
from planaria.kernels.blocks import KINDS
from planaria.kernels.cpu import amx, build
from planaria.kernels.cpu.build import host_isa, target_for
from planaria.kernels.cpu.compiler import Module
from planaria.kernels.cpu.rounded import has_vnni, host_has
from planaria.kernels.ops import Batch, Quantized
from tests.model.tensors import CpuOps, dequantise, random_blocks

ISAS = ["amx", "avx512_bf16", "avx512", "generic"]
FLAVOURS = [(dtype, isa) for dtype in ("bfloat16", "float32") for isa in ISAS[1:]]
FLAVOURS.append(("bfloat16", "amx"))  # whose float32 is that of avx512_bf16
EACH_KIND = [  # by each instruction set, in one of both dtypes
    pytest.param(flavour, kind, marks=() if (i + j) % 2 else pytest.mark.long, id="-".join((*flavour, kind)))
    for i, kind in enumerate(KINDS)
    for j, flavour in enumerate(FLAVOURS)
]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "kernels"


def make(dtype: str, isa: str | None, cache: Path, threads: int = 2) -> CpuOps:
    if isa is not None and ISAS.index(isa) < ISAS.index(host_isa()):
        pytest.skip(f"this CPU has no {isa}")
    return CpuOps(dtype, threads, cache, isa=isa)


@pytest.fixture(params=FLAVOURS, ids=lambda f: f"{f[0]}-{f[1]}")
def ops(request: pytest.FixtureRequest, cache: Path) -> Iterator[CpuOps]:
    made = make(*request.param, cache)
    yield made
    made.close()


@pytest.fixture(params=["bfloat16", "float32"])
def native(request: pytest.FixtureRequest, cache: Path) -> Iterator[CpuOps]:
    made = make(request.param, None, cache)
    yield made
    made.close()


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor, dtype: str) -> Tensor:
    return x.to(DTYPES[dtype]).float()


def close(got: Tensor, want: Tensor, dtype: str, scale: float | None = None) -> None:
    """Within a few roundings of the dtype, relative to the largest value."""
    assert got.shape == want.shape
    limit = (0.012 if dtype == "bfloat16" else 3e-6) * (scale or float(want.abs().max()))
    assert float((got.float() - want).abs().max()) <= limit


class Rows:
    """A batch whose tokens name rows of a table, so that `embed` yields any matrix asked for."""

    def __init__(self, ops: CpuOps, x: Tensor, most: int | None = None) -> None:
        self.ops, self.x = ops, rounded(x, ops.dtype)
        self.batch = Batch(most or len(x), 4, 4, most or len(x))
        self.table = ops.pack(x)
        self.ones = ops.vector(torch.ones(x.shape[1]))
        self.use(range(len(x)))

    def use(self, rows: Any) -> None:
        rows = list(rows)
        self.batch.tokens[: len(rows)] = rows
        self.batch.sample_index[: len(rows)] = range(len(rows))
        self.batch.counts[:3] = len(rows), 1, len(rows)

    def normed(self) -> Tensor:
        """What `o.rms_norm(o.embed(table), ones, 1e-6)` is, rounded as it is."""
        x = self.x * torch.rsqrt(self.x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return rounded(x, self.ops.dtype)

    def seen(self) -> Tensor:
        """The same, bit for bit."""
        one = self.ops.pack(torch.eye(self.x.shape[1]))
        return self.run(lambda o, h: o.scores(h, one)).float()

    def run(self, forward: Callable[[Any, Any], Any]) -> Tensor:
        """forward(ops, the normed rows)."""
        step = self.ops.compile(lambda o: forward(o, o.rms_norm(o.embed(self.table), self.ones, 1e-6)), self.batch)
        return step().clone()


def met(x: Tensor, kind: str, isa: str, skip: int = 0) -> Tensor:
    """Rows as weights of a kind meet them: each block of 32 rounded to 8 bits, or to 15, by its own largest value; on
    AVX2 two blocks of a superblock by that of both, on AVX-512 by as many 127ths of the superblock's largest as hold
    the block's. Kinds of 4 and 5 bits that have no superblocks, but Q4_1, meet 8 bits on AVX2 and on AVX-512 with
    VNNI, IQ4 on the latter alone, and 8 more of blocks whose largest value is 1.5 times the mean of all. skip: how much
    of the first superblock isn't there."""
    twice = rounded_twice(kind, isa)
    most = torch.tensor(127.0 if KINDS[kind].by_bytes or twice else 16383.0)  # a number / a tensor is rounded twice
    blocks = x.reshape(len(x), -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    if KINDS[kind].by_bytes and (isa != "generic" or host_has("avx2")):
        ends = [*range(8 - skip // 32, blocks.shape[1], 8), blocks.shape[1]]
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            own, top = largest[:, first:end], largest[:, first:end].amax(1, keepdim=True)
            if isa == "generic":
                for i in range(0, end - first, 2):
                    own[:, i : i + 2] = own[:, i : i + 2].amax(1, keepdim=True)
            else:
                own[:] = torch.round(own * (most / top) + 0.5).clamp(1, most) * (top / most)
    wide = blocks.double() * (most / largest).double()  # as exactly as fused multiply-adds have it
    whole = torch.round(wide)
    if twice:
        whole += torch.round((wide - whole) * 254) / 254 * (largest > 1.5 * largest.mean(1, keepdim=True))
    return (whole.float() * (largest / most)).reshape(x.shape)


def rounded_twice(kind: str, isa: str) -> bool:
    few_bits, levels = kind in ("q4_0", "q5_0", "q5_1"), kind in ("iq4_nl", "iq4_xs")
    if isa == "generic":
        return host_has("avx2") and few_bits
    return has_vnni(target_for("float32", isa)) and (few_bits or levels)


def exactness(kind: str, isa: str) -> float:
    """How far float32 products may be from those of `met` rows, of the largest. Minima of Q2_K are large, and met by
    sums of 16 bits; on AVX-512 lowest bits of sums of products are cut off, too, for some of what 8 bits
    cost."""
    cut = isa != "generic" and kind in ("q4_k", "q5_k", "q6_k")
    return 1.5e-3 if cut else 3e-5 if kind == "q2_k" else 2e-5


# One operation at a time


@pytest.mark.parametrize("k", [33, 64, 100])
def test_embed_and_norm(ops: CpuOps, k: int) -> None:
    rows = Rows(ops, rand(19, k))
    assert torch.equal(ops.compile(lambda o: o.embed(rows.table), rows.batch)(), rows.x)
    w = rand(k, seed=2)
    got = ops.compile(lambda o: o.rms_norm(o.embed(rows.table), ops.vector(w), 1e-5), rows.batch)()
    want = rows.x * torch.rsqrt(rows.x.pow(2).mean(-1, keepdim=True) + 1e-5) * w
    close(got, want, ops.dtype)
    assert got.dtype == DTYPES[ops.dtype]


@pytest.mark.parametrize("rows", [1, 2, 7, 9, 16, 31, 70, 140])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (77, 33), (200, 130)])
def test_linear(ops: CpuOps, rows: int, n: int, k: int) -> None:
    x = Rows(ops, rand(rows, k))
    w, bias = rand(n, k, seed=1) / k**0.5, rand(n, seed=2)
    want = x.normed() @ rounded(w, ops.dtype).T
    close(x.run(lambda o, h: o.linear(h, ops.pack(w))), want, ops.dtype)
    close(x.run(lambda o, h: o.linear(h, ops.pack(w, bias))), want + bias, ops.dtype)


@pytest.mark.parametrize("rows", [11, 17, 50])
def test_linear_adds_to_the_residual_in_float32(ops: CpuOps, rows: int) -> None:
    x = Rows(ops, rand(rows, 48))
    w = ops.pack(rand(48, 48, seed=1) / 7)

    def forward(o: Any) -> Any:
        stream = o.embed(x.table)
        return o.linear(o.rms_norm(stream, x.ones, 1e-6), w, residual=stream)

    got = ops.compile(forward, x.batch)()
    want = x.x + x.normed() @ rounded(rand(48, 48, seed=1) / 7, ops.dtype).T
    assert got.dtype == torch.float32
    assert float((got - want).abs().max()) < 3e-5


def test_tiles_are_taken_where_the_system_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "allowed", lambda: False)
    assert host_isa() != "amx"


def test_torch_in_the_same_thread_has_its_own_tiles(native: CpuOps) -> None:
    x, other = Rows(native, rand(40, 64)), torch.nn.Linear(64, 80, dtype=torch.bfloat16)
    packed, seen = native.pack(rand(80, 64, seed=1) / 8), rand(40, 64).bfloat16()
    with torch.no_grad():
        want, mine = other(seen), x.run(lambda o, h: o.linear(h, packed))
        for _ in range(3):
            assert torch.equal(x.run(lambda o, h: o.linear(h, packed)), mine)
            assert torch.equal(other(seen), want)


def test_logits_of_taken_rows(ops: CpuOps) -> None:
    x = Rows(ops, rand(23, 64))
    head = rand(1003, 64, seed=4) / 8
    x.batch.sample_index[:3] = 5, 22, 0
    x.batch.counts[2] = 3
    packed = ops.pack(head)
    got = x.run(lambda o, h: o.logits(o.take(h), packed))
    assert got.shape == (3, 1003) and got.dtype == torch.float32
    want = x.normed()[[5, 22, 0]] @ rounded(head, ops.dtype).T
    assert float((got - want).abs().max()) < 3e-5
    x.batch.counts[2] = 0
    assert x.run(lambda o, h: o.logits(o.take(h), packed)).shape == (0, 1003)


@pytest.mark.parametrize("half", [16, 33, 208])
@pytest.mark.parametrize("rows", [1, 12, 130])
def test_gated(ops: CpuOps, half: int, rows: int) -> None:
    """Halves of whole panels are fused with the product; others are not: the same numbers either way."""
    x = Rows(ops, rand(rows, 64) * 3)
    w = rand(2 * half, 64, seed=1) / 3
    both = rounded(x.normed() @ rounded(w, ops.dtype).T, ops.dtype)
    want = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
    packed = ops.pack(w)
    got = x.run(lambda o, h: o.gated(o.linear(h, packed)))
    close(got, want, ops.dtype)
    # what comes after finds zeros in the padding
    down = rand(32, half, seed=5) / 8
    close(x.run(lambda o, h: o.linear(o.gated(o.linear(h, packed)), ops.pack(down))),
          rounded(want, ops.dtype) @ rounded(down, ops.dtype).T, ops.dtype)  # fmt: skip


@pytest.mark.parametrize("skip", [0, 96])
@pytest.mark.parametrize(("ops", "kind"), EACH_KIND, indirect=["ops"])
def test_packed_weights(ops: CpuOps, kind: str, skip: int) -> None:
    """Those of superblocks also as a tensor rank has them, cut inside of one."""
    if skip and not KINDS[kind].small:
        pytest.skip("no superblocks")
    k, n = 96 if not KINDS[kind].small else 544, 200
    weight, bias = random_blocks(kind, n, k, skip=skip), rand(n)
    rows = rand(131, k)
    if rounded_twice(kind, ops.target.isa):
        rows[::3, 40] *= 9  # a block with larger numbers than others, in some of a tile's rows
    x = Rows(ops, rows)
    w = ops.pack(weight, bias)
    more = 1.2 if kind == "q2_k" else 1.05  # than the file, but for whole panels of whole cache lines
    assert w.nbytes <= weight.data.nbytes * more * 208 / 200 + 64 * 13
    plain = dequantise(weight).float()
    limit = {"bfloat16": 0.012, "float32": exactness(kind, ops.target.isa)}[ops.dtype]
    first, seen = None, x.seen()
    run = ops.compile(lambda o: o.linear(o.rms_norm(o.embed(x.table), x.ones, 1e-6), w), x.batch)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 17, 64, 65, 131):
        x.use(range(count))
        got = run().clone()
        want = met(seen[:count], kind, ops.target.isa, skip) @ plain.T + bias
        assert float((got.float() - want).abs().max()) <= limit * float(want.abs().max())
        first = got[:1] if first is None else first
        assert torch.equal(got[:1], first)
    x.use([0, 199, 17])
    x.batch.tokens[:3] = 0, 199, 17
    assert torch.allclose(ops.compile(lambda o: o.embed(w), x.batch)(), plain[[0, 199, 17]], rtol=1e-6)


@pytest.mark.parametrize(
    ("ops", "kind"),
    [each for each in EACH_KIND if each.values[1] in ("q5_0", "iq4_nl", "q4_k", "q6_k")],
    indirect=["ops"],
)
def test_packed_weights_hide_nothing_of_a_row_that_is_not_finite(ops: CpuOps, kind: str) -> None:
    x = rand(3, 64)
    x[1, 40] = torch.nan
    got = Rows(ops, x).run(lambda o, h: o.linear(h, ops.pack(random_blocks(kind, 48, 64))))
    assert torch.isfinite(got.float()).all(-1).tolist() == [True, False, True]


def test_a_product_of_parts_of_several_kinds(ops: CpuOps) -> None:
    """As the query, key and value of a Q4_K_M file: columns, biases, residual and fused activation as of one weight."""
    k = 256
    parts = [random_blocks("q4_k", 48, k), random_blocks("q6_k", 16, k), random_blocks("q5_0", 21, k)]
    bias = rand(85)
    packed = tuple(ops.pack(p, b) for p, b in zip(parts, bias.split([48, 16, 21]), strict=True))
    back, near = ops.pack(torch.eye(85, k)), exactness("q4_k", ops.target.isa)
    for rows in (1, 5, 70):
        x = Rows(ops, rand(rows, k))
        products = [met(x.seen(), part.kind, ops.target.isa) @ dequantise(part).float().T for part in parts]
        want = torch.cat(products, -1) + bias
        got = x.run(lambda o, h: o.linear(h, packed))
        assert float((got.float() - want).abs().max()) <= 0.012 * float(want.abs().max())
        kept = x.run(lambda o, h: o.linear(h, packed, residual=o.scores(h, back)))
        assert float((kept - want - x.seen()[:, :85]).abs().max()) <= near * float(want.abs().max())
    with pytest.raises(ValueError, match="from row 21 on"):
        x.run(lambda o, h: o.linear(h, packed[::-1]))


# Attention


class Sequences:
    """A small attention layer run step by step, beside a plain one that keeps everything in float32 tensors."""

    def __init__(
        self, ops: CpuOps, *, heads: int, kv_heads: int, dim: int, block: int = 16, window: int | None = None,
        rotary: int | None = None, norms: bool = False, blocks: int = 64,
    ) -> None:  # fmt: skip
        self.ops, self.heads, self.kv_heads, self.dim, self.window = ops, heads, kv_heads, dim, window
        self.block, self.rotary = block, rotary or dim
        columns = (heads + 2 * kv_heads) * dim
        self.rows = rounded(rand(997, columns, seed=7), ops.dtype)
        self.batch = Batch(600, 8, blocks, 8)
        self.batch.block_table[:] = 0
        self.free = list(np.random.default_rng(0).permutation(blocks))
        self.lengths: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        angle = torch.arange(1024)[:, None] * torch.logspace(0, -3, self.rotary // 2)
        self.cos, self.sin = torch.cos(angle), torch.sin(angle)
        self.norms = (1 + 0.3 * rand(dim, seed=8), 1 + 0.3 * rand(dim, seed=9)) if norms else None
        self.kv = ops.kv_layer(blocks, block, kv_heads, dim)
        table, rope = ops.pack(self.rows), ops.rope_table(self.cos, self.sin)
        # an identity turns the table's rows into activations unchanged
        identity = ops.pack(torch.eye(columns))
        vectors = [ops.vector(v) for v in self.norms] if self.norms else [None, None]

        def forward(o: Any) -> Any:
            qkv = o.linear(scaled(o, o.embed(table)), identity)
            q = o.rope_store(qkv, self.kv, rope, heads, kv_heads, dim, *vectors, 1e-5)
            return o.attend(q, self.kv, heads, kv_heads, dim, dim**-0.5, window)

        def scaled(o: Any, x: Any) -> Any:
            # rows of unit mean square pass the norm as they are, but for one rounding
            return o.rms_norm(x, ops.vector(torch.ones(columns)), 0.0)

        rms = self.rows.pow(2).mean(-1, keepdim=True).sqrt()
        self.inputs = rounded(self.rows / rms, ops.dtype)
        self.run = ops.compile(forward, self.batch)

    def step(self, feed: dict[int, int]) -> Tensor:
        """`feed`: number of new tokens for each sequence. The attention's output for all of them."""
        b, at = self.batch, 0
        for i, (s, count) in enumerate(feed.items()):
            start, tokens = self.lengths.get(s, 0), self.tokens.setdefault(s, [])
            held = -(-start // self.block)
            for j in range(held, -(-(start + count) // self.block)):
                b.block_table[s, j] = self.free.pop()
            b.seq_start[i], b.seq_len[i], b.seq_row[i] = at, start + count, s
            for p in range(start, start + count):
                tokens.append((s * 131 + p * 7) % 997)
                b.tokens[at], b.positions[at] = tokens[-1], p
                b.slots[at] = b.block_table[s, p // self.block] * self.block + p % self.block
                at += 1
            self.lengths[s] = start + count
        b.seq_start[len(feed)] = at
        b.counts[:3] = at, len(feed), 0
        return self.run().clone()

    def plain(self, feed: dict[int, int]) -> Tensor:
        """The same for the state after `step(feed)`."""
        out = []
        for s, count in feed.items():
            x = self.inputs[self.tokens[s]].view(-1, self.heads + 2 * self.kv_heads, self.dim)
            q, k, v = torch.split(x, [self.heads, self.kv_heads, self.kv_heads], dim=1)
            if self.norms:
                q, k = (
                    y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * w
                    for y, w in zip((q, k), self.norms, strict=True)
                )
            q, k = self.rotate(q), self.rotate(k)
            group = self.heads // self.kv_heads
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * self.dim**-0.5
            at = torch.arange(len(x))
            seen = at[None] <= at[:, None]
            if self.window:
                seen &= at[None] > at[:, None] - self.window
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            o = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))
            out.append(o[-count:].flatten(1))
        return torch.cat(out)

    def rotate(self, x: Tensor) -> Tensor:
        half = self.rotary // 2
        c, s = self.cos[: len(x), None], self.sin[: len(x), None]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return rounded(torch.cat([a * c - b * s, b * c + a * s, rest], -1), self.ops.dtype)


STEPS: list[dict[int, int]] = [
    {0: 5}, {0: 1, 1: 40}, {1: 1, 0: 100, 2: 17}, {2: 1, 3: 130, 0: 1, 1: 1}, {3: 300, 2: 15}, {0: 1, 1: 1, 2: 1, 3: 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "dim": 32},
        {"heads": 9, "kv_heads": 3, "dim": 64, "block": 32},
        {"heads": 2, "kv_heads": 2, "dim": 80, "block": 48, "rotary": 20},
        {"heads": 8, "kv_heads": 1, "dim": 128, "norms": True},
        {"heads": 1, "kv_heads": 1, "dim": 256, "window": 40},
        {"heads": 4, "kv_heads": 2, "dim": 32, "window": 7, "norms": True},
    ],
    ids=str,
)
def test_attention(ops: CpuOps, shape: dict[str, Any]) -> None:
    layer = Sequences(ops, **shape)
    for feed in STEPS:
        got = layer.step(feed)
        close(got, layer.plain(feed), ops.dtype, scale=1.5)


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_cross_tiles(native: CpuOps, window: int | None) -> None:
    layer = Sequences(native, heads=6, kv_heads=2, dim=64, window=window, blocks=100)
    for feed in ({0: 600}, {0: 183}, {0: 1, 1: 5}, {0: 1, 1: 500}):
        got = layer.step(feed)
        close(got, layer.plain(feed), native.dtype, scale=1.5)


def test_a_former_owner_of_a_block_leaves_no_trace(native: CpuOps) -> None:
    """Not a number in another sequence's old keys and values must not reach the next owner of the block."""
    layer = Sequences(native, heads=4, kv_heads=2, dim=32)
    clean = [layer.step({0: n}) for n in (3, 1, 14, 1)]
    again = Sequences(native, heads=4, kv_heads=2, dim=32)
    again.kv.memory.bytes[:] = 0xFF  # all NaN
    assert all(torch.equal(again.step({0: n}), c) for n, c in zip((3, 1, 14, 1), clean, strict=True))


# Promises


def whole_model(ops: CpuOps, kind: str | None) -> Callable[[Any], Any]:
    hidden, inter, heads, kv_heads, dim, vocab = 96, 160, 3, 1, 32, 130

    def weight(n: int, k: int, seed: int) -> Any:
        return ops.pack(random_blocks(kind, n, k, seed=seed) if kind else rand(n, k, seed=seed) / k**0.5)

    table = weight(vocab, hidden, 1)
    angle = torch.arange(512)[:, None] * torch.logspace(0, -3, dim // 2)
    rope, one = ops.rope_table(torch.cos(angle), torch.sin(angle)), ops.vector(torch.ones(hidden))
    layers = [
        (
            weight((heads + 2 * kv_heads) * dim, hidden, 10 * i + 2),
            weight(hidden, hidden, 10 * i + 3),
            weight(2 * inter, hidden, 10 * i + 4),
            weight(hidden, inter, 10 * i + 5),
            ops.kv_layer(80, 16, kv_heads, dim),
        )
        for i in range(2)
    ]

    def forward(o: Any) -> Any:
        x = o.embed(table)
        for qkv, out, gate_up, down, kv in layers:
            q = o.rope_store(o.linear(o.rms_norm(x, one, 1e-5), qkv), kv, rope, heads, kv_heads, dim)
            x = o.linear(o.attend(q, kv, heads, kv_heads, dim, dim**-0.5), out, residual=x)
            x = o.linear(o.gated(o.linear(o.rms_norm(x, one, 1e-5), gate_up)), down, residual=x)
        return o.logits(o.rms_norm(o.take(x), one, 1e-5), table)

    return forward


def feed(batch: Batch, items: list[tuple[int, int, int]]) -> None:
    """Items (sequence, first position, count); a sequence's tokens are a function of its number and position; its
    blocks are its own; the last token of each is sampled."""
    at = 0
    for i, (s, start, count) in enumerate(items):
        batch.block_table[s, :20] = (np.arange(20) * 4 + s) % 80
        batch.seq_start[i], batch.seq_len[i], batch.seq_row[i] = at, start + count, s
        for p in range(start, start + count):
            batch.tokens[at], batch.positions[at] = (s * 31 + p * p) % 130, p
            batch.slots[at] = int(batch.block_table[s, p // 16]) * 16 + p % 16
            at += 1
        batch.sample_index[i] = at - 1
    batch.seq_start[len(items)] = at
    batch.counts[:3] = at, len(items), len(items)


HISTORIES = [  # ways to reach position 210 of sequence 0 with its token sampled
    [[(0, 0, 211)]],
    [[(0, 0, 210)], [(0, 210, 1)]],
    [[(0, p, 70)] for p in range(0, 210, 70)] + [[(0, 210, 1), (1, 0, 33), (2, 0, 9)]],
    [[(1, 0, 3), (0, 0, 100)], [(2, 0, 64), (0, 100, 110), (1, 3, 1)], [(1, 4, 1), (2, 64, 1), (3, 0, 1), (0, 210, 1)]],
    [[(0, p, 1), (1, p, 1)] for p in range(211)],
]


@pytest.mark.parametrize("kind", [None, "q4_1", "q8_0", "q4_k", "q6_k"])
def test_bits_do_not_depend_on_the_batch(native: CpuOps, kind: str | None) -> None:
    """Alone or among others, by chunks or token by token: the same logits, bit for bit."""
    results = []
    for history in HISTORIES:
        batch = Batch(300, 8, 20, 8)
        run = native.compile(whole_model(native, kind), batch)
        for step in history:
            feed(batch, step)
            logits = run()
        results.append(logits[[s for s, _, _ in history[-1]].index(0)].clone())
    assert bool(torch.isfinite(results[0]).all())
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("kind", [None, "q4_1"])
def test_bits_do_not_depend_on_threads(cache: Path, kind: str | None) -> None:
    results = []
    for threads in (1, 2, 3, 7):  # the last are more than most machines that test this have
        ops = make("bfloat16", None, cache, threads)
        batch = Batch(300, 8, 20, 8)
        run = ops.compile(whole_model(ops, kind), batch)
        feed(batch, [(0, 0, 90), (1, 0, 1), (2, 0, 150)])
        run()
        feed(batch, [(0, 90, 1), (1, 1, 1), (2, 150, 1)])
        several = run().clone()
        feed(batch, [(0, 91, 9)])  # of one sequence: its attention is dealt by tokens, too
        results.append(torch.cat([several, run()]))
        ops.close()
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_many_short_steps_of_several_tapes(cache: Path, threads: int) -> None:
    """Helpers come late to most of these: they must neither do another step's work nor miss their own."""
    ops = make("float32", None, cache, threads)
    rng = np.random.default_rng(threads)
    tapes: list[tuple[Rows, Callable[[], Tensor], dict[int, Tensor]]] = []
    for step in range(1500):
        if not tapes or rng.random() < 0.01:
            x = Rows(ops, rand(40, 64, seed=step))
            w = ops.pack(rand(64, 64, seed=1) / 8)

            def forward(o: Any, x: Rows = x, w: Any = w, depth: int = int(rng.integers(1, 20))) -> Any:
                stream = o.embed(x.table)
                for _ in range(depth):
                    stream = o.linear(o.rms_norm(stream, x.ones, 1e-6), w, residual=stream)
                return o.take(stream)

            tapes.append((x, ops.compile(forward, x.batch), {}))
        if len(tapes) > 3:
            tapes.pop(0)
        x, run, seen = tapes[int(rng.integers(len(tapes)))]
        rows = int(rng.choice([0, 1, 2, 17, 40]))
        x.use(range(rows))
        got = run().clone()
        assert torch.equal(got, seen.setdefault(rows, got))
    ops.close()


def test_close_ends_threads_and_refuses_more(cache: Path) -> None:
    before = set(threading.enumerate())
    ops = make("bfloat16", None, cache, 3)
    x = Rows(ops, rand(3, 32))
    run = ops.compile(lambda o: o.embed(x.table), x.batch)
    run()
    assert len(set(threading.enumerate()) - before) == 2
    ops.close()
    ops.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        run()


def test_waiting_threads_use_no_cpu(cache: Path) -> None:
    ops = make("bfloat16", None, cache, 2)
    x = Rows(ops, rand(3, 32))
    run = ops.compile(lambda o: o.embed(x.table), x.batch)
    run()
    time.sleep(0.02)  # past the short spin after a run
    start = time.process_time()
    time.sleep(0.3)  # the time that is measured
    assert time.process_time() - start < 0.15  # one that spins has 0.3
    ops.close()


def test_what_the_tape_names_lives_as_long_as_it(cache: Path) -> None:
    import gc

    ops = make("float32", None, cache, 1)
    batch = Batch(300, 8, 20, 8)
    run = ops.compile(whole_model(ops, None), batch)
    feed(batch, [(0, 0, 50)])
    want = run().clone()
    gc.collect()
    [torch.full((1 << 18,), float("nan")) for _ in range(64)]
    assert torch.equal(run(), want)
    ops.close()


def test_refusals(cache: Path) -> None:
    ops = make("bfloat16", None, cache, 1)
    with pytest.raises(ConfigError, match="block-size 8"):
        ops.kv_layer(4, 8, 2, 64)
    with pytest.raises(ConfigError, match="not 20"):
        ops.kv_layer(4, 16, 2, 20)
    with pytest.raises(ConfigError, match="dtype float16"):
        CpuOps("float16", 1, cache)
    with pytest.raises(ConfigError, match="threads 0"):
        CpuOps("float32", 0, cache)
    with pytest.raises(ValueError, match="isa"):
        CpuOps("float32", 1, cache, isa="mmx")
    with pytest.raises(ValueError, match="multiple of 32"):
        ops.pack(Quantized("q4_0", np.zeros((4, 18), np.uint8), (4, 40)))
    with pytest.raises(ValueError, match="expected"):
        ops.pack(Quantized("q4_0", np.zeros((4, 19), np.uint8), (4, 32)))
    with pytest.raises(ValueError, match="kind 'iq2_xs'"):
        ops.pack(Quantized("iq2_xs", np.zeros((4, 19), np.uint8), (4, 32)))
    kept: list[Any] = []
    with pytest.raises(IndexError):
        ops.compile(lambda o: kept.append(o) or [][0], Batch(4, 4, 4, 4))
    with pytest.raises(RuntimeError, match="outside compile"):
        kept[0].embed(ops.pack(rand(4, 16)))
    x = Rows(ops, rand(4, 16))
    with pytest.raises(ValueError, match="K = 32"):
        x.run(lambda o, h: o.linear(h, ops.pack(rand(8, 32))))
    run = ops.compile(lambda o: o.embed(x.table), x.batch)
    x.batch.counts[0] = 5
    with pytest.raises(ValueError, match="this recording takes 4"):
        run()
    ops.close()


# The cache and the small compiler


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(build, "_loaded", {})


@pytest.mark.usefixtures("nothing_loaded")
def test_kernels_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_for("float32", "generic")
    data = build.ensure(target, tmp_path)
    (kept,) = tmp_path.iterdir()
    count = []
    monkeypatch.setattr(build, "compile_object", lambda t, kind: count.append(t) or data)
    assert build.ensure(target, tmp_path) == data and not count
    kept.write_bytes(kept.read_bytes()[:-100])  # damaged: compiled again and replaced
    assert build.ensure(target, tmp_path) == data and count == [target]
    assert build.ensure(target, tmp_path) == data and len(count) == 1
    start = time.process_time()
    build.load(target, tmp_path)
    assert time.process_time() - start < 1.0


@pytest.mark.usefixtures("nothing_loaded")
def test_kinds_are_compiled_when_weights_of_them_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, target = random_blocks("q4_1", 16, 32), target_for("float32")
    made = {kind: build.ensure(target, None, kind) for kind in ("", "q4_1")}
    compiled: list[str] = []
    monkeypatch.setattr(build, "compile_object", lambda t, kind: compiled.append(kind) or made[kind])
    ops = CpuOps("float32", 1, tmp_path)
    assert compiled == [""]
    for _ in range(2):
        ops.pack(weight)
    assert compiled == ["", "q4_1"] and len(list(tmp_path.iterdir())) == 2
    ops.close()


def test_what_is_written_as_it_is_to_be_is_compiled_so() -> None:
    """Variables are in registers; a loop stays one, where LLVM would work out what comes of it."""
    text = """
define i64 @sum() {
entry:
  %total = alloca i64
  store i64 0, ptr %total
  br label %turn
turn:
  %i = phi i64 [0, %entry], [%next, %turn]
  %before = load i64, ptr %total
  %after = add i64 %before, %i
  store i64 %after, ptr %total
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, 10
  br i1 %more, label %turn, label %done
done:
  ret i64 %after
}
"""
    found = {}
    for as_written in (True, False):
        machine = objects.CodeMachine()
        module = machine.binding.parse_assembly(text)
        engine = machine.load(machine.emit(module, as_written=as_written))
        call = ctypes.CFUNCTYPE(ctypes.c_int64)(engine.get_function_address("sum"))
        assert call() == 45 and "alloca" not in str(module)
        found[as_written] = "phi i64" in str(module)
    assert found == {True: True, False: False}


def test_a_first_start_has_kinds_compiled_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_for("float32", "generic")
    build.compile_beside(target, tmp_path, lambda: ["q4_0"])

    def nowhere(target: Any, kind: str) -> bytes:
        raise AssertionError(f"{kind} is compiled here")

    monkeypatch.setattr(build, "compile_object", nowhere)
    assert build.ensure(target, tmp_path, "q4_0")
    monkeypatch.setattr(build, "compile_object", lambda target, kind: b"all else")
    build.ensure(target, tmp_path)
    build.compile_beside(target, tmp_path, lambda: pytest.fail("something is compiled already"))
    assert not build._beside


@pytest.mark.skipif(not host_has("avx2"), reason="a table of bytes is read lane by lane")
def test_levels_are_looked_up_by_an_instruction() -> None:
    table, plain = (len(build.ensure(target_for("float32", "generic"), None, kind)) for kind in ("iq4_nl", "q4_0"))
    assert table < 1.5 * plain  # lane by lane: five times as long, and one row twelve times as slow


def test_objects_that_nobody_used_for_long_go_when_another_is_made(tmp_path: Path) -> None:
    def name(number: int) -> Path:
        return tmp_path / f"kernels-{number:024}.o"

    for number in range(3):
        objects.ensure(name(number), lambda: b"code")
    others = tmp_path / "sampling-000.o", tmp_path / "mine.o"
    for path in (name(0), name(1), *others):
        path.write_bytes(path.read_bytes() if path.exists() else b"")
        os.utime(path, (0.0, time.time() - objects.UNUSED - 60))
    assert objects.ensure(name(0), lambda: b"other") == b"code"  # used again
    objects.ensure(name(3), lambda: b"code")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (name(0), name(2), name(3), *others)}


@pytest.mark.usefixtures("nothing_loaded")
def test_a_cache_that_can_not_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ops = CpuOps("float32", 1, tmp_path / "file" / "cache", isa="generic")
    x = Rows(ops, rand(3, 32))
    assert torch.equal(ops.compile(lambda o: o.embed(x.table), x.batch)(), x.x)
    ops.close()


class Numbered(int):
    second = 1


PROGRAM = """
def named(row: Numbered) -> int:
    return row.second + Numbered.second


def helper(a: int, b: int) -> int:
    return min(a, b) * 2 + max(a, b) % 3


def entry(p: int, n: int) -> None:
    total, i = 0, 0
    while True:
        if i == n or get(p, i) == 99 and i > 0:
            break
        i += 1
        if i % 4 == 3:
            continue
        x = get(p, i - 1)
        if not (0 <= x < 50) or x == 7:
            total -= x
        elif x > 40:
            total += helper(x, i)
        else:
            total += x << 1 if x & 1 else x // 3
    for k in range(2, n, 3):
        for k2 in range(k):
            total ^= k * k2
    put(p, n, total + (total > 10) - TEN + named(p))
"""


def test_the_compiler_agrees_with_python() -> None:
    from llvmlite import binding

    build.initialise()
    module = Module(PROGRAM, {"TEN": 10, "Numbered": Numbered}, {}, "entry", "small")
    parsed = binding.parse_assembly(module.text())
    parsed.verify()
    machine = binding.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    engine = binding.create_mcjit_compiler(parsed, machine)
    entry = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(engine.get_function_address("small"))
    rng = np.random.default_rng(0)
    for n in range(1, 40):
        values = rng.integers(-20, 110, n + 1)
        mine = values.copy()
        names: dict[str, Any] = {
            "TEN": 10,
            "Numbered": Numbered,
            "get": lambda p, i, mine=mine: int(mine[i]),
            "put": lambda p, i, v, mine=mine: mine.__setitem__(i, v),
        }
        exec(PROGRAM, names)
        names["named"] = lambda p, mine=mine: int(mine[1]) + 1  # Python knows no memory at an address
        names["entry"](0, n)
        entry(values.ctypes.data, n)
        assert np.array_equal(values, mine)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x = 1.5", "Constant"), ("x = [1]", "List"), ("print(1)", "print"), ("x = y", "name y"),
        ("import os", "Import"), ("x = p.y", "Attribute"),
    ],
)  # fmt: skip
def test_the_compiler_refuses_what_it_does_not_know(line: str, what: str) -> None:
    with pytest.raises(SyntaxError, match=what):
        Module(f"def entry(p: int) -> None:\n    {line}\n", {}, {}, "entry", "small").text()
