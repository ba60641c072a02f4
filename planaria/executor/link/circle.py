"""Rounds among the processes of one program: in each, everybody gives a part and gets all of them, in rank order.

Rank 0 collects the parts and sends them out over the TCP link, with its clock. Rule: the parts of a round are about
the same thing; where they are not, the programs have come apart, and every process is told which two ranks differ.
The end of one process is told to all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec

from planaria.executor.link.codec import BAD_BYTES, Bytes, CodecError, said
from planaria.executor.link.faults import DRIVER, ConnectionLost, LinkClosed, LinkError
from planaria.executor.link.keys import Invitation
from planaria.executor.link.tcp import TcpLink
from planaria.executor.link.tcp_port import TcpPort
from planaria.protocol import Failed

LOOK = 0.5  # seconds between looks for who left


class Meeting(Protocol):
    """A store that all processes reach before they have a connection."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for it. Raises PlanariaError."""


class CirclePart(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """what: in words, for the error; digest: of what must be the same everywhere; data: the rank's own."""

    what: str
    digest: bytes
    data: bytes


class Round(msgspec.Struct, frozen=True, array_like=True, tag="round"):
    """clock: rank 0's time.monotonic()."""

    clock: float
    parts: tuple[CirclePart, ...]


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """There will be no more rounds, because of these ranks."""

    why: str
    ranks: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[CirclePart | Round | Over] = msgspec.msgpack.Decoder(CirclePart | Round | Over)


class Circle:
    """One process's place. `give`, then `take` until it returns the parts. One thread uses it; any may `wake`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.clock = 0.0
        self._link: TcpLink | None = None  # rank 0
        self._port: TcpPort | None = None  # the others
        self._parts: dict[int, CirclePart] = {}
        self._over: LinkError | None = None
        self._woken = threading.Event()  # where there is nobody else

    @classmethod
    def open(
        cls, rank: int, size: int, meet: Callable[[], Meeting], address: str, *, heartbeat: float,
        timeout: float = 300.0,
    ) -> Circle:  # fmt: skip
        """address: of this process's node, by which the others reach it; meet: not called where there are none, as who
        serves the place may have ended. Raises LinkError, PlanariaError."""
        circle = cls(rank, size)
        if size == 1:
            return circle
        meeting = meet()
        if rank == 0:
            circle._link = TcpLink(
                size - 1, host=address, heartbeat=heartbeat, encode=encode, decode=lambda data, peer: decode(data)
            )
            for other in range(1, size):
                meeting.put(f"invitation {other}", circle._link.invitation(other - 1).encode())
        else:
            invitation = Invitation.decode(meeting.get(f"invitation {rank}", timeout))
            circle._port = TcpPort(
                invitation, heartbeat=heartbeat, encode=lambda rank, message: encode(message), decode=decode
            )
        return circle

    def give(self, what: str, digest: bytes, data: bytes) -> None:
        """Begin a round. Raises LinkError."""
        part = CirclePart(what, digest, data)
        if self._port is not None:
            try:
                self._port.reply(0, part)
            except LinkError as e:
                self._end(e)
        else:
            self._parts[0] = part

    def take(self, timeout: float | None) -> list[bytes] | None:
        """Everybody's data, or None after `timeout` seconds or a `wake`. May be called before `give`, to learn of ends.

        Raises LinkError when there will be no more rounds: a process ended, or its part is about something else.
        """
        if self._over is not None:
            raise self._over
        if self._port is not None:
            return self._from_rank_0(self._port, timeout)
        if self._link is not None and len(self._parts) < self.size:
            self._collect(self._link, timeout)
        elif not self._parts:
            self._woken.wait(timeout)
            self._woken.clear()
        if len(self._parts) < self.size:
            return None
        parts = tuple(self._parts[rank] for rank in range(self.size))
        self._parts.clear()
        for rank, part in enumerate(parts):
            if (part.what, part.digest) != (parts[0].what, parts[0].digest):
                theirs = part.what if part.what != parts[0].what else f"another {part.what}"
                self._stop(f"rank {rank} differs from rank 0: it has {theirs}, rank 0 has {parts[0].what}", rank, 0)
        self.clock = time.monotonic()
        if self._link is not None:
            self._link.send(0, Round(self.clock, parts))
        return [part.data for part in parts]

    def round(self, what: str, digest: bytes, data: bytes, timeout: float) -> list[bytes]:
        """A whole round. Raises LinkError, also when it takes longer than `timeout` seconds."""
        self.give(what, digest, data)
        until = time.monotonic() + timeout
        while (parts := self.take(LOOK)) is None:
            if time.monotonic() >= until:
                missing = [rank for rank in range(self.size) if rank not in self._parts] if self._link else [0]
                self._stop(f"ranks {missing} did not come to {what} in {timeout:.0f} s", *missing)
        return parts

    def wake(self) -> None:
        """End the `take` that is on, or the next. Any thread."""
        end = self._link or self._port
        if end is not None:
            end.wake()
        else:
            self._woken.set()

    def close(self) -> None:
        """Idempotent. The others learn of it when they come to a round."""
        for end in (self._link, self._port):
            if end is not None:
                end.close()

    # -- inside

    def _collect(self, link: TcpLink, timeout: float | None) -> None:
        """Take in what has come from the others; wait for one of them."""
        try:
            item = link.receive(timeout)
        except ConnectionLost as e:
            ranks = [peer + 1 for peer in e.ranks]
            self._stop(f"the process of rank {ranks[0]} ended or stopped, or its connection broke", *ranks)
        if item is not None:
            peer, _, message = item
            if isinstance(message, CirclePart):
                self._parts[peer + 1] = message
            else:
                self._stop(f"rank {peer + 1} said what can't be understood: {message}", peer + 1)
        elif left := [peer + 1 for peer in link.ranks("left") if peer + 1 not in self._parts]:
            self._stop(f"rank {left[0]} has left: its program ended, or closed its engine", *left)

    def _from_rank_0(self, port: TcpPort, timeout: float | None) -> list[bytes] | None:
        try:
            item = port.receive(timeout)
        except LinkError as e:
            self._end(e)
        if item is None:
            return None
        message = item[1]
        if isinstance(message, Over):
            self._over = LinkError(message.why, *message.ranks)
            raise self._over
        self.clock = message.clock
        return [part.data for part in message.parts]

    def _end(self, error: LinkError) -> NoReturn:
        """What an error of the port means here."""
        why = "rank 0 has left: its program ended, or closed its engine"
        if not isinstance(error, LinkClosed):
            why = f"the process of rank 0 ended or stopped, or its connection broke ({error})"
        self._over = ConnectionLost(why, *(0 if rank == DRIVER else rank for rank in error.ranks))
        raise self._over from None

    def _stop(self, why: str, *ranks: int) -> NoReturn:
        self._over = LinkError(why, *ranks)
        if self._link is not None:
            self._link.send(0, Over(why, ranks))
        raise self._over


def decode(data: Bytes) -> CirclePart | Round | Over | CodecError:
    try:
        return _decoder.decode(data)
    except BAD_BYTES as e:
        return CodecError(f"not a round's part: {said(e)}")


def encode(message: CirclePart | Round | Over | Failed) -> bytes:
    """What a port says by itself, about bytes that it can't read, ends the rounds."""
    return _encoder.encode(Over(message.message, (message.rank,)) if isinstance(message, Failed) else message)
