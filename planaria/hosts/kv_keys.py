"""Which KV, and which block of it has which key, as it is written down in memory of the node (planaria.core.kv_index):
what an engine's core writes, and ranks of other engines read while it does. Pure.

A block's entry goes before the block is used for anything else, and comes when it holds what its key stands for. So who
finds the same entry before and after it has copied a block has copied what the key stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KEY = 16  # bytes
HEAD, DIGEST = 6, 64  # numbers, bytes
FIRST = HEAD * 8 + DIGEST
SET = 0x80  # of a block's flags: it has a key. The rest counts its keys: others see that it had another meanwhile


class Shape(NamedTuple):
    """Of KV: lanes, blocks of each, tokens of a block, rows, blocks of a row at most."""

    lanes: int
    num_blocks: int
    block_size: int
    rows: int
    width: int

    @property
    def lane_bytes(self) -> int:
        return -(-(self._keys_at + self.num_blocks * (KEY + 1)) // 64) * 64

    @property
    def _keys_at(self) -> int:
        """In a lane's part, behind what only its engine reads."""
        return self.num_blocks * 8 + self.rows * (8 + 4 + 4 * self.width + KEY)

    @property
    def size(self) -> int:
        return FIRST + 16 + self.lanes * self.lane_bytes

    def keys_of(self, buffer: memoryview, lane: int) -> BlockKeys:
        """They are at the end of a lane's part."""
        at = -(-FIRST // 16) * 16 + lane * self.lane_bytes + self._keys_at
        keys, flags = at, at + self.num_blocks * KEY
        return BlockKeys(buffer[keys:flags], buffer[flags : flags + self.num_blocks])


class BlockKeys:
    """Of a lane. keys: [blocks][KEY]; flags: [blocks]."""

    def __init__(self, keys: memoryview, flags: memoryview) -> None:
        self._keys, self._flags = keys, flags

    def remember(self, block: int, key: bytes) -> None:
        self._keys[block * KEY : (block + 1) * KEY] = key
        self._flags[block] = SET | self._flags[block] + 1 & ~SET & 0xFF

    def forget(self, block: int) -> None:
        self._flags[block] &= ~SET & 0xFF

    def all(self) -> dict[int, bytes]:
        """By block."""
        marked = (block for block, mark in enumerate(self._flags) if mark & SET)
        return {block: bytes(self._keys[block * KEY : (block + 1) * KEY]) for block in marked}

    def marks(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Of the first of these blocks that have these keys now: a mark, which is another when the block had another
        key meanwhile."""
        found: list[int] = []
        for block, key in zip(blocks, keys, strict=True):
            mark = self._flags[block] if 0 <= block < len(self._flags) else 0
            if not mark & SET or self._keys[block * KEY : (block + 1) * KEY] != key:
                break
            found.append(mark)
        return found


def shape_of(head: memoryview, digest: bytes) -> Shape | None:
    """Of the KV that a buffer which begins so tells of, if its digest begins so."""
    same = bytes(head[HEAD * 8 : HEAD * 8 + len(digest)]) == digest
    return Shape(*head[8 : HEAD * 8].cast("q")) if same else None
