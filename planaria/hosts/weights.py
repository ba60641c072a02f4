"""Packed weights in memory of the node: whoever needs a part first writes it, all others map what is there.

One memory file, as for KV. First come a line for each part (whose it is, by digest; is it whole; how far it has come)
and a table of who names which part: an engine's rank in the layout that is in force, or is to be. Parts are far apart.
A part has a lock, which is gone with the process that held it: who writes a part has it alone, who reads it shares it.
So a writer that dies half way leaves nothing that counts, and another begins anew; and memory is given back when nobody
names it and nobody has it mapped. Where ranks compute on devices, bytes are their keepers' (device_memory).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from planaria.hosts.mapping import HUGE, collapse, for_good, map_file
from planaria.hosts.memory import give_back, make_file, reopened
from planaria.node import Shared

if TYPE_CHECKING:
    from planaria.hosts.device_memory import Keepers

logger = logging.getLogger("planaria.hosts")

DIGEST_BYTES = 16
SLOTS = 64
LINE = 8  # words of a part, in the order of the names below
FIRST, SECOND, WHOLE, SIZE, MANIFEST, DONE = range(6)  # digest, digest, 1, bytes, where its manifest is, how far it is
NAMES, NAME = SLOTS * LINE, 4  # where the table begins, words of an entry: engine + 1, rank, digest, digest
NUM_NAMES = 4096
HEADER = 1 << 20
PART = 1 << 40  # bytes of addresses, for each part
ALIGN = 64
WINDOW = 256 << 20  # bytes that a writer maps at a time, at least
AHEAD = 64 << 20  # bytes that are put into huge pages at a time
LOCKS = 1 << 61  # a file's locks needn't be where it has bytes: of parts; before them of the table, after them of turns
LOOK = 0.005  # seconds
PATIENCE = 10.0  # seconds for the table, which is held for microseconds
STALLED = 60.0  # seconds without progress after which who waits for a part reads it for itself
IN_ALL = 1000  # of `DONE`


class _Descriptor:
    """Of a process, and of all that has it: a lock on it lives as long."""

    def __init__(self, number: int) -> None:
        self.number = number

    def another(self) -> _Descriptor:
        """Whose locks are its own."""
        return _Descriptor(os.open(f"/proc/self/fd/{self.number}", os.O_RDWR | os.O_CLOEXEC))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # also when modules are gone
        close(self.number)


def _lock(fd: int, kind: int, at: int) -> bool:
    """Of this descriptor, in place of what it had there. False: somebody else's stands against it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, at, 1, 0))
    except BlockingIOError:
        return False
    return True


def under(digest: bytes) -> str:
    """Names of what a part has on a device."""
    return f"weights/{digest.hex()}/"


class WrittenPart:
    """A whole one, to be read. memory: of its things, and `manifest`: what was said of them."""

    def __init__(self, descriptor: _Descriptor, start: int, size: int, manifest: int) -> None:
        every, _ = map_file(descriptor.number, start, size, mmap.PROT_READ, descriptor)
        self.memory, self.manifest = every[:manifest].toreadonly(), bytes(every[manifest:size])


