"""One connection's two directions: sequence, chunks, credit. Pure: header and payload in, values out.

A message travels as chunks. Each chunk has the next number of its direction; a number seen before is refused (a replay
or duplicate), one too high means that something was lost. Every header says how many chunks its sender has taken, which
is what lets the other side send on: at most `window` chunks are under way.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from planaria.executor.link.codec import MAX_MESSAGE, Bytes
from planaria.executor.link.faults import MessageLost

_HEADER = struct.Struct("<4sBxxxIIQQQQ")  # magic, kind, epoch, zero, sequence, taken, number, bytes left
_MAGIC = b"PLN1"
HEADER_BYTES = _HEADER.size

T = TypeVar("T")


class Kind(enum.IntEnum):
    HELLO = 1  # a rank's first frame
    DATA = 2
    CREDIT = 3
    PING = 4  # shows whether there is a connection
    FENCE = 5
    BYE = 6


_KINDS = {int(kind) for kind in Kind}


class FrameDropped(Exception):
    """A frame that is dropped and counted under `reason`; nothing else happens."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FrameStream(Generic[T]):
    """One end. `decode` gets whole messages from the peer, called `source` in errors."""

    def __init__(self, epoch: int, source: str, decode: Callable[[Bytes], T], *, chunk_bytes: int, window: int) -> None:
        self.epoch, self.source, self.decode = epoch, source, decode
        self.chunk_bytes, self.window = chunk_bytes, window
        self.sent = self.acknowledged = 0  # our chunks
        self.taken = self.told = 0  # the peer's chunks; how many of them the peer knows about
        self.parts: list[bytes] = []
        self.missing = 0  # bytes that the message in `parts` lacks

    # -- sending

    def chunks(self, data: bytes) -> Iterator[tuple[memoryview, int]]:
        """(chunk, bytes left from it on) in order."""
        view = memoryview(data)
        for at in range(0, len(data), self.chunk_bytes):
            yield view[at : at + self.chunk_bytes], len(data) - at

    def full(self) -> bool:
        return self.sent - self.acknowledged >= self.window

    def data_header(self, number: int, left: int) -> bytes:
        """For the next chunk; counts it as sent."""
        sequence = self.sent
        self.sent += 1
        return self._header(Kind.DATA, sequence, number, left)

    def header(self, kind: Kind) -> bytes:
        return self._header(kind, 0, 0, 0)

    def _header(self, kind: Kind, sequence: int, number: int, left: int) -> bytes:
        self.told = self.taken
        return _HEADER.pack(_MAGIC, kind, self.epoch, 0, sequence, self.taken, number, left)

    # -- receiving

    def owes_credit(self) -> bool:
        """Should the peer be told what was taken, for want of anything else to say?"""
        return (self.taken - self.told) * 4 >= self.window

    def kind(self, header: Bytes) -> Kind:
        """Of a well-formed header of this epoch. Raises Refused."""
        if len(header) != HEADER_BYTES:
            raise FrameDropped("malformed")
        magic, kind, epoch, zero, *_ = _HEADER.unpack(header)
        if magic != _MAGIC or kind not in _KINDS or zero:
            raise FrameDropped("malformed")
        if epoch != self.epoch:
            raise FrameDropped("other epoch")
        return Kind(kind)

    def take(self, header: Bytes, payload: Bytes) -> tuple[Kind, tuple[int, T] | None]:
        """Kind of frame; number and value when it ended a message. Raises Refused, MessageLost."""
        kind = self.kind(header)
        _, _, _, _, sequence, taken, number, left = _HEADER.unpack(header)
        if not self.acknowledged <= taken <= self.sent:
            # Frames of one connection arrive in order, so an older count is a replay; a higher one can't be meant.
            raise FrameDropped("replayed" if taken < self.acknowledged else "malformed")
        if kind is not Kind.DATA:
            if len(payload) or sequence or number or left:
                raise FrameDropped("malformed")
            self.acknowledged = taken
            return kind, None
        if sequence < self.taken:
            raise FrameDropped("replayed")
        size = len(payload)
        if size > self.chunk_bytes or left > MAX_MESSAGE:
            raise FrameDropped("oversized")
        if size != min(left, self.chunk_bytes) or not size or (self.parts and left != self.missing):
            raise FrameDropped("malformed")
        if sequence > self.taken:
            raise MessageLost(f"message from {self.source} lost: got chunk {sequence}, expected {self.taken}")
        self.acknowledged = taken
        self.taken += 1
        if size == left and not self.parts:
            return kind, (number, self.decode(payload))
        self.parts.append(bytes(payload))
        self.missing = left - size
        if self.missing:
            return kind, None
        parts, self.parts = self.parts, []
        return kind, (number, self.decode(b"".join(parts)))
