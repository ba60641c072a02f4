"""Where a rank finds its end of a link: all that it needs to open it. Invitations contain secrets."""

from __future__ import annotations

import msgspec

from planaria.executor.link.faults import RankPort
from planaria.node import Shared


class Inside(msgspec.Struct, frozen=True, array_like=True, tag="inside"):
    """No address: the rank is called directly."""


class ShmAddress(msgspec.Struct, frozen=True, array_like=True, tag="shm"):
    """A shared-memory link's place for one rank."""

    memory: Shared
    rank: int


class TcpAddress(msgspec.Struct, frozen=True, array_like=True, tag="tcp"):
    """An encoded Invitation."""

    invitation: bytes


Address = Inside | ShmAddress | TcpAddress


def open_port(address: Address) -> RankPort:
    """A rank's end. Raises LinkError, Gone."""
    match address:
        case ShmAddress():
            from planaria.executor.link.shm import ShmPort

            return ShmPort(address.memory.open(), address.rank)
        case TcpAddress():
            from planaria.executor.link.keys import Invitation
            from planaria.executor.link.tcp_port import TcpPort

            return TcpPort(Invitation.decode(address.invitation))
        case Inside():
            raise ValueError("a rank that is called directly has no port")
