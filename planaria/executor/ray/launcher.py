"""Ranks as Ray actors, dealt out by a Pool; where Ray does not answer any more, as processes of this node.

That stays so until the engine starts again, also when Ray is back: a cluster that was lost may have given the devices
of other nodes to somebody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError
from planaria.executor.boot import SPARE, RankBoot
from planaria.executor.launcher.process import PoolLauncher
from planaria.executor.patience import FIRST, Patience
from planaria.executor.ray.cluster import HINT
from planaria.executor.ray.host import RayHost
from planaria.hosts.host import Place, Program
from planaria.hosts.local import LocalHost
from planaria.hosts.pool import Pool
from planaria.node import home
from planaria.topology import Infeasible, LaneGroup, Layout, Placement
from planaria.wire import Placed

logger = logging.getLogger("planaria.ray")

REPLACE_LIMIT = 20.0  # seconds an actor that replaces another gets to come up, before another place is tried
CHANGE_LIMIT = 60.0  # the same where nothing is lost: another place would not be better
NO_PLACE = 60.0  # seconds to wait for a place where not one rank has any
LOOK = 1.0


class RayLauncher(PoolLauncher):
    """entry: `package.module:class` of a rank's life (planaria.worker.main). device: "cpu" or an accelerator's name.
    spares: actors that get ready to replace one, in all."""

    name = "ray"
    link, uses_ray = "queue", True

    def __init__(
        self, parallel: ParallelConfig, device: str, entry: str, settings: RaySettings | None = None, *,
        spares: int = 0,
    ) -> None:  # fmt: skip
        self.parallel, self.lane_groups, self.entry = parallel, parallel.lane_groups, entry
        self.settings = settings or RaySettings()
        self.ray = RayHost(parallel, self.settings, device)
        super().__init__(self.ray, entry, parallel.layout, spares=spares, on_each=False, deal=self._deal)
        self.on_placed: Callable[[Placed], None] = lambda message: None
        self.before_leaving: list[Callable[[], None]] = []  # what needs Ray to end; called when the ranks have

    # -- starting

    def start(self) -> list[Place]:
        """Raises ConfigError for a rule that is broken, CapacityError when the cluster stays too small."""
        self.ray.open(self.layout.size + self.pool.num_spares)
        self.address, bundles = self.ray.address, self.ray.bundles
        if self.parallel.lane_groups:
            self.pool.placement = bundles.obtain_lanes(self.parallel.lane_groups, self.layout)
        else:
            self.pool.placement = bundles.obtain(self.parallel.placement_group, self.layout)
        self.on_placed(self._placed())
        for lane, each in enumerate(bundles.first):
            for group in each.placement.spanning():
                first = lane * each.placement.layout.size
                logger.warning(
                    "tensor ranks %s are on several nodes: each layer's sums cross the network",
                    ", ".join(str(first + slot.rank) for slot in group),
                )
        try:
            bundles.look()
            return super().replace((), self.layout)
        except OSError as e:
            raise CapacityError(f"ranks can't be started on Ray: {e}") from None

    def _placed(self) -> Placed:
        """Where the ranks are to come up."""
        pool = self.ray.bundles
        rows, groups = pool.connection.nodes(), pool.first
        names = () if groups[0].owned or groups[0].lent else (self.parallel.placement_group or "the enclosing group",)
        return Placed(pool.connection.source(pool.resource, names), self.layout, [
            (slot.node, rows[slot.node]["NodeManagerAddress"] if slot.node in rows else "", slot.device, bundle)
            for group in groups
            for slot, bundle in zip(group.placement.slots, group.bundles, strict=True)
        ])  # fmt: skip

    def _deal(self, layout: Layout, counts: Mapping[str, int], before: Placement | None) -> Placement:
        """See BundlePool."""
        return self.ray.bundles.deal(layout, counts, before, self.pool.living())

    @property
    def fallen_back(self) -> bool:
        """Has Ray gone?"""
        return self.host is not self.ray

    def lend(self, groups: Sequence[LaneGroup]) -> Sequence[LaneGroup]:
        """See Borrower. Without Ray there is nothing to lend."""
        if not self.fallen_back:
            self.ray.bundles.lend(groups, self.layout)
        before, self.lane_groups = self.lane_groups, tuple(groups)
        return before

    @property
    def graph(self) -> bool:
        """Do steps travel through a compiled graph?"""
        return self.parallel.ray_link == "compiled-graph" and not self.fallen_back

    @property
    def actors(self) -> list[object]:
        return [getattr(child, "actor", None) for _, child in sorted(self.pool.ranks.items())]

    def fitting(self, boot: RankBoot) -> RankBoot:
        """On other machines memory that outlives it is the reaper's there. Without Ray there is no compiled graph."""
        if not self.fallen_back:
            if boot.place.home == home():
                return boot
            memories = self.ray.actors.memories(boot.place.home)
            kv = memories.kv if boot.rank != SPARE else None  # it is a rank's
            return msgspec.structs.replace(boot, memories=msgspec.structs.replace(memories, kv=kv))
        parallel = msgspec.structs.replace(boot.config.parallel, ray_link="queue")
        return msgspec.structs.replace(boot, config=msgspec.structs.replace(boot.config, parallel=parallel))

    # -- replacing

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """See Launcher. Where steps come by a compiled graph all are replaced: survivors sit inside its loop. Those
        that Ray has given up are, too: they can't be told of another epoch."""
        if self.fallen_back:
            return super().replace(ranks, layout)
        self.pool.end(list(self.pool.ranks) if self.graph else [*ranks, *self.pool.leaving])
        self._leave()
        connection = self.ray.connection
        if connection is None or not connection.answers():
            return self._fall_back(layout)
        self.ray.limit, self.ray.layout = REPLACE_LIMIT if ranks else CHANGE_LIMIT, layout
        try:
            places = self._place(layout)
        except TimeoutError:  # meanwhile
            return self._fall_back(layout)
        self.ray.trim()
        self.layout = layout
        return places

    def _place(self, layout: Layout) -> list[Place]:
        """Where one doesn't come up another place is tried. Raises Infeasible, CapacityError; TimeoutError when Ray
        does not answer."""
        patience = Patience(logger.warning, NO_PLACE, FIRST)
        while True:
            self.ray.bundles.look()
            try:
                return super().replace((), layout)
            except Infeasible as e:
                if e.nearest is not None:
                    raise
                if patience.over:
                    raise CapacityError(f"{e.why}; nothing came in {patience.waited:.0f} s") from None
                patience.tell(f"waiting for a place for any rank: {e.why}; {HINT}")
                time.sleep(LOOK)
            except TimeoutError:
                raise
            except OSError as e:
                logger.info("%s; trying another place", e)

    def _fall_back(self, layout: Layout) -> list[Place]:
        """Without Ray from now on. Raises Infeasible, CapacityError."""
        here = {slot: devices for slot, devices in self.ray.here().items() if slot not in self.pool.bad}
        self.pool.kill()
        if not here:
            raise CapacityError("Ray does not answer any more, and none of its ranks was on this node")
        logger.warning("Ray does not answer: ranks go on as processes of this node, which has room for %d", len(here))
        devices = [id for ids in here.values() for id in ids]
        self.host = LocalHost(devices=devices, room=len(here), address=self.address, elastic=False)
        self.pool = Pool(self.host, Program(self.entry.partition(":")[0]), self.pool.clock, self.pool.news)
        return super().replace((), layout)

    def room_for(self, layout: Layout) -> bool:
        """See Launcher. A cluster may have to grow first, or turn out to be too small: the change itself finds out."""
        return self.fallen_back and super().room_for(layout)

    # -- ends

    def close(self) -> None:
        """Let ranks end by themselves for a while, then end what is left; no actor, no placement group made here and no
        process of theirs remains. Idempotent."""
        self.closing()
        self.pool.close()
        self._leave()
        self.host.close()
        self.ray.close()

    def _leave(self) -> None:
        for end in self.before_leaving:
            end()
        self.before_leaving.clear()
