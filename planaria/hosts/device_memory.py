"""Memory of devices that outlives the process which computes in it: a keeper of each device has it (device_keeper),
ranks map it. Here is what a way to have such memory is, and who asks keepers for it.

Rule: what counts, and who may write, memory files say (memory, weights), as on CPUs; only bytes are here. A name ends
with "/", so that what begins with another whole name is under it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from planaria.hosts.memory import make_file

TIMEOUT = 20.0  # seconds for a keeper's answer
LARGEST = 1 << 20  # bytes of a message
MOST = 1 << 46  # bytes of one allocation that are asked for at most
Bytes = Any  # a memoryview, or DeviceBytes of a kind of device: with a length and slices


class TakeMemory(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """The allocation of this name, made where there is none."""

    name: str
    size: int


class FindMemory(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """The allocation of this name, if there is one."""

    name: str


class DropMemory(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """The keeper has nothing under these names any more; memory goes when nobody has it mapped."""

    under: str


class ListMemory(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """What is there under these names?"""

    under: str


class MemoryFound(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """Comes with a descriptor. kind: of allocator, by which it is mapped."""

    kind: str
    size: int
    new: bool


class MemoryNames(msgspec.Struct, frozen=True, array_like=True, tag="names"):
    """Bytes of each; none: nothing, or it is done."""

    sizes: dict[str, int]


class MemoryRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    why: str


KeeperRequest = TakeMemory | FindMemory | DropMemory | ListMemory
KeeperAnswer = MemoryFound | MemoryNames | MemoryRefused


class Allocator(Protocol):
    """A way to have memory of one device that other processes can have, too. Everything raises OSError."""

    kind: str

    def reserve(self, size: int) -> tuple[Any, int]:
        """So many bytes or more: a handle, and how many."""

    def export(self, handle: Any) -> int:
        """A descriptor, the caller's own, for another process."""

    def free(self, handle: Any) -> None:
        """Memory goes when nobody has it mapped."""

    def map(self, fd: int, size: int, *, writable: bool, keeps: object = None) -> Bytes:
        """What is behind a descriptor that was exported, as long as any part of the result is there; and so long
        `keeps` is there, too. The descriptor stays the caller's."""

    def clear(self, mapped: Bytes) -> None:
        """Zeros, where memory that nobody had before has others."""


class _KeptMap(mmap.mmap):
    keeps: object


class FileAllocator:
    """Memory files, in place of a device's memory: where there is no device."""

    kind = "file"

    def reserve(self, size: int) -> tuple[int, int]:
        fd = make_file("planaria-device", size)
        if fd is None:
            raise OSError("no memory file can be made here")
        return fd, size

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def free(self, handle: int) -> None:
        os.close(handle)

    def map(self, fd: int, size: int, *, writable: bool, keeps: object = None) -> memoryview:
        if os.fstat(fd).st_size < size:  # else reading it would end the process
            raise OSError(f"a memory file of fewer than {size} bytes")
        mapped = _KeptMap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        mapped.keeps = keeps
        return memoryview(mapped)

    def clear(self, mapped: memoryview) -> None:
        """It has."""


def allocator_of(kind: str, device: int) -> Allocator:
    """device: as this process numbers them. Raises OSError: not here."""
    if kind == "cuda":
        from planaria.hosts.cuda_memory import CudaAllocator

        return CudaAllocator(device)
    if kind != FileAllocator.kind:
        raise OSError(f"no such kind of memory: {kind}")
    return FileAllocator()


def ask(address: str, asked: KeeperRequest, timeout: float = TIMEOUT) -> tuple[KeeperAnswer, int | None]:
    """A keeper's answer, and a descriptor where it found something: the caller's own. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a socket of Python's with a limit waits for no place
            end.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
        try:
            end.connect("\0" + address)
            end.send(msgspec.msgpack.encode(asked))
            data, fds, _, _ = socket.recv_fds(end, LARGEST, 1)
        except BlockingIOError:
            raise OSError(f"the keeper of the device's memory does not answer in {timeout:.0f} s") from None
        except OSError as e:
            raise OSError(f"the keeper of the device's memory is gone: {e.strerror or e}") from None
    try:
        answer = msgspec.msgpack.decode(data, type=KeeperAnswer)
    except msgspec.MsgspecError:
        answer = MemoryRefused("the keeper of the device's memory has ended" if not data else "no keeper's answer")
    if isinstance(answer, MemoryFound) and fds:
        return answer, fds[0]
    for fd in fds:
        os.close(fd)
    if isinstance(answer, MemoryRefused):
        raise OSError(answer.why)
    return answer, None


class Keepers:
    """A node's, by device. own: id of the device whose memory this process maps, None: it maps none; device: as this
    process numbers it."""

    def __init__(self, addresses: Sequence[tuple[int, str]], own: int | None = None, device: int = 0) -> None:
        self.addresses = tuple((int(id), str(address)) for id, address in addresses)
        self.own, self.device = own, device
        self._allocators: dict[str, Allocator] = {}

    def take(self, name: str, size: int) -> Bytes:
        """The allocation of this name, mapped. It has so many bytes, or more. Raises OSError."""
        answer, fd = ask(self._address, TakeMemory(name, size))
        assert isinstance(answer, MemoryFound) and fd is not None
        mapped = self._map(answer, fd, writable=True)
        if answer.size < size:
            raise OSError(f"{name} has {answer.size} bytes, not {size}")
        if answer.new:
            self._allocators[answer.kind].clear(mapped)
        return mapped

    def find(self, name: str, *, writable: bool = True, keeps: object = None) -> Bytes | None:
        """The same of one that is there. Raises OSError: it can't be had, nor said whether it is there."""
        answer, fd = ask(self._address, FindMemory(name))
        return self._map(answer, fd, writable, keeps) if isinstance(answer, MemoryFound) and fd is not None else None

    def drop(self, under: str) -> None:
        """On all devices. Who doesn't answer has none, or will end with its owner."""
        for _, address in self.addresses:
            with contextlib.suppress(OSError):
                ask(address, DropMemory(under))

    def held(self, under: str = "") -> dict[str, int]:
        """Bytes of each name on this process's device. Raises OSError."""
        answer, _ = ask(self._address, ListMemory(under))
        return answer.sizes if isinstance(answer, MemoryNames) else {}

    @property
    def _address(self) -> str:
        for id, address in self.addresses:
            if id == self.own:
                return address
        raise OSError(f"device {self.own} has no keeper of memory")

    def _map(self, found: MemoryFound, fd: int, writable: bool, keeps: object = None) -> Bytes:
        try:
            if found.kind not in self._allocators:
                self._allocators[found.kind] = allocator_of(found.kind, self.device)
            return self._allocators[found.kind].map(fd, found.size, writable=writable, keeps=keeps)
        finally:
            os.close(fd)
