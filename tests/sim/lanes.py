"""Lanes of an engine that have nothing in a step: counted, and made by pausing some.

A pause is what a request that must run alone does to the others (`holding.pause`, `Lane.only`): here to any lane, at
any time. It ends after a while, or when nothing else is left to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from planaria.core import holding
from planaria.core.scheduler import Lane
from planaria.protocol import StepPlan

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

NOBODY = "nobody"  # a request that there isn't


class Pause(msgspec.Struct, frozen=True):
    lane: int
    seconds: float


class Lanes:
    def __init__(self, sim: Simulation) -> None:
        self.sim = sim

    @property
    def _lanes(self) -> Sequence[Lane]:
        core = self.sim.loop.core
        return core.lanes if core is not None else ()

    def pause(self, wish: Pause) -> None:
        lanes = self._lanes
        if len(lanes) < 2:
            return
        lane = lanes[wish.lane % len(lanes)]
        self.sim.world.note("lane {} is paused for {:.2f} s", wish.lane % len(lanes), wish.seconds)
        self.sim.counts["pauses"] += 1
        for id in list(lane.entries):
            holding.pause(lane, id)
        if lane.only is None:
            lane.only = NOBODY
            self.sim.world.at(wish.seconds, self.go_on)

    def go_on(self) -> None:
        for lane in self._lanes:
            if lane.only == NOBODY:
                lane.only = None

    def planned(self, plan: StepPlan) -> None:
        """How often lanes have nothing to do in a step, are held, or only read prompts while others generate."""
        if len(plan.lanes) < 2:
            return
        counts = self.sim.counts
        going = [lane.turns[plan.turn].num_rows for lane in self._lanes]
        for lane, rows, own in zip(self._lanes, plan.lanes, going, strict=True):
            idle = not rows and not own
            counts["steps with an empty lane"] += idle
            counts["steps with a held lane"] += idle and bool(lane.entries) and lane.only is not None
            counts["steps with a lane that only reads"] += bool(rows) and not own and any(going)
