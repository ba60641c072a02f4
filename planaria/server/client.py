"""How a front end uses engines, wherever they run: their sequences, and their number and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from planaria.core.resize import Resize
from planaria.server.stream import Stream
from planaria.wire import (
    Dead,
    EngineFacts,
    EngineResized,
    EngineState,
    EngineStats,
    ExpertLoads,
    ProcessInfo,
    Recovery,
)


class FleetControl(Protocol):
    """Who has the engines' number and layout changed, and says which processes there are. Called in one event loop."""

    async def resize(self, id: str, size: int, drain_timeout: float) -> Resize:
        """Have `size` engines; returns when that is so, or is known not to be. Asked for again with the same id it is
        not done again. drain_timeout: seconds that sequences may stay in engines that leave. Raises Refused."""
        ...

    async def resize_engines(self, tp: int, pp: int) -> list[EngineResized]:
        """Have every engine's ranks in another layout, one engine after the other; each goes on with its sequences.
        Ends at the first that can't (`error` says why). Raises Refused."""
        ...

    def resizes(self) -> list[Resize]:
        """The latest, the oldest first."""
        ...

    def drain(self) -> None:
        """No new engines will come: the front end shuts down."""
        ...

    async def report(self) -> list[ProcessInfo]:
        """Of each engine its processes; what can be said without the engine where it doesn't answer."""
        ...

    async def experts(self) -> dict[int, ExpertLoads]:
        """Experts' load and places, of each engine that records it and answers, by number."""
        ...


class EngineClient(Protocol):
    """How a front end uses engines, wherever they run. Called from one event loop; sinks are called there too."""

    facts: EngineFacts | None  # None until ready; of several engines what they have in common
    dead: Dead | None
    control: FleetControl | None  # None: in another process
    on_recovery: Callable[[Recovery], None]  # hears of every fault, and of its end
    on_settled: Callable[[int], None]  # hears of every engine that is ready, was given up or has left

    @property
    def stats(self) -> EngineStats:
        """Of all engines together: counters never fall, `epoch` is the highest."""
        ...

    @property
    def last_progress(self) -> float:
        """time.monotonic() of the last message that showed a new step, or of the last idle state; of several engines
        that of the one that has not moved for the longest."""
        ...

    def engines(self) -> list[EngineState]:
        """Each engine, by number."""
        ...

    async def ready(self) -> EngineFacts:
        """Wait until the engine can admit. Raises ModelError, CapacityError or EngineDead if it can't."""
        ...

    def submit(self, stream: Stream) -> None:
        """Start a sequence; its sink gets what comes of it in order, the last piece with `finish` set."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a sequence; its sink hears nothing more. Unknown ids are ignored."""
        ...
