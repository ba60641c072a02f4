"""Memory of the CPU back end: huge pages are asked for, what is given back is zeroed and handed out again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planaria.kernels.cpu.memory import ALIGN, HUGE, Arena, Region

SMAPS = Path("/proc/self/smaps")


def flags(address: int) -> set[str]:
    """What the system says of the mapping that this address is in."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not SMAPS.exists(), reason="a system without /proc")
@pytest.mark.parametrize("huge", [True, False])
def test_large_memory_is_private_and_asks_for_huge_pages(huge: bool) -> None:
    region = Region(3 * HUGE, huge)
    found = flags(region.address)
    assert "sh" not in found and ("hg" in found) == huge
    assert not huge or region.address % HUGE == 0


def test_pages_that_were_given_back_are_zeros_and_no_others() -> None:
    region = Region(2 * HUGE)
    region.bytes[:] = 7
    region.forget(HUGE // 2 + 1, HUGE)
    page = 4096
    assert not region.bytes[HUGE // 2 + page : HUGE // 2 + HUGE - page].any()
    assert region.bytes[: HUGE // 2].all() and region.bytes[HUGE // 2 + HUGE + 1 :].all()


def test_a_piece_is_handed_out_again_when_it_was_given_back() -> None:
    arena = Arena()
    first, second = arena.take(1000), arena.take(HUGE)
    assert first.ctypes.data % ALIGN == second.ctypes.data % ALIGN == 0
    first[:], second[:] = 1, 2
    arena.give_back(second)
    again = arena.take(HUGE)
    assert again.ctypes.data == second.ctypes.data and not again.any() and first.all()
