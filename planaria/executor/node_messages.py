"""What a driver and the agents of other nodes say to each other, as typed msgpack over the TCP link.

A node is here, is told to start its ranks, then what each of them begins with; it tells of their ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.executor.boot import Place
from planaria.executor.link.codec import BAD_BYTES, Bytes, CodecError, said

PURPOSE = "nodes"  # of the keys


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """An agent's first words. address: by which others reach its node, as the way to the driver shows it. same: what
    must be equal on all nodes, by name."""

    node_rank: int
    node: str
    address: str
    pid: int
    same: dict[str, str]


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """Answer to Start and Replace: where all its ranks are now."""

    places: tuple[Place, ...]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A rank's process ended, asked or not."""

    rank: int
    how: str


class AllEnded(msgspec.Struct, frozen=True, array_like=True, tag="all_ended"):
    """Answer to End: no process of a rank is left."""


class Trouble(msgspec.Struct, frozen=True, array_like=True, tag="trouble"):
    """The agent could not do what it was told, or leaves; one line."""

    message: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to Here: this agent is its node's. It waits for the other nodes now."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Make processes for these ranks."""

    ranks: tuple[int, ...]


class Replace(msgspec.Struct, frozen=True, array_like=True, tag="replace"):
    """See these ranks' ends for certain and make other processes in their place. Answered with Started."""

    ranks: tuple[int, ...]


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """An encoded RankBoot for each rank."""

    boots: tuple[bytes, ...]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """See all ranks' ends: kill: at once; else they end by themselves, or are killed when they take too long."""

    kill: bool


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """This node can't take part; one line."""

    why: str


FromAgent = Here | Started | Ended | AllEnded | Trouble
ToAgent = Welcome | Start | Replace | Run | End | Refused

_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


def encode(message: ToAgent) -> bytes:
    return _encoder.encode(message)


def decode(data: Bytes, place: int) -> FromAgent:
    """What the agent at `place` of the link said; Trouble where the bytes are no message."""
    try:
        return _from_agent.decode(data)
    except BAD_BYTES as e:
        return Trouble(f"what it said can't be read: {said(e)}")


def encode_from_agent(place: int, message: Any) -> bytes:
    """What isn't one of an agent's messages is what a port says by itself about bytes that it could not read."""
    if not isinstance(message, FromAgent):
        message = Trouble(str(getattr(message, "message", message)))
    return _encoder.encode(message)


def decode_to_agent(data: Bytes) -> ToAgent | CodecError:
    try:
        return _to_agent.decode(data)
    except BAD_BYTES as e:
        return CodecError(f"not a message to an agent: {said(e)}")
