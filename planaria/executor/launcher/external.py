"""Ranks that an outer launcher (torchrun) has started: every process runs the whole program, and its own rank in it.

The outer launcher owns faults: nothing here can replace a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from planaria.config.machine import accelerator_ids, usable_cores
from planaria.executor.backend import Launcher
from planaria.executor.boot import RankBoot
from planaria.executor.launcher.inline import Handler
from planaria.executor.link.circle import Circle
from planaria.hosts.host import Place
from planaria.node import home, node_name, own_address, resolve_host
from planaria.topology.outer import OuterLauncher

START_TIMEOUT = 300.0  # seconds for all processes to come


class ExternalLauncher(Launcher):
    """factory(boot) makes this process's rank, which `ranks` has from `run` on; open_circle(address) the connection to
    the other processes."""

    name = "external_launcher"
    link, uses_ray = "spmd", False

    def __init__(
        self, outer: OuterLauncher, factory: Callable[[RankBoot], Handler], open_circle: Callable[[str], Circle]
    ) -> None:
        super().__init__()
        self.outer, self.factory, self.open_circle = outer, factory, open_circle
        self.ranks: list[Handler] = []
        self.circle: Circle | None = None

    def start(self) -> list[Place]:
        """Meet the other processes. Raises LinkError, PlanariaError when one doesn't come."""
        outer = self.outer
        alone = outer.local_world_size == outer.world_size
        address = "127.0.0.1" if alone else own_address(resolve_host(outer.master_addr))
        self.circle = self.open_circle(address)
        device = accelerator_ids()[outer.local_rank : outer.local_rank + 1]
        own = Place(outer.rank, home(), node_name(), address, os.getpid(), usable_cores(), tuple(device))
        parts = self.circle.round("start", b"", msgspec.msgpack.encode(own), START_TIMEOUT)
        return [msgspec.msgpack.decode(data, type=Place) for data in parts]

    def run(self, boots: Sequence[RankBoot]) -> None:
        self.ranks += [self.factory(boot) for boot in boots if boot.rank == self.outer.rank]

    def kill(self) -> None:
        """The processes are the outer launcher's."""
        if self.circle is not None and not self.ranks:  # no link has it yet
            self.circle.close()
