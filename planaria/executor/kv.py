"""What KV an engine's ranks have, whether it outlives them, and where."""

from __future__ import annotations

from typing import Protocol

import msgspec

from planaria.executor.bring_up import CommittedKV
from planaria.node import Shared
from planaria.topology import Layout


class NodeMemory(Protocol):
    """Where KV of this node's ranks is, so that it outlives them. origin: what they are told, if anything."""

    @property
    def origin(self) -> Shared | None: ...

    def clear(self) -> None:
        """All that is in it goes; no rank computes."""
        ...


class GangKV:
    """`there`: what there is; `kept`: is it of before this epoch?"""

    def __init__(self, layout: Layout) -> None:
        self.memory: NodeMemory | None = None
        self.there, self.kept = CommittedKV(layout), False

    @property
    def origin(self) -> Shared | None:
        return self.memory.origin if self.memory is not None else None

    def forget(self) -> None:
        """It is computed again in the next epoch."""
        self.there = msgspec.structs.replace(self.there, num_blocks=0)

    def clear(self, layout: Layout) -> None:
        """No rank computes any more, and none goes on with what there is."""
        self.there = CommittedKV(layout, self.there.number + 1)
        if self.memory is not None:
            self.memory.clear()