class UnwrittenPart:
    """One that this process writes: nobody has it before `done`. Memory is zeros."""

    def __init__(self, descriptor: _Descriptor, start: int, line: memoryview, slot: int) -> None:
        self._descriptor, self._start, self._line, self._slot = descriptor, start, line, slot
        self._used = self._ready = 0  # bytes that were taken, and that are in huge pages
        self._window = memoryview(b"")
        self._from = self._address = 0  # where the window begins, in the part and in this process
        self._huge = True
        line[WHOLE] = line[DONE] = 0
        give_back(descriptor.number, start, start + PART)  # what somebody left who died

    def take(self, size: int) -> tuple[int, memoryview]:
        """So many bytes, aligned to a cache line, and where they are in the part. Raises OSError."""
        at = -(-self._used // ALIGN) * ALIGN
        if at + size > PART:
            raise OSError(f"a part of more than {PART >> 40} TiB")
        if at + size > self._from + len(self._window):
            self._from = at // HUGE * HUGE
            length = max(WINDOW, -(-(at + size - self._from) // HUGE) * HUGE)
            access = mmap.PROT_READ | mmap.PROT_WRITE
            held = self._descriptor
            self._window, self._address = map_file(held.number, self._start + self._from, length, access, held)
        self._used = at + size
        if self._huge and self._used > self._ready:
            self._make_ready()
        return at, self._window[at - self._from : at - self._from + size]

    def _make_ready(self) -> None:
        """Put memory that is taken next into huge pages."""
        first = max(self._ready, self._from)
        last = min(max(first + AHEAD, -(-self._used // HUGE) * HUGE), self._from + len(self._window))
        for at in range(first, last, HUGE):
            self._window[at - self._from] = 0
        try:
            collapse(self._address + first - self._from, last - first)
        except OSError as e:
            logger.info("weights that are shared stay in small pages, at least in part: %s", e.strerror)
            self._huge = not for_good(e)
        self._ready = last

    def progress(self, fraction: float) -> None:
        """For who waits."""
        self._line[DONE] = max(self._line[DONE] + 1, int(fraction * IN_ALL))

    def done(self, manifest: bytes) -> WrittenPart:
        """All is written. manifest: what is to be said of it."""
        at, room = self.take(len(manifest))
        room[:] = manifest
        size = self._used
        self._window = memoryview(b"")
        give_back(self._descriptor.number, self._start + -(-size // HUGE) * HUGE, self._start + PART)
        self._line[SIZE], self._line[MANIFEST] = size, at
        self._line[WHOLE] = 1
        _lock(self._descriptor.number, fcntl.F_RDLCK, LOCKS + self._slot)
        return WrittenPart(self._descriptor, self._start, size, at)

    def abandon(self) -> None:
        """It will not be written, by this process."""
        self._window = memoryview(b"")
        give_back(self._descriptor.number, self._start, self._start + PART)
        _lock(self._descriptor.number, fcntl.F_UNLCK, LOCKS + self._slot)


class WeightsMemory:
    """`origin`: how other processes of this node get it, from who made it. keepers: that have the bytes, where they are
    on devices. Used by any thread. It ends when nobody has it any more, nor anything mapped."""

    def __init__(self, fd: int, origin: Shared, keepers: Keepers | None = None) -> None:
        self._file, self.origin, self.keepers = _Descriptor(fd), origin, keepers
        self._alone, self._tidies = threading.Lock(), threading.Lock()  # locks on the file are a process's
        self._words = memoryview(mmap.mmap(fd, HEADER)).cast("q")

    @classmethod
    def make(cls, keepers: Keepers | None = None) -> WeightsMemory | None:
        """None where the system has no such files."""
        fd = make_file("planaria-weights", PART * (SLOTS + 1))
        return cls(fd, Shared.of(fd), keepers) if fd is not None else None

    @classmethod
    def of(cls, shared: Shared, keepers: Keepers | None = None) -> WeightsMemory:
        """Raises ProcessGone."""
        return cls(shared.open(), shared, keepers)

    @classmethod
    def given(cls, fd: int, keepers: Keepers | None = None) -> WeightsMemory:
        """Of a descriptor that another process gave up to this one."""
        own = reopened(fd)
        return cls(own, Shared.of(own), keepers)

    def fileno(self) -> int:
        return self._file.number

    def open(
        self, digest: bytes, heard: Callable[[float], None] = lambda fraction: None
    ) -> WrittenPart | UnwrittenPart | None:
        """What there is of a part, or the right to write it. While another writes it this waits, and `heard` how far
        that one has come. None: there is no room for it, or whoever writes it gets nowhere. Raises OSError."""
        descriptor, seen, since = self._file.another(), -1, time.monotonic()
        while True:
            with self._table() as ours:
                slot = self._slot_of(digest) if ours else None
                if slot is None:
                    return None
                line, start, lock = self._line(slot), PART * (slot + 1), LOCKS + slot
                if _lock(descriptor.number, fcntl.F_RDLCK, lock):
                    if line[WHOLE]:
                        return WrittenPart(descriptor, start, line[SIZE], line[MANIFEST])
                    _lock(descriptor.number, fcntl.F_WRLCK, lock)  # nobody else has any: they ask as we do
                    break
                done = line[DONE]
            if done != seen:
                seen, since = done, time.monotonic()
                heard(min(1.0, done / IN_ALL))
            elif time.monotonic() - since > STALLED:
                return None
            time.sleep(LOOK)
        return UnwrittenPart(descriptor, start, line, slot)

    @contextlib.contextmanager
    def turn(self, most: int | None, heard: Callable[[float], None]) -> Iterator[None]:
        """Be one of at most so many processes of the node that read weights; None: of any number. Who ends has given
        its turn up. heard: is called about once a second meanwhile."""
        if most is None:
            yield
            return
        descriptor, since = self._file.another(), 0.0
        while not any(_lock(descriptor.number, fcntl.F_WRLCK, LOCKS + SLOTS + place) for place in range(most)):
            if time.monotonic() - since > 1.0:
                heard(0.0)
                since = time.monotonic()
            time.sleep(LOOK)
        try:
            yield
        finally:
            del descriptor  # and with it the lock

    def name(self, engine: int, rank: int, ranks: int, digest: bytes | None) -> None:
        """A rank of an engine of so many has this part from now on (None: none), and not that which it had."""
        with self._table() as ours:
            free = -1
            for at in range(NAMES, NAMES + NUM_NAMES * NAME, NAME) if ours else ():
                by, of = self._words[at], self._words[at + 1]
                if by == engine + 1 and (of == rank or of >= ranks):
                    self._words[at] = by = 0
                free = at if free < 0 and not by else free
            if free >= 0 and digest is not None:
                for offset, word in enumerate((engine + 1, rank, *struct.unpack("qq", digest))):
                    self._words[free + offset] = word

    def forget(self, engine: int) -> None:
        """There is no such engine any more."""
        with self._table() as ours:
            for at in range(NAMES, NAMES + NUM_NAMES * NAME, NAME) if ours else ():
                if self._words[at] == engine + 1:
                    self._words[at] = 0
        self.tidy()

    def tidy(self) -> None:
        """Give back what nobody names and nobody has mapped."""
        with self._tidies:
            self._tidy()

    def _tidy(self) -> None:
        unused: list[int] = []
        with self._table() as ours:
            entries = range(NAMES, NAMES + NUM_NAMES * NAME, NAME) if ours else ()
            named = {tuple(self._words[at + 2 : at + 4]) for at in entries if self._words[at]}
            for slot in range(SLOTS) if ours else ():
                line = self._line(slot)
                whose = line[FIRST], line[SECOND]
                if any(whose) and whose not in named and _lock(self._file.number, fcntl.F_WRLCK, LOCKS + slot):
                    line[WHOLE] = 0  # the rest goes last: who dies before that leaves it to the next
                    unused.append(slot)
        for slot in unused:  # who wants this part waits for the lock
            line = self._line(slot)
            if self.keepers is not None:
                self.keepers.drop(under(struct.pack("qq", line[FIRST], line[SECOND])))
            give_back(self._file.number, PART * (slot + 1), PART * (slot + 2))
            with self._table() as ours:
                if ours:
                    line[:] = memoryview(bytes(8 * LINE)).cast("q")
            _lock(self._file.number, fcntl.F_UNLCK, LOCKS + slot)

    def _line(self, slot: int) -> memoryview:
        return self._words[slot * LINE : (slot + 1) * LINE]

    def _slot_of(self, digest: bytes) -> int | None:
        """Of this part, or a free one that is its from now on. The table is ours."""
        whose, free = struct.unpack("qq", digest), None
        for slot in range(SLOTS):
            line = self._line(slot)
            found = line[FIRST], line[SECOND]
            if found == whose:
                return slot
            if free is None and not any(found):
                free = slot
        if free is not None:
            self._line(free)[FIRST], self._line(free)[SECOND] = whose
        return free

    @contextlib.contextmanager
    def _table(self) -> Iterator[bool]:
        """Alone at it; False: somebody has been for too long, who must be stopped."""
        until = time.monotonic() + PATIENCE
        with self._alone:
            while not (ours := _lock(self._file.number, fcntl.F_WRLCK, LOCKS - 1)) and time.monotonic() < until:
                time.sleep(LOOK)
            try:
                yield ours
            finally:
                if ours:
                    _lock(self._file.number, fcntl.F_UNLCK, LOCKS - 1)
