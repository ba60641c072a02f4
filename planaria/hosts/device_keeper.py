"""Has memory of one device for others: `python -m planaria.hosts.device_keeper PARENT SAYS SOCKET KIND`.

It computes nothing, imports no torch, and ends with its owner: when nobody has the other end of its standard input any
more, which an owner may hand on. SOCKET is a descriptor of a Unix socket that listens under an abstract name; whoever
has this user's id may ask, one question a connection.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from planaria.hosts.device_memory import (
    LARGEST,
    MOST,
    Allocator,
    DropMemory,
    FindMemory,
    KeeperAnswer,
    KeeperRequest,
    ListMemory,
    MemoryFound,
    MemoryNames,
    MemoryRefused,
    TakeMemory,
    allocator_of,
)
from planaria.hosts.host import Program
from planaria.hosts.local import HERE, LocalChild, LocalHost
from planaria.logs import wait_for_no_reader
from planaria.node import Keeping
from planaria.processes import die_with_pipe, leave_signals_to_parent, set_title
from planaria.topology.platforms import Platform

BACKLOG = 128
MOST_NAMES = 16384
LONGEST = 200  # letters of a name
PROGRAM = "planaria.hosts.device_keeper"


class DeviceKeeper:
    """What there is, by name."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._held: dict[str, tuple[Any, int]] = {}

    def answer(self, asked: KeeperRequest) -> tuple[KeeperAnswer, int | None]:
        """And a descriptor to go with it, the caller's own."""
        try:
            match asked:
                case TakeMemory():
                    return self._take(asked)
                case FindMemory() if asked.name in self._held:
                    return self._found(asked.name, new=False)
                case DropMemory():
                    for name in self._under(asked.under):
                        self._allocator.free(self._held.pop(name)[0])
                case ListMemory():
                    return MemoryNames({name: self._held[name][1] for name in self._under(asked.under)}), None
            return MemoryNames({}), None
        except OSError as e:
            return MemoryRefused(e.strerror or str(e)), None

    def _take(self, asked: TakeMemory) -> tuple[KeeperAnswer, int | None]:
        name, size = asked.name, asked.size
        if new := name not in self._held:
            if not 0 < len(name) <= LONGEST or not name.endswith("/") or not 0 < size <= MOST:
                return MemoryRefused(f"no memory is called {name[:LONGEST]!r} with {size} bytes"), None
            if len(self._held) >= MOST_NAMES:
                return MemoryRefused(f"there are {MOST_NAMES} names already"), None
            self._held[name] = self._allocator.reserve(size)
        try:
            return self._found(name, new=new)
        except OSError:
            if new:
                self._allocator.free(self._held.pop(name)[0])
            raise

    def _found(self, name: str, *, new: bool) -> tuple[KeeperAnswer, int | None]:
        handle, size = self._held[name]
        return MemoryFound(self._allocator.kind, size, new), self._allocator.export(handle)

    def _under(self, under: str) -> list[str]:
        return [name for name in self._held if name.startswith(under)]


def serve(listener: socket.socket, kind: str) -> None:
    """For ever. The device is looked for when somebody asks."""
    keeper: DeviceKeeper | None = None
    selector = selectors.DefaultSelector()
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    asking: list[socket.socket] = []
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    end, _ = listener.accept()
                    if not _is_ours(end):
                        end.close()
                        continue
                    end.setblocking(False)
                    asking.append(end)
                    selector.register(end, selectors.EVENT_READ)
                    if len(asking) > BACKLOG:  # somebody who asks nothing
                        _leave(asking.pop(0), selector)
            elif key.fileobj in asking:
                end = next(each for each in asking if each is key.fileobj)
                asking.remove(end)
                try:
                    keeper = keeper or DeviceKeeper(allocator_of(kind, 0))
                    _answer(end, keeper)
                except OSError as e:  # no device, or who asked has gone
                    with contextlib.suppress(OSError):
                        end.send(msgspec.msgpack.encode(MemoryRefused(str(e))))
                _leave(end, selector)


def _leave(end: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(end)
    end.close()


def _is_ours(end: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def _answer(end: socket.socket, keeper: DeviceKeeper) -> None:
    data = end.recv(LARGEST)
    if not data:
        return
    fd: int | None
    try:
        answer, fd = keeper.answer(msgspec.msgpack.decode(data, type=KeeperRequest))
    except msgspec.MsgspecError as e:
        answer, fd = MemoryRefused(f"not a question: {e}"), None
    try:
        socket.send_fds(end, [msgspec.msgpack.encode(answer)], [] if fd is None else [fd])
    finally:
        if fd is not None:
            os.close(fd)


class OwnedKeepers:
    """A keeper for each of these devices, of this process: they end with it, or when it is closed, or let go of. Once
    it has left them to a process that was given their `pipes` (see GivenKeepers) they are that one's."""

    def __init__(self, kind: str, devices: Sequence[int]) -> None:
        self._host, self.keeping = LocalHost(devices=()), list[Keeping]()
        self._children = list[LocalChild]()
        self._end = weakref.finalize(self, _kill, self._children)
        for device in devices:
            address = f"planaria-{secrets.token_hex(16)}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind("\0" + address)
                listener.listen(BACKLOG)
                program = Program(PROGRAM, (kind,), (device,) if kind != "file" else ())
                started = self._host.spawn((HERE, 0), program, None, lambda child: None, [listener.fileno()])
            self._children.append(started)
            self.keeping.append((device, address))

    @property
    def pids(self) -> list[int]:
        return [each.place.pid for each in self._children]

    @property
    def pipes(self) -> list[int]:
        """Descriptors: a keeper lives as long as anybody has its own."""
        return [each.stdin for each in self._children]

    def leave(self) -> None:
        """They end with whoever else has their pipes."""
        self._end.detach()
        self._children.clear()

    def close(self) -> None:
        """Idempotent."""
        _kill(self._children)
        self._host.await_ends(self._children, 5.0)
        self._host.close()


class GivenKeepers:
    """Keepers that another process has given to this one, with its pipes, which become this one's."""

    def __init__(self, keeping: Sequence[Keeping], pipes: Sequence[int]) -> None:
        self.keeping, self.pipes = list(keeping), list(pipes)
        for pipe in self.pipes:
            os.set_inheritable(pipe, False)

    def leave(self) -> None:
        """See OwnedKeepers."""
        self.close()

    def close(self) -> None:
        """Idempotent."""
        while self.pipes:
            os.close(self.pipes.pop())


def _kill(children: Iterable[LocalChild]) -> None:
    for each in children:
        each.kill()


def keepers_of_all(platform: Platform, devices: Sequence[int]) -> OwnedKeepers | None:
    """Of all these devices; None where there are none, or their memory can't be kept, and where ranks compute in main
    memory, which memory files have."""
    return OwnedKeepers(platform.keeps, list(dict.fromkeys(devices))) if platform.keeps and devices else None


def main() -> int:
    listener, kind = sys.argv[3:]
    wait_for_no_reader()
    leave_signals_to_parent()
    set_title("keeper", of=kind)
    die_with_pipe(0)
    serve(socket.socket(fileno=int(listener)), kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
