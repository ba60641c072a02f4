"""A rank's side of a connector: what it does for `StepPlan.kv`, and what it says in `StepResult.kv`.

`begin` is called before a step computes and never waits for what is outside; what came of it `finished` says after
that step or a later one. Bytes come into a block only while its load isn't dropped, and only once they are known to be
the right ones. planaria.worker.kv_tier is one, for stores of blocks; the core's side is planaria.core.connector.
"""

from __future__ import annotations

from typing import Protocol

from planaria.protocol import KVNews, KVWork, StoreNews


class Unconnected:
    """A store that a rank has not, and says so (as kv_tier.StoreThreads is one that it has). why: in words."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why, self._said = name, why, False
        self._loads: list[tuple[int, int, float]] = []
        self._refused: list[bytes] = []

    def stored(self) -> bytes:
        return b""

    def has(self, key: bytes) -> bool:
        return False

    def begin(self, work: KVWork) -> None:
        self._loads += [(load.number, 0, 0.0) for load in work.loads]
        self._refused += [key for key, _ in work.saves]

    def finished(self) -> KVNews | None:
        if self._said and not (self._loads or self._refused):
            return None
        news = KVNews(tuple(self._loads), refused=tuple(self._refused), stores={self.name: StoreNews(why=self.why)})
        self._said, self._loads, self._refused = True, [], []
        return news

    def close(self, *, last: bool) -> None:
        """Nothing is open."""


class RankConnector(Protocol):
    """Of one rank in one epoch."""

    def stored(self) -> dict[str, bytes]:
        """The keys that this rank could bring back, by store, one behind the other."""

    def begin(self, work: KVWork) -> None:
        """Heed what is dropped, begin with loads, take the bytes of blocks that are to be saved."""

    def finished(self, *, waits: bool) -> KVNews | None:
        """What has been done since the last time; waits: a moment, until there is something."""

    def close(self, *, last: bool) -> None:
        """Write into no block any more. last: the process ends, so what was taken is saved now, as far as that takes no
        long time."""
