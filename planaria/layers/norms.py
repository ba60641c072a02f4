"""Norms, and the product that ends a block: into the residual, normalised before where the family does that."""

from __future__ import annotations

from planaria.kernels.ops import Act, Operations, Weight
from planaria.layers.weights import WeightLoader
from planaria.models.config import ModelConfig
from planaria.models.shard import Shard


class RMSNorm:
    """offset: added to its weights (Gemma keeps them around 0); times: what they are multiplied by then."""

    def __init__(
        self, load: WeightLoader, name: str, size: int, eps: float, offset: float = 0.0, times: float = 1.0
    ) -> None:
        self.weight, self.eps = load.vector(f"{name}.weight", size, plus=offset, times=times), eps

    def __call__(self, ops: Operations, x: Act) -> Act:
        return ops.rms_norm(x, self.weight, self.eps)


class LayerNorm:
    def __init__(self, load: WeightLoader, name: str, size: int, eps: float, times: float = 1.0) -> None:
        self.weight = load.vector(f"{name}.weight", size, times=times)
        self.bias, self.eps = load.vector(f"{name}.bias", size, times=times), eps

    def __call__(self, ops: Operations, x: Act) -> Act:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class Narrow:
    """The residual as it is, in the activation dtype: an RMS norm whose eps is all that counts, times the root of it.
    Both are powers of two, so no digit changes."""

    EPS = 2.0**100

    def __init__(self, load: WeightLoader, size: int) -> None:
        self.weight = load.constant(size, self.EPS**0.5)

    def __call__(self, ops: Operations, x: Act) -> Act:
        return ops.rms_norm(x, self.weight, self.EPS)


def norm_of(c: ModelConfig, load: WeightLoader, name: str, times: float = 1.0) -> RMSNorm | LayerNorm | Narrow:
    """A norm of the residual, in the family's way."""
    if name in c.absent_norms:
        return Narrow(load, c.hidden_size)
    if c.layer_norms:
        return LayerNorm(load, name, c.hidden_size, c.norm_eps, times)
    return RMSNorm(load, name, c.hidden_size, c.norm_eps, c.norm_offset, times)


class WideNorm:
    """RMS norms of q and of k over all their heads, on all ranks."""

    def __init__(
        self, c: ModelConfig, name: str, load: WeightLoader, shard: Shard, queries: range, keys: range
    ) -> None:
        self.whole = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.widths, self.eps, self.counts_keys = (len(queries), len(keys)), c.norm_eps, shard.leads_keys(c)
        self.q = load.vector(f"{name}.q_norm.weight", self.whole[0], queries)
        self.k = load.vector(f"{name}.k_norm.weight", self.whole[1], keys)

    def __call__(self, ops: Operations, qkv: Act) -> Act:
        return ops.wide_norm(qkv, self.widths, self.whole, self.q, self.k, self.eps, counts_keys=self.counts_keys)


def into(ops: Operations, x: Act, weight: Weight, h: Act, norm: RMSNorm | None) -> Act:
    """x W^T, summed over the tensor ranks, into the residual."""
    if norm is None:
        return ops.linear(x, weight, h, reduce=True)
    return ops.linear_norm(x, weight, norm.weight, norm.eps, h)
