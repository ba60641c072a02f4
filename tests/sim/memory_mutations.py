"""Mistakes with KV that outlives its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from planaria.core import holding
from planaria.core.engine import EngineCore
from planaria.core.kv_cache import BlockPool
from planaria.core.kv_index import BufferIndex, HeldBlocks
from planaria.core.scheduler import Lane
from planaria.core.sequence import SequenceState
from planaria.executor.bring_up import BringUp
from planaria.executor.kv import GangKV
from planaria.executor.reply_ledger import ReplyLedger, Ticket
from planaria.protocol import Command, Hello, Reply, StepPlan
from planaria.topology import kv_parts
from planaria.topology.kv_parts import KVPiece, KVRect
from planaria.types import Request


@contextmanager
def count_what_is_planned() -> Iterator[None]:
    """What steps in flight were to compute is believed to be there."""
    hold = holding.hold

    def planned(lane: Lane, entry: SequenceState) -> None:
        if entry.row is not None and not entry.auto and entry.planned > entry.request.computed:
            entry.request.computed = min(entry.planned, entry.request.num_tokens - 1)
        hold(lane, entry)

    with patch.object(holding, "hold", planned):
        yield


@contextmanager
def ask_one_rank() -> Iterator[None]:
    """What rank 0 has, all are believed to have."""
    on_done = BringUp.on_done

    def first(self: BringUp, replies: list[Reply]) -> Command | None:
        command = on_done(self, replies)
        if self.state == "grouping" and isinstance(hello := replies[0], Hello):
            self.keeps_kv = self.layout == self.kv.layout and self.kv.number in hello.kv and self.kv.num_blocks > 0
        return command

    with patch.object(BringUp, "on_done", first):
        yield


@contextmanager
def whatever_the_layout() -> Iterator[None]:
    """Ranks of another layout go on with KV by their number."""
    init = BringUp.__init__

    def same(self: BringUp, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.kv = type(self.kv)(self.layout, self.kv.number, self.kv.num_blocks)

    with patch.object(BringUp, "__init__", same), patch.object(GangKV, "clear", lambda self, layout: None):
        yield


@contextmanager
def commit_what_one_rank_has() -> Iterator[None]:
    """A step counts when it has been answered by who draws."""
    on_reply = ReplyLedger.on_reply

    def early(self: ReplyLedger, rank: int, number: int, reply: Reply) -> list[Ticket]:
        for ticket in self.open:
            if ticket.number == number and isinstance(ticket.command, StepPlan) and rank == self.world_size - 1:
                for other in range(self.world_size):
                    if other not in ticket.replies and other != rank:
                        on_reply(self, other, number, reply)
        return on_reply(self, rank, number, reply)

    with patch.object(ReplyLedger, "on_reply", early):
        yield


@contextmanager
def let_go_of_blocks_that_count() -> Iterator[None]:
    """They are free, and belong to who waits with them."""
    hold = holding.hold

    def loose(lane: Lane, entry: SequenceState) -> None:
        hold(lane, entry)
        lane.pool.release(entry.blocks)

    with patch.object(holding, "hold", loose), patch.object(BlockPool, "share", share_anything):
        yield


def share_anything(self: BlockPool, blocks: Any) -> None:
    for block in blocks:
        self.idle.pop(block, None)
        self.refs[block] += 1


@contextmanager
def keep_blocks_of_who_has_ended() -> Iterator[None]:
    with patch.object(holding, "release_ended", lambda lane: None):
        yield


@contextmanager
def adopt_the_token_in_flight() -> Iterator[None]:
    """Another engine takes a row for longer than it was committed."""
    load = BufferIndex.load

    def more(self: BufferIndex) -> tuple[dict[int, bytes], dict[bytes, HeldBlocks]]:
        keys, held = load(self)
        return keys, {name: HeldBlocks(blocks, length + 1) for name, (blocks, length) in held.items()}

    with patch.object(BufferIndex, "load", more):
        yield


@contextmanager
def believe_what_a_dead_rank_has_left() -> Iterator[None]:
    with patch.object(EngineCore, "cut", lambda self, damaged: None):
        yield


@contextmanager
def check_what_has_a_key() -> Iterator[None]:
    """And not what only its own row knows."""
    with patch.object(holding, "full_blocks", lambda lane: set(lane.pool.key_of)):
        yield


@contextmanager
def write_down_what_is_planned() -> Iterator[None]:
    """A row's history counts as soon as it enters."""
    enter = BufferIndex.enter

    def whole(self: BufferIndex, row: int, request: Request, blocks: Sequence[int]) -> None:
        enter(self, row, request, blocks)
        self.lengths[row] = request.num_tokens

    with patch.object(BufferIndex, "enter", whole):
        yield


@contextmanager
def take_the_first_heads() -> Iterator[None]:
    """When KV is cut anew, whichever a rank has now: those of rank 0."""
    pieces = kv_parts.pieces

    def first(wanted: KVRect, held: Sequence[KVRect]) -> list[KVPiece]:
        return [piece._replace(rank=0) for piece in pieces(wanted, held)]

    with patch.object(kv_parts, "pieces", first):
        yield


@contextmanager
def keep_old_numbers_of_blocks() -> Iterator[None]:
    """Rows go on with the blocks that they had in the other layout."""

    def same(blocks: list[int], moved: Mapping[int, int]) -> list[int]:
        return blocks[: len([block for block in blocks if block in moved])]

    with patch.object(holding, "_moved", same):
        yield
