"""Memory of the node, not of the process that computes in it: what a rank has written stays when it dies.

One memory file for an engine, without a name, handed on by descriptor (see node.Shared): it ends with its owner. First
come words, one for each part: which KV is in it, 0 for none. Then an index, which the engine writes, and the parts, two
for each rank: KV of odd and of even numbers, so that what there is can be cut anew for another layout while it counts.
Beside the first there is what a rank keeps of KV that its caches have no room for. They are far apart in the file, and
take memory where they were written. Who computes in it holds a lock, so that another engine can wait until nobody does.
Where ranks compute on devices, the bytes of caches are their keepers' (device_memory), and all that is said of them is
here.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import sys
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from planaria.hosts.mapping import HUGE, map_file
from planaria.node import Shared, available_memory, home
from planaria.topology.layout import Layout

if TYPE_CHECKING:
    from planaria.hosts.device_memory import Keepers

logger = logging.getLogger("planaria.hosts")

RANKS = 512
PARTS = 2 * RANKS
INDEX = 1 << 20  # where it begins
PART = 1 << 40  # bytes of addresses, for each part
SUMS = 1 << 30  # bytes at the end of a part, for checksums
KEPT = 1 << 39  # bytes of a part before what is kept beside caches
ALIGN = HUGE
LOOK = 0.005  # seconds
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def make_file(name: str, size: int) -> int | None:
    """A descriptor of a memory file, which can't be made smaller; None where there can be none of so many addresses."""
    if sys.platform != "linux":
        return None
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
    except OSError as e:  # a limit on files (ulimit -f)
        os.close(fd)
        logger.warning("KV and weights don't outlive processes here: %s", e.strerror)
        return None
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def reopened(fd: int) -> int:
    """In place of a descriptor that came from another process: locks on that one would be of both."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(fd)


def give_back(fd: int, start: int, end: int) -> None:
    """A file's memory between these: zeros, where it is touched again. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(end - start)):
        raise OSError(ctypes.get_errno(), "memory of the node can't be given back")


def _part(rank: int, number: int) -> int:
    return rank + number % 2 * RANKS


