"""Where the lanes of one engine are on a cluster, whose experts they share (D1, D8): a placement group for each lane,
packed as engines of a fleet are. All calls block; who has an event loop makes them from a thread.

Every lane's group has a bundle with a core beside those of its ranks, so that the engine can sit in any: it is in that
of the first lane there is. Another number of lanes adds groups or removes the last ones, since a group neither grows
nor gives back a bundle. An engine's process that follows another gets new groups for the lanes whose nodes are gone,
and begins with fewer where there is no place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from planaria.config.options import EngineConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError
from planaria.executor.patience import FIRST, Patience
from planaria.executor.ray.actors import Actors
from planaria.executor.ray.child import RayChild
from planaria.executor.ray.cluster import HINT
from planaria.executor.ray.fleet import LOOK, NO_PLACE, RayHosts
from planaria.hosts.host import News
from planaria.node import Memories
from planaria.topology import Infeasible, LaneGroup
from planaria.topology.table import CameUp

logger = logging.getLogger("planaria.ray")


class LaneHosts:
    """config: of the engine. It has the number 0; `places` counts lanes, as it would engines."""

    def __init__(
        self, config: EngineConfig, settings: RaySettings, on_packing: Callable[[str], None] = lambda table: None
    ) -> None:
        self.lanes = config.parallel.lanes
        self.places = RayHosts(config, settings, on_packing)

    @property
    def actors(self) -> Actors:
        return self.places.actors

    def open(self, size: int) -> None:
        """A group for each lane, or none. Raises ConfigError, CapacityError."""
        self.places.open(self.lanes)

    def grow(self, engines: Iterable[int]) -> None:
        """There is one engine."""

    def room(self, engine: int) -> bool:
        """Is there a place for a lane, at least?"""
        return bool(self.places.groups) or self.places.room(0)

    def release(self, engine: int) -> None:
        for lane in list(self.places.groups):
            self.places.release(lane)

    def close(self) -> None:
        self.places.close()

    # -- another number of lanes

    def lend(self, lanes: int) -> tuple[LaneGroup, ...]:
        """The groups of so many, made where there are none, or none of them. `take_back` decides which stay. Raises
        ConfigError, CapacityError."""
        try:
            self.places.grow(range(lanes))
        except Infeasible as e:
            raise CapacityError(f"lanes are placed as engines are: {e}") from None
        return tuple(self._group(lane) for lane in self._there if lane < lanes)

    def take_back(self, lanes: int) -> None:
        """So many it is. Groups of others are removed."""
        self.lanes = lanes
        for lane in [lane for lane in self._there if lane >= lanes]:
            self.places.release(lane)

    # -- the engine's process

    def renew(self, engine: int, stop: threading.Event) -> None:
        """Before it begins: lanes that have no group, or whose node is gone, get another where there is a place. While
        there is none for any it is waited for, until `stop` too. Raises CapacityError."""
        patience = Patience(logger.warning, NO_PLACE, FIRST)
        while not self.places.groups or any(self.places.stranded(lane) for lane in range(self.lanes)):
            why = self._renew()
            if self.places.groups:
                return
            patience.tell(f"waiting for a place for a lane: {why}; {HINT}")
            if patience.over or stop.wait(LOOK):
                raise CapacityError(why)

    def _renew(self) -> str:
        """What was in the way, if anything."""
        for lane in range(self.lanes):
            if lane in self.places.groups and self.places.stranded(lane):
                self.places.let_go(lane)
        why = ""
        for lane in range(self.lanes):
            try:
                self.places.grow([lane])
            except CapacityError as e:
                why = str(e)
        return why

    def stranded(self, engine: int) -> bool:
        """Is a node of the lane with which the engine sits gone?"""
        return not self.places.groups or self.places.stranded(self._there[0])

    def spawn(self, engine: int, entry: str, variables: Mapping[str, str], limit: float, news: News) -> RayChild:
        """See RayHosts."""
        return self.places.spawn(self._there[0], entry, variables, limit, news)

    def memories(self, child: RayChild) -> Memories:
        """See RayHosts."""
        return self.places.memories(child)

    def share(self, engine: int) -> int:
        """Engines on its node."""
        return 1

    def settings_of(self, engine: int, ranks: int) -> dict[str, str]:
        """Environment variables of its process."""
        return {}

    def fields_of(self, engine: int) -> dict[str, Any]:
        """Fields of its ParallelConfig."""
        lanes = tuple(self._group(lane) for lane in self._there if lane < self.lanes)
        return {"placement_group": None, "lane_groups": lanes}

    def came_up(self, engine: int, node: str) -> None:
        self.places.came_up(self._there[0], node)

    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        """See Plan. Nothing while there are other lanes than were planned."""
        there, ranks = self._there, len(places) // max(1, self.lanes)
        if there != list(range(self.lanes)) or ranks * self.lanes != len(places):
            return []
        return [
            line for lane in there for line in self.places.differences(lane, places[lane * ranks : (lane + 1) * ranks])
        ]

    @property
    def _there(self) -> list[int]:
        """Lanes that have a group."""
        return sorted(self.places.groups)

    def _group(self, lane: int) -> LaneGroup:
        places = self.places
        return LaneGroup(places.groups[lane].id.hex(), tuple(places.bundles(lane)), places.given is None)
