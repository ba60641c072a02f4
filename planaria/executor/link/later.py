"""A rank's answers, in the order of its commands: that to a step may come when the rank has begun the next one, so that
a device has something to do while its host plans.

Rule: a step whose answer is open is read before anything else than a step is carried out, and as soon as it is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from planaria.protocol import Command, Reply, StepPlan

LOOK = 2e-4  # seconds between looks at whether a step is there, while no command comes


class Later(ABC):
    """An answer that is still to come."""

    @abstractmethod
    def ready(self) -> bool:
        """Would `reply` not wait?"""

    @abstractmethod
    def reply(self) -> Reply:
        """Never raises."""


def answers(
    receive: Callable[[float | None], tuple[int, Command] | None], handle: Callable[[Command], Reply | Later]
) -> Iterator[tuple[int, Command, Reply]]:
    """Number, command and reply of one after the other. receive: the next command and its number, None after so many
    seconds without one."""
    under_way: tuple[int, Command, Later] | None = None
    while True:
        item = receive(None if under_way is None else LOOK)
        if item is None and under_way is not None and not under_way[2].ready():
            continue
        begun = handle(item[1]) if item is not None and isinstance(item[1], StepPlan) else None
        if under_way is not None:
            number, command, later = under_way
            under_way = None
            yield number, command, later.reply()
        if item is None:
            continue
        number, command = item
        found = begun if begun is not None else handle(command)
        if isinstance(found, Later):
            under_way = number, command, found
        else:
            yield number, command, found
