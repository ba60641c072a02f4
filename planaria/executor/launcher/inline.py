"""Ranks in this process: `uni`. The rank is made by a factory that the composition root hands in."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from planaria.config.machine import usable_cores
from planaria.executor.boot import RankBoot
from planaria.executor.launcher.defaults import Defaults
from planaria.hosts.host import Place
from planaria.node import home, node_name
from planaria.protocol import Command, Reply
from planaria.topology import Infeasible, Layout


class Handler(Protocol):
    def handle(self, command: Command) -> Reply: ...

    def enter(self, boot: RankBoot) -> None:
        """Go on in another epoch. It may lack this, where weights never change."""
        ...


class InlineLauncher(Defaults):
    """Makes rank 0 by calling `factory`; `ranks` has it from `run` on."""

    name = "uni"
    link, uses_ray, replaces = "direct", False, True

    def __init__(self, factory: Callable[[RankBoot], Handler]) -> None:
        super().__init__()
        self.factory = factory
        self.ranks: list[Handler] = []
        self._number = 0  # of the weights

    def start(self) -> list[Place]:
        return [Place(0, home(), node_name(), pid=os.getpid(), cores=usable_cores())]

    def run(self, boots: Sequence[RankBoot]) -> None:
        """Make the rank; in a later epoch it is there."""
        if not self.ranks:
            self.ranks += [self.factory(boot) for boot in boots]
        elif boots[0].config.weights_number != self._number:
            self.ranks[0].enter(boots[0])
        self._number = boots[0].config.weights_number

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """A rank that failed again and again is made anew. There is one at most."""
        if layout.size > 1:
            why = f"{layout} needs {layout.size} processes, ranks here share this one"
            raise Infeasible(why, Layout(), layout.size, 1)
        if ranks:
            self.ranks.clear()
        return self.start()
