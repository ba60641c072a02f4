"""Who waits with blocks: after a fault that left what was committed, a request keeps the blocks up to its cursor and
enters with them. When memory is short, the last of these gives them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from planaria.core.policy import Key
from planaria.core.sequence import SequenceState

if TYPE_CHECKING:
    from planaria.core.scheduler import Lane


def release_ended(lane: Lane) -> None:
    """Blocks of those that have ended, or are without a row, which no step needs any more."""
    for _, row, blocks in lane.deferred:
        at = lane.at_row[row]
        if at is None or not at.open or at.blocks is not blocks:
            lane.pool.release(blocks)


def hold(lane: Lane, entry: SequenceState) -> None:
    """It keeps the blocks up to its cursor; what steps in flight put behind it counts for nothing."""
    if entry.prompt_logprobs is not None and not entry.request.output:
        entry.request.computed = 0  # its prompt's are drawn from steps, not from KV
    computed = entry.request.computed
    held = -(-computed // lane.block_size)
    blocks, remembered = entry.blocks[:held], min(entry.remembered, held)
    lane.pool.release(entry.blocks[held:])
    lane.rewind(entry)
    entry.blocks, entry.remembered, entry.request.computed = blocks, remembered, computed


def last(waiting: Iterable[tuple[Key, SequenceState]]) -> SequenceState | None:
    """In policy order, of those that have blocks."""
    return max((entry for _, entry in waiting if entry.blocks), key=lambda entry: entry.key, default=None)


def relieve(lane: Lane, entry: SequenceState) -> None:
    """Of the blocks it waits with: what they hold is computed again, unless it is found by its key."""
    lane.pool.release(entry.blocks)
    lane.rewind(entry)
