"""Ranks that fail when they are told to, at the phase that they are told."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from planaria.executor.boot import SPARE, RankBoot
from planaria.protocol import Allocate, Command, Join, Load, Regroup, Reply, StepPlan
from planaria.worker.guard import guard
from planaria.worker.null import NullRank
from planaria.worker.worker import Worker
from tests.faults.harm import harm, watch
from tests.faults.orders import Orders
from tests.reference_worker import HashWorker

PACE = 0.008  # seconds that a step takes at least, so that there is time for a phase to be one


class Obedient:
    """Mixed into a worker. It is `rankN`, or `spare` until it has joined as a rank."""

    boot: RankBoot
    rank: int

    def __init__(self, boot: RankBoot, *args: Any) -> None:
        super().__init__(boot, *args)  # type: ignore[call-arg]
        self.orders = Orders()
        self.name = "spare" if boot.rank == SPARE else f"rank{boot.rank}"
        self.epoch = 0
        self.times = ("", 0)  # a phase that somebody has an order for, and how often it was seen
        if self.name != "spare":  # which is one when it is ready
            self.orders.sign(self.name)
        watch(lambda: self.name, self.orders)

    def prepare(self) -> None:
        if fault := self.orders.take("spare", "start-up"):
            harm(fault)
        prepare = getattr(super(), "prepare", None)
        if prepare is not None:
            prepare()
        self.orders.sign(self.name)

    def enter(self, boot: RankBoot) -> None:
        enter = getattr(super(), "enter", None)
        if enter is not None:
            enter(boot)
        else:
            self.boot, self.rank = boot, boot.rank

    def handle(self, command: Command) -> Reply:
        fault = ""
        match command:
            case StepPlan():
                time.sleep(PACE)
                long = any(row.count > 1 for row in command.lanes[0])
                fault = self.reached("prefill" if long else "decode")
                if fault == "exception":  # a plan that is found wrong: what a mistake in a kernel looks like
                    command, fault = msgspec.structs.replace(command, step=command.step + 7), ""
            case Join():  # before memory files are made
                self.epoch = command.epoch
                fault = self._coming_up("full")
                if self.name == "spare":
                    fault = fault or self.orders.take("spare", "recovery")
                    self.name = f"rank{self.rank}"
                    self.orders.sign(self.name)
            case Regroup() if self.epoch:
                fault = self._coming_up("")
            case Load() if not self.epoch:
                fault = self._coming_up("")
        if fault == "exception":
            return guard(self.rank, type(command).__name__.lower(), lambda: _raise())
        if fault:
            harm(fault)
        return super().handle(command)  # type: ignore[misc,no-any-return]

    def _coming_up(self, only: str) -> str:
        phase = "recovery" if self.epoch else "start-up"
        path = self.orders.folder / "open" / f"{self.name}.{phase}"
        if only and not (path.exists() and path.read_text().startswith(only)):
            return ""
        return self.orders.take(self.name, phase)

    def reached(self, phase: str) -> str:
        """What this rank shall do; rank 0 tells on for those that can't see a step."""
        waiting = self.orders.at(phase)
        if not waiting:
            return ""
        self.times = (phase, self.times[1] + 1 if self.times[0] == phase else 1)
        for who, after in waiting:
            if self.times[1] > after:
                if who == self.name:
                    self.times = ("", 0)
                    return self.orders.take(who, phase)
                if self.rank == 0 and not who.startswith("rank"):
                    self.orders.tell_on(who, phase)
        return ""


def _raise() -> Reply:
    harm("exception")
    raise AssertionError


class ModelRank(Obedient, Worker):
    """With a model."""


class HashRank(Obedient, NullRank):
    """Without one, and without torch: a token is a function of the whole history before it, the seed and the position,
    so that one that is lost, repeated or foreign changes all that follow."""

    def __init__(self, boot: RankBoot, *args: Any) -> None:
        super().__init__(boot)

    def handle(self, command: Command) -> Reply:
        if isinstance(command, Allocate):
            config = self.boot.config
            self.worker = HashWorker(  # type: ignore[assignment]
                command.num_blocks, config.cache.block_size, config.model.vocab_size
            )
        return super().handle(command)
