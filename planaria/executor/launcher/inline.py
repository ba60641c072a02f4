"""Ranks in this process: `uni`. The rank is made by a factory that the composition root hands in."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from planaria.config.machine import usable_cores
from planaria.config.system import no_processes
from planaria.executor.backend import Launcher
from planaria.executor.boot import SPARE, RankBoot
from planaria.hosts.host import Child, Place, Program
from planaria.hosts.local import HERE, LocalHost
from planaria.node import home, node_name
from planaria.protocol import Command, Reply
from planaria.topology import Infeasible, Layout


class Handler(Protocol):
    def handle(self, command: Command) -> Reply: ...

    def enter(self, boot: RankBoot) -> None:
        """Go on in another epoch. It may lack this, where weights never change."""


class InlineLauncher(Launcher):
    """Makes rank 0 by calling `factory`; `ranks` has it from `run` on. module: that a rank's process would run."""

    name = "uni"
    link, uses_ray, replaces = "direct", False, True

    def __init__(self, factory: Callable[[RankBoot], Handler], module: str = "") -> None:
        super().__init__()
        self.factory, self.module = factory, module
        self.ranks: list[Handler] = []
        self._number = 0  # of the weights
        self._others: list[Child] = []

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

    def beside(self, boots: Sequence[RankBoot]) -> Sequence[Child]:
        """See Launcher."""
        if not self.module or no_processes():
            return ()
        host = LocalHost()
        self._others = [host.spawn((HERE, 0), Program(self.module), None, self._wake) for _ in boots]
        for child, boot in zip(self._others, boots, strict=True):
            place = msgspec.structs.replace(child.place, rank=SPARE)
            child.tell(msgspec.structs.replace(boot, place=place).encode())
        return self._others

    def _wake(self, child: Child) -> None:
        if child in self._others:
            self.on_exit()

    def close(self) -> None:
        others, self._others = self._others, []
        for child in others:
            child.kill()

    kill = close
