"""What a server and the agents of other nodes say to each other about engines, as typed msgpack over the TCP link.

An engine's process has a number, so that nothing said of one is taken for news of the next. Configurations are encoded
EngineConfigs, of the server's node: an agent puts in what is its own node's.
"""

from __future__ import annotations

import msgspec

from planaria.executor.link.keys import Keys
from planaria.executor.node_messages import AgentCodec, AllEnded, End, Here, Refused, Trouble, Welcome

PURPOSE = "engines"  # of the keys


class StartEngine(msgspec.Struct, frozen=True, array_like=True, tag="start_engine"):
    """Have a process of this engine, and no other. seat: which of the node's engines it is; keys: who may come to it;
    again: another served before it. Answered with Listening or EngineEnded."""

    engine: int
    number: int
    seat: int
    config: bytes
    keys: Keys
    again: bool


class EndEngine(msgspec.Struct, frozen=True, array_like=True, tag="end_engine"):
    """Kill its process, if that is still the one. EngineEnded follows."""

    engine: int
    number: int


class TakePart(msgspec.Struct, frozen=True, array_like=True, tag="take_part"):
    """Be one of the nodes of an engine that is on another: its ranks are started when it asks for them."""

    engine: int
    seat: int
    config: bytes


class LeavePart(msgspec.Struct, frozen=True, array_like=True, tag="leave_part"):
    """That engine doesn't come again."""

    engine: int


class Listening(msgspec.Struct, frozen=True, array_like=True, tag="listening"):
    """An engine's process is there, and loads."""

    engine: int
    number: int
    pid: int
    address: str


class EngineEnded(msgspec.Struct, frozen=True, array_like=True, tag="engine_ended"):
    """spoke: it has said why, to those who heard it."""

    engine: int
    number: int
    how: str
    spoke: bool


class Leaves(msgspec.Struct, frozen=True, array_like=True, tag="leaves"):
    """The node is about to go: no engine is to be started on it any more."""


FromNode = Here | Listening | EngineEnded | Leaves | AllEnded | Trouble
ToNode = Welcome | StartEngine | EndEngine | TakePart | LeavePart | End | Refused

_codec: AgentCodec[FromNode, ToNode] = AgentCodec(FromNode, ToNode)
encode, decode = _codec.encode, _codec.decode
encode_from_node, decode_to_node = _codec.encode_from, _codec.decode_to
