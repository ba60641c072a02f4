"""Ranks as processes of this node, when Ray is gone: in place of all actors, on the devices that those here had.

It stays so until the engine starts again, also when Ray is back: a cluster that was lost may have given the devices of
other nodes to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planaria.executor.boot import RankBoot
from planaria.executor.launcher.process import PoolLauncher
from planaria.hosts.local import LocalHost
from planaria.topology import Layout


class LocalFallback(PoolLauncher):
    """room: how many processes; devices: their accelerators, empty without any. on_exit as of any launcher."""

    def __init__(
        self, module: str, address: str, room: int, devices: Sequence[int], on_exit: Callable[[], None]
    ) -> None:
        host = LocalHost(devices=devices, room=room, address=address, elastic=False)
        super().__init__(host, module, Layout(), address)
        self.on_exit = on_exit

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        return super().prepare(layout, _plain(boot))

    def run(self, boots: Sequence[RankBoot]) -> None:
        super().run([_plain(boot) for boot in boots])


def _plain(boot: RankBoot) -> RankBoot:
    """Without a compiled graph."""
    parallel = msgspec.structs.replace(boot.config.parallel, ray_link="queue")
    return msgspec.structs.replace(boot, config=msgspec.structs.replace(boot.config, parallel=parallel))
