"""Several links as one: ranks of the driver's node over one, those of other nodes over another.

The first part is served by the driver's thread; every other part by a thread of its own, which hands on what it hears
and wakes the driver. Order is kept within each part, and every rank is in one part.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from planaria.executor.link.codec import encode_command
from planaria.executor.link.faults import LinkError
from planaria.executor.reply_ledger import RankReply
from planaria.protocol import Command, Failed

_CLOSE_TIMEOUT = 2.0


class _Part(threading.Thread):
    """A link in a thread. `inbox` takes commands (no more than the engine has in flight), `heard` gets answers and the
    error that ended it."""

    def __init__(self, link: Any, heard: deque[RankReply | LinkError], wake: Any) -> None:
        super().__init__(name=f"link-{link.name}", daemon=True)
        self.link, self.heard, self.wake = link, heard, wake
        self.inbox: queue.SimpleQueue[tuple[int, Command]] = queue.SimpleQueue()
        self.ended = False

    def run(self) -> None:
        try:
            while not self.ended:
                while not self.inbox.empty():
                    self.link.send(*self.inbox.get())
                if (answer := self.link.receive(None)) is not None:
                    self.heard.append(answer)
                    self.wake()
        except LinkError as e:
            self.heard.append(e)
            self.wake()
        finally:
            self.link.close()


class JoinedLink:
    """`parts`: (link, the world ranks of its ranks 0, 1, ...). The first link is the one that waits."""

    def __init__(self, parts: Sequence[tuple[Any, Sequence[int]]]) -> None:
        (self.first, self.own), *others = parts
        self.name = "+".join(link.name for link, _ in parts)
        self.place = {rank: (link, i) for link, ranks in parts for i, rank in enumerate(ranks)}
        self._heard: list[tuple[deque[RankReply | LinkError], Sequence[int]]] = []
        self._parts: list[_Part] = []
        self._woken = False
        for link, ranks in others:
            heard: deque[RankReply | LinkError] = deque()
            part = _Part(link, heard, self.first.wake)
            self._heard.append((heard, ranks))
            self._parts.append(part)
            part.start()

    def address_of(self, rank: int) -> Any:
        link, i = self.place[rank]
        return link.address_of(i)

    def pulses(self) -> list[tuple[int, int]]:
        """By world rank; (0, 0) where the link itself notices silence."""
        found = [(0, 0)] * len(self.place)
        for rank, pulse in zip(self.own, self.first.pulses(), strict=True):
            found[rank] = pulse
        return found

    def send(self, number: int, command: Command) -> None:
        """As the parts' own. What can't be encoded reaches nobody."""
        encode_command(command)
        for part in self._parts:
            part.inbox.put((number, command))
            part.link.wake()
        try:
            self.first.send(number, command)
        except LinkError as e:
            raise _renamed(e, self.own) from None

    def receive(self, timeout: float | None) -> RankReply | None:
        """As the parts' own."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if (found := self._others()) is not None:
                return found
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                answer = self.first.receive(left)
            except LinkError as e:
                raise _renamed(e, self.own) from None
            if answer is not None:
                return _from(self.own, answer)
            if self._woken:
                self._woken = False
                return self._others()
            if left == 0:
                return self._others()

    def _others(self) -> RankReply | None:
        for heard, ranks in self._heard:
            if heard:
                item = heard[0]
                if isinstance(item, LinkError):  # stays: this part is over
                    raise _renamed(item, ranks)
                heard.popleft()
                return _from(ranks, item)
        return None

    def wake(self) -> None:
        self._woken = True  # parts wake the first link too, when they have heard something
        self.first.wake()

    def fence(self) -> None:
        self.first.fence()
        for part in self._parts:
            part.link.fence()

    def close(self) -> None:
        """Idempotent."""
        for part in self._parts:
            part.ended = True
            part.link.wake()
        for part in self._parts:
            part.join(_CLOSE_TIMEOUT)
            if part.is_alive():  # it waits for a rank that takes nothing
                part.link.fence()
                part.join(_CLOSE_TIMEOUT)
        self.first.close()


def _from(ranks: Sequence[int], answer: RankReply) -> RankReply:
    """The same answer from the world rank. A part's own `Failed` (for what can't be carried) names a place there."""
    place, number, reply = answer
    if isinstance(reply, Failed) and reply.rank != ranks[place]:
        reply = msgspec.structs.replace(reply, rank=ranks[place])
    return ranks[place], number, reply


def _renamed(error: LinkError, ranks: Sequence[int]) -> LinkError:
    """The same error, naming world ranks."""
    world = [ranks[rank] if 0 <= rank < len(ranks) else rank for rank in error.ranks]
    return type(error)(error.text, *world)
