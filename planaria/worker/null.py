"""A rank that answers every command and computes nothing: for measuring the engine alone (`--null-worker`)."""

from __future__ import annotations

import os

from planaria.config.digest import compared, compute_hash, hash_fields
from planaria.executor.boot import RankBoot
from planaria.protocol import (
    Allocate,
    Call,
    Command,
    Done,
    Facts,
    FreeMemory,
    Hello,
    Join,
    LanePlan,
    LaneResult,
    Load,
    PlaceExperts,
    Probe,
    Ready,
    Regroup,
    Reply,
    SendExperts,
    StepPlan,
    StepResult,
)
from planaria.worker.classes import call
from planaria.worker.guard import guard

ENOUGH = 1 << 40  # bytes for KV, of which nothing is taken


class NullRank:
    """Has the methods of `planaria.worker.worker.Worker` that others call."""

    def __init__(self, boot: RankBoot) -> None:
        self.enter(boot)

    def prepare(self) -> None:
        """A spare has nothing to load."""

    def enter(self, boot: RankBoot) -> None:
        self.boot, self.rank, self.worker = boot, boot.rank, NullWorker()
        self.lane = 0  # until it joins

    def handle(self, command: Command) -> Reply:
        match command:
            case StepPlan():
                return guard(self.rank, "step", lambda: self._step(command))
            case Join():
                place, config, self.lane = self.boot.place, self.boot.config, command.layout.coords(self.rank).dp
                return Hello(
                    self.rank, os.getpid(), place.home, place.node, place.address, compared(config),
                    hash_fields(config), digest=compute_hash(config, str(command.layout)),
                )  # fmt: skip
            case Probe():
                return Facts(self.rank, 1, ENOUGH, 0)
            case Regroup() | Load() | SendExperts() | PlaceExperts() | Allocate() | FreeMemory():
                return Ready(self.rank)
            case Call():
                return guard(self.rank, f"call {command.method}", lambda: Done(self.rank, call(self, command)))
            case _:
                return Done(self.rank)

    def _step(self, plan: StepPlan) -> Reply:
        own = self.lane
        lane: LaneResult = self.worker.step(plan.step, plan.lanes[own], plan.freed_rows[own], plan.turn)
        return StepResult(plan.epoch, plan.step, (lane,))


class NullWorker:
    """Gives every sampling row the same token at once: what is left is the engine's own cost."""

    def __init__(self, token: int = 1000) -> None:
        self.token = token
        self.rows: dict[int, int] = {}  # row -> turn

    def step(self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0) -> LaneResult:
        for row in freed:
            self.rows.pop(row, None)
        for change in plan:
            if change.sample:
                self.rows[change.row] = turn
        rows = [row for row, own in self.rows.items() if own == turn]
        return LaneResult(rows, [self.token] * len(rows))
