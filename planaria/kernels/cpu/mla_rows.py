"""What is recorded for latent attention beside attention itself (mla.py runs it): into the cache, and head by head."""

from __future__ import annotations

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.caches import PagedLatents, sixteens
from planaria.kernels.cpu.fields import ByHeadOp, MlaStoreOp
from planaria.kernels.cpu.micro import DENSE
from planaria.kernels.cpu.pack import Packed
from planaria.kernels.cpu.recorder import Recorder, float_bits
from planaria.kernels.cpu.tape import Act


def groups(num_heads: int, threads: int) -> int:
    """Groups that heads are cut into, to be attended one by one: as many as threads, but of four heads at least (where
    the number of heads allows it)."""
    least = max(1, -(-num_heads // layout.MAX_GROUP), min(threads, num_heads // 4))
    return next(n for n in range(least, num_heads + 1) if num_heads % n == 0)


def by_head(recorder: Recorder, x: Act, w: Packed, heads: int, tables: dict[str, int]) -> Act:
    """See `Operations.by_head`. tables: cos, sin, half; zeros where nothing is rotated."""
    recorder.expect(x, "by_head")
    rows, rotated, half = w.rows // heads, x.columns // heads - w.columns, tables["half"]
    if w.kind != DENSE or x.columns % heads or rotated < 2 * half or bool(rotated) != bool(half):
        raise ValueError(f"by_head: {x.columns} columns do not fit {heads} heads of {w.columns}")
    sixteens(rows, w.columns, rotated)
    out, item = recorder.new(x.rows, heads * (rows + rotated)), recorder.target.item
    recorder.own(w)
    recorder.wants(layout.BIG + 4 * rotated)
    recorder.add(
        ByHeadOp, w=w.address, stride=w.stride, length=w.length, panels=rows // 16, x=x.buffer, ldx=x.ld,
        x_head=(w.columns + rotated) * item, out=out.buffer, ldo=out.ld, out_head=(rows + rotated) * item,
        heads=heads, rotated=rotated, x_tail=w.columns * item, out_tail=rows * item,
        positions=recorder.batch.positions.ctypes.data, **tables,
    )  # fmt: skip
    return out


def store(
    recorder: Recorder, x: Act, kv: PagedLatents, norm: tuple[int, int], eps: float, tables: dict[str, int]
) -> None:  # fmt: skip
    """See `Operations.mla_store`. norm: address, length."""
    recorder.expect(x, "mla_store")
    (address, rank), item = norm, recorder.target.item
    rotated = x.columns - rank
    sixteens(rank)
    if x.columns != kv.width or rotated < 2 * tables["half"]:
        raise ValueError(f"mla_store: {x.columns} columns, {2 * tables['half']} rotated, for a cache of {kv.width}")
    recorder.own(kv)
    recorder.wants(layout.BIG + kv.width * item + 4 * max(rank, rotated))
    recorder.add(
        MlaStoreOp, x=x.buffer, ldx=x.ld, cache=kv.memory.address, block_bytes=kv.block_bytes,
        block_size=kv.block_size, rank=rank, rotated=rotated, norm=address, eps=float_bits(eps),
        slots=recorder.batch.slots.ctypes.data, positions=recorder.batch.positions.ctypes.data, **tables,
    )  # fmt: skip
