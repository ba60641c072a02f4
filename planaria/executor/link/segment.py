"""The memory that a shared-memory link lives in: layout, rings, and who is alive.

A memfd: it has no name, so nothing can be left behind, and it isn't limited by the size of /dev/shm. Its size is
sealed. Every process at it holds a record lock on a byte of its own, which the kernel drops when the process ends,
however it ends: that is how each end knows a dead peer, without pids. (Closing any descriptor of the memfd drops the
process's lock too, so a process opens it once.)

One ring has one writer and one or more readers. It is a row of slots of equal size; chunk k is in slot k modulo their
number. The writer stores the chunk, then the count of chunks written (`head`); each reader stores its count of chunks
taken (`tail`). Counts are 32 bits and wrap. Every chunk repeats its own count, so a reader that was overtaken, or reads
what was never written, knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from planaria.executor.link import futex
from planaria.executor.link.codec import MAX_MESSAGE
from planaria.executor.link.faults import LinkError, MessageLost

_MAGIC = 0x504C4E31
_LINE = 32  # words in 128 bytes: two cache lines, since processors fetch them in pairs
_MASK = 0xFFFFFFFF
_CHUNK = struct.Struct("<IIQQ")  # count, length, bytes of the message from here on, the command's number
_CHUNK_ROOM = 32
_FLOCK = struct.Struct("hhqqi")  # struct flock on 64-bit Linux

# Words of the first page: fixed facts, then lines with one writer each.
_MAGIC_AT, _RANKS, _SLOTS, _SLOT_BYTES, _REPLY_SLOTS, _REPLY_SLOT_BYTES, EPOCH, DRIVER_PID = range(8)
FENCE = 1 * _LINE  # differs from EPOCH when the epoch is over
BELL = 2 * _LINE  # changed by the driver; ranks sleep on it
HEAD = BELL + 1  # of the ring from driver to ranks
DOORBELL = 3 * _LINE  # changed by any rank; the driver sleeps on it
_RANK_LINES = 4 * _LINE

T = TypeVar("T")


def rank_word(rank: int) -> int:
    """First of the rank's words: STATE, PID, TAIL, REPLY_HEAD; the driver writes REPLY_TAIL, a line further."""
    return _RANK_LINES + 2 * _LINE * rank


STATE, PID, TAIL, REPLY_HEAD, REPLY_TAIL = 0, 1, 2, 3, _LINE
ATTACHED, LEFT = 1, 2  # values of STATE; 0: not there yet


