"""This process's TCP connections, found by address: what libraries open and don't hand out.

Rule: only connections of the addresses given are touched, and each is looked at and ended through the same duplicate of
its descriptor, so that a number that was reused meanwhile does no harm.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

Address = tuple[str, int]  # numeric host, port

_MAPPED = "::ffff:"  # an IPv4 address as an IPv6 socket shows it


def listening() -> set[Address]:
    """Where this process listens."""
    return {local for _, local, remote in _sockets() if local is not None and remote is None}


def hang_up(local: set[Address], remote: set[Address]) -> int:
    """End the connections from one of `local` or to one of `remote`, at both ends; how many there were. A read or write
    that waits on one, in any thread, ends with an error."""
    count = 0
    for connection, here, there in _sockets():
        if there is not None and (here in local or there in remote):
            with contextlib.suppress(OSError):  # ended already
                connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _sockets() -> Iterator[tuple[socket.socket, Address | None, Address | None]]:
    """TCP sockets that listen or are connected, with their addresses; each is closed when the next is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # gone meanwhile
            continue
        with found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                continue
            try:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                local = _address(found.getsockname())
                remote = None if listens else _address(found.getpeername())
            except OSError:  # not connected yet, or no more
                continue
            yield found, local, remote


def _address(name: tuple[str, int]) -> Address:
    return name[0].removeprefix(_MAPPED), name[1]
