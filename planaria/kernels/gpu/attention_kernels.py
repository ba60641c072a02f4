"""The kernels of attention.py. Importing this imports Triton.

A tile is BLOCK_Q tokens of one sequence times BLOCK_G query heads that share a key head: the rows of its products. A
program goes over one split of its keys, which are found through the table of blocks. exact: products in float32, for
the interpreter, which multiplies bfloat16 wrongly.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # stands for minus infinity: differences of it stay numbers


@triton.jit
def _dot(a, b, exact: tl.constexpr):
    if exact:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def paged(
    q, keys, values, out, state, sinks, tables, lengths, starts, tile_seq, tile_first, scale, cap, window, group,
    head_blocks, table_stride, slot_stride, value_stride, split_size, num_splits, ranks, rank, interleave,
    dim: tl.constexpr, dim_p: tl.constexpr, rest: tl.constexpr, rest_p: tl.constexpr, vdim: tl.constexpr,
    vdim_p: tl.constexpr, page: tl.constexpr, block_q: tl.constexpr, block_g: tl.constexpr, block_n: tl.constexpr,
    latent: tl.constexpr, capped: tl.constexpr, windowed: tl.constexpr, sunk: tl.constexpr, whole: tl.constexpr,
    exact: tl.constexpr,
):  # fmt: skip
    """whole: attention itself goes to `out` [T, heads, vdim]; else, by token of the tiles, the split's sums go to `out`
    float32 [tiles * block_q, heads, splits, vdim], its greatest score and sum of weights to `state` [.., 2]."""
    seq = tl.load(tile_seq + tl.program_id(0))
    first = tl.load(tile_first + tl.program_id(0))
    start = tl.load(starts + seq)
    end = tl.load(starts + seq + 1)
    length = tl.load(lengths + seq)
    kv_head = tl.program_id(1) // head_blocks
    split = tl.program_id(2)
    heads = (tl.num_programs(1) // head_blocks) * group
    row = tl.arange(0, block_q * block_g)
    token = first + row // block_g
    member = (tl.program_id(1) % head_blocks) * block_g + row % block_g
    real = (token < end) & (member < group)
    head = kv_head * group + member
    before = length - (end - start)  # tokens of earlier steps
    position = before + token - start
    line = (token.to(tl.int64) * heads + head) * (dim + rest)
    d = tl.arange(0, dim_p)
    query = tl.load(q + line[:, None] + d[None, :], mask=real[:, None] & (d < dim)[None, :], other=0.0)
    if rest > 0:
        r = tl.arange(0, rest_p)
        turned = tl.load(q + line[:, None] + dim + r[None, :], mask=real[:, None] & (r < rest)[None, :], other=0.0)
    # The keys that are here, and of those the split's that some token of the tile sees.
    cycle = interleave * ranks
    held = length // cycle * interleave + tl.minimum(
        tl.maximum(length % cycle - rank * interleave, 0), interleave
    )  # fmt: skip
    low = split * split_size
    high = tl.minimum(held, low + split_size)
    if ranks == 1:
        high = tl.minimum(high, before + tl.minimum(first + block_q, end) - start)
        if windowed:
            low = tl.maximum(low, (before + first - start - window + 1) // block_n * block_n)
    most = tl.full((block_q * block_g,), LOWEST, tl.float32)
    total = tl.zeros((block_q * block_g,), tl.float32)
    sums = tl.zeros((block_q * block_g, vdim_p), tl.float32)
    v = tl.arange(0, vdim_p)
    for at in range(low, high, block_n):
        key = at + tl.arange(0, block_n)
        inside = key < high
        block = tl.load(tables + seq.to(tl.int64) * table_stride + key // page, mask=inside, other=0)
        slot = block.to(tl.int64) * page + key % page
        spot = keys + slot * slot_stride + kv_head * dim
        k = tl.load(spot[None, :] + d[:, None], mask=inside[None, :] & (d < dim)[:, None], other=0.0)
        scores = _dot(query, k, exact)
        if rest > 0:
            k_rest = tl.load(spot[None, :] + dim + r[:, None], mask=inside[None, :] & (r < rest)[:, None], other=0.0)
            scores += _dot(turned, k_rest, exact)
        scores = scores * scale
        if capped:
            ratio = scores / cap
            scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)  # tanh
        there = (key // interleave * ranks + rank) * interleave + key % interleave
        seen = inside[None, :] & (there[None, :] <= position[:, None])
        if windowed:
            seen = seen & (there[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, LOWEST)
        now = tl.maximum(most, tl.max(scores, 1))
        fade = tl.exp(most - now)
        weights = tl.where(seen, tl.exp(scores - now[:, None]), 0.0)
        total = total * fade + tl.sum(weights, 1)
        most = now
        if latent:
            value = tl.trans(k)
        else:
            spot = values + slot * value_stride + kv_head * vdim
            value = tl.load(spot[:, None] + v[None, :], mask=inside[:, None] & (v < vdim)[None, :], other=0.0)
        sums = sums * fade[:, None] + _dot(weights.to(value.dtype), value, exact)
    spot = token.to(tl.int64) * heads + head
    if whole:
        if sunk:
            sink = tl.load(sinks + head, mask=real, other=0.0)
            now = tl.maximum(most, sink)
            sums = sums * tl.exp(most - now)[:, None]
            total = total * tl.exp(most - now) + tl.exp(sink - now)
        sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    else:
        spot = ((tl.program_id(0) * block_q + row // block_g).to(tl.int64) * heads + head) * num_splits + split
        tl.store(state + spot * 2, most, mask=real)
        tl.store(state + spot * 2 + 1, total, mask=real)
    kept = real[:, None] & (v < vdim)[None, :]
    tl.store(out + spot[:, None] * vdim + v[None, :], sums.to(out.dtype.element_ty), mask=kept)


@triton.jit
def merge(
    parts, state, out, sinks, starts, tile_seq, tile_first, num_splits, block_q, heads,
    vdim: tl.constexpr, vdim_p: tl.constexpr, sunk: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Splits of one token's head into attention [T, heads, vdim], or, unless `whole`, into a rank's part of it: float32
    [T, heads, vdim + 2] (see `reference_context.part`)."""
    tile = tl.program_id(0) // block_q
    token = tl.load(tile_first + tile) + tl.program_id(0) % block_q
    if token < tl.load(starts + tl.load(tile_seq + tile) + 1):
        line = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
        to = token.to(tl.int64) * heads + tl.program_id(1)
        v = tl.arange(0, vdim_p)
        most = tl.load(state + line * num_splits * 2)
        for i in range(1, num_splits):
            most = tl.maximum(most, tl.load(state + (line * num_splits + i) * 2))
        if sunk:
            sink = tl.load(sinks + tl.program_id(1))
            most = tl.maximum(most, sink)
        total = 0.0
        sums = tl.zeros((vdim_p,), tl.float32)
        for i in range(num_splits):
            spot = line * num_splits + i
            fade = tl.exp(tl.load(state + spot * 2) - most)
            total += tl.load(state + spot * 2 + 1) * fade
            sums += tl.load(parts + spot * vdim + v, mask=v < vdim, other=0.0) * fade
        if sunk:
            total += tl.exp(sink - most)
        if whole:
            sums = sums / tl.where(total > 0.0, total, 1.0)
            tl.store(out + to * vdim + v, sums.to(out.dtype.element_ty), mask=v < vdim)
        else:
            into = out + to * (vdim + 2)
            tl.store(into + v, sums, mask=v < vdim)
            tl.store(into + vdim, most)
            tl.store(into + vdim + 1, total)
