"""The process's side: `python -m MODULE PARENT SAYS ARGS...`, messages on standard input, each after its length in 8
bytes, SAYS a descriptor for lines to who keeps it. Standard input stays open as long as the parent lives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from planaria.processes import die_with_parent

LENGTH = 8  # bytes of a message's length


def begin() -> list[str]:
    """The first thing a process does: end with its parent. Returns ARGS."""
    die_with_parent(int(sys.argv[1]))
    return sys.argv[3:]


def say(line: str) -> None:
    """To who keeps this process."""
    os.write(int(sys.argv[2]), f"{line}\n".encode())


def hear() -> Iterator[bytes]:
    """Messages, until the parent has ended. Not by sys.stdin, whose lock would be held when the interpreter ends."""
    while (size := _read(LENGTH)) and (data := _read(int.from_bytes(size, "little"))):
        yield data


def _read(size: int) -> bytes:
    """So many bytes; fewer, or none, at the end."""
    data = bytearray()
    while len(data) < size and (more := os.read(0, size - len(data))):
        data += more
    return bytes(data) if len(data) == size else b""


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH, "little") + message
