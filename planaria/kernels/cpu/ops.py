"""`CpuOps`: records a forward pass once, on fixed buffers, and runs the recording.

It owns weights, caches, buffers and the team of threads. The rule: after `compile`, a step costs Python one call;
everything that varies from step to step is read by the kernels from the `Batch`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from planaria.config.machine import usable_cores
from planaria.errors import CapacityError, ConfigError
from planaria.kernels.cpu import exchange, latents, layout, tape
from planaria.kernels.cpu import experts as mixture
from planaria.kernels.cpu.build import load, target_for
from planaria.kernels.cpu.memory import Arena, Region
from planaria.kernels.cpu.micro import ADD_RESIDUAL, DENSE, STORE_ACT, STORE_F32
from planaria.kernels.cpu.pack import Packed, blank, form_of, pack, up
from planaria.kernels.cpu.tape import Buffer, Tape
from planaria.kernels.cpu.team import Team
from planaria.kernels.ops import Batch, Quantized, Slots
from planaria.mesh.all2all import All2All
from planaria.mesh.comm import Comm, NativeComm, Solo
from planaria.models.config import MoEConfig

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Act:
    """An activation [rows, columns]: `ld` bytes a row, padded to 16 columns; Batch.counts[rows] says how many."""

    buffer: Buffer
    rows: int
    columns: int
    ld: int
    dtype: str  # float32 | bfloat16


@dataclass(frozen=True)
class Vector:
    """A norm's weight, float32, padded with zeros to 16."""

    values: npt.NDArray[np.float32]
    length: int

    @property
    def address(self) -> int:
        return int(self.values.ctypes.data)


@dataclass(frozen=True)
class Rope:
    """cos, sin float32 [positions, half]."""

    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Cache:
    """Paged keys and values of one layer: [blocks][keys, values][kv head][block_size / 16][a chunk of 16 tokens].

    A chunk of keys is a panel whose columns are tokens: [dim / pair][16][pair]; of values, dim / 16 panels whose K
    runs over tokens: [dim / 16][16 / pair][16][pair].
    """

    memory: Region
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int


