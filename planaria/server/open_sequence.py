"""A sequence that a fleet has open, wherever it is.

Each stay in an engine has a name of its own, so nothing that one has still to say of a sequence that has left it is
ever taken for news.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from planaria.types import Delta
from planaria.wire import Sink, Submit

if TYPE_CHECKING:
    from planaria.server.fleet import Fleet
    from planaria.server.supervisor import SupervisedEngine


class Open:
    """An open sequence and where it is. `name`: what that engine calls it; `lost`: that engine was lost with it;
    `tried`: how many tokens it had when it was moved away from one that was, -1 if that never was so; `goes_on`: called
    once when it is heard of next, or ends."""

    __slots__ = ("engine", "fleet", "goes_on", "id", "lost", "moves", "name", "priority", "sink", "tried")

    def __init__(self, fleet: Fleet, submit: Submit, sink: Sink) -> None:
        self.fleet, self.id, self.name, self.sink = fleet, submit.id, submit.id, sink
        self.priority = submit.priority
        self.engine: SupervisedEngine
        self.moves, self.tried, self.lost = 0, -1, False
        self.goes_on: Callable[[], None] | None = None

    @property
    def stuck(self) -> bool:
        """It has got no token since an engine was lost with it, so it may be what engines die of."""
        entry = self.engine.journal.get(self.name)
        return entry is None or self.tried == len(entry.tokens)

    def history(self) -> list[int]:
        """Its tokens so far, prompt and output."""
        entry = self.engine.journal.get(self.name)
        return [*entry.submit.prompt, *entry.tokens] if entry is not None else []

    def heard(self) -> None:
        """Something came of it, or it has ended."""
        if self.goes_on is not None:
            self.goes_on()
            self.goes_on = None

    def take(self, delta: Delta) -> None:
        """An engine's sink."""
        self.heard()
        delta.request_id = self.id
        if delta.finish is not None:
            self.fleet.ended(self)
        else:
            self.fleet.router.progressed(self.id, len(delta.tokens))
        self.sink(delta)
