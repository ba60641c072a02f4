"""The operations of a model in plain torch, run at once, on any device: what kernels are tested against.

Rule: nothing here is clever. A quantised weight is unpacked to the activation dtype when it is packed, so its
memory is that of a plain weight; keys and values lie in one array of slots, block after block.
A step's inputs are copied to the device once, when the step begins. gpu/ops.py is the same with kernels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from planaria.kernels import reference_experts as mixture
from planaria.kernels.ops import Array, AttentionKind, Batch, CacheMemory, Slots
from planaria.kernels.reference_context import SharedTokens
from planaria.kernels.reference_linear import Linear, Products
from planaria.kernels.torch_placed import seen
from planaria.mesh.all2all import All2All
from planaria.mesh.comm import Comm, Solo
from planaria.models.config import MoEConfig
from planaria.topology.stripes import Stripes

ALL = Stripes()  # of tokens
LOGIT_ROWS = 16384  # rows of the output head taken to float32 at a time, so that no float32 copy of it ever exists


@dataclass
class SlotExperts:
    """Of a rank's slots: gate over up, and down."""

    pairs: list[tuple[Linear, Linear]]


@dataclass
class SlotKV:
    """keys, values [slots, kv_heads, head_dim]; slot = block * block_size + offset."""

    keys: Tensor
    values: Tensor
    block_size: int

    def blocks(self) -> list[npt.NDArray[np.uint8]]:
        return [_rows(cache, self.block_size) for cache in (self.keys, self.values)]

    def items(self) -> list[npt.NDArray[np.intp]]:
        """Of each of `blocks`, where in a block the numbers of a head's token are: [heads][tokens][numbers]."""
        shape = self.block_size, *self.keys.shape[1:]
        return [np.arange(math.prod(shape)).reshape(shape).swapaxes(0, 1)] * 2


@dataclass
class SlotLatents:
    """rows [slots, width], keys of all heads; the first columns are the values."""

    rows: Tensor
    block_size: int

    def blocks(self) -> list[npt.NDArray[np.uint8]]:
        return [_rows(self.rows, self.block_size)]

    def items(self) -> list[npt.NDArray[np.intp]]:
        return [np.arange(self.block_size * self.rows.shape[1]).reshape(1, self.block_size, -1)]


def _rows(cache: Tensor, block_size: int) -> npt.NDArray[np.uint8]:
    blocks = len(cache) // block_size
    rows: npt.NDArray[np.uint8] = cache.view(blocks, -1).view(torch.uint8).numpy()
    return rows


