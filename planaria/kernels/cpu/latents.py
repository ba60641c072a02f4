"""What `CpuOps` records for latent attention (latent.py runs it): the cache, and products head by head."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.errors import ConfigError
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.memory import Region
from planaria.kernels.cpu.micro import DENSE
from planaria.kernels.cpu.pack import Packed
from planaria.kernels.cpu.tape import Buffer


@dataclass(frozen=True)
class LatentCache:
    """Paged rows of one layer, keys of all heads: [blocks][block_size / 16][a chunk of 16 tokens, as of keys]."""

    memory: Region
    block_size: int
    width: int
    block_bytes: int


def sixteens(*sizes: int) -> None:
    """Raises ConfigError unless all are multiples of 16."""
    for size in sizes:
        if size % 16:
            raise ConfigError(
                "--device", "cpu", f"its kernels take latents and heads of multiples of 16 columns, not {size}"
            )


def groups(num_heads: int, threads: int) -> int:
    """Groups that heads are cut into, to be attended one by one: as many as threads, but of four heads at least (where
    the number of heads allows it)."""
    least = max(1, -(-num_heads // layout.MAX_GROUP), min(threads, num_heads // 4))
    return next(n for n in range(least, num_heads + 1) if num_heads % n == 0)


class ByHead:
    """A product head by head. columns: of its result; scratch: bytes of a thread's scratch memory.

    x_columns: of what comes in, all heads. tables: cos, sin, their columns; zeros where nothing is rotated.
    """

    def __init__(
        self, weight: Packed, num_heads: int, x_columns: int, item: int, tables: tuple[int, int, int]
    ) -> None:
        self.weight, self.heads, self.item, self.tables = weight, num_heads, item, tables
        self.rows, self.rotated = weight.rows // num_heads, x_columns // num_heads - weight.columns
        half = tables[2]
        if weight.kind != DENSE or x_columns % num_heads or self.rotated < 2 * half or bool(self.rotated) != bool(half):
            raise ValueError(f"by_head: {x_columns} columns do not fit {num_heads} heads of {weight.columns}")
        sixteens(self.rows, weight.columns, self.rotated)
        self.columns = num_heads * (self.rows + self.rotated)
        self.scratch = layout.BIG + 4 * self.rotated

    def fields(self, x: Buffer, ldx: int, out: Buffer, ldo: int, positions: int) -> list[int | Buffer]:
        """Of its BY_HEAD operation. positions: address of the tokens' positions."""
        w, item = self.weight, self.item
        return [
            w.address, w.stride, w.length, self.rows // 16, x, ldx, (w.columns + self.rotated) * item,
            out, ldo, (self.rows + self.rotated) * item, self.heads, self.rotated, w.columns * item, self.rows * item,
            *self.tables, positions,
        ]  # fmt: skip
