"""Ranks as Ray actors. Translates a placement; decides nothing.

`start` makes the actors, light, and asks where they came up; `run` completes them: each becomes its rank, and the
reference of that run is watched. Who replaces a lost one is `Staff`'s; where Ray does not answer any more, ranks go on
as processes of this node (see `local_fallback`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError
from planaria.executor.boot import RankBoot
from planaria.executor.ray.cluster import Connection, connect
from planaria.executor.ray.groups import PlacedGroup
from planaria.executor.ray.local_fallback import LocalFallback
from planaria.executor.ray.members import Member
from planaria.executor.ray.staff import Staff
from planaria.hosts.host import Place
from planaria.topology import LaneGroup, Layout
from planaria.wire import Placed

logger = logging.getLogger("planaria.ray")

REPLACE_LIMIT = 20.0  # seconds an actor that replaces another gets to come up, before another place is tried
CHANGE_LIMIT = 60.0  # the same where nothing is lost: another place would not be better


class RayLauncher:
    """entry: `package.module:class` of a rank's life (planaria.worker.main). device: "cpu" or an accelerator's name.
    spares: actors that get ready to replace one."""

    name = "ray"
    link, uses_ray, replaces, followed = "queue", True, True, False

    def __init__(
        self, parallel: ParallelConfig, device: str, entry: str, settings: RaySettings | None = None, *,
        spares: int = 0,
    ) -> None:  # fmt: skip
        self.parallel, self.device, self.entry, self.num_spares = parallel, device, entry, spares
        self.settings = settings or RaySettings()
        self.layout, self.lane_groups = parallel.layout, parallel.lane_groups
        self.on_exit: Callable[[], None] = lambda: None
        self.on_placed: Callable[[Placed], None] = lambda message: None
        self.address = "127.0.0.1"  # of this node, for those elsewhere
        self.before_leaving: list[Callable[[], None]] = []  # what needs Ray to end; called when the ranks have
        self.connection: Connection | None = None
        self.fallback: LocalFallback | None = None  # instead, once Ray is gone
        self._closing = False
        self.staff: Staff  # with a connection

    # -- starting

    def start(self) -> list[Place]:
        """Raises ConfigError for a rule that is broken, CapacityError when the cluster stays too small."""
        slots = self.layout.size + self.num_spares
        connection = connect(self.settings.address, slots, self.parallel.ray_runtime_env)
        try:
            self.staff = Staff(
                connection, self.parallel, self.settings, self.device, self.entry, secrets.token_hex(3),
                self.num_spares, self._exited,
            )  # fmt: skip
        except Exception:
            connection.close()
            raise
        self.connection, self.address = connection, connection.address
        pool = self.staff.bundles
        if self.parallel.lane_groups:
            bundles = pool.obtain_lanes(self.parallel.lane_groups, self.layout)
        else:
            bundles = pool.obtain(self.parallel.placement_group, self.layout)
        self.on_placed(self._placed())
        for lane, each in enumerate(pool.first):
            for group in each.placement.spanning():
                first = lane * each.placement.layout.size
                logger.warning(
                    "tensor ranks %s are on several nodes: each layer's sums cross the network",
                    ", ".join(str(first + slot.rank) for slot in group),
                )
        self.staff.start(bundles, self.layout, self.settings.wait)
        return self.staff.places()

    def _placed(self) -> Placed:
        """Where the ranks are to come up."""
        pool = self.staff.bundles
        rows, groups = pool.connection.nodes(), pool.first
        names = () if groups[0].owned or groups[0].lent else (self.parallel.placement_group or "the enclosing group",)
        return Placed(pool.connection.source(pool.resource, names), self.layout, [
            (slot.node, rows[slot.node]["NodeManagerAddress"] if slot.node in rows else "", slot.device, bundle)
            for group in groups
            for slot, bundle in zip(group.placement.slots, group.bundles, strict=True)
        ])  # fmt: skip

    @property
    def group(self) -> PlacedGroup:
        """The first, which came into being as one."""
        return self.staff.bundles.groups[0]

    def lend(self, groups: Sequence[LaneGroup]) -> Sequence[LaneGroup]:
        """See Borrower. Without Ray there is nothing to lend."""
        if self.fallback is None:
            self.staff.bundles.lend(groups, self.layout)
        before, self.lane_groups = self.lane_groups, tuple(groups)
        return before

    @property
    def ranks(self) -> dict[int, Member]:
        return self.staff.ranks

    @property
    def leaving(self) -> Sequence[int]:
        """Ranks on nodes that Ray has given up: none once there is no Ray to move to."""
        return self.staff.leaving if self.connection is not None else []

    @property
    def graph(self) -> bool:
        """Do steps travel through a compiled graph?"""
        return self.parallel.ray_link == "compiled-graph" and self.fallback is None

    @property
    def actors(self) -> list[object]:
        return [member.actor for _, member in sorted(self.ranks.items())]

    def run(self, boots: Sequence[RankBoot]) -> None:
        (self.fallback or self.staff).run(boots)

    # -- replacing

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """See Launcher. Where steps come by a compiled graph all are replaced: survivors sit inside its loop. Those
        that Ray has given up are, too: they can't be told of another epoch."""
        if self.fallback is not None:
            return self.fallback.replace(ranks, layout)
        self.staff.end(list(self.ranks) if self.graph else ranks)
        self._leave()
        if not self.staff.connection.answers():
            return self._fall_back(layout)
        try:
            self.staff.fill(layout, REPLACE_LIMIT if ranks else CHANGE_LIMIT)
        except TimeoutError:  # meanwhile
            return self._fall_back(layout)
        self.layout = layout
        return self.staff.places()

    def _fall_back(self, layout: Layout) -> list[Place]:
        """Without Ray from now on. Raises Infeasible, CapacityError."""
        room, devices = self.staff.go()
        if not room:
            raise CapacityError("Ray does not answer any more, and none of its ranks was on this node")
        logger.warning("Ray does not answer: ranks go on as processes of this node, which has room for %d", room)
        self.fallback = LocalFallback(self.entry.partition(":")[0], self.address, room, devices, self._exited)
        return self.fallback.replace((), layout)

    def give_up(self, ranks: Sequence[int]) -> None:
        """See Launcher."""
        (self.fallback or self.staff).give_up(ranks)

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        """See Launcher."""
        return (self.fallback or self.staff).prepare(layout, boot)

    def room_for(self, layout: Layout) -> bool:
        """See Launcher. A cluster may have to grow first, or turn out to be too small: the change itself finds out."""
        return self.fallback is not None and self.fallback.room_for(layout)

    def stand_by(self, boot: RankBoot) -> None:
        """See Launcher."""
        if self.fallback is None:
            self.staff.keep_spares(self.layout, boot)

    def spare_pids(self) -> list[int]:
        """Of this node."""
        if self.fallback is not None:
            return self.fallback.spare_pids()
        return [member.at.pid for member in self.staff.spares.there() if member.here]

    # -- ends

    def _exited(self) -> None:
        self.on_exit()

    def lost(self) -> dict[int, str]:
        """Ranks that have ended though nobody asked, and how."""
        return {} if self._closing or self.connection is None else (self.fallback or self.staff).lost()

    def settle(self, ranks: Sequence[int]) -> None: ...

    def closing(self) -> None:
        self._closing = True
        if self.connection is not None:
            self.staff.closing = True
        if self.fallback is not None:
            self.fallback.closing()

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""
        self.closing()
        if self.fallback is not None:
            self.fallback.kill()
        if self.connection is not None:
            self.staff.members.end(list(self.ranks.values()))
        self.close()

    def close(self) -> None:
        """Let ranks end by themselves for a while, then end what is left; no actor, no placement group made here and no
        process of theirs remains. Idempotent."""
        self.closing()
        if self.fallback is not None:
            self.fallback.close()
        connection, self.connection = self.connection, None
        if connection is None:
            return
        answers = self.staff.close()
        self._leave()
        if answers:
            self.staff.members.close()
            self.staff.bundles.remove()
        connection.close()

    def _leave(self) -> None:
        for end in self.before_leaving:
            end()
        self.before_leaving.clear()
