"""Ranks that are to leave send what only they have to those that stay, while requests go on: then the layout changes.

Rule: it is no part of the change. If an epoch ends in the middle, what has arrived is kept, and the wish is looked at
anew; what could not be sent is read from the checkpoint.
"""

from __future__ import annotations

from planaria.core.eplb.places import ExpertsPlaced, Placing, departing
from planaria.executor.reply_ledger import Ticket
from planaria.protocol import Command, SendExperts, StepResult
from planaria.topology import Layout
from planaria.wire import ResizeEngine

VERSION = 1 << 40  # of what is prepared; no step of a rearrangement has it


def leaving(placing: Placing | None, before: Layout, after: Layout) -> ExpertsPlaced | None:
    """What ranks send that `after` has no place for; None: nothing."""
    fewer_lanes = after.dp < before.dp and (after.tp, after.pp) == (before.tp, before.pp)
    if placing is None or not placing.in_force or not fewer_lanes:
        return None
    found = departing(placing, after.dp * after.tp)
    return found if found.sent else None


class Departure:
    """For a wish that came in `epoch`, at `began`."""

    def __init__(self, wish: ResizeEngine, asked: ExpertsPlaced, epoch: int, began: float) -> None:
        self.wish, self.asked, self.epoch, self.began = wish, asked, epoch, began
        self.done = False
        self._waits = False

    def begin(self) -> Command:
        """All ranks exchange experts beside their steps."""
        return SendExperts(VERSION, self.asked.moves, aside=True)

    def wait(self) -> Command | None:
        """There are no steps now that would tell of the end."""
        if self.done or self._waits:
            return None
        self._waits = True
        return SendExperts(VERSION, ())

    def answered(self, ticket: Ticket) -> None:
        """By all ranks."""
        replies = ticket.replies.values()
        if isinstance(ticket.command, SendExperts):
            self.done = self.done or not ticket.command.moves
        elif all(isinstance(reply, StepResult) and reply.prepared >= VERSION for reply in replies):
            self.done = True
