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
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from planaria.executor.link import futex
from planaria.executor.link.codec import BAD_BYTES, MAX_MESSAGE
from planaria.executor.link.faults import LinkError, MessageLost

_MAGIC = 0x504C4E31
_LINE = 32  # words in 128 bytes: two cache lines, since processors fetch them in pairs
_MASK = 0xFFFFFFFF
COUNT = 0xFFFFF  # of the value of a bell; the bits above tell who rang
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

_fence = futex.fence

T = TypeVar("T")


def rank_word(rank: int) -> int:
    """First of the rank's words: STATE, PID, TAIL, REPLY_HEAD, PULSE; the driver writes REPLY_TAIL, a line further."""
    return _RANK_LINES + 2 * _LINE * rank


STATE, PID, TAIL, REPLY_HEAD, PULSE, REPLY_TAIL = 0, 1, 2, 3, 4, _LINE
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

    def futex(self, word: int) -> futex.Word:
        return futex.Word(self.base + 4 * word)

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
    """The writing end of a ring, and the bell of its readers. One thread.

    Each value that `bell` gets is `tag` and a count from `rings`: no other process stores such a value, and this one
    never the same twice, so the word always changes.
    """

    __slots__ = (
        "bell", "free", "head", "head_word", "map", "rings", "room", "slots", "start", "stride", "tag", "tails", "wake",
        "words",
    )  # fmt: skip

    def __init__(
        self, segment: Segment, ring: tuple[int, int, int], head: int, tails: list[int], bell: int, tag: int,
        rings: Iterator[int],
    ) -> None:  # fmt: skip
        self.map, self.words, self.head_word, self.tails = segment.map, segment.words, head, tails
        self.bell, self.tag, self.rings, self.wake = bell, tag, rings, segment.futex(bell).wake
        self.start, self.slots, self.stride = ring
        self.room = self.stride - _CHUNK_ROOM
        self.head = segment.words[head]
        self.free = 0  # slots known to be free

    def full(self) -> bool:
        """Look at the readers when no slot is known to be free. False: `write` may be called once."""
        if self.free > 0:
            return False
        self.free = self.slots - max((self.head - self.words[tail]) & _MASK for tail in self.tails)
        return self.free <= 0

    def behind(self) -> list[int]:
        """Which readers (places in `tails`) the ring is full for."""
        return [i for i, tail in enumerate(self.tails) if (self.head - self.words[tail]) & _MASK >= self.slots]

    def write(self, number: int, chunk: bytes | memoryview, left: int) -> None:
        """Store a chunk, announce it, wake who waits. `left`: bytes of the message from this chunk's first on."""
        head, size = self.head, len(chunk)
        at = self.start + head % self.slots * self.stride
        _CHUNK.pack_into(self.map, at, head, size, left, number)
        at += _CHUNK_ROOM
        self.map[at : at + size] = chunk
        self.free -= 1
        self.head = head = (head + 1) & _MASK
        if _fence is not None:
            _fence()
        words = self.words
        words[self.head_word] = head
        words[self.bell] = self.tag | next(self.rings) & COUNT
        self.wake()

    def write_all(self, number: int, data: bytes, await_room: Callable[[int], None]) -> None:
        """A message of any length. await_room(bytes written so far): returns when a slot is free."""
        size, room, at = len(data), self.room, 0
        view: bytes | memoryview = data if size <= room else memoryview(data)
        while at < size:
            if self.full():
                await_room(at)
            self.write(number, view[at : at + room] if size > room else view, size - at)
            at += room

    def ring(self) -> None:
        """Wake the readers for another reason."""
        self.words[self.bell] = self.tag | next(self.rings) & COUNT
        self.wake()


class Inlet(Generic[T]):
    """One reader's end of a ring. One thread.

    `read` gets a whole message and keeps nothing of it; where it raises one of BAD_BYTES, `unreadable` makes the value.
    """

    __slots__ = (
        "filled", "head_word", "map", "parts", "pressed", "read", "slots", "source", "start", "stride", "tail",
        "tail_word", "unreadable", "view", "words",
    )  # fmt: skip

    def __init__(
        self, segment: Segment, ring: tuple[int, int, int], head: int, tail: int, source: str,
        read: Callable[[memoryview], T], unreadable: Callable[[BaseException], T],
    ) -> None:  # fmt: skip
        self.map, self.view, self.words = segment.map, segment.view, segment.words
        self.head_word, self.tail_word = head, tail
        self.start, self.slots, self.stride = ring
        self.source, self.read, self.unreadable = source, read, unreadable
        self.tail = segment.words[tail]
        self.parts: bytearray | None = None  # of a message of several chunks
        self.filled = 0
        self.pressed = False  # after `take`: the writer may be waiting for room

    def take(self) -> tuple[int, T] | None:
        """Take one chunk (there must be one); number and value when it ended a message. Raises MessageLost."""
        tail, words = self.tail, self.words
        if _fence is not None:
            _fence()
        at = self.start + tail % self.slots * self.stride
        count, size, left, number = _CHUNK.unpack_from(self.map, at)
        if count != tail or not 0 < size <= left <= MAX_MESSAGE or size > self.stride - _CHUNK_ROOM:
            raise MessageLost(f"message from {self.source} lost: found chunk {count} of {size} bytes, expected {tail}")
        at += _CHUNK_ROOM
        found: tuple[int, T] | None
        if size == left and self.parts is None:
            try:
                found = number, self.read(self.view[at : at + size])
            except BAD_BYTES as e:
                found = number, self.unreadable(e)
        else:
            found = self._gather(number, at, size, left)
        if _fence is not None:
            _fence()
        words[self.tail_word] = self.tail = (tail + 1) & _MASK
        self.pressed = 2 * ((words[self.head_word] - tail) & _MASK) >= self.slots
        return found

    def _gather(self, number: int, at: int, size: int, left: int) -> tuple[int, T] | None:
        if self.parts is None:
            self.parts, self.filled = bytearray(left), 0
        if len(self.parts) - self.filled != left:
            raise MessageLost(f"message from {self.source} lost: {left} bytes announced in the middle of another")
        self.parts[self.filled : self.filled + size] = self.view[at : at + size]
        self.filled += size
        if size < left:
            return None
        whole, self.parts = self.parts, None
        try:
            return number, self.read(memoryview(whole))
        except BAD_BYTES as e:
            return number, self.unreadable(e)


def _ring_start(num_ranks: int) -> int:
    words = 4 * rank_word(num_ranks)
    return -(-words // mmap.PAGESIZE) * mmap.PAGESIZE


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
