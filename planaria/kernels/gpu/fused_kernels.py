"""The kernels of fused.py: what torch would do in several passes over memory. Importing this imports Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(x, add, weight, out, hidden, eps, block: tl.constexpr, adds: tl.constexpr):
    """A row: RMS-normalised; with `adds` x + add is, which takes the place of x."""
    at = tl.program_id(0).to(tl.int64) * hidden + tl.arange(0, block)
    inside = tl.arange(0, block) < hidden
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        row += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + at, row, mask=inside)
    scale = tl.rsqrt(tl.sum(row * row) / hidden + eps)
    row = row * scale * tl.load(weight + tl.arange(0, block), mask=inside, other=0.0)
    tl.store(out + at, row.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_store(
    qkv, q, keys, values, cos, sin, positions, slots, q_norm, k_norm, heads, kv_heads, half, eps, key_stride,
    value_stride, dim: tl.constexpr, block: tl.constexpr, norms_q: tl.constexpr, norms_k: tl.constexpr,
):  # fmt: skip
    """A head of a token's q, k and v: normalised and rotated where it is q or k; k and v go to the token's slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, block)
    inside = d < dim
    line = qkv + (token * (heads + 2 * kv_heads) + head) * dim
    other = tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))  # the other number of its pair
    x = tl.load(line + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(line + other, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if norms_q:  # noqa: SIM102, the kernel has one of these, or the other
        if head < heads:
            scale = tl.rsqrt(tl.sum(x * x) / dim + eps)
            x = x * scale * tl.load(q_norm + d, mask=inside, other=0.0)
            y = y * scale * tl.load(q_norm + other, mask=inside, other=0.0)
    if norms_k:  # noqa: SIM102
        if (head >= heads) & (head < heads + kv_heads):
            scale = tl.rsqrt(tl.sum(x * x) / dim + eps)
            x = x * scale * tl.load(k_norm + d, mask=inside, other=0.0)
            y = y * scale * tl.load(k_norm + other, mask=inside, other=0.0)
    if head < heads + kv_heads:
        position = tl.load(positions + token).to(tl.int64)
        turned = d < 2 * half
        pair = position * half + tl.where(d < half, d, d - half)
        c = tl.load(cos + pair, mask=turned, other=1.0)
        s = tl.load(sin + pair, mask=turned, other=0.0)
        x = x * c + tl.where(d < half, -y, y) * s
    slot = tl.load(slots + token).to(tl.int64)
    if head < heads:
        tl.store(q + (token * heads + head) * dim + d, x.to(q.dtype.element_ty), mask=inside)
    elif head < heads + kv_heads:
        to = keys + slot * key_stride + (head - heads) * dim
        tl.store(to + d, x.to(keys.dtype.element_ty), mask=inside & (slot + d >= d))
    else:
        to = values + slot * value_stride + (head - heads - kv_heads) * dim
        tl.store(to + d, x.to(values.dtype.element_ty), mask=inside & (slot + d >= d))


@triton.jit
def put(cache, rows, slots, width, block: tl.constexpr):
    """A row to its slot, if it has one."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(rows + tl.program_id(0).to(tl.int64) * width + at, mask=at < width, other=0.0)
    tl.store(cache + slot * width + at, x, mask=(at < width) & (slot + at >= at))


@triton.jit
def activated(g, u, kind: tl.constexpr):
    """See `Operations.gated`, float32. kind: 0 silu, 1 gelu by tanh, 2 clamped."""
    if kind == 0:
        y = g / (1.0 + tl.exp(-g)) * u
    elif kind == 1:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        y = 0.5 * g * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))) * u
    else:
        g = tl.minimum(g, 7.0)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0)
        y = g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)
    return y


@triton.jit
def gated(both, out, width, kind: tl.constexpr, block: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    g = tl.load(both + line * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + line * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    y = activated(g, u, kind)
    tl.store(out + line * width + at, y.to(out.dtype.element_ty), mask=inside)
