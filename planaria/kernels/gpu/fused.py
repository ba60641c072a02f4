"""Operations in one pass over memory each, by Triton: the definitions are those of `Operations`."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("silu", "gelu_tanh", "clamped")  # by number, of `gated`
BLOCK = 1024


def power(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, add: Tensor | None = None) -> Tensor:
    """x [T, H], contiguous; with `add` of x + add, which x becomes."""
    from planaria.kernels.gpu.fused_kernels import norm

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    other, adds = (x, False) if add is None else (add, True)
    if len(x):
        norm[(len(x),)](x, other, weight, out, x.shape[1], eps, block=power(x.shape[1]), adds=adds)
    return out


def rope_store(
    qkv: Tensor, caches: tuple[Tensor, Tensor], rope: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor],
    heads: int, kv_heads: int, dim: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """See `Operations.rope_store`. caches: of keys, of values [slots, kv_heads, dim]; places: positions and slots int32
    [T], below 0: stored nowhere."""
    from planaria.kernels.gpu.fused_kernels import rope_store as kernel

    out = torch.empty(len(qkv), heads * dim, dtype=caches[0].dtype, device=qkv.device)
    norms = [rope[0] if each is None else each for each in (q_norm, k_norm)]
    if len(qkv):
        kernel[len(qkv), heads + 2 * kv_heads](
            qkv, out, *caches, *rope, *places, *norms, heads, kv_heads, rope[0].shape[1], eps, caches[0].stride(0),
            caches[1].stride(0), dim=dim, block=power(dim), norms_q=q_norm is not None, norms_k=k_norm is not None,
        )  # fmt: skip
    return out


def put(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """rows [T, ...] to slots int32 [T] of a contiguous cache; below 0: nowhere."""
    from planaria.kernels.gpu.fused_kernels import put as kernel

    width = cache[0].numel()
    if len(rows):
        kernel[len(rows), -(-width // BLOCK)](cache, rows.contiguous(), slots, width, block=BLOCK)


def gated(both: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """See `Operations.gated`; both [T, 2 I], contiguous."""
    from planaria.kernels.gpu.fused_kernels import gated as kernel

    width = both.shape[1] // 2
    out = torch.empty(len(both), width, dtype=dtype, device=both.device)
    if len(both):
        kernel[len(both), -(-width // BLOCK)](both, out, width, kind=KINDS.index(kind), block=BLOCK)
    return out
