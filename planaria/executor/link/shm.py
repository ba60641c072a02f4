"""Commands and replies through shared memory, between processes of one node.

A ring carries commands to all ranks, a ring per rank carries its replies. Who has nothing to do sleeps on a futex:
ranks on the bell that the driver rings, the driver on one doorbell that any rank rings. No wait is longer than its
deadline; all end when the epoch is fenced, and within ALIVE_CHECK seconds of a peer's death.

    link = ShmLink(num_ranks)                              in the driver
    link.address_of(rank)                                  to the rank, through a pipe
    port = open_port(address)                              in the rank (see address.py)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections import deque

from planaria.executor.link import futex
from planaria.executor.link.address import ShmAddress
from planaria.executor.link.codec import (
    CodecError,
    answer,
    encode_command,
    read_command,
    read_reply,
    unreadable_command,
    unreadable_reply,
)
from planaria.executor.link.faults import DRIVER, ConnectionLost, Fenced, LinkClosed, LinkError, PeerLags
from planaria.executor.link.segment import (
    ATTACHED,
    BELL,
    COUNT,
    DOORBELL,
    DRIVER_PID,
    EPOCH,
    FENCE,
    HEAD,
    LEFT,
    PID,
    PULSE,
    REPLY_HEAD,
    REPLY_TAIL,
    STATE,
    TAIL,
    Inlet,
    Outlet,
    Segment,
    rank_word,
)
from planaria.executor.reply_ledger import RankReply
from planaria.node import Shared
from planaria.protocol import Command, Failed, Reply

SLOTS = 16
SLOT_BYTES = 1 << 16
ALIVE_CHECK = 0.5  # seconds between looks at the peers' locks while waiting
ROOM_CHECK = 0.05  # the same while waiting for room; also the longest delay of a fence there
_NAP = futex.Limit(ALIVE_CHECK).pointer
_OVER = 0xFFFFFFFF  # value of FENCE: the driver closed the link
_DRIVER_TAG = 0xFFF << 20
_FENCE_TAG = 1 << 20  # of the bell
MAX_RANKS = 4000


class ShmLink:
    """The driver's end. One thread sends and receives; `wake` and `fence` may be called from any.

    `send_timeout`: seconds without progress after which a rank that has no room is reported.
    """

    name = "shm"

    def __init__(
        self, num_ranks: int, *, chunk_bytes: int = SLOT_BYTES, epoch: int = 0, send_timeout: float = 30.0
    ) -> None:
        """chunk_bytes: of a ring's slot; memory is taken as it is used. Raises LinkError where futexes can't be had."""
        if missing := futex.available():
            raise LinkError(f"shared memory can't be used for links: {missing}; use the tcp link")
        if not 1 <= num_ranks <= MAX_RANKS:
            raise LinkError(f"a shared-memory link has 1 to {MAX_RANKS} ranks, not {num_ranks}")
        ring = SLOTS, max(4096, chunk_bytes // 4096 * 4096)
        self.segment = segment = Segment.create(num_ranks, ring, ring, epoch)
        self.num_ranks, self.epoch, self.send_timeout = num_ranks, epoch, send_timeout
        self._words = segment.words
        ranks = range(num_ranks)
        tails = [rank_word(rank) + TAIL for rank in ranks]
        self._outlet = Outlet(segment, segment.ring(), HEAD, tails, BELL, 0, itertools.count(1))
        self._inlets = [
            Inlet(
                segment, segment.reply_ring(rank), rank_word(rank) + REPLY_HEAD, rank_word(rank) + REPLY_TAIL,
                f"rank {rank}", read_reply, functools.partial(unreadable_reply, rank=rank),
            )
            for rank in ranks
        ]  # fmt: skip
        self._bell, self._doorbell = segment.futex(BELL), segment.futex(DOORBELL)
        self._freed = [segment.futex(rank_word(rank) + REPLY_TAIL) for rank in ranks]
        self._next = 0  # where the next look at the ranks begins, so that none is served last always
        self._heard: deque[RankReply] = deque()
        self._rings = itertools.count(1)
        self._woken = False
        self._broken: LinkError | None = None
        self._closed = False

    def address_of(self, rank: int) -> ShmAddress:
        """Where this rank attaches, if its process has the same `planaria.node.home`."""
        return ShmAddress(Shared.of(self.segment.fd), rank)

    def pulses(self) -> list[tuple[int, int]]:
        """By rank: its pid and how often it has said that it lives; (0, 0) before it attaches."""
        words = self._words
        return [(words[rank_word(rank) + PID], words[rank_word(rank) + PULSE]) for rank in range(self.num_ranks)]

    def dead(self) -> list[int]:
        """Ranks that were attached and ended without `close`."""
        return [
            rank
            for rank in range(self.num_ranks)
            if self._words[rank_word(rank) + STATE] == ATTACHED
            and not self.segment.held(1 + rank, rank_word(rank) + PID)
        ]

    def send(self, number: int, command: Command) -> None:
        """To every rank. Raises CodecError; PeerLags, ConnectionLost when a rank makes no room; Fenced, LinkClosed."""
        data = encode_command(command)
        if self._broken is not None or self._words[FENCE] != self.epoch:
            raise self._why()
        outlet, size = self._outlet, len(data)
        if size <= outlet.room and outlet.free > 0:
            outlet.write(number, data, size)
        else:
            outlet.write_all(number, data, self._await_room)

    def receive(self, timeout: float | None) -> RankReply | None:
        """The next reply: rank, number, reply. None after `timeout` seconds or a `wake`.

        Raises ConnectionLost when a rank has died (its last replies come first), MessageLost, Fenced, LinkClosed.
        """
        if self._heard:
            return self._heard.popleft()
        if self._closed:
            raise self._why()
        words, epoch, doorbell = self._words, self.epoch, self._doorbell
        deadline = -1.0 if timeout is None else time.monotonic() + timeout
        while True:
            seen = words[DOORBELL]
            if words[FENCE] != epoch:
                raise self._why()
            if (found := self._look()) is not None:
                return found
            if self._woken:
                self._woken = False
                return None
            if timeout is None:
                doorbell.sleep(seen, _NAP)
            elif (left := deadline - time.monotonic()) <= 0:
                return None
            else:
                doorbell.wait(seen, min(left, ALIVE_CHECK))
            quiet = words[DOORBELL] == seen
            if quiet and (dead := self.dead()) and not any(words[i.head_word] != i.tail for i in self._inlets):
                raise ConnectionLost("the process of {} has ended", *dead)

    def wake(self) -> None:
        """Make `receive` (this one, or the next) return None. Any thread."""
        self._woken = True
        with contextlib.suppress(ValueError):  # its memory is gone: another thread closes it, or has
            self._ring_own()

    def fence(self) -> None:
        """End the epoch: every wait on this link, here and in all ranks, ends with Fenced. Any thread. Idempotent."""
        if not self._closed and self._words[FENCE] == self.epoch:
            self._end((self.epoch + 1) & 0x7FFFFFFF)

    def close(self) -> None:
        """Idempotent. Ranks that wait hear LinkClosed."""
        if self._closed:
            return
        self._end(_OVER)
        self._closed, self._broken = True, LinkClosed("the link is closed")
        self.segment.close()

    # -- inside

    def _ring_own(self) -> None:
        self._words[DOORBELL] = _DRIVER_TAG | next(self._rings) & COUNT
        self._doorbell.wake()

    def _end(self, fence: int) -> None:
        words = self._words
        words[FENCE] = fence
        words[BELL] = _FENCE_TAG | next(self._rings) & COUNT
        self._bell.wake()
        for freed in self._freed:
            freed.wake()
        self._ring_own()

    def _look(self) -> RankReply | None:
        """Take chunks that are there, until one ends a reply."""
        words, count, rank = self._words, self.num_ranks, self._next
        quiet = 0
        while quiet < count:
            rank = rank + 1 if rank + 1 < count else 0
            inlet = self._inlets[rank]
            if words[inlet.head_word] == inlet.tail:
                quiet += 1
                continue
            quiet = 0
            found = inlet.take()
            if inlet.pressed:
                self._freed[rank].wake()
            if found is not None:
                self._next = rank
                return rank, found[0], found[1]
        return None

    def _await_room(self, written: int) -> None:
        """Until no rank is a whole ring behind. Replies are taken in meanwhile, for a rank may wait for that."""
        try:
            self._wait_for_room()
        except LinkError as e:
            if written:  # half a message is in the ring
                self._broken = e
            raise

    def _wait_for_room(self) -> None:
        words, outlet = self._words, self._outlet
        began = time.monotonic()
        while True:
            seen = words[DOORBELL]
            if words[FENCE] != self.epoch:
                raise self._why()
            while (found := self._look()) is not None:
                self._heard.append(found)
            behind = outlet.behind()
            if not behind:
                outlet.full()  # takes the readers' new places in
                return
            waited = time.monotonic() - began
            if waited >= self.send_timeout:
                raise PeerLags(
                    f"{{}} took no command for {waited:.1f} s and the ring is full: stopped, stuck or busy",
                    *behind,
                )
            self._doorbell.wait(seen, min(ROOM_CHECK, self.send_timeout - waited))
            dead = [rank for rank in self.dead() if rank in behind]
            left = [rank for rank in behind if words[rank_word(rank) + STATE] == LEFT]
            if (dead or left) and words[FENCE] != self.epoch:
                raise self._why()  # which they heard of first
            if dead:
                raise ConnectionLost("the process of {} has ended", *dead)
            if left:
                raise LinkClosed("{} left the link", *left)

    def _why(self) -> LinkError:
        return self._broken or Fenced(f"epoch {self.epoch} is over")


class ShmPort:
    """A rank's end. One thread receives, one (the same or another) replies.

    `reply_timeout`: seconds without progress after which a driver that takes no replies is reported.
    """

    name = "shm"

    def __init__(self, fd: int, rank: int, *, reply_timeout: float = 60.0) -> None:
        """Takes `fd` over (also when it fails). Raises LinkError if it isn't a link's or has no such rank."""
        self.segment = segment = Segment.attach(fd)
        self.rank, self.reply_timeout = rank, reply_timeout
        self._words, self._at = words, at = segment.words, rank_word(rank)
        if not 0 <= rank < segment.num_ranks or words[at + STATE]:
            ranks = segment.num_ranks
            segment.close()
            raise LinkError(f"rank {rank} can't attach: the link has {ranks} ranks, each attaches once", rank)
        words[at + PID] = os.getpid()
        segment.hold(1 + rank)
        words[at + STATE] = ATTACHED
        self.epoch = segment.words[EPOCH]
        self._inlet = Inlet(
            segment, segment.ring(), HEAD, self._at + TAIL, "the driver", read_command, unreadable_command
        )
        self._outlet = Outlet(
            segment, segment.reply_ring(rank), self._at + REPLY_HEAD, [self._at + REPLY_TAIL], DOORBELL,
            rank + 1 << 20, itertools.count(1),
        )  # fmt: skip
        self._bell, self._freed = segment.futex(BELL), segment.futex(self._at + REPLY_TAIL)
        self._beats = 0
        self._closed = False
        self._outlet.ring()

    def receive(self, timeout: float | None) -> tuple[int, Command] | None:
        """The next command and its number. None after `timeout` seconds.

        A command that can't be read is answered with Failed here, for every command is answered. Raises ConnectionLost
        when the driver has died, MessageLost, Fenced, LinkClosed.
        """
        if self._closed:
            raise LinkClosed(f"rank {self.rank} closed its end", self.rank)
        words, inlet, epoch, bell = self._words, self._inlet, self.epoch, self._bell
        deadline = -1.0 if timeout is None else time.monotonic() + timeout
        while True:
            seen = words[BELL]
            if words[FENCE] != epoch:
                raise self._why()
            if words[HEAD] != inlet.tail:
                found = inlet.take()
                if inlet.pressed:
                    self._outlet.ring()
                if found is not None:
                    if not isinstance(found[1], CodecError):
                        return found  # type: ignore[return-value]  # mypy doesn't narrow inside a tuple
                    self.reply(found[0], Failed(self.rank, "receive", str(found[1]), ""))
                continue
            if timeout is None:
                bell.sleep(seen, _NAP)
            elif (left := deadline - time.monotonic()) <= 0:
                return None
            else:
                bell.wait(seen, min(left, ALIVE_CHECK))
            if words[BELL] == seen and not self.segment.held(0, DRIVER_PID) and words[HEAD] == inlet.tail:
                raise ConnectionLost("the driver's process has ended", DRIVER)

    def beat(self) -> None:
        """Say that this process lives. Any thread, but one."""
        if not self._closed:
            self._words[self._at + PULSE] = self._beats = (self._beats + 1) & 0xFFFFFFFF

    def reply(self, number: int, reply: Reply) -> None:
        """Answer command `number`. A reply that can't be sent goes as Failed. Raises PeerLags or ConnectionLost when
        the driver makes no room; Fenced, LinkClosed."""
        if self._closed:
            raise LinkClosed(f"rank {self.rank} closed its end", self.rank)
        data = answer(self.rank, reply)
        if self._words[FENCE] != self.epoch:
            raise self._why()
        outlet, size = self._outlet, len(data)
        if size <= outlet.room and outlet.free > 0:
            outlet.write(number, data, size)
        else:
            outlet.write_all(number, data, self._wait_for_room)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._words[self._at + STATE] = LEFT
        self._outlet.ring()
        self.segment.close()

    # -- inside

    def _wait_for_room(self, written: int) -> None:
        words, outlet, tail = self._words, self._outlet, self._at + REPLY_TAIL
        began = time.monotonic()
        while True:
            seen = words[tail]
            if words[FENCE] != self.epoch:
                raise self._why()
            if not outlet.full():
                return
            waited = time.monotonic() - began
            if waited >= self.reply_timeout:
                raise PeerLags(f"the driver took no reply of rank {self.rank} for {waited:.1f} s", DRIVER)
            self._freed.wait(seen, min(ROOM_CHECK, self.reply_timeout - waited))
            if not self.segment.held(0, DRIVER_PID):
                raise ConnectionLost("the driver's process has ended", DRIVER)

    def _why(self) -> LinkError:
        if self._words[FENCE] == _OVER:
            return LinkClosed("the driver closed the link", DRIVER)
        return Fenced(f"epoch {self.epoch} is over")
