"""Attention over paged keys and values: the ways there are, and which of them takes what.

Rule: the first of WAYS that has no refusal is taken; the last one takes everything. What a way can do is found once, by
trying it where that can't be known otherwise.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.kernels.gpu.step import FEW, DeviceStep, QueryTiles
from planaria.topology.stripes import Stripes

SPLIT = 512  # keys of a split: at fixed positions, so that a row's sums depend on nothing but the row
ALL = Stripes()


@dataclass(frozen=True)
class Need:
    """What a layer's attention asks for, see AttentionKind. device: torch's kind. page: tokens of a block."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    page: int
    rank: int = 0
    cap: float = 0.0
    window: int | None = None
    sunk: bool = False
    part: bool = False


@cache
def installed() -> bool:
    """Is Triton? It is where torch was built for a GPU."""
    return importlib.util.find_spec("triton") is not None


@cache
def interprets() -> bool:
    """Does Triton's interpreter carry kernels out, on the CPU?"""
    if not installed():
        return False
    import triton  # type: ignore[import-untyped, unused-ignore]

    return bool(triton.knobs.runtime.interpret)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


# -- torch's own


def varlen_refusal(need: Need) -> str:
    """Why not `torch.nn.attention.varlen`: what it has no argument for, or what a trial says."""
    lacking = {
        "a soft cap": need.cap, "sinks": need.sunk, "values that are columns of keys": need.rank,
        "a context rank's part": need.part, str(need.dtype): need.dtype not in (torch.bfloat16, torch.float16),
        f"the {need.device}": need.device != "cuda",
    }  # fmt: skip
    for what, asked in lacking.items():
        if asked:
            return f"it does not do {what}"
    return _trial(need)


@cache
def _trial(need: Need) -> str:
    """Blocks are a matter of the flash attention that torch is given (its own has none): of those that are registered
    the first that computes what it should; or what is in force, which another layer has found good."""
    from torch.nn import attention

    why, given = "", attention.current_flash_attention_impl() is not None
    for name in (None, *(() if given else attention.list_flash_attention_impls()[::-1])):
        try:
            if name is not None:
                attention.activate_flash_attention_impl(name)
            return _compare(need)
        except (RuntimeError, ImportError, ValueError, TypeError, NotImplementedError, AssertionError) as e:
            why = why or (str(e).splitlines() or [type(e).__name__])[0]
            if name is not None and attention.current_flash_attention_impl() is not None:
                attention.restore_flash_attention_impl()
    return why


