"""Who owes which reply. Pure: events in, values out.

Every rank answers every command, in the order the commands were sent. A ticket is complete when all ranks have
answered; one `Failed` completes it as a failure that names the rank.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from planaria.protocol import Command, Failed, Reply

RankReply = tuple[int, int, Reply]  # rank, ticket number, reply


@dataclass
class Ticket:
    """One command sent to all ranks. `replies` by rank, as they arrive; `closed` when nothing more is waited for."""

    number: int
    command: Command
    sent: float
    replies: dict[int, Reply] = field(default_factory=dict)
    closed: bool = False

    def in_order(self) -> list[Reply]:
        """The replies that came, in rank order."""
        return [self.replies[rank] for rank in sorted(self.replies)]

    @property
    def failed(self) -> Failed | None:
        """The first rank's failure, if any; one that is another rank's doing only if no rank says more."""
        failures = [reply for reply in self.replies.values() if isinstance(reply, Failed)]
        if not failures:
            return None
        return next((failed for failed in failures if failed.kind != "peer"), failures[0])


class ReplyLedger:
    """Ranks 0..world_size-1 of one epoch."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.next_number = 0
        self.open: deque[Ticket] = deque()

    def submit(self, command: Command, now: float) -> Ticket:
        """Note that every rank now owes a reply. The caller sends it."""
        ticket = Ticket(self.next_number, command, now)
        self.next_number += 1
        self.open.append(ticket)
        return ticket

    def on_reply(self, rank: int, number: int, reply: Reply) -> list[Ticket]:
        """Take in a reply; returns the tickets that are complete now, in order. Unknown tickets are ignored."""
        for ticket in self.open:
            if ticket.number == number:
                ticket.replies[rank] = reply
                break
        done = []
        while self.open and (len(self.open[0].replies) == self.world_size or self.open[0].failed):
            done.append(self.open.popleft())
            done[-1].closed = True
        return done

    def end_epoch(self, why: str) -> None:
        """Nobody will answer what is open: it has failed, here and now."""
        while self.open:
            ticket = self.open.popleft()
            for rank in self.owing_of(ticket):
                ticket.replies[rank] = Failed(rank, "epoch", why, "", "fenced")
            ticket.closed = True

    def owing_of(self, ticket: Ticket) -> list[int]:
        """Ranks that have not answered it."""
        return [rank for rank in range(self.world_size) if rank not in ticket.replies]

    def owing(self) -> list[int]:
        """Ranks that owe the oldest open ticket a reply."""
        if not self.open:
            return []
        return self.owing_of(self.open[0])
