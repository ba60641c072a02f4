"""The block pool: reference counts, what a free block still remembers, and the key of what a block holds.

A full block's key hashes its tokens and its parent's key, and the first one's parent is a root that hashes all else KV
depends on: the weights, an adapter, the cache's dtype, and the salt of who asked. So equal keys mean equal bytes, here
and wherever a key may go, and a block's key costs the same whatever is in the root. Blocks get theirs at commit, never
at plan: what has one was computed.

A block is in exactly one of three states: used (count > 0), idle (count 0, holds a prefix that may be hit, evicted
oldest first) or empty. A key maps to at most one block.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple, Protocol

from planaria.hosts.kv_keys import KEY

BlockKey = bytes


class KeyScope(NamedTuple):
    """What all keys of an engine depend on. weights: their digest, or another version of them; dtype: of the cache;
    number: by which the weights are told of (wire.UpdateWeights), and no part of keys."""

    weights: str = ""
    dtype: str = ""
    number: int = 0

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # of a few values
    def root(self, salt: str = "", adapter: str = "") -> BlockKey:
        """Where the keys of requests with this salt and this adapter (its digest) begin."""
        parts = [part.encode() for part in (self.weights, adapter, self.dtype, salt)]
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake2b(framed, digest_size=KEY, person=b"planaria root").digest()


class KeyListener(Protocol):
    """Hears which block has a key."""

    def remember(self, block: int, key: BlockKey) -> None: ...

    def forget(self, block: int) -> None: ...

    def release(self, block: int) -> None: ...


class BlockPool:
    """`num_blocks` blocks, numbered from 0. index: what others may know of them."""

    def __init__(self, num_blocks: int, *, caching: bool = True, index: KeyListener | None = None) -> None:
        self.num_blocks, self.caching, self.index = num_blocks, caching, index
        self.refs = [0] * num_blocks
        self.empty = list(range(num_blocks - 1, -1, -1))
        # in order of release; a plain dict would walk over every hole in front of its first entry
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.block_of: dict[BlockKey, int] = {}
        self.key_of: dict[int, BlockKey] = {}

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.idle)

    def usage(self) -> float:
        return 1.0 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def take(self, count: int) -> list[int]:
        """`count` blocks with a reference each. The caller has checked `num_free`."""
        taken = []
        for _ in range(count):
            if self.empty:
                block = self.empty.pop()
            else:
                block, _ = self.idle.popitem(last=False)
                del self.block_of[self.key_of.pop(block)]
                if self.index is not None:
                    self.index.forget(block)
            self.refs[block] = 1
            taken.append(block)
        return taken

    def hits(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks of the longest known prefix of `keys`; takes no reference."""
        found = []
        for key in keys:
            block = self.block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference for each."""
        for block in blocks:
            if self.refs[block] == 0:
                del self.idle[block]
            self.refs[block] += 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these are counted in `num_free` now."""
        return sum(1 for block in blocks if self.refs[block] == 0)

    def remember(self, block: int, key: BlockKey) -> None:
        """The used block holds the prefix `key`, computed. The first block with a key keeps it."""
        if self.caching and key not in self.block_of and block not in self.key_of:
            self.block_of[key] = block
            self.key_of[block] = key
            if self.index is not None:
                self.index.remember(block, key)

    def adopt(self, keys: Mapping[int, BlockKey], used: Iterable[int]) -> None:
        """A new pool's blocks hold what these keys say, in the order of release; `used`: a reference to each."""
        for block in used:
            self.refs[block] += 1
        if self.caching:
            self.key_of = {block: key for block, key in keys.items() if block < self.num_blocks}
            self.block_of = {key: block for block, key in self.key_of.items()}
        for block in self.key_of:
            if not self.refs[block]:
                self._idle(block)
        self.empty = [block for block in self.empty if not self.refs[block] and block not in self.key_of]

    def forget_block(self, block: int) -> None:
        """What it holds counts for nothing. Who uses it goes on to do so."""
        key = self.key_of.pop(block, None)
        if key is None:
            return
        del self.block_of[key]
        if self.index is not None:
            self.index.forget(block)
        if block in self.idle:
            del self.idle[block]
            self.empty.append(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each. Given in history order; the end of a history is evicted before its start."""
        for block in reversed(list(blocks)):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if block in self.key_of:
                    self._idle(block)
                else:
                    self.empty.append(block)

    def _idle(self, block: int) -> None:
        self.idle[block] = None
        if self.index is not None:
            self.index.release(block)

    def forget(self) -> None:
        """Remember nothing of what blocks hold. Those in use stay so."""
        if self.index is not None:
            for block in self.key_of:
                self.index.forget(block)
        self.empty += self.idle
        self.idle.clear()
        self.block_of.clear()
        self.key_of.clear()

    def check(self) -> None:
        """Raise AssertionError if the books don't balance (for tests)."""
        used = {b for b in range(self.num_blocks) if self.refs[b] > 0}
        assert all(r >= 0 for r in self.refs)
        assert len(self.empty) == len(set(self.empty))
        assert not used & set(self.empty) and not used & set(self.idle) and not set(self.empty) & set(self.idle)
        assert len(used) + len(self.empty) + len(self.idle) == self.num_blocks
        assert {b: k for k, b in self.block_of.items()} == self.key_of
        assert set(self.idle) <= set(self.key_of) and not set(self.empty) & set(self.key_of)


def block_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Key of a full block after `parent`. 128 bits: a collision would show one user another's history."""
    return blake2b(_numbers(len(tokens)).pack(*tokens), digest_size=KEY, key=parent).digest()


@functools.cache
def _numbers(count: int) -> Struct:
    """So many of 8 bytes each; half of the time that `array` takes for a block's."""
    return Struct(f"={count}q")


def chain(tokens: Sequence[int], block_size: int, known: list[BlockKey], root: BlockKey) -> list[BlockKey]:
    """Keys of all full blocks of a history, continuing `known` (the keys of the first blocks), which is extended."""
    for at in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        known.append(block_key(known[-1] if known else root, tokens[at : at + block_size]))
    return known
