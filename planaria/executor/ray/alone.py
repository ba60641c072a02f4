"""Ranks as processes of this node, when Ray is gone: in place of all actors, on the devices that those here had.

It stays so until the engine starts again, also when Ray is back: a cluster that was lost may have given the devices of
other nodes to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planaria.executor.boot import Place, RankBoot
from planaria.executor.launcher.process import ProcessLauncher
from planaria.topology import Cluster, Infeasible, Layout, Node, shrink


class Alone(ProcessLauncher):
    """room: how many processes; devices: their accelerators, empty without any. on_exit as of any launcher."""

    def __init__(
        self, module: str, address: str, room: int, devices: Sequence[int], on_exit: Callable[[], None]
    ) -> None:
        super().__init__(module, (), address)
        self.room, self.devices, self.num_slots, self.on_exit = room, list(devices), room, on_exit

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """As its base. Raises Infeasible where there is no such room."""
        if layout.size > self.room:
            self.end(ranks)
            why = f"{layout} needs {layout.size} processes, without Ray there is room for {self.room} on this node"
            raise Infeasible(why, self._fitting(layout), layout.size, self.room)
        return super().replace(ranks, layout)

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        fitting = self._fitting(layout)
        return super().prepare(fitting, _plain(boot)) if fitting is not None else None

    def room_for(self, layout: Layout) -> bool:
        return layout.size <= self.room and super().room_for(layout)

    def run(self, boots: Sequence[RankBoot]) -> None:
        super().run([_plain(boot) for boot in boots])

    def _fitting(self, layout: Layout) -> Layout | None:
        return shrink(Cluster((Node.of("", self.room),)), layout)


def _plain(boot: RankBoot) -> RankBoot:
    """Without a compiled graph."""
    parallel = msgspec.structs.replace(boot.config.parallel, ray_link="queue")
    return msgspec.structs.replace(boot, config=msgspec.structs.replace(boot.config, parallel=parallel))
