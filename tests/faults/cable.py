"""Two networks of this machine whose packets a program carries from one to the other, and loses, delays or damages.

Each namespace has a TUN device; what the kernel sends there is read here, and written into the other one's. Needs root,
and no part of the kernel that shapes traffic.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.faults.streams import within
from tests.proc.networks import Networks, ip

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500
TCP, RST, ACK = 6, 0x04, 0x10


class PacketCable:
    """Carries packets between two descriptors until it is closed. What it does to them may be set at any time.

    loss, twice, damage: shares of packets that are lost, come twice, have a wrong byte. delay: seconds that each takes,
    spread: up to so many more, so that they overtake each other. longest: bytes beyond which one is lost, and nobody is
    told. deaf: whose packets are lost, all of them (0: the first network's). resets: TCP segments with data that become
    the end of their connection, so many from now on.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self.calm()
        self.carried = self.harmed = 0
        self._ends, self._draw = ends, random.Random(1)
        self._under_way: list[tuple[float, int, int, bytes]] = []  # due, number, to, packet
        self._numbers = itertools.count()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def calm(self) -> None:
        """From now on a good cable."""
        self.loss = self.twice = self.damage = self.delay = self.spread = 0.0
        self.longest, self.resets = MTU, 0
        self.deaf: tuple[int, ...] = ()

    def set(self, **what: Any) -> None:
        """Attributes by name."""
        for name, value in what.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def close(self) -> None:
        self._over = True
        os.eventfd_write(self._bell, 1)
        self._thread.join(60)
        for fd in (*self._ends, self._bell):
            os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self._ends, self._bell):
            poll.register(fd, select.POLLIN)
        while not self._over:
            wait = max(0.0, self._under_way[0][0] - time.monotonic()) * 1000 if self._under_way else None
            ready = {fd for fd, _ in poll.poll(wait)}
            for source, fd in enumerate(self._ends):
                if fd in ready:
                    with contextlib.suppress(OSError):  # the device is down
                        self._take(source, os.read(fd, 65536))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._under_way)
                with contextlib.suppress(OSError):
                    os.write(self._ends[to], packet)

    def _take(self, source: int, packet: bytes) -> None:
        self.carried += 1
        draw = self._draw.random
        if source in self.deaf or len(packet) > self.longest or draw() < self.loss:
            self.harmed += 1
            return
        if self.resets > 0 and (end := ending(packet)):
            self.resets -= 1
            self.harmed += 1
            packet = end
        if draw() < self.damage:
            self.harmed += 1
            at = self._draw.randrange(20, len(packet))
            packet = packet[:at] + bytes([packet[at] ^ 0x5A]) + packet[at + 1 :]
        for _ in range(2 if draw() < self.twice else 1):
            due = time.monotonic() + self.delay + draw() * self.spread
            heapq.heappush(self._under_way, (due, next(self._numbers), 1 - source, packet))


def ending(packet: bytes) -> bytes:
    """A reset in place of a TCP segment with data, for the same connection; b"" for any other packet."""
    size = (packet[0] & 15) * 4
    if packet[0] >> 4 != 4 or packet[9] != TCP or len(packet) <= size + (packet[size + 12] >> 4) * 4:
        return b""
    head = bytearray(packet[:20])
    head[0], head[2:4], head[10:12] = 0x45, struct.pack("!H", 40), b"\0\0"
    head[10:12] = checksum(bytes(head))
    tcp = bytearray(packet[size : size + 20])
    tcp[12:14], tcp[16:18] = bytes([5 << 4, RST | ACK]), b"\0\0"
    tcp[16:18] = checksum(bytes(head[12:20]) + struct.pack("!HH", TCP, 20) + bytes(tcp))
    return bytes(head + tcp)


def checksum(data: bytes) -> bytes:
    """The internet's, of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


class CarriedNetworks(Networks):
    """Two, 10.93.0.1 and 10.93.0.2, with a `cable` between them that is a program; else as `Networks`."""

    cable: PacketCable

    def __init__(self) -> None:
        super().__init__(2, elsewhere=False)

    def make(self) -> None:
        for space in self.spaces:
            ip("netns", "add", space)
        each = list(zip(self.spaces, self.ends, strict=True))
        devices = [within(space, functools.partial(tun, end)) for space, end in each]
        for i, (space, end) in enumerate(each):
            address = ["10.93.0.1", "10.93.0.2"]
            ip("-n", space, "addr", "add", address[i], "peer", address[1 - i], "dev", end)
            ip("-n", space, "link", "set", end, "mtu", str(MTU), "up")
            ip("-n", space, "link", "set", "lo", "up")
            self.without_names(space)
        self.cable = PacketCable((devices[0], devices[1]))

    def remove(self) -> None:
        if hasattr(self, "cable"):
            self.cable.close()
        super().remove()


def tun(name: str) -> int:
    """A new device in the calling thread's namespace: packets sent there are read. It goes when it is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


@contextlib.contextmanager
def carried_networks() -> Iterator[CarriedNetworks]:
    """Raises as `ip`, and OSError. Nothing of them is left."""
    networks = CarriedNetworks()
    try:
        networks.make()
        yield networks
    finally:
        networks.remove()
