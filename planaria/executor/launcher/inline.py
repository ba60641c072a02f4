"""Ranks in this process: `uni`. The rank is made by a factory that the composition root hands in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from planaria.protocol import Command, Reply


class Handler(Protocol):
    def handle(self, command: Command) -> Reply: ...


class InlineLauncher:
    """Starts rank 0 by calling `factory`."""

    name = "uni"

    def __init__(self, factory: Callable[[], Handler]) -> None:
        self.factory = factory
        self.on_exit: Callable[[], None] = lambda: None

    def launch(self) -> list[Handler]:
        return [self.factory()]

    def pids(self) -> list[int]:
        return [os.getpid()]

    def lost(self) -> dict[int, str]:
        """Nobody: these ranks live and die with this process."""
        return {}

    def closing(self) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...
