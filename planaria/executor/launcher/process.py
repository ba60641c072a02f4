"""Ranks as processes, dealt out by a Pool: of this node (`mp`), or of whatever host. What runs in them is named by a
module, so nothing of it is imported here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from planaria.executor.backend import Launcher
from planaria.executor.boot import SPARE, RankBoot
from planaria.hosts.host import Child, Host, Place, Program
from planaria.hosts.local import LocalHost
from planaria.hosts.pool import BackOff, Pool
from planaria.node import home
from planaria.topology import Layout

logger = logging.getLogger("planaria.engine")

SETTLE = 0.5  # seconds between a process's end, as others notice it, and its code
SHORTEST, LONGEST = 0.5, 8.0  # seconds between tries, where no process can be started


class PoolLauncher(Launcher):
    """See Launcher. layout: that `start` has; address: by which others reach this node; clock: seconds, monotonic;
    pause: lets so many pass; others as Pool's."""

    name = "mp"
    link, uses_ray, replaces = "queue", False, True

    def __init__(
        self, host: Host, module: str, layout: Layout, address: str = "127.0.0.1", *, spares: int = 0,
        clock: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep, **how: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.host, self.layout, self.address, self.clock, self.pause = host, layout, address, clock, pause
        self.starts = BackOff(LONGEST, SHORTEST)
        self.pool = Pool(host, Program(module), clock, self._news, spares=spares, **how)
        self._closing = False

    def start(self) -> list[Place]:
        return self.replace((), self.layout)

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """See Launcher. What could not be started is tried again after a pause: what was lacking may be there then, and
        all tries would be over in no time."""
        if (early := self.starts.at - self.clock()) > 0:
            self.pause(early)
        try:
            self.pool.replace(ranks, layout)
        except OSError:
            self.starts.failed(self.clock())
            raise
        self.starts.worked()
        return [msgspec.structs.replace(child.place, rank=rank) for rank, child in sorted(self.pool.ranks.items())]

    def run(self, boots: Sequence[RankBoot]) -> None:
        """Tell each rank what it is; those that ended already are known to have."""
        for boot in boots:
            self.pool.ranks[boot.rank].tell(self.fitting(boot).encode())

    def fitting(self, boot: RankBoot) -> RankBoot:
        """As it is told where its place is."""
        return boot

    def _reserve(self, boot: RankBoot) -> Callable[[Place], bytes]:
        """What a process in reserve begins with, by where it is."""

        def told(place: Place) -> bytes:
            place = msgspec.structs.replace(place, rank=SPARE, bundle=boot.place.bundle)
            return self.fitting(msgspec.structs.replace(boot, place=place)).encode()

        return told

    @property
    def leaving(self) -> Sequence[int]:
        return self.pool.leaving

    def give_up(self, ranks: Sequence[int]) -> None:
        self.pool.give_up(ranks)

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        return self.pool.prepare(layout, self._reserve(boot))

    def room_for(self, layout: Layout) -> bool:
        return self.pool.room_for(layout)

    def stand_by(self, boot: RankBoot) -> None:
        self.pool.stand_by(self._reserve(boot))

    def spare_pids(self) -> list[int]:
        return [spare.place.pid for spare in self.pool.spares if spare.place.home == home()]

    def beside(self, boots: Sequence[RankBoot]) -> Sequence[Child]:
        """See Launcher."""
        of: dict[tuple[str, tuple[int, ...]], list[RankBoot]] = {}
        for boot in boots:
            of.setdefault((self.pool.ranks[boot.rank].slot[0], boot.place.devices), []).append(boot)
        found = [self.pool.beside(node, self._wake) for node, _ in of]
        for child, (first, *rest) in zip(found, of.values(), strict=True):
            beside = first.beside + tuple(boot.rank for boot in rest)
            place = child.place if child.place.pid else self.pool.ranks[first.rank].place  # it is to come up there
            place = msgspec.structs.replace(place, devices=first.place.devices)
            child.tell(self._reserve(msgspec.structs.replace(first, beside=beside))(place))
        return found

    def tell_spares(self, boot: RankBoot) -> None:
        told = self._reserve(boot)
        for spare in self.pool.spares:
            spare.tell(told(spare.place))

    def settle(self, ranks: Sequence[int]) -> None:
        self.host.await_ends([self.pool.ranks[rank] for rank in ranks if rank in self.pool.ranks], SETTLE)

    def lost(self) -> dict[int, str]:
        return {} if self._closing else self.pool.lost()

    def closing(self) -> None:
        self._closing = True

    def close(self) -> None:
        self.closing()
        self.pool.close()
        self.host.close()

    def kill(self) -> None:
        self.closing()
        self.pool.kill()
        self.close()

    def _wake(self, child: Child) -> None:
        if not self._closing:
            self.on_exit()

    def _news(self, child: Child) -> None:
        if child.ended and not self._closing:
            self.on_exit()


class ProcessLauncher(PoolLauncher):
    """Runs the module for each of `ranks`, on this node. spares: processes that get ready to replace one; each says a
    line when it is. imports: what it needs, imported once for all of its processes. `on_exit`, set by the owner, may be
    called from any thread."""

    def __init__(
        self, module: str, ranks: Sequence[int], address: str = "127.0.0.1", *, spares: int = 0,
        imports: Sequence[str] = (),
    ) -> None:  # fmt: skip
        host = LocalHost(room=len(ranks) + spares, address=address, forks={module: imports})
        super().__init__(host, module, Layout(tp=len(ranks)), address, spares=spares)
