"""What a driver and the agents of other nodes say to each other, as typed msgpack over the TCP link.

A node is here, is told which ranks it has, then what each of them begins with; it tells of their ends.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from planaria.executor.boot import Place, Room
from planaria.executor.link.codec import BAD_BYTES, Bytes, CodecError, said

PURPOSE = "nodes"  # of the keys

F = TypeVar("F")
T = TypeVar("T")


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """An agent's first words. address: by which others reach its node, as the way to the driver shows it. same: what
    must be equal on all nodes, by name. accelerators: how many its node has. spares: that it keeps."""

    node_rank: int
    node: str
    address: str
    pid: int
    same: dict[str, str]
    accelerators: int = 0
    spares: int = 0


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """Answer to Arrange: where all its ranks are now, and the room there. why: these aren't those asked for."""

    places: tuple[Place, ...]
    room: Room
    why: str = ""


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag="prepared"):
    """Answer to Prepare, and news when a spare has got ready or ended: the room as it is now."""

    room: Room


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A rank's process ended though nobody asked."""

    pid: int
    how: str


class AllEnded(msgspec.Struct, frozen=True, array_like=True, tag="all_ended"):
    """Answer to End: no process of a rank is left."""


class Trouble(msgspec.Struct, frozen=True, array_like=True, tag="trouble"):
    """The agent could not do what it was told, or leaves; one line."""

    message: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to Here: this agent is its node's."""


class Arrange(msgspec.Struct, frozen=True, array_like=True, tag="arrange"):
    """See the ends of `lost` for certain, then have exactly `ranks`: those that live keep their processes, or hand them
    on. slots: for so many ranks, where no accelerators count them. Answered with Started."""

    lost: tuple[int, ...]
    ranks: tuple[int, ...]
    slots: int


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Have spares for what is missing to so many ranks, and those that were asked for; boot: what they begin with.
    Answered with Prepared."""

    ranks: int
    slots: int
    boot: bytes


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag="give_up"):
    """What was started for these ranks ended again and again."""

    ranks: tuple[int, ...]


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """An encoded RankBoot for each rank."""

    boots: tuple[bytes, ...]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """See all ranks' ends: kill: at once; else they end by themselves, or are killed when they take too long. last: so
    does the agent; else it waits for another driver."""

    kill: bool
    last: bool = True


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """This node can't take part; one line."""

    why: str


FromAgent = Here | Started | Prepared | Ended | AllEnded | Trouble
ToAgent = Welcome | Arrange | Prepare | GiveUp | Run | End | Refused

class AgentCodec(Generic[F, T]):
    """Between messages and bytes. F, T: unions of what comes from agents and of what goes to them. Bytes that are no
    message never raise here."""

    def __init__(self, from_agent: Any, to_agent: Any) -> None:
        self._from = from_agent
        self._encoder = msgspec.msgpack.Encoder()
        self._from_decoder: msgspec.msgpack.Decoder[F] = msgspec.msgpack.Decoder(from_agent)
        self._to_decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(to_agent)

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: Bytes, place: int) -> F | Trouble:
        """What the agent at `place` of the link said; Trouble where the bytes are no message."""
        try:
            return self._from_decoder.decode(data)
        except BAD_BYTES as e:
            return Trouble(f"what it said can't be read: {said(e)}")

    def encode_from(self, place: int, message: Any) -> bytes:
        """What isn't one of an agent's messages is what a port says by itself about bytes that it could not read."""
        if not isinstance(message, self._from):
            message = Trouble(str(getattr(message, "message", message)))
        return self._encoder.encode(message)

    def decode_to(self, data: Bytes) -> T | CodecError:
        try:
            return self._to_decoder.decode(data)
        except BAD_BYTES as e:
            return CodecError(f"not a message to an agent: {said(e)}")


_codec: AgentCodec[FromAgent, ToAgent] = AgentCodec(FromAgent, ToAgent)
encode, decode = _codec.encode, _codec.decode
encode_from_agent, decode_to_agent = _codec.encode_from, _codec.decode_to
