"""What a process knows of the node it runs on, and how processes of one node share memory.

Two processes with the same `home()` see each other's memory files: same kernel, same process numbers, same
network (so that a container with an address of its own counts as a node), same user. A
memory file has no name; others open it through its owner's entry under /proc, so that nobody has to inherit it and
nothing is left behind when the last user ends.
"""

from __future__ import annotations

import functools
import os
import platform
import select
import socket
import sys
from typing import Protocol

import msgspec

from planaria.errors import CapacityError, PlanariaError


class ProcessGone(PlanariaError):
    """A memory file's owner has ended, or belongs to another user."""


class Shared(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """A memory file: its owner's pid and descriptor there, and the inode that the descriptor must show."""

    pid: int
    fd: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> Shared:
        """Of this process's own memory file."""
        return cls(os.getpid(), fd, os.fstat(fd).st_ino)

    def open(self) -> int:
        """A descriptor of one's own. Raises Gone."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise ProcessGone(f"can't open the memory that process {self.pid} shares: {e.strerror}") from None
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise ProcessGone(f"the memory that process {self.pid} shared is gone")
        return fd


class _Addresses(Protocol):
    @property
    def addresses(self) -> tuple[Keeping, ...]: ...


class Owned(Protocol):
    """A memory file, as who made it has it. keepers: of the devices that its bytes are on."""

    origin: Shared

    @property
    def keepers(self) -> _Addresses | None: ...


Keeping = tuple[int, str]  # a device's id, and where its keeper of memory is asked


class Memories(msgspec.Struct, frozen=True, array_like=True):
    """Memory files that a process may use, of who lives longer, on the node of this `home`; keepers: of its devices'
    memory, where the bytes are there."""

    home: str = ""
    kv: Shared | None = None
    weights: Shared | None = None
    keepers: tuple[Keeping, ...] = ()

    @classmethod
    def of(cls, kv: Owned | None, weights: Owned | None) -> Memories:
        """What this process has."""
        held = weights.keepers if weights is not None else None
        kept = held.addresses if held is not None else ()
        own = kv.origin if kv is not None else None
        return cls(home(), own, weights.origin if weights is not None else None, kept)


@functools.cache
def home() -> str:
    """Equal in two processes that can share memory; differs on every other machine, boot, container and user."""
    if sys.platform != "linux":
        return f"{platform.node()}/{os.getuid()}"
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    spaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    return "/".join([boot, *map(str, spaces), str(os.geteuid())])


@functools.cache
def node_name() -> str:
    """For people."""
    return socket.gethostname()


def resolve_host(host: str) -> str:
    """An address for a host's name. Raises CapacityError."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as e:
        raise CapacityError(f"the name {host} has no address here: {e.strerror}") from None


def own_address(host: str) -> str:
    """This node's address on the way to the address `host`. Nothing is sent. Raises CapacityError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as e:
        raise CapacityError(f"there is no way to {host} from here: {e.strerror}") from None


def _stat(pid: int) -> list[bytes]:
    """What the kernel says of a process of this node, from its state on; nothing if gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()
    except OSError:
        return []


def process_state(pid: int) -> str:
    """The kernel's letter for a process of this node: R, S, D, T (stopped), t (traced), Z (ended) ...; "" if gone."""
    return b"".join(_stat(pid)[:1]).decode()


def born(pid: int) -> int:
    """When a process of this node started, in the kernel's ticks; 0 if it is gone."""
    return int(b"".join(_stat(pid)[19:20]) or 0)


def available_memory() -> int:
    """Bytes of this node's memory that could be taken without swapping; all it has, where nobody says (not Linux)."""
    if sys.platform != "linux":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as f:
        fields = dict(line.split(":", 1) for line in f)
    return int(fields["MemAvailable"].split()[0]) * 1024


def resident_bytes(pid: int) -> int:
    """Resident memory of a process of this node; 0 if gone."""
    try:
        with open(f"/proc/{pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def uptime(pid: int) -> float | None:
    """Seconds since a process of this node was started; None if gone."""
    if not (began := born(pid)):
        return None
    with open("/proc/uptime") as now:
        return max(0.0, float(now.read().split()[0]) - began / os.sysconf("SC_CLK_TCK"))


def readable(fd: int, seconds: float = 0.0) -> bool:
    """Is there something to read, or has the other end (of a pidfd: the process) gone? Waits for so long at most.
    Whatever the descriptor's number: select() takes none above 1023."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0, int(seconds * 1000))))


def writable(fd: int, seconds: float) -> bool:
    """Is there room for more, or has the other end gone? Waits for so long at most."""
    waiting = select.poll()
    waiting.register(fd, select.POLLOUT)
    return bool(waiting.poll(max(0, int(seconds * 1000))))
