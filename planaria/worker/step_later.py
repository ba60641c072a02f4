"""The answer to a step that the device still computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from planaria.executor.link.later import Later
from planaria.protocol import LaneResult, Reply
from planaria.worker.guard import guard

if TYPE_CHECKING:
    from planaria.worker.runner import StepUnderWay


class StepLater(Later):
    """See planaria.executor.link.later. answer: made of what the step drew."""

    def __init__(self, rank: int, under_way: StepUnderWay, answer: Callable[[LaneResult], Reply]) -> None:
        self._rank, self._under_way, self._answer = rank, under_way, answer

    def ready(self) -> bool:
        return self._under_way.ready()

    def reply(self) -> Reply:
        return guard(self._rank, "step", lambda: self._answer(self._under_way.result()))
