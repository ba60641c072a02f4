"""Checksums of blocks against their definition, and that everything in a block counts, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planaria.kernels.block_sums import _KEYS, _PRIME, _SCRAMBLE, _STEPS, STRIPE
from planaria.worker.kv_sums import BlockSums

MASK = 2**64 - 1


def defined(pieces: list[bytes]) -> int:
    sums = list(_STEPS)
    for piece in pieces:
        places = [*range(0, len(piece) - STRIPE, STRIPE), len(piece) - STRIPE]
        for number, place in enumerate(places):
            words = [int.from_bytes(piece[place + 8 * i : place + 8 * i + 8], "little") for i in range(8)]
            for lane, word in enumerate(words):
                mixed = word ^ ((_KEYS[lane] + number * _STEPS[lane]) & MASK)
                product = (mixed & (2**32 - 1)) * (mixed >> 32)
                sums[lane] = (sums[lane] + product + words[lane ^ 1]) & MASK
        sums = [((sum ^ (sum >> 47) ^ key) * _SCRAMBLE) & MASK for sum, key in zip(sums, _KEYS, strict=True)]
    found = 0
    for sum in sums:
        found = ((found ^ sum) * _PRIME) & MASK
        found ^= found >> 29
    return (found >> 1) | 1


@pytest.fixture
def blocks() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 256, (5, size), np.uint8) for size in (64, 128, 320, 1000)]


def test_sums_are_as_defined(blocks: list[np.ndarray]) -> None:
    sums = BlockSums(blocks, np.zeros(5, np.int64), 1, 16)
    sums.note([4, 1, 0])
    wanted = [defined([cache[block].tobytes() for cache in blocks]) for block in range(5)]
    assert sums.table.tolist() == [wanted[0], wanted[1], 0, 0, wanted[4]]
    assert sums.copied([2, 3], np.array([wanted[2], wanted[3] ^ 2])) == 1
    assert sums.table.tolist() == [*wanted[:3], 0, wanted[4]]
    assert sums.wrong([0, 1, 3]) == [3] and sums.wrong([]) == []
    with pytest.raises(IndexError):
        sums.note([5])


def test_each_bit_of_a_block_counts_and_no_other(blocks: list[np.ndarray]) -> None:
    sums = BlockSums(blocks, np.zeros(5, np.int64), 1, 16)
    sums.note(range(5))
    for cache in blocks:
        for place in range(cache.shape[1]):
            cache[2, place] ^= 1 << place % 8
            assert sums.wrong(range(5)) == [2]
            cache[2, place] ^= 1 << place % 8
    for cache in blocks:  # and so does the place of what is in it
        cache[2, :8], cache[2, -8:] = cache[2, -8:].copy(), cache[2, :8].copy()
        assert sums.wrong(range(5)) == [2]
        cache[2, :8], cache[2, -8:] = cache[2, -8:].copy(), cache[2, :8].copy()
    assert sums.wrong(range(5)) == []


def test_many_are_looked_at_by_several_threads() -> None:
    blocks = [np.random.default_rng(2).integers(0, 256, (500, 256), np.uint8)]
    sums = BlockSums(blocks, np.zeros(500, np.int64), 1, 16)
    sums.note(range(500))
    blocks[0][[3, 499], 100] ^= 1
    assert sums.wrong(range(499, -1, -1)) == [499, 3]


def test_the_code_is_kept(tmp_path: Path) -> None:
    from planaria.kernels.block_sums import load

    load(tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("sums-")