def _compare(need: Need) -> str:
    """Against plain products, of two sequences in shuffled blocks. Raises AssertionError."""
    page, lengths = need.page, (need.page + 3, 2)
    make = torch.Generator(need.device).manual_seed(0)
    shape: dict[str, Any] = {"dtype": need.dtype, "device": need.device}
    keys, values = (
        torch.randn(4, page, need.kv_heads, need.dim, generator=make, **shape) for _ in range(2)
    )  # fmt: skip
    q = torch.randn(3, need.heads, need.dim, generator=make, **shape)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": need.device}
    table = torch.tensor([[3, 1], [2, 0]], **ints)
    starts, held = torch.tensor([0, 2, 3], **ints), torch.tensor(lengths, **ints)
    out = torch.empty_like(q)
    run_varlen(q, keys, values, out, table, starts, held, (2, lengths[0]), 0.1, need.window)
    for row, (seq, position) in enumerate(((0, lengths[0] - 2), (0, lengths[0] - 1), (1, 1))):
        first = max(0, position + 1 - (need.window or position + 1))
        k, v = (x[table[seq].long()].flatten(0, 1)[first : position + 1].float() for x in (keys, values))
        k, v = (x.repeat_interleave(need.heads // need.kv_heads, 1) for x in (k, v))
        weights = (torch.einsum("hd,khd->hk", q[row].float(), k) * 0.1).softmax(-1)
        gap = float((torch.einsum("hk,khd->hd", weights, v) - out[row].float()).abs().max())
        if not gap < 0.05:
            raise AssertionError(f"its result differs from plain products by {gap}")
    return ""


def run_varlen(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor,
    longest: tuple[int, int], scale: float, window: int | None,
) -> None:  # fmt: skip
    """keys, values [blocks, page, kv_heads, dim]; longest: new tokens of a sequence, its keys."""
    from torch.nn.attention.varlen import varlen_attn_out

    left = -1 if window is None else window - 1
    varlen_attn_out(
        out, q, keys, values, starts, None, *longest, scale=scale, window_size=(left, 0),
        enable_gqa=q.shape[1] != keys.shape[2], seqused_k=lengths, block_table=tables, num_splits=1,
    )  # fmt: skip


def _by_varlen(q: Tensor, kv: Any, need: Need, step: DeviceStep, scale: float, sinks: Tensor | None) -> Tensor:
    out = torch.empty_like(q)
    keys, values = (x.view(-1, need.page, need.kv_heads, need.dim) for x in (kv.keys, kv.values))
    longest = step.most, step.longest
    run_varlen(q, keys, values, out, step.tables, step.starts, step.lengths, longest, scale, need.window)
    return out


# -- this package's


def triton_refusal(need: Need) -> str:
    if not installed():
        return "Triton is not installed"
    return "" if need.device == "cuda" or interprets() else f"it does not run on the {need.device}"


def by_triton(
    q: Tensor, kv: Any, need: Need, step: DeviceStep, scale: float, sinks: Tensor | None, stripes: Stripes = ALL
) -> Tensor:
    """[T, heads, dim of values]; of a context rank's part see `reference_context.part`."""
    q, rank = q.contiguous(), need.rank
    keys, values = (kv.rows, kv.rows) if rank else (kv.keys, kv.values)
    out = q.new_empty(
        len(q), need.heads, (rank or need.dim) + 2 * need.part, dtype=torch.float32 if need.part else q.dtype
    )
    for tiles in step.tiles:
        _tiles_by_triton(q, keys, values, out, need, step, tiles, scale, sinks, stripes)
    return out


def _tiles_by_triton(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, need: Need, step: DeviceStep, tiles: QueryTiles, scale: float,
    sinks: Tensor | None, stripes: Stripes,
) -> None:  # fmt: skip
    from planaria.kernels.gpu.attention_kernels import merge, paged

    main = need.rank or need.dim
    group, few = need.heads // need.kv_heads, tiles.block_q <= FEW
    block_g = max(min(_power(group), 16 if few else 4), 16 // tiles.block_q)
    blocks, rest = -(-group // block_g), need.dim - main
    splits = max(1, -(-stripes.held(tiles.longest) // SPLIT)) if few else 1
    whole = splits == 1 and not need.part
    lines = len(tiles.sequences) * tiles.block_q, need.heads
    parts = out if whole else q.new_empty(*lines, splits, main, dtype=torch.float32)
    state = out if whole else q.new_empty(*lines, splits, 2, dtype=torch.float32)
    sink = state if sinks is None else sinks
    own = step.starts, tiles.sequences, tiles.firsts
    sizes: dict[str, Any] = {"vdim": main, "vdim_p": max(16, _power(main)), "whole": whole}
    paged[len(tiles.sequences), need.kv_heads * blocks, splits](
        q, keys, values, parts, state, sink, step.tables, step.lengths, *own, scale, need.cap, need.window or 0,
        group, blocks, step.tables.stride(0), keys.stride(0), values.stride(0), SPLIT if few else 1 << 30, splits,
        *stripes, **sizes, dim=main, dim_p=max(16, _power(main)), rest=rest, rest_p=max(16, _power(rest)),
        page=need.page, block_q=tiles.block_q, block_g=block_g, block_n=32 if main > 128 else 64,
        latent=bool(need.rank), capped=bool(need.cap), windowed=need.window is not None,
        sunk=sinks is not None and whole, exact=interprets(),
    )  # fmt: skip
    if not whole:
        sizes["whole"] = not need.part
        merge[lines](parts, state, out, sink, *own, splits, tiles.block_q, need.heads, **sizes, sunk=sinks is not None)


# -- the choice


class Way(NamedTuple):
    """attend: (q [T, heads, dim], cache, need, step, scale, sinks) -> [T, heads, dim of values]; None: plain torch's.
    refused: who would have come before it, and why not."""

    name: str
    attend: Callable[..., Tensor] | None
    refused: tuple[str, ...] = ()


_WAYS: tuple[tuple[str, Callable[[Need], str], Callable[..., Tensor] | None], ...] = (
    ("torch varlen", varlen_refusal, _by_varlen),
    ("Triton", triton_refusal, by_triton),
    ("plain torch", lambda need: "", None),
)


@cache
def way_for(need: Need) -> Way:
    """See Rule."""
    refused = list[str]()
    for name, refusal, attend in _WAYS:
        if not (why := refusal(need)):
            return Way(name, attend, tuple(refused))
        refused.append(f"{name}: {why}")
    raise AssertionError("the last way has no refusal")
