"""Networks on this machine, each with a cable to the same switch."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

_numbers = itertools.count()

# Waits until nobody holds its input any more.
REMOVE = """
while read -r line; do :; done
for space; do ip netns pids "$space" | xargs -r kill -9; ip netns del "$space"; rm -rf "/etc/netns/$space"; done
"""


class Networks:
    """Namespaces: 10.93.0.1 is in the first, 10.93.0.2 in the second, and so on. elsewhere: each has a second cable,
    10.94.0.1 and so on, to nobody, and that is its default route. They end with this process, however that ends."""

    def __init__(self, count: int, elsewhere: bool) -> None:
        mark = f"{os.getpid()}n{next(_numbers)}"
        self.elsewhere = elsewhere
        self.switch = f"planaria-{mark}-s"
        self.spaces = [f"planaria-{mark}-{i}" for i in range(1, count + 1)]
        self.ends = [f"pln{mark}{chr(97 + i)}" for i in range(count)]  # at most 15 characters
        command = ["sh", "-c", REMOVE, "sh", *self.spaces, self.switch]
        self._remover = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=DEVNULL, start_new_session=True)

    @property
    def prefixes(self) -> list[tuple[str, ...]]:
        """How to run a command in each."""
        return [("ip", "netns", "exec", space) for space in self.spaces]

    def cut(self, which: int = 1) -> None:
        """Pull the cable out of the second, or another (they count from 0)."""
        ip("-n", self.spaces[which], "link", "set", self.ends[which], "down")

    def mend(self, which: int = 1) -> None:
        """Put it in again."""
        ip("-n", self.spaces[which], "link", "set", self.ends[which], "up")

    def make(self) -> None:
        """Raises as `ip`."""
        for space in (self.switch, *self.spaces):
            ip("netns", "add", space)
        ip("-n", self.switch, "link", "add", "hub", "type", "bridge")
        ip("-n", self.switch, "link", "set", "hub", "up")
        for i, (space, end) in enumerate(zip(self.spaces, self.ends, strict=True), 1):
            self._plug(space, end, f"port{i}", f"10.93.0.{i}/24")
            ip("-n", self.switch, "link", "set", f"port{i}", "master", "hub")
            if self.elsewhere:
                self._plug(space, "elsewhere", f"away{i}", f"10.94.0.{i}/24")
                ip("-n", space, "route", "add", "default", "via", "10.94.0.254", "dev", "elsewhere")
            ip("-n", space, "link", "set", "lo", "up")
            self.without_names(space)

    def without_names(self, space: str) -> None:
        """Without an answer to names, each look for one would take seconds."""
        folder = Path("/etc/netns", space)
        folder.mkdir(parents=True)
        (folder / "resolv.conf").write_text("")

    def _plug(self, space: str, end: str, port: str, address: str) -> None:
        ip("link", "add", end, "netns", space, "type", "veth", "peer", port, "netns", self.switch)
        ip("-n", space, "addr", "add", address, "dev", end)
        ip("-n", space, "link", "set", end, "up")
        ip("-n", self.switch, "link", "set", port, "up")

    def remove(self) -> None:
        """With whatever still runs there."""
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        self._remover.wait(60)


def ip(*args: str) -> None:
    """Raises OSError or CalledProcessError: only root can, and not in every container."""
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def several_networks(count: int, *, elsewhere: bool = False) -> Iterator[Networks]:
    """Raises as `ip`. Nothing of them is left."""
    networks = Networks(count, elsewhere)
    try:
        networks.make()
        yield networks
    finally:
        networks.remove()


@contextlib.contextmanager
def two_networks() -> Iterator[Networks]:
    """As `several_networks`."""
    with several_networks(2) as networks:
        yield networks
