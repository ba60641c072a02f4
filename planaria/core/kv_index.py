"""What is in KV, written down where it outlives the engine's process, so that another can go on with it.

Two kinds of entries: the key of a block that is full; and of a row its request's name, its blocks and how many of its
tokens are committed. Rules: an entry is there only while what it says is true, so it goes before its block is used for
anything else; it comes at commit. All is written in place and in order, whenever the process may die.

A buffer: a number, 0 if nothing in it counts, and its Shape, of 8 bytes each; a digest of the configuration; for each
lane releases [blocks] and lengths [rows] of 8 bytes, counts [rows] and tables [rows][width] of 4, names [rows][16],
keys [blocks][16] and flags [blocks].
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from planaria.core.kv_cache import BlockKey
from planaria.hosts.kv_keys import DIGEST, FIRST, HEAD, KEY, Shape
from planaria.types import Request


class HeldBlocks(NamedTuple):
    """Of a request: they hold its first `length` tokens."""

    blocks: list[int]
    length: int


class LaneIndex:
    """Of one lane whose KV nobody else can go on with: nothing is written down. `lengths`: how many tokens of each row
    are committed."""

    def __init__(self, rows: int) -> None:
        self.lengths: memoryview | list[int] = [0] * rows
        self.block_size = 1

    def remember(self, block: int, key: BlockKey) -> None: ...

    def forget(self, block: int) -> None: ...

    def release(self, block: int) -> None:
        """It has a key, and nobody uses it any more."""

    def enter(self, row: int, request: Request, blocks: Sequence[int]) -> None: ...

    def append(self, row: int, first: int, blocks: Sequence[int]) -> None: ...

    def leave(self, row: int) -> None: ...

    def load(self) -> tuple[dict[int, BlockKey], dict[bytes, HeldBlocks]]:
        """Keys by block, in the order in which these were released; and what rows hold by name."""
        return {}, {}


def name_of(id: str, prompt: Sequence[int], seed: int, salt: str = "", adapter: str = "") -> bytes:
    """Of a request. All that its tokens follow from, but for parameters that don't change, is in it: what bears the
    name of another is never taken for its own."""
    history = blake2b(array("q", [seed & ((1 << 63) - 1), *prompt]).tobytes(), digest_size=KEY)
    history.update(adapter.encode() + b"\0" + id.encode() + b"\0" + salt.encode())
    return history.digest()


def name_of_request(request: Request) -> bytes:
    return name_of(request.id, request.prompt, request.seed, request.salt, request.adapter)


class BufferIndex(LaneIndex):
    """Of the lane `number`, in such a buffer."""

    def __init__(self, buffer: memoryview, shape: Shape, number: int) -> None:
        self.shape, rows, self.block_size = shape, shape.rows, shape.block_size
        at = -(-FIRST // 16) * 16 + number * shape.lane_bytes

        def part(size: int) -> memoryview:
            nonlocal at
            at += size
            return buffer[at - size : at]

        self._releases, self._last = part(shape.num_blocks * 8).cast("q"), 0
        self.lengths: memoryview | list[int] = part(rows * 8).cast("q")
        self._counts = part(rows * 4).cast("i")
        self._tables = part(rows * 4 * shape.width).cast("i")
        self._names = part(rows * KEY)
        self.keys = shape.keys_of(buffer, number)
        self.remember, self.forget = self.keys.remember, self.keys.forget  # type: ignore[method-assign]

    def release(self, block: int) -> None:
        self._last += 1
        self._releases[block] = self._last

    def enter(self, row: int, request: Request, blocks: Sequence[int]) -> None:
        self._counts[row] = 0
        self._names[row * KEY : (row + 1) * KEY] = name_of_request(request)
        self.lengths[row] = request.computed
        self.append(row, 0, blocks)

    def append(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """blocks: in order, behind the row's `first` blocks."""
        start, end = row * self.shape.width + first, first + len(blocks)
        self._tables[start : start + len(blocks)] = memoryview(array("i", blocks))
        self._counts[row] = end

    def leave(self, row: int) -> None:
        self._counts[row] = 0

    def load(self) -> tuple[dict[int, BlockKey], dict[bytes, HeldBlocks]]:
        held, keys = {}, self.keys.all()
        for row, count in enumerate(self._counts):
            blocks = self._tables[row * self.shape.width : row * self.shape.width + count].tolist()
            length = min(self.lengths[row], count * self.shape.block_size)
            if length > 0:
                held[bytes(self._names[row * KEY : (row + 1) * KEY])] = HeldBlocks(blocks, length)
        return {block: keys[block] for block in sorted(keys, key=self._releases.__getitem__)}, held


def full_blocks(index: LaneIndex) -> set[int]:
    """Those that are full, of what it tells."""
    keys, held = index.load()
    return {*keys, *(block for blocks, length in held.values() for block in blocks[: length // index.block_size])}


def begin(buffer: memoryview, shape: Shape, digest: bytes, number: int) -> list[BufferIndex]:
    """Nothing is in the KV of this number. `buffer` has zeros."""
    head = buffer[: HEAD * 8].cast("q")
    head[0] = 0
    head[1:] = memoryview(array("q", shape))
    buffer[HEAD * 8 : FIRST] = digest.ljust(DIGEST, b"\0")
    head[0] = number
    return [BufferIndex(buffer, shape, lane) for lane in range(shape.lanes)]


def found(head: memoryview, digest: bytes) -> tuple[int, Shape] | None:
    """Number and shape of the KV that a buffer which begins so tells of, if it is of this configuration."""
    numbers = head[: HEAD * 8].cast("q")
    if not numbers[0] or bytes(head[HEAD * 8 : FIRST]) != digest.ljust(DIGEST, b"\0"):
        return None
    return numbers[0], Shape(*numbers[1:])
