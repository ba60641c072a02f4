"""What is recorded for latent attention beside attention itself (mla.py runs it): into the cache, and head by head."""

from __future__ import annotations

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.caches import PagedLatents, sixteens
from planaria.kernels.cpu.fields import ByHeadOp, MlaStoreOp
from planaria.kernels.cpu.micro import DENSE
from planaria.kernels.cpu.pack import Packed
from planaria.kernels.cpu.recorder import Recorder, Rope, Vector
from planaria.kernels.cpu.tape import Act


def groups(num_heads: int, threads: int) -> int:
    """Groups that heads are cut into, to be attended one by one: as many as threads, but of four heads at least (where
    the number of heads allows it)."""
    least = max(1, -(-num_heads // layout.MAX_GROUP), min(threads, num_heads // 4))
    return next(n for n in range(least, num_heads + 1) if num_heads % n == 0)


class LatentOps:
    """A part of `RecordedOps`."""

    recorder: Recorder

    def by_head(self, x: Act, weight: Packed, num_heads: int, rope: Rope | None = None) -> Act:
        """The weight is not quantised; its K and N / num_heads are multiples of 16."""
        recorder, w = self.recorder, weight
        recorder.expect(x, "by_head")
        tables = rope.fields if rope is not None else {"cos": 0, "sin": 0, "half": 0}
        half = rope.cos.shape[1] if rope is not None else 0
        rows, rotated = w.rows // num_heads, x.columns // num_heads - w.columns
        if w.kind != DENSE or x.columns % num_heads or rotated < 2 * half or bool(rotated) != bool(half):
            raise ValueError(f"by_head: {x.columns} columns do not fit {num_heads} heads of {w.columns}")
        sixteens(rows, w.columns, rotated)
        if rows // 16 > layout.MOST_POINTERS:
            raise ValueError(f"by_head: {rows} rows of a head; at most {16 * layout.MOST_POINTERS} are taken")
        out, item = recorder.new(x.rows, num_heads * (rows + rotated)), recorder.target.item
        recorder.wants(layout.BIG + 4 * rotated)
        recorder.add(
            ByHeadOp, w=w, stride=w.stride, length=w.length, panels=rows // 16, x=x,
            x_head=(w.columns + rotated) * item,
            out=out, out_head=(rows + rotated) * item, heads=num_heads, rotated=rotated, x_tail=w.columns * item,
            out_tail=rows * item, positions=recorder.batch.positions, **tables,
        )  # fmt: skip
        return out

    def mla_store(self, x: Act, kv: PagedLatents, norm: Vector, eps: float, rope: Rope) -> None:
        recorder, item, rank = self.recorder, self.recorder.target.item, norm.length
        recorder.expect(x, "mla_store")
        rotated, turned = x.columns - rank, 2 * rope.cos.shape[1]
        sixteens(rank)
        if x.columns != kv.width or rotated < turned:
            raise ValueError(f"mla_store: {x.columns} columns, {turned} rotated, for a cache of {kv.width}")
        recorder.wants(layout.BIG + kv.width * item + 4 * max(rank, rotated))
        recorder.add(
            MlaStoreOp, x=x, cache=kv.memory, block_bytes=kv.block_bytes, block_size=kv.block_size, rank=rank,
            rotated=rotated, norm=norm, eps=eps, slots=recorder.batch.slots, positions=recorder.positions(x),
            rows=x.rows, **rope.fields,
        )  # fmt: skip