def float_bits(value: float) -> int:
    """float32 bits as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class CpuOps:
    """The native CPU back end. dtype: of activations, weights and cache; the residual stream is float32.

    threads: all that work, the caller's own included. cache_dir: where compiled kernels are kept (default
    ~/.cache/planaria). isa: an instruction level below the machine's own, for tests. One step at a time; `close`
    ends its threads. tp: the tensor ranks that hold the other parts; where they share memory
    (shared.py), all that passes between them happens inside the native call, otherwise the recording is run in pieces.
    """

    def __init__(
        self, dtype: str, threads: int, cache_dir: Path | None = None, *, isa: str | None = None, tp: Comm | None = None
    ) -> None:
        if dtype not in ("bfloat16", "float32"):
            raise ConfigError("--dtype", dtype, "the CPU kernels compute in bfloat16 or float32")
        if threads < 1:
            raise ConfigError("--threads", threads, "at least one thread is needed")
        self.target = target_for(dtype, isa)
        self.dtype = dtype
        self._arena = Arena()
        self._biases: dict[int, npt.NDArray[np.float32]] = {}  # of blank weights: zeros, by bytes
        self._entry = load(self.target, cache_dir)
        self._team = Team(self._entry, threads)
        self._most = max(threads, usable_cores())  # threads that a recording has memory for
        self._tape: Tape | None = None
        self._batch: Batch | None = None
        self._owners: list[object] = []  # what the tape being recorded names by address
        self._scratch = 0
        self._shared = 0
        self.join(tp or Solo())
        self._gathers: list[tuple[Act, Act, range]] = []  # where Python brings columns together
        self._between: list[exchange.Between] = []  # what it does at each EXCHANGE
        self._external: dict[int, npt.NDArray[Any]] = {}  # memory of buffers that are not the recording's, by address
        self._zeros = self._arena.take(layout.ZERO_BYTES)

    @property
    def threads(self) -> int:
        return self._team.threads

    def use_threads(self, threads: int) -> None:
        threads = min(threads, self._most)
        if threads != self._team.threads:
            self._team.close()
            self._team = Team(self._entry, threads)

    def join(self, tp: Comm, lanes: All2All | None = None) -> None:
        self.tp, self.lanes, self.spread = tp, lanes, lanes is not None
        self._native_tp = cast(NativeComm, tp) if tp.port else None
        self._port = tp.port
        if self._native_tp is not None and self._native_tp.lanes > self.threads:
            raise ValueError(f"{self._native_tp.lanes} lanes of a shared group for {self.threads} threads")

    # Loading

    def pack(self, weight: torch.Tensor | Quantized, bias: torch.Tensor | None = None) -> Packed:
        """A weight [N, K] and bias [N] as the kernels read it; a `Quantized` keeps its codes and float16 scales."""
        return pack(weight, bias, self.target, self._arena)

    def vector(self, values: torch.Tensor) -> Vector:
        """A norm's weight [K], in float32."""
        length = values.numel()
        out = self._arena.take(up(length, 16) * 4).view(np.float32)
        out[:length] = values.detach().to(torch.float32).cpu().numpy()
        return Vector(out, length)

    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        """cos, sin [max_position, rotary_dim / 2], in float32."""
        both = [np.ascontiguousarray(t.detach().to(torch.float32).cpu().numpy()) for t in (cos, sin)]
        return Rope(*both)

    def kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> Cache:
        """One layer's paged cache. block_size: a multiple of 16; head_dim: a multiple of 16 up to 256."""
        size = self.kv_block_bytes(block_size, num_kv_heads, head_dim)
        return Cache(self._blocks(num_blocks, size), num_blocks, block_size, num_kv_heads, head_dim, size)

    def latent_layer(self, num_blocks: int, block_size: int, width: int) -> latents.LatentCache:
        """One layer's paged latents. block_size and width: multiples of 16."""
        size = self.latent_block_bytes(block_size, width)
        return latents.LatentCache(self._blocks(num_blocks, size), block_size, width, size)

    def _blocks(self, num_blocks: int, size: int) -> Region:
        try:
            return Region(num_blocks * size)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"no memory for {num_blocks} KV blocks of {size} bytes in one layer: {error}") from None

    def kv_block_bytes(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of one block of one layer, keys and values."""
        self._chunks(block_size)
        if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 16:
            raise ConfigError(
                "--device", "cpu", f"its kernels take head sizes that are multiples of 16 up to 256, not {head_dim}"
            )
        return 2 * block_size * num_kv_heads * head_dim * self.target.item

    def latent_block_bytes(self, block_size: int, width: int) -> int:
        """Bytes of one block of one layer."""
        self._chunks(block_size)
        latents.sixteens(width)
        return block_size * width * self.target.item

    def _chunks(self, block_size: int) -> None:
        if block_size < 16 or block_size % 16:
            raise ConfigError(
                "--block-size", block_size, "the CPU kernels keep tokens in chunks of 16", "use a multiple of 16"
            )

    # Forward: each call appends to the tape

    def _new(self, rows: int, columns: int, dtype: str) -> Act:
        ld = up(columns, 16) * (4 if dtype == "float32" else 2)
        return Act(tape.buffer(self._most_rows(rows), ld), rows, columns, ld, dtype)

    def _most_rows(self, rows: int) -> int:
        """How many there can be of a kind of rows."""
        batch = self._recording()
        if rows == layout.ROWS_ALL:
            assert self.lanes is not None
            return batch.max_tokens * self.lanes.lanes
        return batch.max_tokens if rows == layout.ROWS_TOKENS else batch.max_samples

    def _record(self, code: int, *fields: int | Buffer) -> None:
        if self._tape is None:
            raise RuntimeError("an operation was called outside compile(); pass the forward function to it")
        self._tape.add(code, *fields)

    def _recording(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("an operation was called outside compile(); pass the forward function to it")
        return self._batch

    def embed(self, table: Packed, vocab: range | None = None) -> Act:
        batch = self._recording()
        whole = self.tp.size == 1 or vocab is None
        out = self._new(layout.ROWS_TOKENS, table.columns, "float32")
        self._owners.append(table)
        self._record(
            layout.EMBED, table.kind, table.address, table.stride, table.scales, table.length, out.buffer, out.ld,
            batch.tokens.ctypes.data, table.rows, 0 if whole or vocab is None else vocab.start, 0 if whole else 1,
        )  # fmt: skip
        if not whole:
            self._record(layout.REDUCE, self._port, out.buffer, out.buffer, out.ld, out.rows, 0)
        return out

    def hidden(self, columns: int) -> Act:
        array = self._recording().make_hidden(columns)
        address, ld = int(array.ctypes.data), int(array.strides[0])
        self._external[address] = array.view(np.uint8)
        return Act(Buffer(array.nbytes, address=address), layout.ROWS_TOKENS, columns, ld, "float32")

    def rms_norm(self, x: Act, weight: Vector, eps: float) -> Act:
        self._recording()
        if x.dtype != "float32":
            self._expect(x, self.dtype, "rms_norm")
            self._scratch = max(self._scratch, layout.BIG + 4 * up(x.columns, 16))
        if weight.length != x.columns:
            raise ValueError(f"rms_norm: a weight of {weight.length} for {x.columns} columns")
        out = self._new(x.rows, x.columns, self.dtype)
        self._owners.append(weight)
        self._record(
            layout.NORM, x.buffer, x.ld, weight.address, out.buffer, out.ld, up(x.columns, 16), x.columns,
            float_bits(eps), x.rows, int(x.dtype != "float32"),
        )  # fmt: skip
        return out

    def linear(self, x: Act, weight: Packed, residual: Act | None = None, *, reduce: bool = False) -> Act:
        """x W^T + bias; added to `residual` in float32, unrounded, where one is given."""
        self._recording()
        if residual is None:
            return self._linear(x, weight, self._new(x.rows, weight.rows, self.dtype), STORE_ACT)
        self._expect(residual, "float32", "the residual of linear")
        if residual.columns != weight.rows or residual.rows != x.rows:
            raise ValueError(f"linear: a residual of {residual.columns} columns for {weight.rows} outputs")
        if not reduce or self.tp.size == 1:
            return self._linear(x, weight, residual, ADD_RESIDUAL)
        part = self._linear(x, weight, self._new(x.rows, weight.rows, "float32"), STORE_F32)
        self._record(layout.REDUCE, self._port, part.buffer, residual.buffer, part.ld, part.rows, 1)
        return residual

    def logits(self, x: Act, weight: Packed, vocab: range | None = None, size: int | None = None) -> Act:
        batch = self._recording()
        if self.tp.size > 1 and vocab is not None and size is not None:
            return self._gathered(x, weight, vocab, size, batch)
        return self._linear(x, weight, self._new(x.rows, weight.rows, "float32"), STORE_F32)

    def _gathered(self, x: Act, weight: Packed, vocab: range, size: int, batch: Batch) -> Act:
        """Each rank writes its columns of one array that all see. The reductions of the next step keep it as it is
        until rank 0, which takes part in them, is done with it."""
        if vocab.start % 16:
            raise ValueError(f"logits from token {vocab.start}, which is no multiple of 16")
        if self._native_tp is None:
            part = self._linear(x, weight, self._new(x.rows, weight.rows, "float32"), STORE_F32)
            out = self._new(x.rows, size, "float32")
            self._record(layout.MEET, 0, part.buffer, out.buffer)
            self._gathers.append((part, out, vocab))
            return out
        ld = up(size, 16) * 4
        memory = self._native_tp.window((batch.max_samples if x.rows == layout.ROWS_SAMPLES else batch.max_tokens) * ld)
        address = int(memory.ctypes.data)
        self._external[address] = memory
        columns = Act(Buffer(memory.nbytes, address=address + 4 * vocab.start), x.rows, weight.rows, ld, "float32")
        self._linear(x, weight, columns, STORE_F32)
        self._record(layout.MEET, self._port)
        return Act(Buffer(memory.nbytes, address=address), x.rows, size, ld, "float32")

    def _linear(self, x: Act, w: Packed, out: Act, mode: int) -> Act:
        self._expect(x, self.dtype, "linear")
        if x.columns != w.columns:
            raise ValueError(f"linear: {x.columns} columns into a weight with K = {w.columns}")
        batch = self._recording()
        self._owners.append(w)
        tile = mixture.tile_bytes(w, self.target)
        self._scratch = max(self._scratch, self._product_bytes(w))
        self._shared = max(self._shared, batch.max_tokens * w.length * 4 if w.kind != DENSE else 0)
        self._record(
            layout.LINEAR, w.kind, w.address, w.stride, w.scales, w.length, x.buffer, x.ld, out.buffer, out.ld, mode,
            w.bias.ctypes.data, x.rows, 0, tile, w.panels,
        )  # fmt: skip
        return out

    def _product_bytes(self, w: Packed) -> int:
        """Of a thread's scratch memory: its tiles, those of a fused activation, its rows if they are widened."""
        fused = 2 * layout.ROW_BLOCK * layout.FUSED_PANELS * 16 * self.target.item
        rows = layout.ROW_BLOCK * w.length * 8 if self.target.widens and w.kind == DENSE else 0
        return mixture.tile_bytes(w, self.target) + fused + rows

    def rope_store(
        self, qkv: Act, kv: Cache, rope: Rope, num_heads: int, num_kv_heads: int, head_dim: int,
        q_norm: Vector | None = None, k_norm: Vector | None = None, eps: float = 0.0,
    ) -> Act:  # fmt: skip
        batch = self._recording()
        self._expect(qkv, self.dtype, "rope_store")
        self._heads(kv, num_heads, num_kv_heads, head_dim)
        if qkv.columns != (num_heads + 2 * num_kv_heads) * head_dim:
            raise ValueError(
                f"rope_store: {qkv.columns} columns for {num_heads} + 2 * {num_kv_heads} heads of {head_dim}"
            )
        half = rope.cos.shape[1]
        if 2 * half > head_dim:
            raise ValueError(f"rope_store: {2 * half} rotated elements in a head of {head_dim}")
        out = self._new(qkv.rows, num_heads * head_dim, self.dtype)
        self._owners += [kv, rope, q_norm, k_norm]
        self._scratch = max(self._scratch, layout.BIG)
        self._record(
            layout.ROPE, qkv.buffer, qkv.ld, out.buffer, out.ld, kv.memory.address, kv.block_bytes,
            kv.block_bytes // 2, kv.block_size, num_heads, num_kv_heads, head_dim, rope.cos.ctypes.data,
            rope.sin.ctypes.data, half, q_norm.address if q_norm else 0, k_norm.address if k_norm else 0,
            float_bits(eps), batch.slots.ctypes.data, batch.positions.ctypes.data,
        )  # fmt: skip
        return out

    def attend(
        self, q: Act, kv: Cache, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        window: int | None = None,
    ) -> Act:  # fmt: skip
        self._expect(q, self.dtype, "attend")
        self._heads(kv, num_heads, num_kv_heads, head_dim)
        out = self._new(q.rows, q.columns, self.dtype)
        both = 2 * 16 * head_dim * self.target.item  # of keys and of values
        self._attend(
            q, kv, out, heads=num_heads, groups=num_kv_heads, dim=head_dim, value_dim=head_dim, scale=scale,
            window=window, chunk_bytes=both, group_bytes=kv.block_size // 16 * both,
        )  # fmt: skip
        return out

    def by_head(self, x: Act, weight: Packed, num_heads: int, rope: Rope | None = None) -> Act:
        """The weight is not quantised; its K and N / num_heads are multiples of 16."""
        self._expect(x, self.dtype, "by_head")
        tables = (0, 0, 0) if rope is None else (rope.cos.ctypes.data, rope.sin.ctypes.data, rope.cos.shape[1])
        row = latents.ByHead(weight, num_heads, x.columns, self.target.item, tables)
        out = self._new(x.rows, row.columns, self.dtype)
        self._owners += [weight, rope]
        self._scratch = max(self._scratch, row.scratch)
        positions = self._recording().positions.ctypes.data
        self._record(layout.BY_HEAD, *row.fields(x.buffer, x.ld, out.buffer, out.ld, positions))
        return out

    def latent_store(self, x: Act, kv: latents.LatentCache, norm: Vector, eps: float, rope: Rope) -> None:
        batch, half = self._recording(), rope.cos.shape[1]
        self._expect(x, self.dtype, "latent_store")
        rotated = x.columns - norm.length
        latents.sixteens(norm.length)
        if x.columns != kv.width or rotated < 2 * half:
            raise ValueError(f"latent_store: {x.columns} columns, {2 * half} rotated, for a cache of {kv.width}")
        self._owners += [kv, rope, norm]
        self._scratch = max(self._scratch, layout.BIG + kv.width * self.target.item + 4 * max(norm.length, rotated))
        self._record(
            layout.LATENT, x.buffer, x.ld, kv.memory.address, kv.block_bytes, kv.block_size, norm.length, rotated,
            norm.address, float_bits(eps), rope.cos.ctypes.data, rope.sin.ctypes.data, half,
            batch.slots.ctypes.data, batch.positions.ctypes.data,
        )  # fmt: skip

    def latent_attend(self, q: Act, kv: latents.LatentCache, num_heads: int, rank: int, scale: float) -> Act:
        self._expect(q, self.dtype, "latent_attend")
        if q.columns != num_heads * kv.width or rank > kv.width:
            raise ValueError(f"latent_attend: {q.columns} columns of {num_heads} heads for a cache of {kv.width}")
        out = self._new(q.rows, num_heads * rank, self.dtype)
        # All heads read the same rows. They are cut into groups, so that one sequence alone keeps all threads busy.
        groups = latents.groups(num_heads, self._most)
        self._attend(
            q, kv, out, heads=num_heads, groups=groups, dim=kv.width, value_dim=rank, scale=scale, window=None,
            chunk_bytes=16 * kv.width * self.target.item, group_bytes=0,
        )  # fmt: skip
        return out

    def _attend(
        self, q: Act, kv: Cache | latents.LatentCache, out: Act, *, heads: int, groups: int, dim: int, value_dim: int,
        scale: float, window: int | None, chunk_bytes: int, group_bytes: int,
    ) -> None:  # fmt: skip
        """Attention of `groups` groups of heads. chunk_bytes: of a chunk of 16 tokens of a group, up to the next;
        group_bytes: from the chunks of one group to those of the next, 0 where they read the same, whose first columns
        are the values."""
        batch, item = self._recording(), self.target.item
        rows = max(layout.QUERY_ROWS, heads // groups)
        tile_bytes = rows * (dim * item + value_dim * 4 + layout.KEY_TILE * (item + 4))
        self._scratch = max(self._scratch, layout.BIG + tile_bytes)
        self._owners.append(kv)
        self._record(
            layout.ATTEND, q.buffer, q.ld, out.buffer, out.ld, kv.memory.address, kv.block_bytes,
            chunk_bytes, kv.block_size, heads, groups, dim, float_bits(scale), window or 0,
            batch.seq_start.ctypes.data, batch.seq_len.ctypes.data, batch.seq_row.ctypes.data,
            batch.block_table.ctypes.data, batch.block_table.strides[0], group_bytes, value_dim, int(group_bytes == 0),
        )  # fmt: skip

    def silu_mul(self, gate_up: Act) -> Act:
        self._recording()
        self._expect(gate_up, self.dtype, "silu_mul")
        if gate_up.columns % 2:
            raise ValueError(f"silu_mul: {gate_up.columns} columns are not two halves")
        half = gate_up.columns // 2
        out = self._new(gate_up.rows, half, self.dtype)
        self._record(layout.SILU, gate_up.buffer, gate_up.ld, out.buffer, out.ld, half, up(half, 16), gate_up.rows)
        return out

    def wide_norm(
        self, qkv: Act, widths: tuple[int, int], whole: tuple[int, int], q_norm: Vector, k_norm: Vector, eps: float, *,
        counts_keys: bool = True,
    ) -> Act:  # fmt: skip
        """In place."""
        self._expect(qkv, self.dtype, "wide_norm")
        q, k = widths
        if q % 16 or k % 16:
            raise ValueError(f"wide_norm: {q} and {k} columns are not multiples of 16")
        self._owners += [q_norm, k_norm]
        sums = self._new(qkv.rows, 2, "float32")
        second = q * self.target.item
        self._record(
            layout.SQUARES, qkv.buffer, qkv.ld, sums.buffer, sums.ld, q, second, k if counts_keys else 0, qkv.rows
        )
        if self.tp.size > 1:
            self._record(layout.REDUCE, self._port, sums.buffer, sums.buffer, sums.ld, sums.rows, 0)
        self._record(
            layout.RESCALE, qkv.buffer, qkv.ld, sums.buffer, sums.ld, q, second, k, qkv.rows, *whole,
            q_norm.address, k_norm.address, float_bits(eps),
        )  # fmt: skip
        return qkv

    def gate_rows(self, x: Act, logit: Act) -> Act:
        self._expect(x, self.dtype, "gate_rows")
        self._expect(logit, "float32", "the gate of gate_rows")
        out = self._new(x.rows, x.columns, self.dtype)
        self._record(
            layout.GATE, x.buffer, x.ld, logit.buffer, logit.ld, out.buffer, out.ld, up(x.columns, 16), x.rows
        )
        return out

    def scores(self, x: Act, weight: Packed) -> Act:
        return self._linear(x, weight, self._new(x.rows, weight.rows, "float32"), STORE_F32)

    def group(self, experts: Sequence[tuple[Packed, Packed]]) -> mixture.Experts:
        return mixture.group(experts)

    def put(self, experts: mixture.Experts, slot: int, expert: tuple[Packed, Packed]) -> None:
        experts.put(slot, *expert)

    def form(self, weight: Packed) -> tuple[int, ...]:
        return form_of(weight)

    def blank(self, form: Sequence[int]) -> Packed:
        size = form[3] * 64  # of its panels; a recording has the address, so it stays
        if size not in self._biases:
            self._biases[size] = self._arena.take(size).view(np.float32)
        return blank(form, self._biases[size], self._arena)

    def memory(self, weight: Packed) -> torch.Tensor:
        return torch.from_numpy(weight.data)

    def release(self, weight: Packed) -> None:
        self._arena.give_back(weight.data)

    def route(
        self, logits: Act, rule: MoEConfig, slots: Slots, correction: Vector | None = None
    ) -> mixture.Routing:  # fmt: skip
        batch = self._recording()
        self._expect(logits, "float32", "route")
        self._owners += [slots, slots.table, slots.load, correction]
        self._scratch = max(self._scratch, mixture.route_scratch(rule))
        routing, fields = mixture.route_row(
            (logits.buffer, logits.ld), logits.rows, self._most_rows(logits.rows), rule, slots,
            correction.address if correction else 0, int(batch.positions.ctypes.data),
        )  # fmt: skip
        self._record(layout.ROUTE, *fields)
        return routing

    def experts(
        self, x: Act, routing: mixture.Routing, weights: mixture.Experts, slots: Slots, residual: Act | None = None,
        *, reduce: bool = False,
    ) -> Act:  # fmt: skip
        self._expect(x, self.dtype, "experts")
        self._owners.append(weights)
        k, most = routing.k, self._most_rows(x.rows) * routing.k
        up_, down = weights.gate_up[0], weights.down[0]
        if x.columns != up_.columns:
            raise ValueError(f"experts: {x.columns} columns into weights with K = {up_.columns}")
        for w in (up_, down):
            self._scratch = max(self._scratch, self._product_bytes(w))
            self._shared = max(self._shared, most * w.length * 4 if w.kind != DENSE else 0)
        by_slot = mixture.sorted_buffers(self._most_rows(x.rows), k, x.ld, len(slots.held))
        self._record(layout.SORT, *mixture.sort_fields(routing, slots.held, x.buffer, x.ld, by_slot))
        inner = tape.buffer(most, inner_ld := down.columns * self.target.item)
        self._record(layout.GROUPED, *mixture.grouped_fields(
            weights.gate_up, weights.tables[0], by_slot.first, by_slot.x, x.ld, inner, inner_ld,
            half=up_.panels // 2, temp=mixture.tile_bytes(up_, self.target),
        ))  # fmt: skip
        y = tape.buffer(most, y_ld := up(down.rows, 16) * 4)
        self._record(layout.GROUPED, *mixture.grouped_fields(
            weights.down, weights.tables[1], by_slot.first, inner, inner_ld, y, y_ld,
            half=0, temp=mixture.tile_bytes(down, self.target),
        ))  # fmt: skip
        summed = reduce and self.tp.size > 1
        out = self._new(x.rows, down.rows, "float32") if residual is None or summed else residual
        self._record(
            layout.COMBINE, y, y_ld, by_slot.places, routing.weights, k, out.buffer, out.ld, x.rows,
            int(out is residual),
        )  # fmt: skip
        if residual is None or not summed:
            return out
        self._record(layout.REDUCE, self._port, out.buffer, residual.buffer, out.ld, out.rows, 1)
        return residual

    def dispatch(self, x: Act, routing: mixture.Routing) -> tuple[Act, mixture.Routing]:
        assert self.lanes is not None
        self._expect(x, self.dtype, "dispatch")
        every = self._new(layout.ROWS_ALL, x.columns, x.dtype)
        chosen = exchange.routing_of_all(routing, self._most_rows(layout.ROWS_ALL))
        self._exchange(*exchange.dispatching(self.lanes, x, routing, every, chosen, self._recording().counts))
        return every, chosen

    def combine(self, y: Act, residual: Act) -> Act:
        assert self.lanes is not None
        self._expect(residual, "float32", "the residual of combine")
        sums = self._new(residual.rows, y.columns, "float32")
        self._exchange(*exchange.combining(self.lanes, y, sums, residual, self._recording().counts))
        return residual

    def _exchange(self, buffers: Sequence[Buffer], between: exchange.Between) -> None:
        self._record(layout.EXCHANGE, *buffers)
        self._between.append(between)

    def take(self, x: Act) -> Act:
        batch = self._recording()
        if x.rows != layout.ROWS_TOKENS:
            raise ValueError("take: these rows were taken already")
        out = self._new(layout.ROWS_SAMPLES, x.columns, x.dtype)
        self._record(layout.TAKE, x.buffer, x.ld, out.buffer, batch.sample_index.ctypes.data)
        return out

    def _expect(self, x: Act, dtype: str, what: str) -> None:
        if x.dtype != dtype:
            raise ValueError(f"{what}: {x.dtype} where {dtype} is wanted")

    def _heads(self, kv: Cache, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        if (kv.num_kv_heads, kv.head_dim) != (num_kv_heads, head_dim) or num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} heads of {head_dim} over {num_kv_heads} do not fit a cache of {kv.num_kv_heads} "
                f"heads of {kv.head_dim}"
            )
        if num_heads // num_kv_heads > layout.MAX_GROUP:
            raise ValueError(f"more than {layout.MAX_GROUP} query heads share a key head")

    # Running

    def compile(
        self, forward: Callable[[Any], Act], batch: Batch, lanes: All2All | None = None
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Record `forward`; a function that runs it on what `batch` then holds.

        Its result [rows, columns] is a view of the recording's own buffer: valid until the next run. Rows are the
        step's samples after `take`, else its tokens.
        """
        if self._tape is not None:
            raise RuntimeError("compile() called from inside a forward function")
        self._tape, self._batch, self._scratch, self._shared = (Tape(), batch, layout.BIG, 0)
        self._owners, self._external, self._gathers, self._between = [batch, self._zeros], {}, [], []
        joined, self.lanes = self.lanes, lanes or self.lanes
        try:
            result = forward(self)
            return self._finish(self._tape, batch, result)
        finally:
            self._tape, self._batch, self._owners, self._external, self._gathers = None, None, [], {}, []
            self._between, self.lanes = [], joined

    def _finish(self, recorded: Tape, batch: Batch, result: Act) -> Callable[[], torch.Tensor]:
        recorded.fuse(result.buffer)
        memory = Region(max(recorded.place(result.buffer), 1))
        rows = recorded.encode(memory)
        scratch_bytes = up(self._scratch, 4096)
        scratch = Region(scratch_bytes * self._most)
        shared = Region(max(self._shared, 1))
        tickets = Region(max(len(rows), 1) * layout.TICKET_BYTES, huge=False)
        words = {
            layout.TAPE: int(rows.ctypes.data),
            layout.OPS: len(rows),
            layout.SCRATCH: scratch.address,
            layout.SCRATCH_BYTES: scratch_bytes,
            layout.TICKETS: tickets.address,
            layout.SHARED: shared.address,
            layout.COUNTS: int(batch.counts.ctypes.data),
            layout.ZEROS: int(self._zeros.ctypes.data),
        }
        external, lanes = self._external, self.lanes
        limits = {layout.ROWS_TOKENS: batch.max_tokens, layout.ROWS_SAMPLES: batch.max_samples}
        if lanes is not None:
            limits[layout.ROWS_ALL] = self._most_rows(layout.ROWS_ALL)

        def view(buffer: Buffer, ld: int, row_kind: int, dtype: str = "float32") -> torch.Tensor:
            kind, item = (np.float32, 4) if dtype == "float32" else (np.int16, 2)
            most = limits[row_kind]
            if buffer.address:
                array = external[buffer.address].reshape(-1)[: most * ld].view(kind).reshape(most, ld // item)
            else:
                array = memory.array(buffer.offset, kind, (most, ld // item))
            values = torch.from_numpy(array)
            return values.view(torch.bfloat16) if dtype == "bfloat16" else values

        out = view(result.buffer, result.ld, result.rows, result.dtype)[:, : result.columns]
        counts, native_tp = batch.counts, self._native_tp
        owners = (memory, scratch, shared, tickets, rows, external, *self._owners)
        pieces = self._pieces(recorded, words, view, batch)

        def run() -> torch.Tensor:
            tokens, sequences, samples, _ = counts.tolist()
            if tokens > batch.max_tokens or sequences > batch.max_seqs or samples > batch.max_samples:
                raise ValueError(
                    f"a step of {tokens} tokens, {sequences} sequences, {samples} samples; this recording takes "
                    f"{batch.max_tokens}, {batch.max_seqs}, {batch.max_samples}"
                )
            if lanes is not None:
                counts[layout.ROWS_ALL] = lanes.begin(tokens)
            for part, after in pieces:
                self._team.run(part, owners)
                if after is not None:
                    after()
            if native_tp is not None:
                native_tp.check()
            return out[: samples if result.rows == layout.ROWS_SAMPLES else tokens]

        return run

    def _pieces(
        self, recorded: Tape, words: dict[int, int], view: Callable[..., torch.Tensor], batch: Batch
    ) -> list[tuple[dict[int, int], Callable[[], None] | None]]:
        """The recording in one piece, or cut where Python must reach the other ranks; what it does after each."""
        pieces: list[tuple[dict[int, int], Callable[[], None] | None]] = []
        start, tape_address, gathers, between = 0, words[layout.TAPE], list(self._gathers), list(self._between)

        def cut(end: int, after: Callable[[], None] | None) -> None:
            nonlocal start
            place = {
                layout.TAPE: tape_address + start * layout.ROW_WORDS * 8, layout.OPS: end - start,
                layout.TICKETS: words[layout.TICKETS] + start * layout.TICKET_BYTES,
            }  # fmt: skip
            pieces.append(({**words, **place}, after))
            start = end + 1

        for index, row in enumerate(recorded.rows):
            if row.code == layout.REDUCE and not row.fields[1]:
                part, target, ld, kind, add = (row.fields[i] for i in (2, 3, 4, 5, 6))
                cut(index, self._reduction(view(part, ld, kind), view(target, ld, kind), batch.counts, kind, add))  # type: ignore[arg-type]
            elif row.code == layout.MEET and not row.fields[1]:
                source, whole, vocab = gathers.pop(0)
                cut(index, self._gathering(view(source.buffer, source.ld, source.rows)[:, : source.columns],
                                           view(whole.buffer, whole.ld, whole.rows)[:, : whole.columns],
                                           vocab, batch.counts, source.rows))  # fmt: skip
            elif row.code == layout.EXCHANGE:
                cut(index, between.pop(0)(view))
        cut(len(recorded.rows), None)
        return pieces

    def _reduction(
        self, part: torch.Tensor, target: torch.Tensor, counts: npt.NDArray[np.int64], kind: int, add: int
    ) -> Callable[[], None]:
        def run() -> None:
            rows = int(counts[kind])
            self.tp.all_reduce(part[:rows])
            if add:
                target[:rows] += part[:rows]

        return run

    def _gathering(
        self, part: torch.Tensor, whole: torch.Tensor, vocab: range, counts: npt.NDArray[np.int64], kind: int
    ) -> Callable[[], None]:
        def run() -> None:
            rows = int(counts[kind])
            whole[:rows] = self.tp.gather_columns(part[:rows].contiguous(), vocab, whole.shape[1])

        return run

    def close(self) -> None:
        """End threads and give up weights. Results and caches handed out stay valid while they are held."""
        self._team.close()
        self._arena.clear()