@dataclass
class SequenceGroup:
    """Sequences with the same number of new tokens: attended together.

    rows int64 [B, Q]: their tokens. slots int64 [B, L]: their cache, padded to the longest with the first.
    positions int64 [B, Q]: of those tokens; key l of a sequence is at position l of those in `stripes`.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    stripes: Stripes

    def of(self, cache: Tensor) -> Tensor:
        """Rows of a cache [slots, ...]: [B, L, ...]."""
        rows = cache.index_select(0, self.slots.flatten())  # copies whole rows, as cache[slots] doesn't
        return rows.view(*self.slots.shape, *cache.shape[1:])

    def mask(self, window: int | None) -> Tensor:
        """bool [B, 1, Q, L]: which keys a token sees."""
        key: Tensor = self.stripes.position(torch.arange(self.slots.shape[1], device=self.slots.device))
        query = self.positions[:, None, :, None]
        seen = key <= query
        return seen if window is None else seen & (key > query - window)


class StepTensors:
    """One step's inputs on the device: the batch's arrays cut to its counts. shares: is it a `BatchShare`, whose token
    number `first` is its own first?"""

    shares, first = False, 0

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.device, self.batch = device, batch
        tokens, sequences, self.samples, self.all_tokens = (int(n) for n in batch.counts[:4])
        every, step_samples = (int(n) for n in batch.step.counts[[0, 2]])
        self.first, self.shares = int(batch.counts[6]), batch.step is not batch
        self.tokens = self.put(batch.tokens[:tokens])
        self.positions = self.put(batch.positions[:tokens])
        self.step_positions = self.put(batch.step.positions[:every])
        self.slots = self.put(batch.slots[:every])
        self.sample_index = self.put(batch.sample_index[:step_samples])
        self.loras = self.put(batch.loras[:tokens])
        self._hidden, self._arrived = batch.hidden, batch.arrived
        self._starts = batch.seq_start[: sequences + 1].astype(np.int64)
        self._lengths = batch.seq_len[:sequences].astype(np.int64)
        self._tables = batch.block_table[batch.seq_row[:sequences]].astype(np.int64)
        here = batch.slots[:every] >= 0
        self._here = None if here.all() else self.put(here.nonzero()[0])  # the others are on other context ranks
        self._groups: dict[tuple[int, Stripes], list[SequenceGroup]] = {}
        self._masks: dict[tuple[int, Stripes, int | None], list[Tensor]] = {}

    @property
    def hidden(self) -> Tensor:
        """The previous stage's residual."""
        if self._arrived is not None:
            arrived: Tensor = self._arrived
            return arrived
        assert self._hidden is not None
        return torch.from_numpy(self._hidden[: len(self.tokens)]).to(self.device, copy=True)

    def store(self, cache: Tensor, rows: Tensor) -> None:
        """rows [T, ...] at the step's slots."""
        if self._here is None:
            cache.index_copy_(0, self.slots, rows)
        else:
            cache[self.slots[self._here]] = rows[self._here]

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """It on the device, int64."""
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def sequences(self, block_size: int, stripes: Stripes = ALL) -> list[SequenceGroup]:
        """The step's sequences by number of new tokens. Made once a step, used by all layers."""
        groups = self._groups.get((block_size, stripes))
        if groups is None:
            counts = np.diff(self._starts)
            groups = [self._group(counts == n, int(n), block_size, stripes) for n in np.unique(counts) if n]
            self._groups[block_size, stripes] = groups
        return groups

    def groups(
        self, block_size: int, window: int | None, stripes: Stripes = ALL
    ) -> list[tuple[SequenceGroup, Tensor]]:  # fmt: skip
        """`sequences`, with masks."""
        groups = self.sequences(block_size, stripes)
        masks = self._masks.get((block_size, stripes, window))
        if masks is None:
            masks = self._masks[block_size, stripes, window] = [group.mask(window) for group in groups]
        return list(zip(groups, masks, strict=True))

    def _group(
        self, members: npt.NDArray[np.bool_], count: int, block_size: int, stripes: Stripes
    ) -> SequenceGroup:  # fmt: skip
        lengths, tables = self._lengths[members], self._tables[members]
        held = np.array([stripes.held(length) for length in lengths.tolist()])
        key = np.arange(max(1, held.max()))
        slots = tables[:, key // block_size] * block_size + key % block_size
        slots = np.where(key < held[:, None], slots, slots[:, :1])
        new = np.arange(count)
        rows = self._starts[:-1][members][:, None] + new
        positions = (lengths - count)[:, None] + new
        return SequenceGroup(self.put(rows), self.put(slots), self.put(positions), stripes)


def attended(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """q [B, Q, heads, D], keys and values [B, L, kv_heads, D] -> as q; mask: [B, 1, Q, L]; cap, sinks: see
    `Operations.attend`."""
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    if cap or sinks is not None:
        return _attend(q, keys, values, mask, scale, cap, sinks).transpose(1, 2)
    grouped = q.shape[1] != keys.shape[1]
    found = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return found.transpose(1, 2)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """q [B, heads, Q, D], keys and values [B, kv_heads, L, D]."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = (q @ keys.transpose(2, 3)).float() * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights.to(values.dtype) @ values).to(q.dtype)


class TorchOps(Products, SharedTokens):
    """`Ops` in eager torch. dtype: of activations, weights and cache; the residual stream is float32. tp: the tensor
    ranks that hold the other parts."""

    def __init__(self, device: str = "cpu", dtype: str = "float32", tp: Comm | None = None) -> None:
        self.device = torch.device(device)
        self.tp: Comm = tp or Solo()
        self.cp = self.tp
        self.dtype: torch.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._step: StepTensors | None = None
        self.lanes: All2All | None = None
        self.kv_part: CacheMemory | None = None
        self.spread = self.early = False

    def join(self, tp: Comm, lanes: All2All | None = None, cp: Comm | None = None) -> None:
        self.tp, self.cp, self.lanes, self.spread = tp, cp or tp, lanes, lanes is not None

    @property
    def step(self) -> StepTensors:
        if self._step is None:
            raise RuntimeError("an operation was called outside a step; pass the forward function to compile()")
        return self._step

    # Loading

    def vector(self, values: npt.NDArray[Any]) -> Tensor:
        return self._keep(values, torch.float32)

    def rope_table(self, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        return self._keep(cos, torch.float32), self._keep(sin, torch.float32)

    def kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> SlotKV:
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        keys, values = self._cache(*shape), self._cache(*shape)
        return SlotKV(keys, values, block_size)

    def kv_block_bytes(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        return 2 * block_size * num_kv_heads * head_dim * self.dtype.itemsize

    def mla_layer(self, num_blocks: int, block_size: int, width: int) -> SlotLatents:
        return SlotLatents(self._cache(num_blocks * block_size, width), block_size)

    def mla_block_bytes(self, block_size: int, width: int) -> int:
        return block_size * width * self.dtype.itemsize

    def _cache(self, *shape: int) -> Tensor:
        if self.kv_part is None:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        size = math.prod(shape) * self.dtype.itemsize
        return seen(self.kv_part.take(size), self.device).view(self.dtype).view(shape)

    def add_up(self, x: Tensor) -> Tensor:
        """Over the tensor ranks."""
        sums = x.float().contiguous()
        self.tp.all_reduce(self._shared(sums))
        return sums.to(x.dtype)

    def _shared(self, x: Tensor) -> Array:
        """The same numbers for who has no torch: in main memory a NumPy array of the same memory, bfloat16 as its bits;
        on a device the tensor."""
        if self.device.type != "cpu":
            return x
        return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()

    # Forward

    def embed(self, table: Linear, vocab: range | None = None, scale: float = 1.0) -> Tensor:
        if self.tp.size == 1 or vocab is None:
            return table.rows(self.step.tokens).float() * scale
        ids = self.step.tokens - vocab.start
        here = (ids >= 0) & (ids < len(vocab))
        h = table.rows(ids.where(here, 0)).float() * here[:, None] * scale
        self.tp.all_reduce(self._shared(h))
        return h

    def hidden(self, columns: int) -> Tensor:
        return self.step.hidden[:, :columns].contiguous()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps).to(self.dtype)

    @staticmethod
    def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps).to(self.dtype)

    def rope_store(
        self, qkv: Tensor, kv: SlotKV, rope: tuple[Tensor, Tensor],
        num_heads: int, num_kv_heads: int, head_dim: int,
        q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        heads = qkv.view(-1, qkv.shape[1] // head_dim, head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None:
            q = self._norm(q, q_norm, eps)
        if k_norm is not None:
            k = self._norm(k, k_norm, eps)
        cos, sin = (table[self.step.step_positions][:, None, :] for table in rope)
        self.step.store(kv.keys, self._rotate(k, cos, sin))
        self.step.store(kv.values, v)
        return self._rotate(q, cos, sin).flatten(1)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        x = x.float()
        x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1).to(self.dtype)

    def attend(
        self, q: Tensor, kv: SlotKV, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        window: int | None = None, cap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        q = q.view(-1, num_heads, head_dim)
        out = torch.empty_like(q)
        for group, mask in self.step.groups(kv.block_size, window):
            keys, values = group.of(kv.keys), group.of(kv.values)
            out[group.rows] = attended(q[group.rows], keys, values, mask, scale, cap, sinks)
        return out.flatten(1)

    def by_head(self, x: Tensor, weight: Linear, num_heads: int, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        heads = x.view(-1, num_heads, x.shape[1] // num_heads)
        rows = weight.weight.view(num_heads, -1, weight.weight.shape[1])
        out = torch.einsum("thk,hnk->thn", heads[..., : rows.shape[2]], rows)
        if rope is not None:
            cos, sin = (table[self.step.positions][:, None, :] for table in rope)
            out = torch.cat([out, self._rotate(heads[..., rows.shape[2] :], cos, sin)], -1)
        return out.flatten(1)

    def mla_store(self, x: Tensor, kv: SlotLatents, norm: Tensor, eps: float, rope: tuple[Tensor, Tensor]) -> None:
        latent, rotated = x[:, : len(norm)], x[:, len(norm) :]
        cos, sin = (table[self.step.step_positions] for table in rope)
        self.step.store(kv.rows, torch.cat([self.rms_norm(latent, norm, eps), self._rotate(rotated, cos, sin)], -1))

    def mla_attend(self, q: Tensor, kv: SlotLatents, num_heads: int, rank: int, scale: float) -> Tensor:
        q = q.view(-1, num_heads, q.shape[1] // num_heads)
        out = q.new_empty(len(q), num_heads, rank)
        for group, mask in self.step.groups(kv.block_size, None):
            keys = group.of(kv.rows)[:, None]
            found = F.scaled_dot_product_attention(
                q[group.rows].transpose(1, 2), keys, keys[..., :rank], attn_mask=mask, scale=scale, enable_gqa=True
            )
            out[group.rows] = found.transpose(1, 2)
        return out.flatten(1)

    def gated(self, gate_up: Tensor, kind: str = "silu") -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        if kind == "clamped":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(self.dtype)
        return ((F.gelu(gate, approximate="tanh") if kind == "gelu_tanh" else F.silu(gate)) * up).to(self.dtype)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x.float(), approximate="tanh").to(self.dtype)

    def clip(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    def wide_norm(
        self, qkv: Tensor, widths: tuple[int, int], whole: tuple[int, int], q_norm: Tensor, k_norm: Tensor, eps: float,
        *, counts_keys: bool = True,
    ) -> Tensor:  # fmt: skip
        q, k, v = torch.split(qkv.float(), [*widths, qkv.shape[1] - sum(widths)], dim=-1)
        squares = torch.stack([q.pow(2).sum(-1), k.pow(2).sum(-1) * counts_keys], dim=-1)
        if self.tp.size > 1:
            self.tp.all_reduce(self._shared(squares))
        q_scale, k_scale = (torch.rsqrt(squares[:, i : i + 1] / whole[i] + eps) for i in range(2))
        return torch.cat([q * q_scale * q_norm, k * k_scale * k_norm, v], dim=-1).to(self.dtype)

    def gate_rows(self, x: Tensor, logit: Tensor) -> Tensor:
        return (x.float() * logit.sigmoid()).to(self.dtype)

    def scores(self, x: Tensor, weight: Linear) -> Tensor:
        return F.linear(x.float(), weight.weight.float(), None if weight.bias is None else weight.bias.float())

    def group(self, experts: Sequence[tuple[Linear, Linear]]) -> SlotExperts:
        return SlotExperts(list(experts))

    def put(self, experts: SlotExperts, slot: int, expert: tuple[Linear, Linear]) -> None:
        experts.pairs[slot] = expert

    def form(self, weight: Linear) -> tuple[int, ...]:
        rows, columns = weight.weight.shape
        return rows, columns, int(weight.bias is not None)

    def blank(self, form: Sequence[int]) -> Linear:
        rows, columns, biased = form
        whole = torch.empty(rows * (columns + biased), dtype=self.dtype, device=self.device)
        return Linear.of(whole, rows, columns, biased)

    def memory(self, weight: Linear) -> Array:
        return self._shared(weight.whole.view(torch.uint8))

    def release(self, weight: Linear) -> None:
        """The last reference frees it."""

    def route(
        self, logits: Tensor, rule: MoEConfig, slots: Slots, correction: Tensor | None = None
    ) -> mixture.RoutedRows:  # fmt: skip
        routing, chosen = mixture.route(logits, rule, self.step.put(slots.table), correction, self.step.positions)
        if slots.load is not None:
            slots.load += torch.bincount(chosen.flatten().cpu(), minlength=len(slots.load)).numpy()
        return routing

    def read_loads(self) -> None:
        """Each step has told them."""

    def experts(
        self, x: Tensor, routing: mixture.RoutedRows, weights: SlotExperts, slots: Slots,
        residual: Tensor | None = None, *, reduce: bool = False, kind: str = "silu",
    ) -> Tensor:  # fmt: skip
        y = mixture.experts(x, routing, weights.pairs, slots.held, lambda both: self.gated(both, kind))
        if reduce and self.tp.size > 1:
            self.tp.all_reduce(self._shared(y))
        return y if residual is None else residual.add_(y)

    def dispatch(self, x: Tensor, routing: mixture.RoutedRows) -> tuple[Tensor, mixture.RoutedRows]:
        assert self.lanes is not None
        parts = [x.contiguous(), routing.slots.contiguous(), routing.weights.contiguous()]
        every = [part.new_empty(self.step.all_tokens, *part.shape[1:]) for part in parts]
        self.lanes.dispatch([self._shared(part) for part in parts], [self._shared(part) for part in every])
        return every[0], mixture.RoutedRows(every[1], every[2])

    def combine(self, y: Tensor, residual: Tensor) -> Tensor:
        assert self.lanes is not None
        sums = torch.empty_like(residual)
        self.lanes.combine(self._shared(y), self._shared(sums))
        return residual.add_(sums)

    def take(self, x: Tensor) -> Tensor:
        return self.take_from_all(x) if self.step.shares else x[self.step.sample_index]

    def logits(
        self, x: Tensor, weight: Linear, vocab: range | None = None, size: int | None = None, cap: float = 0.0
    ) -> Tensor:  # fmt: skip
        out = torch.cat([x.float() @ rows.float().T for rows in torch.split(weight.weight, LOGIT_ROWS)], dim=-1)
        return self._finished(out, vocab, size, cap)

    def _finished(self, out: Tensor, vocab: range | None, size: int | None, cap: float) -> Tensor:
        """Of this rank's logits those of all."""
        if cap:
            out = torch.tanh(out / cap) * cap
        if self.tp.size == 1 or vocab is None:
            return out
        assert size is not None
        whole = torch.as_tensor(self.tp.gather_columns(self._shared(out), vocab, size))
        return whole.clone() if self.tp.port else whole  # the next one may be another micro-batch's, in the same memory

    def compile(
        self, forward: Callable[[Any], Tensor | tuple[Tensor, ...]], batch: Batch, lanes: All2All | None = None
    ) -> Callable[[], Array]:  # fmt: skip
        own = self if lanes is None else copy.copy(self)  # with a step of its own
        own.lanes = own.lanes if lanes is None else lanes
        places = self.places(batch)

        @torch.inference_mode()
        def run() -> Array:
            if own.lanes is not None:
                batch.counts[3] = own.lanes.begin(int(batch.counts[0]))
            own._step = own.begin(batch, places)
            found = forward(own)
            own.settle()
            return tuple(map(own._shared, found)) if isinstance(found, tuple) else own._shared(found)

        return run

    def choose_attention(self, kinds: Iterable[AttentionKind]) -> list[str]:
        """How such layers are computed from now on, in a name each."""
        return ["plain torch"]

    def places(self, batch: Batch) -> Any:
        """What all steps of a compiled function share."""

    def begin(self, batch: Batch, places: Any) -> StepTensors:
        return StepTensors(batch, self.device)

    def settle(self) -> None:
        """The end of a forward pass."""

    def use_threads(self, threads: int) -> None:
        """Torch keeps their number for each thread that computes; the worker sets it."""

    def leave(self) -> None:
        """Nothing computes beside steps."""

    def close(self) -> None:
        self._step = None
