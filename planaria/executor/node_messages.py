"""What a host of several nodes and their agents say to each other, as typed msgpack over the TCP link.

A node is here; then processes are started on it, told things and killed, each by its number, and it tells how they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.executor.link.codec import BAD_BYTES, Bytes, CodecError, said
from planaria.hosts.host import Program

PURPOSE = "nodes"  # of the keys


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """An agent's first words. address: by which others reach its node, as the way to the first one shows it. same: what
    must be equal on all nodes, by name. accelerators: their ids; home: see `planaria.node`; cores: that it may use."""

    node_rank: int
    node: str
    address: str
    pid: int
    same: dict[str, str]
    accelerators: tuple[int, ...] = ()
    home: str = ""
    cores: int = 1


class ChildNews(msgspec.Struct, frozen=True, array_like=True, tag="child_news"):
    """How a process is now: see Child. pid 0, and `ended`: it could not be started."""

    id: int
    pid: int
    said: str = ""
    ended: str = ""
    code: int = 0
    stopped: bool = False


class Leaves(msgspec.Struct, frozen=True, array_like=True, tag="leaves"):
    """The node is about to go: nothing is to be started on it any more."""


class AllEnded(msgspec.Struct, frozen=True, array_like=True, tag="all_ended"):
    """Answer to EndAll: no process is left."""


class Trouble(msgspec.Struct, frozen=True, array_like=True, tag="trouble"):
    """The agent could not do what it was told, or leaves; one line."""

    message: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to Here: this agent is its node's."""


class Spawn(msgspec.Struct, frozen=True, array_like=True, tag="spawn"):
    """Start a process, and tell it `boot`. Answered with ChildNews, as is all that becomes of it."""

    id: int
    slot: int
    entry: Program
    boot: bytes | None


class Tell(msgspec.Struct, frozen=True, array_like=True, tag="tell"):
    id: int
    message: bytes


class KillChild(msgspec.Struct, frozen=True, array_like=True, tag="kill"):
    id: int


class EndAll(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """See the ends of all processes: they end by themselves, or are killed when they take too long. last: so does the
    agent; else it waits for another who comes in place of this one."""

    last: bool = True


class NodeRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """This node can't take part; one line."""

    why: str


FromAgent = Here | ChildNews | Leaves | AllEnded | Trouble
ToAgent = Welcome | Spawn | Tell | KillChild | EndAll | NodeRefused

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
