"""Attention whose tokens context ranks share, in plain torch: the definition of what kernels/cpu/striped.py does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planaria.kernels.ops import Columns
from planaria.mesh.comm import Comm
from planaria.models.shard import ContextGroup

LOWEST = -1e30  # stands for minus infinity: differences of it stay numbers


def part(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """q [B, H, Q, D], keys [B, K, L, D], values [B, K, L, V], mask [B, 1, Q, L]: float32 [B, Q, H, V + 2], of each head
    the sums of weighted values, the greatest score and the sum of weights."""
    repeats = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(repeats, 1) for x in (keys, values))
    scores = q.float() @ keys.transpose(2, 3) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~mask, LOWEST)
    most = scores.amax(-1, keepdim=True)
    weights = (scores - most).exp() * mask
    return torch.cat([weights @ values, most, weights.sum(-1, keepdim=True)], -1).transpose(1, 2)


def merged(parts: list[Tensor], sinks: Tensor | None) -> Tensor:
    """Parts [T, H, V + 2] of the context ranks, in order, by pairs of neighbours: [T, H, V]. sinks [H]: as the part of
    a rank more, of one key whose value is 0."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [_pair(a, b) for a, b in pairs] + parts[len(parts) // 2 * 2 :]
    (whole,) = parts
    if sinks is not None:
        sink = torch.zeros_like(whole)
        sink[..., -2], sink[..., -1] = sinks, 1
        whole = _pair(whole, sink)
    return whole[..., :-2] / whole[..., -1:]


def _pair(a: Tensor, b: Tensor) -> Tensor:
    most = torch.maximum(a[..., -2:-1], b[..., -2:-1])
    x, y = ((part[..., -2:-1] - most).exp() for part in (a, b))
    sums = a * x + b * y
    sums[..., -2:-1] = most
    return sums


def everyone(
    own: Tensor, pieces: tuple[tuple[int, int, int], ...], group: ContextGroup, width: int, rows: tuple[int, int],
    cp: Comm, shared: Any,
) -> Tensor:  # fmt: skip
    """Float32 [T, width] of a context group, of which this rank has `pieces` (see ops.Columns). rows: the number of its
    first, and of the step's. shared: makes of a tensor what `cp` takes."""
    row = own.new_zeros(rows[1], group.count * width, dtype=torch.float32)
    for start, to, count in pieces:
        first = group.number * width + to
        row[rows[0] : rows[0] + len(own), first : first + count] = own[:, start : start + count]
    cp.all_reduce(shared(row))
    return row[:, group.number * width : (group.number + 1) * width]


class SharedTokens:
    """A part of `TorchOps`."""

    tp: Comm
    cp: Comm
    dtype: torch.dtype
    step: Any
    _shared: Any

    def gather(self, x: Tensor, group: ContextGroup, own: Columns) -> Tensor:
        rows = self.step.first, len(self.step.step_positions)
        whole = everyone(x, own.pieces, group, own.most, rows, self.cp, self._shared)
        return whole[:, : own.width].to(self.dtype)

    def attend_part(
        self, q: Tensor, kv: Any, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        group: ContextGroup, window: int | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        q = q.view(-1, num_heads, head_dim)
        return self._parts(q, kv.keys, kv.values, kv.block_size, scale, group, window, cap)

    def mla_attend_part(
        self, q: Tensor, kv: Any, num_heads: int, rank: int, scale: float, group: ContextGroup
    ) -> Tensor:  # fmt: skip
        q, rows = q.view(-1, num_heads, q.shape[1] // num_heads), kv.rows[:, None]
        return self._parts(q, rows, rows[..., :rank], kv.block_size, scale, group)

    def _parts(
        self, q: Tensor, keys: Tensor, values: Tensor, block_size: int, scale: float, group: ContextGroup,
        window: int | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty(*q.shape[:2], values.shape[-1] + 2, dtype=torch.float32)
        for some, mask in self.step.groups(block_size, window, group.stripes):
            queries, keys_here, values_here = (
                x.transpose(1, 2) for x in (q[some.rows], some.of(keys), some.of(values))
            )
            out[some.rows] = part(queries, keys_here, values_here, mask, scale, cap)
        return out.flatten(1)

    def merge(
        self, parts: Tensor, group: ContextGroup, heads: range, dim: int, sinks: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        width, ranks = group.most_heads * (dim + 2), group.stripes.size
        pieces = ((0, group.stripes.rank * width, parts.shape[1]),)
        every = everyone(parts, pieces, group, ranks * width, (0, len(parts)), self.cp, self._shared)
        first, last = self.step.first, self.step.first + len(self.step.tokens)
        own = every.view(len(parts), ranks, group.most_heads, dim + 2)[first:last, :, heads.start : heads.stop]
        return merged(list(own.unbind(1)), sinks).to(self.dtype).flatten(1)

    def take_from_all(self, x: Tensor) -> Tensor:
        """Of a step whose tokens are shared: on the ranks with the first share all of the rows, on others none."""
        index = self.step.sample_index - self.step.first
        rows = x.new_zeros(len(index), x.shape[1])
        if len(x) and not self.tp.rank:  # others have what the first tensor rank has
            here = (index >= 0) & (index < len(x))
            rows = torch.where(here[:, None], x[index.clamp(0, len(x) - 1)], rows)
        self.cp.all_reduce(self._shared(rows))
        return rows[: self.step.samples]
