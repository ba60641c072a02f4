"""Rearrangements of experts as the link sees them: one step at a time, each committed once or never; what they move.

Rules: "prepared" and "bytes" of `experts.py`; "deadlock": what a rearrangement waits for is on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.core.eplb.balance import ASK, ExpertBalance
from planaria.executor.layout_change import VERSION as LEAVING
from planaria.protocol import Command, PlaceExperts, SendExperts, StepPlan

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Travel:
    """Of one engine, over its epochs. Version 0 is what ranks exchange while they come up; LEAVING is what those send
    that are to leave."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.world = sim, sim.world
        self.coming: SendExperts | None = None  # that is not committed
        self.committed = 0  # the version that was last
        self.experts = 0  # that went from one rank to another, by committed steps
        self._state: ExpertBalance | None = None  # that counts them

    def sent(self, command: Command) -> None:
        require, counts = self.world.require, self.sim.counts
        state = self.sim.loop.balancing.state
        require(self._state in (None, state), "bytes", "what was counted until now is forgotten")
        self._state = state
        if isinstance(command, StepPlan) and state is not None:
            self._waits(state)
        if isinstance(command, SendExperts) and command.version == LEAVING:
            counts["departures"] += bool(command.moves)
            self.coming = None  # there will be other maps
        elif isinstance(command, SendExperts) and command.version:
            require(self.coming is None, "prepared", f"version {command.version} is begun, and another is on its way")
            require(command.version > self.committed, "prepared", f"{command.version} after {self.committed}")
            self.coming = command
            counts["steps prepared aside" if command.aside else "steps prepared"] += 1
            self.world.note("version {} of the experts: {} moves", command.version, len(command.moves))
        elif isinstance(command, PlaceExperts) and command.version:
            coming = self.coming
            require(coming is not None, "prepared", f"version {command.version} is committed, none was prepared")
            assert coming is not None
            same = coming.version == command.version
            require(same, "prepared", f"{command.version} is committed, {coming.version} is on its way")
            assert self.sim.link is not None
            lacking = [r for r, port in self.sim.link.ports.items() if port.experts.prepared < command.version]
            require(not lacking, "prepared", f"{command.version} is committed, ranks {lacking} have not received it")
            self.experts += sum(move.source != move.target for move in coming.moves)
            self.coming, self.committed = None, command.version
            counts["steps committed"] += 1
            self.world.note("version {} of the experts is committed", command.version)

    def _waits(self, state: ExpertBalance) -> None:
        require, moving = self.world.require, state._moving
        awaited = moving is not None and moving.preparing is not None
        require(not awaited or self.coming is not None, "deadlock", "a step is awaited that nobody prepares")
        under_way = [ticket.command for ticket in self.sim.loop.gang.ledger.open]
        arranges = any(isinstance(command, PlaceExperts) for command in under_way)
        require(arranges or not state._arranging, "deadlock", "a commit is awaited that nobody was told")
        require(ASK in under_way or not state._asking, "deadlock", "load is awaited that nobody was asked for")

    def lost(self) -> None:
        """The epoch is over."""
        self.sim.counts["lost between prepare and commit"] += self.coming is not None
        self.sim.counts["lost in a commit"] += any(
            isinstance(ticket.command, PlaceExperts) for ticket in self.sim.loop.gang.ledger.open
        )
        self.coming, self.committed = None, 0

    def check(self) -> None:
        """At the end."""
        state = self.sim.loop.balancing.state
        if state is None:
            return
        self.sim.counts["rearrangements"] += state.rearrangements
        sent = self.experts * state.expert_bytes
        self.world.require(state.bytes_moved == sent, "bytes", f"{state.bytes_moved} are said to have moved: {sent}")
