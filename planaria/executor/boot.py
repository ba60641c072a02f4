"""What launchers and ranks say to each other before there is a link: where a rank came up, and all it needs to begin."""

from __future__ import annotations

import msgspec

from planaria.config.options import EngineConfig
from planaria.errors import PlanariaError
from planaria.executor.link.address import Address


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank came up, as its launcher saw it. home: see `planaria.node`; address: by which other nodes reach it;
    cores: that its node gives to all its ranks together; devices: ids of the accelerators that are its own."""

    rank: int
    home: str
    node: str
    address: str = "127.0.0.1"
    pid: int = 0
    cores: int = 1
    devices: tuple[int, ...] = ()


class RankBoot(msgspec.Struct, frozen=True, array_like=True):
    """All that a rank needs. Holds secrets (in `link`): handed over by pipe or by a connection that is private.

    threads: of this rank. lanes: the fewest threads that any rank has. crowded: this node's ranks have more threads
    than it has cores, so nobody spins.
    """

    config: EngineConfig
    place: Place
    link: Address
    threads: int
    lanes: int
    crowded: bool
    log_level: str = "info"

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
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise PlanariaError(f"not what a rank is started with: {e}") from None
