"""A queue of a CUDA device for each micro-batch, so that one's exchange goes on beside what another computes.

On a device a thread only queues what is to be done. Turns say in which order threads queue; here events say the same of
what the device does: a turn's work begins when that of the turn before is done, whereas exchanges, which are queued
outside of turns, keep only their own micro-batch waiting. Not run on hardware: tested against stand-ins.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class Streams:
    """Of `count` micro-batches. The caller's current stream is the step's: its work of before comes first, and what
    follows `end` comes after all."""

    def __init__(self, count: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._turn: Any = None  # the end of the last turn

    def of(self, place: int) -> AbstractContextManager[Any]:
        """What the thread queues inside goes to the micro-batch's stream."""
        return torch.cuda.stream(self._streams[place])

    def taken(self) -> None:
        """The current stream's turn begins."""
        torch.cuda.current_stream().wait_event(self._turn)

    def handed_on(self) -> None:
        """It is over, or the step begins."""
        self._turn = torch.cuda.current_stream().record_event()

    def end(self) -> None:
        current = torch.cuda.current_stream()
        for stream in self._streams:
            current.wait_stream(stream)
