"""The process's side: `python -m MODULE PARENT SAYS GIVEN... ARGS...`, messages on standard input, each after its
length in 8 bytes, SAYS a descriptor for lines to who keeps it, GIVEN others that it was given. Standard input stays
open as long as the parent lives. PARENT is below 0 for a fork, whose parent is another, and which ends with this one
anyway (see forkserver).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from planaria.logs import wait_for_no_reader
from planaria.processes import die_with_parent

LENGTH = 8  # bytes of a message's length


def begin() -> list[str]:
    """The first thing a process does: end with its parent, and wait for no reader. Returns what comes after SAYS."""
    if (parent := int(sys.argv[1])) > 0:
        die_with_parent(parent)
    wait_for_no_reader()
    return sys.argv[3:]


def keeper() -> int:
    """Pid of who keeps this process."""
    return abs(int(sys.argv[1]))


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
