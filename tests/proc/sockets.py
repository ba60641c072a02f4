"""Where processes listen, from the kernel's tables: of each process's own network, which psutil doesn't look at."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

_LISTENS = "0A"  # of TCP; a UDP socket that is bound hears everybody
_ACCEPTS = 0x10000  # of unix sockets


class Listener(NamedTuple):
    """kind: tcp, udp or unix. address: numeric, or a path; of an unnamed unix socket "". role: the process's title."""

    pid: int
    role: str
    kind: str
    address: str
    port: int = 0


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def listeners(pid: int) -> list[Listener]:
    """Of one process; threads share them."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    role = " ".join(psutil.Process(pid).cmdline())
    net = Path(f"/proc/{pid}/net")
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        table = net / name
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if inode in inodes and (name.startswith("udp") or state == _LISTENS):
                host, port = local.split(":")
                found.append(Listener(pid, role, name.rstrip("6"), _address(host), int(port, 16)))
    for line in (net / "unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & _ACCEPTS:
            found.append(Listener(pid, role, "unix", " ".join(fields[7:])))
    return found


def _address(text: str) -> str:
    """Words of 4 bytes in the machine's order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def free_port() -> int:
    """Below those that the kernel deals out to whoever asks for any: one of them could be somebody else's by the time
    that it is used."""
    dealt = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, dealt)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
