"""Who waits with blocks: after a fault that left what was committed, a request keeps the blocks up to its cursor and
enters with them. Another engine than the one that computed them has them by the request's name, in case it comes. When
memory is short, first what nobody has claimed goes, then the last who waits gives up its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from planaria.core.kv_cache import BlockPool
from planaria.core.kv_index import HeldBlocks, name_of_request
from planaria.core.policy import Key
from planaria.core.sequence import SequenceState

if TYPE_CHECKING:
    from planaria.core.scheduler import Lane


Moved = Mapping[int, int]  # blocks of before, and what they are now


def hold_all(lane: Lane) -> None:
    release_ended(lane)
    for entry in lane.entries.values():
        hold(lane, entry)


def forget_rows(lane: Lane) -> None:
    """Nobody has one."""
    for row in range(lane.config.max_num_seqs):
        lane.index.leave(row)


def release_ended(lane: Lane) -> None:
    """Blocks of those that have ended, or are without a row, which no step needs any more."""
    for _, row, blocks in lane.deferred:
        at = lane.at_row[row]
        if at is None or not at.open or at.blocks is not blocks:
            lane.pool.release(blocks)


def hold(lane: Lane, entry: SequenceState) -> None:
    """It keeps the blocks up to its cursor; what steps in flight put behind it counts for nothing."""
    if entry.reads and not entry.request.output:
        entry.request.computed = 0  # what is told of its prompt comes from steps, not from KV
    computed = entry.request.computed
    held = -(-computed // lane.block_size)
    blocks, remembered = entry.blocks[:held], min(entry.remembered, held)
    lane.pool.release(entry.blocks[held:])
    lane.rewind(entry)
    entry.blocks, entry.remembered, entry.request.computed = blocks, remembered, computed


def full_blocks(lane: Lane) -> set[int]:
    """Those that are full and count."""
    size = lane.block_size
    running = (entry.blocks[: entry.request.computed // size] for entry in lane.entries.values())
    held = (held.blocks[: held.length // size] for held in lane.held.values())
    return {*lane.pool.key_of, *chain.from_iterable(running), *chain.from_iterable(held)}


def counting_blocks(lane: Lane) -> list[int]:
    """Those that count, in the order in which they are to be kept: of requests, in policy order; of who may come; of
    prefixes, what was used last."""
    size, entries = lane.block_size, sorted(lane.entries.values(), key=lambda entry: entry.key)
    open = (entry.blocks[: -(-entry.request.computed // size)] for entry in entries)
    held = (held.blocks for held in lane.held.values())
    return list(dict.fromkeys(chain(chain.from_iterable(open), chain.from_iterable(held), reversed(lane.pool.idle))))


def move(lane: Lane, moved: Moved) -> None:
    """What was in a block is in another now, of a new pool; what has none is gone, and all that comes after it. Nobody
    has a row."""
    size = lane.block_size
    for entry in lane.entries.values():
        entry.blocks = _moved(entry.blocks, moved)
        good = len(entry.blocks)
        entry.remembered = min(entry.remembered, good)
        entry.request.computed = min(entry.request.computed, good * size)
    for name, held in lane.held.items():
        blocks = _moved(held.blocks, moved)
        lane.held[name] = HeldBlocks(blocks, min(held.length, len(blocks) * size))
    known = lane.pool.key_of
    keys = {moved[block]: known[block] for block in dict.fromkeys(chain(lane.pool.idle, known)) if block in moved}
    used = [*(entry.blocks for entry in lane.entries.values()), *(held.blocks for held in lane.held.values())]
    lane.pool = BlockPool(lane.num_blocks, caching=lane.caching, index=lane.index)
    lane.pool.adopt(keys, chain.from_iterable(used))
    for block, key in keys.items():
        lane.index.remember(block, key)


def _moved(blocks: list[int], moved: Moved) -> list[int]:
    """Up to the first that isn't anywhere."""
    return [moved[block] for block in takewhile(moved.__contains__, blocks)]


def cut(lane: Lane, damaged: Collection[int]) -> None:
    """These blocks don't hold what they are to hold: nobody waits with one, or with what comes after it."""
    for block in damaged:
        lane.pool.forget_block(block)
    for entry in lane.entries.values():
        good = _good(entry.blocks, damaged)
        if good < len(entry.blocks):
            lane.pool.release(entry.blocks[good:])
            entry.blocks = entry.blocks[:good]
            entry.remembered, entry.request.computed = min(entry.remembered, good), good * lane.block_size
    for name, (blocks, length) in lane.held.items():
        good = _good(blocks, damaged)
        lane.pool.release(blocks[good:])
        lane.held[name] = HeldBlocks(blocks[:good], min(length, good * lane.block_size))


def _good(blocks: list[int], damaged: Collection[int]) -> int:
    return next((i for i, block in enumerate(blocks) if block in damaged), len(blocks))


def last(waiting: Iterable[tuple[Key, SequenceState]]) -> SequenceState | None:
    """In policy order, of those that have blocks."""
    return max((entry for _, entry in waiting if entry.blocks), key=lambda entry: entry.key, default=None)


def adopt(lane: Lane) -> None:
    """A new lane goes on with what its index tells of."""
    keys, lane.held = lane.index.load()
    lane.pool.adopt(keys, [block for held in lane.held.values() for block in held.blocks])
    forget_rows(lane)


def claim(lane: Lane, entry: SequenceState) -> None:
    """It has come: what of its history is computed."""
    request = entry.request
    held = lane.held.pop(name_of_request(request), None)
    if held is None:
        return
    entry.blocks, request.computed = held.blocks, min(held.length, request.num_tokens - 1)
    hold(lane, entry)


def drop_unclaimed(lane: Lane) -> None:
    for held in lane.held.values():
        lane.pool.release(held.blocks)
    lane.held = {}


def make_room(lane: Lane, waiting: Iterable[tuple[Key, SequenceState]]) -> bool:
    """Take blocks from one that doesn't run. False: none of those has any."""
    if lane.held:
        drop_unclaimed(lane)
        return True
    holder = last(waiting)
    if holder is not None:
        relieve(lane, holder)
    return holder is not None


def relieve(lane: Lane, entry: SequenceState) -> None:
    """Of the blocks it waits with: what they hold is computed again, unless it is found by its key."""
    lane.pool.release(entry.blocks)
    lane.rewind(entry)


def again(lane: Lane, row: int) -> None:
    """Who has this row could not draw, though all its tokens are computed: it waits, with their blocks, and enters
    again."""
    entry = lane.at_row[row]
    if entry is None or not entry.open or entry.row != row:
        return
    lane.computed_to(entry, entry.request.num_tokens)
    if entry.leaving:  # so are its blocks
        lane.disown(entry)
        lane.rewind(entry)
    else:
        blocks, entry.blocks = entry.blocks, []
        lane.leave(entry, at_once=True)
        entry.blocks, entry.request.computed = blocks, entry.request.num_tokens - 1  # the last draws
        hold(lane, entry)
    heapq.heappush(lane.waiting, (entry.key, entry))


def pause(lane: Lane, request_id: str) -> None:
    """Send a running request back to waiting; its tokens stay."""
    entry = lane.entries[request_id]
    if entry.row is not None and not entry.leaving:
        lane.leave(entry, at_once=True)
        lane.rewind(entry)
        heapq.heappush(lane.waiting, (entry.key, entry))
        lane.collect()
