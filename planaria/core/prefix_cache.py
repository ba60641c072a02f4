"""Which block holds which prefix. A full block's key hashes its tokens and its parent's key, so equal keys mean
equal histories up to and including that block. Blocks enter at commit, never at plan: what is in here was computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockKey = bytes
ROOT: BlockKey = b""


def block_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Key of a full block after `parent`. 128 bits: a collision would show one user another's history."""
    return blake2b(array("q", tokens).tobytes(), digest_size=16, key=parent).digest()


def chain(tokens: Sequence[int], block_size: int, known: list[BlockKey]) -> list[BlockKey]:
    """Keys of all full blocks of `tokens`, continuing `known` (the keys of the first blocks), which is extended."""
    for i in range(len(known), len(tokens) // block_size):
        known.append(block_key(known[-1] if known else ROOT, tokens[i * block_size : (i + 1) * block_size]))
    return known
