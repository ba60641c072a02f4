"""`RecordedOps`: what a forward function is given. Each operation appends to the tape of a `Recorder`."""

from __future__ import annotations

import numpy as np

from planaria.kernels.cpu import fields, layout, mla_rows
from planaria.kernels.cpu.activations import ACTIVATIONS
from planaria.kernels.cpu.caches import PagedKV, PagedLatents
from planaria.kernels.cpu.context import ContextOps
from planaria.kernels.cpu.experts import ExpertOps
from planaria.kernels.cpu.lora_rows import LoraRows, record_lora
from planaria.kernels.cpu.micro import ADD_RESIDUAL, STORE_ACT, STORE_F32
from planaria.kernels.cpu.pack import Packed, up
from planaria.kernels.cpu.recorder import Recorder, Rope, Thing, Vector
from planaria.kernels.cpu.tape import Act
from planaria.kernels.ops import parts_of
from planaria.models.shard import ContextGroup
from planaria.topology.stripes import Stripes


class RecordedOps(ExpertOps, mla_rows.LatentOps, ContextOps):
    """See `planaria.kernels.ops.Operations`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.spread = recorder, recorder.lanes is not None
        self.batch, self.target = recorder.batch, recorder.target
        self.early = self.batch.step is self.batch

    def embed(self, table: Packed, vocab: range | None = None, scale: float = 1.0) -> Act:
        whole = self.recorder.tp.size == 1 or vocab is None
        out = self.recorder.new(layout.ROWS_TOKENS, table.columns, "float32")
        self.recorder.add(
            fields.EmbedOp, kernels=self.recorder.kernels(table.kind), w=table, stride=table.stride,
            scales=table.scales, length=table.length, out=out, tokens=self.batch.tokens, rows=table.rows,
            first=0 if whole or vocab is None else vocab.start, partial=not whole,
            factor=None if scale == 1.0 else float(scale),
        )  # fmt: skip
        return out if whole else self.recorder.reduce(out, out)

    def hidden(self, columns: int) -> Act:
        array = self.batch.make_hidden(columns)
        return self.recorder.outside(array.view(np.uint8), layout.ROWS_TOKENS, columns, int(array.strides[0]))

    def rms_norm(self, x: Act, weight: Vector, eps: float) -> Act:
        narrow = x.dtype != "float32"
        if narrow:
            self.recorder.expect(x, "rms_norm")
            self.recorder.wants(layout.BIG + 4 * up(x.columns, 16))
        if weight.length != x.columns:
            raise ValueError(f"rms_norm: a weight of {weight.length} for {x.columns} columns")
        out = self.recorder.new(x.rows, x.columns)
        self.recorder.add(
            fields.NormOp, x=x, weight=weight, out=out, padded=up(x.columns, 16), count=x.columns, eps=eps, rows=x.rows,
            narrow=narrow,
        )  # fmt: skip
        return out

    def layer_norm(self, x: Act, weight: Vector, bias: Vector, eps: float) -> Act:
        self.recorder.expect(x, "layer_norm", "float32")
        if not weight.length == bias.length == x.columns:
            raise ValueError(f"layer_norm: {weight.length} weights and {bias.length} biases for {x.columns} columns")
        out = self.recorder.new(x.rows, x.columns)
        self.recorder.add(
            fields.LayerNormOp, x=x, weight=weight, bias=bias, out=out, padded=up(x.columns, 16), count=x.columns,
            eps=eps, rows=x.rows,
        )  # fmt: skip
        return out

    def linear_norm(
        self, x: Act, weight: Packed, norm: Vector, eps: float, residual: Act, *, lora: LoraRows | None = None
    ) -> Act:
        self.recorder.expect(residual, "the residual of linear_norm", "float32")
        y = record_lora(self.recorder, x, self.scores(x, weight), lora)
        if not norm.length == y.columns == residual.columns:
            raise ValueError(f"linear_norm: a norm of {norm.length} for {y.columns} columns")
        if self.recorder.tp.size > 1:
            self.recorder.reduce(y, y)
        self.recorder.add(
            fields.AddNormOp, x=y, weight=norm, target=residual, padded=up(y.columns, 16), count=y.columns, eps=eps,
            rows=y.rows,
        )  # fmt: skip
        return residual

    def linear(
        self, x: Act, weight: Packed | tuple[Packed, ...], residual: Act | None = None, *, reduce: bool = False,
        lora: LoraRows | None = None,
    ) -> Act:  # fmt: skip
        """x W^T + bias; added to `residual` in float32, unrounded, where one is given."""
        rows = sum(w.rows for w in parts_of(weight))
        if residual is None:
            out = self._linear(x, weight, self.recorder.new(x.rows, rows), STORE_ACT)
            return record_lora(self.recorder, x, out, lora)
        self.recorder.expect(residual, "the residual of linear", "float32")
        if residual.columns != rows or residual.rows != x.rows:
            raise ValueError(f"linear: a residual of {residual.columns} columns for {rows} outputs")
        if not reduce or self.recorder.tp.size == 1:
            return record_lora(self.recorder, x, self._linear(x, weight, residual, ADD_RESIDUAL), lora)
        return self.recorder.reduce(record_lora(self.recorder, x, self.scores(x, weight), lora), residual)

    def scores(self, x: Act, weight: Packed | tuple[Packed, ...]) -> Act:
        rows = sum(w.rows for w in parts_of(weight))
        return self._linear(x, weight, self.recorder.new(x.rows, rows, "float32"), STORE_F32)

    def logits(
        self, x: Act, weight: Packed, vocab: range | None = None, size: int | None = None, cap: float = 0.0
    ) -> Act:  # fmt: skip
        if self.recorder.tp.size == 1 or vocab is None or size is None:
            return self._capped(self.scores(x, weight), cap)
        part, whole = self.recorder.gathered(x.rows, vocab, size)
        return self.recorder.gather(self._capped(self._linear(x, weight, part, STORE_F32), cap), whole, vocab)

    def _capped(self, x: Act, cap: float) -> Act:
        """cap * tanh(x / cap), in place."""
        if cap:
            self.recorder.add(
                fields.CapOp, x=x, padded=up(x.columns, 16), rows=x.rows, inner=1 / cap, outer=float(cap)
            )  # fmt: skip
        return x

    def _linear(self, x: Act, weight: Packed | tuple[Packed, ...], out: Act, mode: int) -> Act:
        self.recorder.expect(x, "linear")
        first = 0
        for w in parts_of(weight):
            if x.columns != w.columns:
                raise ValueError(f"linear: {x.columns} columns into a weight with K = {w.columns}")
            if first % 16:
                raise ValueError(f"linear: a part of a weight from row {first} on, which is no multiple of 16")
            self.recorder.wants_product(w)
            self.recorder.add(
                fields.LinearOp, kernels=self.recorder.kernels(w.kind), w=w, stride=w.stride, scales=w.scales,
                length=w.length, x=x, out=out, first=first * (self.target.item if mode == STORE_ACT else 4), mode=mode,
                bias=w.bias, rows=x.rows, half=0, temp=self.recorder.tile_bytes(w), panels=w.panels, attend=0, act=0,
            )  # fmt: skip
            first += w.rows
        return out

    def rope_store(
        self, qkv: Act, kv: PagedKV, rope: Rope, num_heads: int, num_kv_heads: int, head_dim: int,
        q_norm: Vector | None = None, k_norm: Vector | None = None, eps: float = 0.0,
    ) -> Act:  # fmt: skip
        self.recorder.expect(qkv, "rope_store")
        kv.check(num_heads, num_kv_heads, head_dim)
        if qkv.columns != (num_heads + 2 * num_kv_heads) * head_dim:
            raise ValueError(
                f"rope_store: {qkv.columns} columns for {num_heads} + 2 * {num_kv_heads} heads of {head_dim}"
            )
        if 2 * rope.cos.shape[1] > head_dim:
            raise ValueError(f"rope_store: {2 * rope.cos.shape[1]} rotated elements in a head of {head_dim}")
        out = self.recorder.new(qkv.rows, num_heads * head_dim)
        self.recorder.add(
            fields.RopeOp, x=qkv, out=out, cache=kv.memory, block_bytes=kv.block_bytes, block_size=kv.block_size,
            heads=num_heads, kv_heads=num_kv_heads, dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps,
            slots=self.batch.slots, positions=self.recorder.positions(qkv), rows=qkv.rows, **rope.fields,
        )  # fmt: skip
        return out

    def attend(
        self, q: Act, kv: PagedKV, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        window: int | None = None, cap: float = 0.0, sinks: Vector | None = None,
    ) -> Act:  # fmt: skip
        if sinks is not None and sinks.length != num_heads:
            raise ValueError(f"attend: {sinks.length} sinks for {num_heads} heads")
        out = self.recorder.new(q.rows, q.columns)
        return self._attend_heads(q, kv, out, num_heads, num_kv_heads, head_dim, scale, window, cap, sinks)

    def attend_part(
        self, q: Act, kv: PagedKV, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, group: ContextGroup,
        window: int | None = None, cap: float = 0.0,
    ) -> Act:  # fmt: skip
        out, stripes = self.new_part(q.rows, group, head_dim), group.stripes
        return self._attend_heads(q, kv, out, num_heads, num_kv_heads, head_dim, scale, window, cap, stripes=stripes)

    def _attend_heads(
        self, q: Act, kv: PagedKV, out: Act, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        window: int | None, cap: float, sinks: Vector | None = None, stripes: Stripes | None = None,
    ) -> Act:  # fmt: skip
        self.recorder.expect(q, "attend")
        kv.check(num_heads, num_kv_heads, head_dim)
        both = 2 * 16 * head_dim * self.target.item  # of keys and of values
        return self._attend(
            q, kv, out, heads=num_heads, groups=num_kv_heads, dim=head_dim, value_dim=head_dim, scale=cap or scale,
            window=window, chunk_bytes=both, group_bytes=kv.block_size // 16 * both,
            cap=scale / cap if cap else None, sinks=sinks, stripes=stripes,
        )  # fmt: skip

    def mla_attend(self, q: Act, kv: PagedLatents, num_heads: int, rank: int, scale: float) -> Act:
        return self._attend_latents(q, kv, self.recorder.new(q.rows, num_heads * rank), num_heads, rank, scale)

    def mla_attend_part(
        self, q: Act, kv: PagedLatents, num_heads: int, rank: int, scale: float, group: ContextGroup
    ) -> Act:  # fmt: skip
        out = self.new_part(q.rows, group, rank)
        return self._attend_latents(q, kv, out, num_heads, rank, scale, group.stripes)

    def _attend_latents(
        self, q: Act, kv: PagedLatents, out: Act, num_heads: int, rank: int, scale: float,
        stripes: Stripes | None = None,
    ) -> Act:  # fmt: skip
        self.recorder.expect(q, "mla_attend")
        if q.columns != num_heads * kv.width or rank > kv.width:
            raise ValueError(f"mla_attend: {q.columns} columns of {num_heads} heads for a cache of {kv.width}")
        # All heads read the same rows. They are cut into groups, so that one sequence alone keeps all threads busy.
        return self._attend(
            q, kv, out, heads=num_heads, groups=mla_rows.groups(num_heads, self.recorder.most), dim=kv.width,
            value_dim=rank, scale=scale, window=None, chunk_bytes=16 * kv.width * self.target.item, group_bytes=0,
            stripes=stripes,
        )  # fmt: skip

    def _attend(
        self, q: Act, kv: PagedKV | PagedLatents, out: Act, *, heads: int, groups: int, dim: int, value_dim: int,
        scale: float, window: int | None, chunk_bytes: int, group_bytes: int, cap: float | None = None,
        sinks: Vector | None = None, stripes: Stripes | None = None,
    ) -> Act:  # fmt: skip
        """Attention of `groups` groups of heads. chunk_bytes: of a chunk of 16 tokens of a group, up to the next;
        group_bytes: from the chunks of one group to those of the next, 0 where they read the same, whose first columns
        are the values."""
        batch, item = self.batch, self.target.row_item
        rows = max(layout.QUERY_ROWS, heads // groups)
        self.recorder.wants(layout.BIG + rows * (dim * item + value_dim * 4 + layout.KEY_TILE * (item + 4)))
        self.recorder.add(
            fields.AttendOp, q=q, out=out, cache=kv.memory, block_bytes=kv.block_bytes, chunk_bytes=chunk_bytes,
            block_size=kv.block_size, heads=heads, groups=groups, dim=dim, scale=scale, window=window,
            seq_start=batch.seq_start, seq_len=batch.seq_len, seq_row=batch.seq_row, table=batch.block_table,
            ld_table=batch.block_table.strides[0], group_bytes=group_bytes, value_dim=value_dim,
            keys_are_values=group_bytes == 0, cap=cap, sinks=sinks,
            stripes=None if stripes is None else np.array(stripes, np.int64),
        )  # fmt: skip
        return out

    def gated(self, gate_up: Act, kind: str = "silu") -> Act:
        self.recorder.expect(gate_up, "gated")
        if gate_up.columns % 2:
            raise ValueError(f"gated: {gate_up.columns} columns are not two halves")
        half = gate_up.columns // 2
        out = self.recorder.new(gate_up.rows, half)
        self.recorder.add(
            fields.GatedOp, x=gate_up, out=out, half=half, padded=up(half, 16), rows=gate_up.rows, act=ACTIVATIONS[kind]
        )  # fmt: skip
        return out

    def gelu(self, x: Act) -> Act:
        """In place."""
        self.recorder.expect(x, "gelu")
        self.recorder.add(fields.GeluOp, x=x, padded=up(x.columns, 16), rows=x.rows)
        return x

    def clip(self, x: Act, limit: float) -> Act:
        """In place."""
        self.recorder.expect(x, "clip")
        self.recorder.add(fields.ClipOp, x=x, padded=up(x.columns, 16), rows=x.rows, limit=float(limit))
        return x

    def wide_norm(
        self, qkv: Act, widths: tuple[int, int], whole: tuple[int, int], q_norm: Vector, k_norm: Vector, eps: float, *,
        counts_keys: bool = True,
    ) -> Act:  # fmt: skip
        """In place."""
        self.recorder.expect(qkv, "wide_norm")
        q, k = widths
        if q % 16 or k % 16:
            raise ValueError(f"wide_norm: {q} and {k} columns are not multiples of 16")
        sums = self.recorder.new(qkv.rows, 2, "float32")
        row: dict[str, Thing] = {"x": qkv, "first": q, "second": q * self.target.item, "rows": qkv.rows}
        self.recorder.add(fields.SquaresOp, out=sums, last=k if counts_keys else 0, **row)
        if self.recorder.tp.size > 1:
            self.recorder.reduce(sums, sums)
        self.recorder.add(
            fields.RescaleOp, sums=sums, last=k, whole_first=whole[0], whole_last=whole[1], first_weight=q_norm,
            last_weight=k_norm, eps=eps, **row,
        )  # fmt: skip
        return qkv

    def gate_rows(self, x: Act, logit: Act) -> Act:
        self.recorder.expect(x, "gate_rows")
        self.recorder.expect(logit, "the gate of gate_rows", "float32")
        out = self.recorder.new(x.rows, x.columns)
        self.recorder.add(fields.GateOp, x=x, logits=logit, out=out, padded=up(x.columns, 16), rows=x.rows)
        return out

    def take(self, x: Act) -> Act:
        if x.rows != layout.ROWS_TOKENS:
            raise ValueError("take: these rows were taken already")
        if self.batch.step is not self.batch:
            return self.take_from_all(x)
        out = self.recorder.new(layout.ROWS_SAMPLES, x.columns, x.dtype)
        self.recorder.add(fields.TakeOp, x=x, ld=x.ld, out=out, index=self.batch.sample_index, rows=layout.ROWS_SAMPLES)
        return out
