"""Before there is a link: where a rank came up, and all that it needs to begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from planaria.config.options import EngineConfig
from planaria.errors import PlanariaError
from planaria.executor.link.address import Address
from planaria.executor.link.codec import BAD_BYTES
from planaria.hosts.host import Place
from planaria.logs import current_level
from planaria.node import Memories
from planaria.topology.experts import Maps

SPARE = -1  # the rank of a process that waits to become one
READY = "ready"  # what it says when it has prepared what it was told to


class RankBoot(msgspec.Struct, frozen=True, array_like=True):
    """All that a rank needs. Holds secrets (in `link`): handed over by pipe or by a connection that is private.

    threads: of this rank. lanes: the fewest threads that any rank has. crowded: this node's ranks have more threads
    than it has cores, so nobody spins. experts_sent: other ranks will send it whole experts, so it reads none.
    memories: of its node, for its KV and weights. beside: ranks of this node whose weights it packs into that memory
    while they compute with others; maps: where these have whole experts, by layer.
    """

    config: EngineConfig
    place: Place
    link: Address
    threads: int
    lanes: int
    crowded: bool
    log_level: str = "info"
    experts_sent: bool = False
    memories: Memories = Memories()
    beside: tuple[int, ...] = ()
    maps: Maps = ()

    @property
    def rank(self) -> int:
        return self.place.rank

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RankBoot:
        """Raises PlanariaError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except BAD_BYTES as e:
            raise PlanariaError(f"not what a rank is started with: {e}") from None


class Addresses(Protocol):
    def address_of(self, rank: int) -> Address: ...


def boots_for(
    config: EngineConfig, places: Sequence[Place], link: Addresses, memories: Memories = Memories()
) -> list[RankBoot]:
    """One for each place. Threads are dealt by node: those that were asked for, or the node's cores over the engines
    there, and over their ranks. memories: of a node."""
    given = None if config.device.auto_threads else config.device.threads
    ranks_at = Counter({home: ranks * config.device.sharers for home, ranks in Counter(p.home for p in places).items()})
    threads = [given or max(1, place.cores // ranks_at[place.home]) for place in places]
    return [
        RankBoot(
            config, place, link.address_of(place.rank), own, min(threads), own * ranks_at[place.home] > place.cores,
            current_level(), memories=memories if place.home == memories.home else Memories(),
        )
        for place, own in zip(places, threads, strict=True)
    ]  # fmt: skip
