"""The kernels of draw.py. Importing this imports Triton.

A weight's arithmetic is single float32 operations in the order of the definition (planaria.worker.sampling), and sums
are of integers: so tokens are those of any other device. They must be compiled without fused multiplications.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weight(y):
    """2^(40 - y), rounded down, for y in [0, 60]."""
    whole = y.to(tl.int32)
    f = y - whole.to(tl.float32)
    value = f * -0.0009449035278521478 + 0.00920579768717289
    value = value * f + -0.0552973598241806
    value = value * f + 0.2401801496744156
    value = value * f + -0.6931437253952026
    value = value * f + 1.0
    return ((value * 16777216.0).to(tl.int32).to(tl.int64) << 16) >> whole.to(tl.int64)


@triton.jit
def _kept(x, at, top, scale, limit, least, last, size):
    """Weights of those that are kept: y up to the limit, above `least`, or equal with an id up to `last`."""
    y = (top - x) * scale
    kept = (at < size) & (y <= limit) & ((x > least) | ((x == least) & (at <= last)))
    return tl.where(kept, _weight(tl.minimum(tl.where(kept, y, 60.0), 60.0)), 0)


@triton.jit
def tops(logits, out, size, block: tl.constexpr):
    """The greatest logit of each block; NaN where there is one."""
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(logits + line * size + at, mask=at < size, other=float("-inf"))
    broken = tl.sum((x != x).to(tl.int32)) > 0
    most = tl.max(tl.where(x == x, x, float("-inf")))
    tl.store(out + line * tl.num_programs(1) + tl.program_id(1), tl.where(broken, float("nan"), most))


@triton.jit
def masses(logits, tops, scales, limits, least, last, out, size, blocks, block: tl.constexpr, blocks_p: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, blocks_p)
    top = tl.max(tl.load(tops + line * blocks + b, mask=b < blocks, other=float("-inf")))
    at = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(logits + line * size + at, mask=at < size, other=float("-inf"))
    w = _kept(
        x, at, top, tl.load(scales + line), tl.load(limits + line), tl.load(least + line), tl.load(last + line), size
    )  # fmt: skip
    tl.store(out + line * blocks + tl.program_id(1), tl.sum(w))


@triton.jit
def weights(logits, tops, scales, limits, out, size, blocks, block: tl.constexpr, blocks_p: tl.constexpr):
    """Of each token, before anything is cut but by the limit."""
    line = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, blocks_p)
    top = tl.max(tl.load(tops + line * blocks + b, mask=b < blocks, other=float("-inf")))
    at = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(logits + line * size + at, mask=at < size, other=float("-inf"))
    w = _kept(x, at, top, tl.load(scales + line), tl.load(limits + line), float("-inf"), size, size)
    tl.store(out + line * size + at, w, mask=at < size)


@triton.jit
def _bits(seed, position):
    """64 random bits: Philox4x32-10 (planaria.worker.rng)."""
    low = 0xFFFFFFFF
    c0 = position & low
    c1 = position >> 32
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = seed & low
    k1 = seed >> 32
    for _ in range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1 ^ k0
        c1 = p1 & low
        c2 = (p0 >> 32) ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return c0 | (c1 << 32)


@triton.jit
def _high_product(a, b):
    """The high 64 bits of a * b."""
    low = 0xFFFFFFFF
    a0 = a & low
    a1 = a >> 32
    b0 = b & low
    b1 = b >> 32
    middle = a1 * b0 + ((a0 * b0) >> 32)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> 32) + (other >> 32)


@triton.jit
def pick(
    logits, tops, masses, scales, limits, least, last, seeds, positions, out, size, blocks, lines,
    block: tl.constexpr, blocks_p: tl.constexpr,
):  # fmt: skip
    """A line's token into out [0], and into out [1] 0, or 1 where its logits are broken, 2 where all are banned."""
    line = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, blocks_p)
    every = tl.load(tops + line * blocks + b, mask=b < blocks, other=float("-inf"))
    top = tl.max(tl.where(every == every, every, float("inf")))
    scale = tl.load(scales + line)
    flag = tl.where(top == float("inf"), 1, tl.where(top == float("-inf"), 2, 0))
    mass = tl.load(masses + line * blocks + b, mask=b < blocks, other=0)
    sums = tl.cumsum(mass, 0)
    total = tl.sum(mass)
    seed = tl.load(seeds + line).to(tl.uint64, bitcast=True)
    position = tl.load(positions + line).to(tl.uint64, bitcast=True)
    point = _high_product(_bits(seed, position), total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    drawn = tl.sum((sums <= point).to(tl.int32))
    first = tl.min(tl.where(every == top, b, blocks_p))
    own = tl.minimum(tl.where(scale == 0.0, first, drawn), blocks - 1)
    point = point - tl.sum(tl.where(b < own, mass, 0))
    at = own * block + tl.arange(0, block)
    x = tl.load(logits + line * size + at, mask=at < size, other=float("-inf"))
    w = _kept(x, at, top, scale, tl.load(limits + line), tl.load(least + line), tl.load(last + line), size)
    within = tl.sum((tl.cumsum(w, 0) <= point).to(tl.int32))
    greatest = tl.min(tl.where((x == top) & (at < size), tl.arange(0, block), block))
    token = own * block + tl.where(scale == 0.0, greatest, within)
    tl.store(out + line, tl.where(flag == 0, token, 0).to(tl.int64))
    tl.store(out + lines + line, flag.to(tl.int64))


@triton.jit
def follow(tokens, drawn_at, out, count, block: tl.constexpr):
    """In place of some tokens what these lines of `out` drew."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    line = tl.load(drawn_at + at, mask=at < count, other=-1)
    tl.store(tokens + at, tl.load(out + line, mask=line >= 0, other=0).to(tl.int32), mask=line >= 0)
