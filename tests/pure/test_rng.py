"""The generator: published answers, and numbers that look alike neither along positions nor along seeds."""

from __future__ import annotations

import math
from functools import cache

import pytest

from planaria.worker.rng import draw_bits, philox4x32

# Known answers of the authors' own implementation (Random123, kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == answer


def test_words_of_counter_and_key_are_low_first() -> None:
    seed, position = 0xA4093822_299F31D0, 0x243F6A88_85A308D3
    first, second, _, _ = philox4x32((0x85A308D3, 0x243F6A88, 0, 0), (0x299F31D0, 0xA4093822))
    assert draw_bits(seed, position) == second << 32 | first
    assert draw_bits(0, 0) == 0xE169C58D_6627E8D5


def test_seeds_are_64_bits_in_twos_complement() -> None:
    assert draw_bits(-1, 5) == draw_bits(2**64 - 1, 5)
    assert draw_bits(-(2**63), 5) == draw_bits(2**63, 5)
    numbers = {draw_bits(seed, 5) for seed in (0, 1, -1, 2**32, 2**63 - 1, -(2**63))}
    assert len(numbers) == 6


def chi_square_is_plausible(counts: list[int], expected: float) -> bool:
    """Within five standard deviations of the mean (a few in a million would fail, were the seeds not fixed)."""
    freedom = len(counts) - 1
    value = sum((n - expected) ** 2 / expected for n in counts)
    return abs(value - freedom) < 5 * math.sqrt(2 * freedom)


DRAWS = 16384


@cache
def drawn(along: str) -> list[int]:
    return [draw_bits(7, i) if along == "positions" else draw_bits(i, 7) for i in range(DRAWS)]


@pytest.mark.parametrize("shift", [0, 24, 32, 56])
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_bytes_are_uniform_and_neighbours_independent(shift: int, along: str) -> None:
    octets = [value >> shift & 0xFF for value in drawn(along)]
    counts, pairs = [0] * 256, [0] * 256
    for octet, following in zip(octets, octets[1:] + octets[:1], strict=True):
        counts[octet] += 1
        pairs[octet >> 4 | following >> 4 << 4] += 1
    assert chi_square_is_plausible(counts, DRAWS / 256)
    assert chi_square_is_plausible(pairs, DRAWS / 256)
