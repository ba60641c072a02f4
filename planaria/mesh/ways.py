"""What carries a group of ranks that compute on devices: the first way that has no refusal is taken, the last one takes
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from planaria.protocol import Hello


class GroupWay(NamedTuple):
    """refusal: of a group with these ranks, in a word for people; empty: it takes them."""

    name: str
    refusal: Callable[[Sequence[Hello], bool], str]


def nccl_refusal(members: Sequence[Hello], has_nccl: bool) -> str:
    """has_nccl: is it in this torch?"""
    if not has_nccl:
        return "this PyTorch has none"
    seen = dict[tuple[str, int], Hello]()
    for each in members:
        if (other := seen.setdefault((each.home, each.device), each)) is not each:
            both = f"ranks {other.rank} and {each.rank} are both on device {each.device} of {each.node}"
            return f"{both}, and it wants one for each"
    return ""


def memory_refusal(members: Sequence[Hello], has_nccl: bool) -> str:
    first = members[0]
    apart = [each for each in members if each.home != first.home]
    if apart:
        return f"ranks {first.rank} and {apart[0].rank} are on different nodes"
    return "" if first.segments else "this system has no memory files"


NCCL, MEMORY, GLOO = "NCCL", "shared memory", "gloo"
WAYS = (GroupWay(NCCL, nccl_refusal), GroupWay(MEMORY, memory_refusal), GroupWay(GLOO, lambda members, has_nccl: ""))


def choose(members: Sequence[Hello], has_nccl: bool) -> tuple[str, str]:
    """Which way, and a line for people: it, and why not those before it."""
    refused = list[str]()
    for way in WAYS:
        why = way.refusal(members, has_nccl)
        if not why:
            break
        refused.append(f"not {way.name}: {why}")
    return way.name, way.name + (f" ({'; '.join(refused)})" if refused else "")
