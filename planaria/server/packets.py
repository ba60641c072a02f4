"""Typed messages and descriptors between two servers of one user on one machine: a connected socket of packets."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

LONGEST = 128 << 10  # bytes of a packet: below what a socket takes by default
MOST_FDS = 250  # of a packet: the kernel takes no more than 253


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Packets(Generic[T]):
    """One end. hear: gets what the other end says, with its descriptors, which are its to close; gone: called once,
    when nothing more will come: the other end has ended, or said what can't be."""

    def __init__(
        self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T], hear: Callable[[T, list[int]], None],
        gone: Callable[[], None],
    ) -> None:  # fmt: skip
        self.sock, self.hear, self.gone = sock, hear, gone
        self._decoder, self._encoder = decoder, msgspec.msgpack.Encoder()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Never waits. fds: copies of them go. To an end that is closed nothing is sent. Raises ValueError: it is too
        much for a packet; OSError: no descriptor is left."""
        payload = self._encoder.encode(message)
        if len(payload) > LONGEST or len(fds) > MOST_FDS:
            raise ValueError(f"a packet of {len(payload)} bytes and {len(fds)} descriptors")
        if self.closed:
            return
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError:
            _close_all(copies)
            raise
        self._unsent.append((payload, copies))
        if len(self._unsent) == 1:
            self._writable()

    def _writable(self) -> None:
        while self._unsent:
            payload, fds = self._unsent[0]
            try:
                socket.send_fds(self.sock, [payload], fds)
            except BlockingIOError:
                self._loop.add_writer(self.sock, self._writable)
                return
            except OSError:
                self._end()
                return
            _close_all(fds)
            self._unsent.popleft()
        self._loop.remove_writer(self.sock)

    def _readable(self) -> None:
        try:
            data, fds = _received(self.sock)
            message = self._decoder.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            message, fds = None, []
        if message is None:
            self._end()
        else:
            self.hear(message, fds)

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self.gone()

    def close(self) -> None:
        """`gone` isn't called. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        while self._unsent:
            _close_all(self._unsent.popleft()[1])
        self.sock.close()


def _received(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Raises OSError: nothing is there, or what is there was cut."""
    size = array.array("i").itemsize * MOST_FDS
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, ancillary, flags, _ = sock.recvmsg(LONGEST, socket.CMSG_SPACE(size), flags)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        _close_all(list(fds))
        raise OSError("a packet that was cut")
    return data, list(fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