class KVPart:
    """Where one rank's caches are, one after the other. mapped: a memoryview, or bytes of a device."""

    def __init__(self, mapped: Any) -> None:
        self._bytes, self._next = mapped, 0

    def take(self, size: int) -> Any:
        """Memory of the next cache. Who asks for the same sizes in the same order gets the same memory."""
        taken = self._bytes[self._next : self._next + size]
        self._next += -(-size // ALIGN) * ALIGN
        return taken


class KVMemory:
    """`origin`: how other processes of this node get it, from who made it. keepers: that have the bytes of its parts,
    where they are on devices."""

    def __init__(self, fd: int, origin: Shared, keepers: Keepers | None = None) -> None:
        self._fd, self.origin, self.keepers = fd, origin, keepers
        self._close = weakref.finalize(self, os.close, fd)  # also where its owner is only forgotten
        self._mapped: dict[tuple[int, int], Any] = {}  # parts on the device, by rank and number
        self._file = mmap.mmap(fd, PARTS * 8)
        self._words = memoryview(self._file).cast("q")

    @classmethod
    def make(cls, ranks: int = 1, keepers: Keepers | None = None) -> KVMemory | None:
        """None where the system has no such files, or of so many ranks."""
        if ranks > RANKS:
            logger.warning("KV doesn't outlive processes: %d ranks, and its memory has parts for %d", ranks, RANKS)
            return None
        fd = make_file("planaria-kv", PART * (PARTS + 1))
        return cls(fd, Shared.of(fd), keepers) if fd is not None else None

    @classmethod
    def of(cls, shared: Shared, keepers: Keepers | None = None) -> KVMemory:
        """Raises ProcessGone."""
        return cls(shared.open(), shared, keepers)

    @classmethod
    def given(cls, fd: int, keepers: Keepers | None = None) -> KVMemory:
        """Of a descriptor that another process gave up to this one."""
        own = reopened(fd)
        return cls(own, Shared.of(own), keepers)

    def fileno(self) -> int:
        return self._fd

    def numbers(self, rank: int) -> tuple[int, ...]:
        """Of the KV that is in its parts and counts; on a device what can be had there."""
        there = tuple(filter(None, (self._words[rank], self._words[rank + RANKS])))
        if self.keepers is None or self.keepers.own is None:
            return there
        return tuple(each for each in there if self._on_device(rank, each))

    def made(self, rank: int, number: int) -> None:
        """Its part has room for KV of this number, and nothing else in it."""
        self._words[_part(rank, number)] = number

    def whole(self, number: int, layout: Layout, homes: Collection[str]) -> bool:
        """Has each rank of a layout its part of this KV here, where all of `homes` are, and is there room for another
        as large?"""
        here = all(each == home() for each in homes)
        held = all(number in self.numbers(rank) for rank in range(layout.size))
        return here and held and available_memory() > self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Of memory that it takes."""
        return os.fstat(self._fd).st_blocks * 512

    def part(self, rank: int, number: int, size: int, count: int) -> KVPart:
        """Room for so many caches of `size` bytes together, of this KV. Raises OSError."""
        size += count * ALIGN
        if self.keepers is not None:
            return KVPart(self._take(self.keepers, rank, number, size))
        size, access = -(-size // ALIGN) * ALIGN, mmap.PROT_READ | mmap.PROT_WRITE
        return KVPart(map_file(self._fd, PART * (_part(rank, number) + 1), size, access)[0])

    def _name(self, *of: int) -> str:
        """Of parts on devices: of all, of a rank's, of one with a number."""
        return "/".join(["kv", *map(str, (self.origin.inode, *of)), ""])

    def _on_device(self, rank: int, number: int) -> bool:
        """Is this part there? Then it is mapped, for one that can't be is as good as none."""
        if (rank, number) in self._mapped:
            return True
        assert self.keepers is not None
        try:
            found = self.keepers.find(self._name(rank, number))
        except OSError as e:
            logger.warning("KV of rank %d is computed again: %s", rank, e)
            return False
        if found is not None:
            self._mapped[rank, number] = found
        return found is not None

    def _take(self, keepers: Keepers, rank: int, number: int, size: int) -> Any:
        """A part on the device. What nobody says is in use was of somebody who died before it counted."""
        if (rank, number) not in self._mapped:
            own = (self._words[rank], self._words[rank + RANKS], number)
            for name in keepers.held(self._name(rank)):
                if name not in {self._name(rank, each) for each in own}:
                    keepers.drop(name)
            self._mapped[rank, number] = keepers.take(self._name(rank, number), size)
        if len(self._mapped[rank, number]) < size:
            raise OSError(f"KV {number} of rank {rank} has no {size} bytes on the device")
        return self._mapped[rank, number]

    def sums(self, rank: int, number: int, num_blocks: int) -> memoryview:
        """A number for each block of its part; zeros, where nothing has been written since the part was cleared."""
        start = PART * (_part(rank, number) + 2) - SUMS
        return memoryview(mmap.mmap(self._fd, 8 * num_blocks, offset=start)).cast("q")

    def kept(self, rank: int, size: int) -> mmap.mmap:
        """Memory for what its rank keeps beside its caches; with zeros, where nobody has written."""
        return mmap.mmap(self._fd, size, offset=PART * (rank + 1) + KEPT)

    def index(self, size: int) -> memoryview:
        return memoryview(mmap.mmap(self._fd, size, offset=INDEX))

    def compute(self) -> None:
        """This process does, until it has closed it and let go of its part, or ends."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def settle(self, timeout: float) -> bool:
        """Wait until nobody computes in it; timeout: in seconds. False: somebody still does."""
        until = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                return True
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(LOOK)

    def clear(self) -> None:
        """Give the index and all parts back. Nobody computes in them."""
        for part in range(PARTS):
            self._words[part] = 0
        self._mapped.clear()
        self._drop()
        give_back(self._fd, INDEX, PART * (PARTS + 1))

    def keep(self, number: int) -> None:
        """Give the index back, and all parts but those of this KV."""
        for part in range(PARTS):
            if self._words[part] not in (0, number):
                self._clear(part)
        give_back(self._fd, INDEX, PART)

    def clear_part(self, rank: int, number: int) -> None:
        """That KV of this number has, or will have; all but what it keeps beside its caches."""
        self._clear(_part(rank, number))

    def _clear(self, part: int) -> None:
        rank, number, start = part % RANKS, self._words[part], PART * (part + 1)
        self._words[part] = 0
        for of in [of for of in self._mapped if _part(*of) == part]:  # another may have cleared the word
            del self._mapped[of]
        if self.keepers is not None and number:
            self.keepers.drop(self._name(rank, number))
        give_back(self._fd, start, start + KEPT)
        give_back(self._fd, start + PART - SUMS, start + PART)

    def unmap(self) -> None:
        """What this process has mapped of devices, once nothing computes there."""
        self._mapped.clear()

    def end(self) -> None:
        """Nobody goes on with it: once other processes have let go of it, its memory is the system's again, whoever
        still knows of it here."""
        self._drop()
        self.close()
        self._words.release()
        self._file.close()

    def _drop(self) -> None:
        """On devices there is nothing of it any more, but what somebody has mapped."""
        if self.keepers is not None:
            self.keepers.drop(self._name())

    def close(self) -> None:
        """What is mapped stays until it is let go of."""
        self._mapped.clear()
        self._close()
