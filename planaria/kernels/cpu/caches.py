"""The paged caches of a layer: keys and values, or latents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planaria.errors import CapacityError, ConfigError
from planaria.kernels.cpu import layout
from planaria.kernels.cpu.memory import MappedRegion, Region
from planaria.kernels.ops import CacheMemory

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class PagedKV:
    """[blocks][kv head][block_size / 16][keys, values][a chunk of 16 tokens].

    A chunk of keys is a panel whose columns are tokens: [dim / pair][16][pair]; of values, dim / 16 panels whose K
    runs over tokens: [dim / 16][16 / pair][16][pair].
    """

    memory: Region
    block_size: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int

    def blocks(self) -> list[npt.NDArray[np.uint8]]:
        return [_rows(self.memory, self.block_bytes)]

    def items(self) -> list[npt.NDArray[np.intp]]:
        """Of each of `blocks`, where in a block the numbers of a head's token are: [heads][tokens][numbers]."""
        heads, dim = self.num_kv_heads, self.head_dim
        pair = _pair(self.block_bytes, count := 2 * heads * self.block_size * dim)
        keys, values = np.arange(count).reshape(heads, -1, 2, 16 * dim).transpose(2, 0, 1, 3)
        values = values.reshape(heads, -1, dim // 16, 16 // pair, 16, pair).transpose(0, 1, 3, 5, 2, 4)
        return [np.concatenate([_panels(keys, pair), values.reshape(heads, self.block_size, dim)], 2)]

    def check(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError for an attention of other heads."""
        if (self.num_kv_heads, self.head_dim) != (num_kv_heads, head_dim) or num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} heads of {head_dim} over {num_kv_heads} do not fit a cache of {self.num_kv_heads} "
                f"heads of {self.head_dim}"
            )
        if num_heads // num_kv_heads > layout.MAX_GROUP:
            raise ValueError(f"more than {layout.MAX_GROUP} query heads share a key head")


@dataclass(frozen=True)
class PagedLatents:
    """Rows of one layer, keys of all heads: [blocks][block_size / 16][a chunk of 16 tokens, as of keys]."""

    memory: Region
    block_size: int
    width: int
    block_bytes: int

    def blocks(self) -> list[npt.NDArray[np.uint8]]:
        return [_rows(self.memory, self.block_bytes)]

    def items(self) -> list[npt.NDArray[np.intp]]:
        count = self.block_size * self.width
        return [_panels(np.arange(count).reshape(1, -1, 16 * self.width), _pair(self.block_bytes, count))]


def _pair(num_bytes: int, count: int) -> int:
    """Neighbours in one step of a dot product, of 4 bytes."""
    return 4 * count // num_bytes


def _panels(chunks: npt.NDArray[np.intp], pair: int) -> npt.NDArray[np.intp]:
    """Of chunks of keys [heads][chunks][width / pair, 16, pair]: [heads][tokens][width]."""
    heads, count, size = chunks.shape
    by_token = chunks.reshape(heads, count, -1, 16, pair).swapaxes(2, 3)
    return by_token.reshape(heads, 16 * count, size // 16)


def _rows(memory: Region, size: int) -> npt.NDArray[np.uint8]:
    count = len(memory.bytes) // size
    return memory.bytes[: count * size].reshape(count, size)


def paged(num_blocks: int, size: int, part: CacheMemory | None = None) -> Region:
    """Memory of blocks of `size` bytes. Raises CapacityError."""
    try:
        return Region(num_blocks * size) if part is None else MappedRegion(part.take(num_blocks * size))
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(f"no memory for {num_blocks} KV blocks of {size} bytes in one layer: {error}") from None


def kv_elements(block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Of one block, keys and values. Raises ConfigError for what the kernels don't take."""
    _chunks(block_size)
    if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 16:
        raise ConfigError(
            "--device", "cpu", f"its kernels take head sizes that are multiples of 16 up to 256, not {head_dim}"
        )
    return 2 * block_size * num_kv_heads * head_dim


def latent_elements(block_size: int, width: int) -> int:
    """As `kv_elements`, of latents."""
    _chunks(block_size)
    sixteens(width)
    return block_size * width


def sixteens(*sizes: int) -> None:
    """Raises ConfigError unless all are multiples of 16."""
    for size in sizes:
        if size % 16:
            raise ConfigError(
                "--device", "cpu", f"its kernels take latents and heads of multiples of 16 columns, not {size}"
            )


def _chunks(block_size: int) -> None:
    if block_size < 16 or block_size % 16:
        raise ConfigError(
            "--block-size", block_size, "the CPU kernels keep tokens in chunks of 16", "use a multiple of 16"
        )
