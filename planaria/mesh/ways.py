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


def direct_refusal(members: Sequence[Hello], there: bool) -> str:
    """Of the devices' own collective. there: is it in this torch?"""
    if not there:
        return "this PyTorch has none"
    seen = dict[tuple[str, int], Hello]()
    for each in members:
        if (other := seen.setdefault((each.home, each.device), each)) is not each:
            both = f"ranks {other.rank} and {each.rank} are both on device {each.device} of {each.node}"
            return f"{both}, and it wants one for each"
    return ""


def memory_refusal(members: Sequence[Hello], there: bool) -> str:
    first = members[0]
    apart = [each for each in members if each.home != first.home]
    if apart:
        return f"ranks {first.rank} and {apart[0].rank} are on different nodes"
    return "" if first.segments else "this system has no memory files"


MEMORY, GLOO = "shared memory", "gloo"
OTHERS = (GroupWay(MEMORY, memory_refusal), GroupWay(GLOO, lambda members, there: ""))


def choose(members: Sequence[Hello], collective: str, there: bool) -> tuple[str, str]:
    """Which way, and a line for people: it, and why not those before it. collective: of these devices, which comes
    first; there: is it in this torch?"""
    refused = list[str]()
    for way in (GroupWay(collective, direct_refusal), *OTHERS):
        why = way.refusal(members, there)
        if not why:
            break
        refused.append(f"not {way.name}: {why}")
    return way.name, way.name + (f" ({'; '.join(refused)})" if refused else "")