class Segment:
    """The mapping. `words` are its 4-byte words, `view` its bytes."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.map = mmap.mmap(fd, size)
        self.view = memoryview(self.map)
        self.words = self.view.cast("I")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.closed = False

    @classmethod
    def create(cls, num_ranks: int, ring: tuple[int, int], reply_ring: tuple[int, int], epoch: int) -> Segment:
        """Rings are given as (slots, bytes of a slot)."""
        fd = os.memfd_create("planaria-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = _ring_start(num_ranks) + ring[0] * ring[1] + num_ranks * reply_ring[0] * reply_ring[1]
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            segment = cls(fd, size)
        except BaseException:
            os.close(fd)
            raise
        segment.words[FENCE] = epoch
        for at, value in enumerate((_MAGIC, num_ranks, *ring, *reply_ring, epoch, os.getpid())):
            segment.words[at] = value
        segment.hold(0)
        return segment

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """Takes `fd` over, also when it fails. Raises LinkError if it isn't a link's."""
        try:
            os.set_inheritable(fd, False)
            size = os.fstat(fd).st_size
            if size < mmap.PAGESIZE:
                raise LinkError(f"descriptor {fd} is not a link's memory: {size} bytes")
            segment = cls(fd, size)
        except (OSError, ValueError) as e:
            _close(fd)
            raise LinkError(f"descriptor {fd} is not a link's memory: {e}") from None
        except LinkError:
            _close(fd)
            raise
        words = segment.words
        expected = _ring_start(words[_RANKS]) + words[_SLOTS] * words[_SLOT_BYTES]
        expected += words[_RANKS] * words[_REPLY_SLOTS] * words[_REPLY_SLOT_BYTES]
        if words[_MAGIC_AT] != _MAGIC or size != expected:
            segment.close()
            raise LinkError(f"descriptor {fd} is not a link's memory of this version")
        return segment

    @property
    def num_ranks(self) -> int:
        return self.words[_RANKS]

    def ring(self) -> tuple[int, int, int]:
        """Of driver to ranks: first byte, slots, bytes of a slot."""
        return _ring_start(self.num_ranks), self.words[_SLOTS], self.words[_SLOT_BYTES]

    def reply_ring(self, rank: int) -> tuple[int, int, int]:
        start, slots, slot_bytes = self.ring()
        own, own_bytes = self.words[_REPLY_SLOTS], self.words[_REPLY_SLOT_BYTES]
        return start + slots * slot_bytes + rank * own * own_bytes, own, own_bytes

    def address(self, word: int) -> int:
        return self.base + 4 * word

    def wake(self, word: int) -> None:
        futex.wake(self.base + 4 * word)

    # -- who is alive: byte 0 is the driver's, byte 1 + rank a rank's

    def hold(self, byte: int) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)

    def held(self, byte: int, pid_word: int) -> bool:
        """Does a living process hold the byte? `pid_word` tells whether that is ourselves (own locks don't show)."""
        if self.words[pid_word] == os.getpid():
            return True
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.words.release()
        self.view.release()
        self.map.close()
        _close(self.fd)


class Outlet:
    """The writing end of a ring. One thread."""

    def __init__(self, segment: Segment, ring: tuple[int, int, int], head: int, tails: list[int]) -> None:
        self.segment, self.words, self.head_word, self.tails = segment, segment.words, head, tails
        self.start, self.slots, self.stride = ring
        self.room = self.stride - _CHUNK_ROOM
        self.head = self.limit = segment.words[head]  # `limit`: where the slowest reader was when last looked at

    def full(self) -> bool:
        if (self.head - self.limit) & _MASK < self.slots:
            return False
        self.limit = self.head - max((self.head - self.words[tail]) & _MASK for tail in self.tails)
        return (self.head - self.limit) & _MASK >= self.slots

    def behind(self) -> list[int]:
        """Which readers (places in `tails`) the ring is full for."""
        return [i for i, tail in enumerate(self.tails) if (self.head - self.words[tail]) & _MASK >= self.slots]

    def write(self, number: int, chunk: bytes | memoryview, left: int) -> None:
        """There must be a free slot. `left`: bytes of the message from this chunk's first on."""
        head = self.head
        at = self.start + head % self.slots * self.stride
        size = len(chunk)
        _CHUNK.pack_into(self.segment.map, at, head, size, left, number)
        at += _CHUNK_ROOM
        self.segment.map[at : at + size] = chunk
        self.head = (head + 1) & _MASK
        if futex.fence is not None:
            futex.fence()
        self.words[self.head_word] = self.head


class Inlet(Generic[T]):
    """One reader's end of a ring. `decode` gets a whole message and keeps nothing of it. One thread."""

    def __init__(
        self, segment: Segment, ring: tuple[int, int, int], head: int, tail: int, source: str,
        decode: Callable[[memoryview], T],
    ) -> None:  # fmt: skip
        self.segment, self.words, self.head_word, self.tail_word = segment, segment.words, head, tail
        self.start, self.slots, self.stride = ring
        self.source, self.decode = source, decode
        self.tail = segment.words[tail]
        self.parts: bytearray | None = None  # of a message of several chunks
        self.filled = 0
        self.pressed = False  # after `take`: the writer may be waiting for room

    def ready(self) -> bool:
        return self.words[self.head_word] != self.tail

    def take(self) -> tuple[int, T] | None:
        """Take one chunk (there must be one); number and value when it ended a message. Raises MessageLost, and what
        `decode` raises, having taken the message."""
        tail, segment = self.tail, self.segment
        if futex.fence is not None:
            futex.fence()
        at = self.start + tail % self.slots * self.stride
        count, size, left, number = _CHUNK.unpack_from(segment.map, at)
        if count != tail or not 0 < size <= min(left, self.stride - _CHUNK_ROOM) or left > MAX_MESSAGE:
            raise MessageLost(f"message from {self.source} lost: found chunk {count} of {size} bytes, expected {tail}")
        at += _CHUNK_ROOM
        try:
            if size == left and self.parts is None:
                return number, self.decode(segment.view[at : at + size])
            return self._gather(number, at, size, left)
        finally:
            self.tail = (tail + 1) & _MASK
            if futex.fence is not None:
                futex.fence()
            self.words[self.tail_word] = self.tail
            self.pressed = 2 * ((self.words[self.head_word] - tail) & _MASK) >= self.slots

    def _gather(self, number: int, at: int, size: int, left: int) -> tuple[int, T] | None:
        if self.parts is None:
            self.parts, self.filled = bytearray(left), 0
        if len(self.parts) - self.filled != left:
            raise MessageLost(f"message from {self.source} lost: {left} bytes announced in the middle of another")
        self.parts[self.filled : self.filled + size] = self.segment.view[at : at + size]
        self.filled += size
        if size < left:
            return None
        whole, self.parts = self.parts, None
        return number, self.decode(memoryview(whole))


def _ring_start(num_ranks: int) -> int:
    words = 4 * rank_word(num_ranks)
    return -(-words // mmap.PAGESIZE) * mmap.PAGESIZE


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
