"""Programs that are ranks of one engine and bring prompts of their own (`$PLANARIA_DP_SIZE`): each says what it asks
for, all compute all of it, and each keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planaria.errors import EngineDead
from planaria.executor.link.faults import LinkError
from planaria.types import SamplingParams


class PromptAsked(msgspec.Struct, array_like=True, frozen=True):
    """One prompt, as a program gives it to its engine."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""


def everyones(
    share: Callable[[bytes], tuple[int, list[bytes]]], own: Sequence[PromptAsked]
) -> tuple[list[PromptAsked], slice]:  # fmt: skip
    """What all programs ask for, in order of their ranks, and where the own part is. Raises EngineDead: one has
    ended."""
    try:
        rank, parts = share(msgspec.msgpack.encode(own))
    except LinkError as e:
        raise EngineDead(f"{e}; each program calls generate as often as the others do, if with no prompt") from None
    asked = [msgspec.msgpack.decode(part, type=list[PromptAsked]) for part in parts]
    first = sum(map(len, asked[:rank]))
    return [one for part in asked for one in part], slice(first, first + len(own))
