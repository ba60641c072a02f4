"""What is kept of a response, as records of a file, and back. Pure.

A file is a `Head` and then what came of it, each record behind its length and a checksum of both. What a death leaves
half written at the end, and whatever follows a byte that is not what was written, is no record: `scan` says where the
records end. A piece and the end that it brings are one record, so no end is ever lost between the two.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from planaria.parsers.reading import Reading
from planaria.wire import Submit

FRAME = 8  # bytes before a record: its length and its checksum
MAX_RECORD = 64 << 20  # bytes


class ConversationItem(msgspec.Struct, frozen=True, array_like=True):
    """Of the input. kind: the role of a message, or function_call, function_call_output or reasoning; texts: of its
    parts, or a call's arguments as JSON; call_id: of a call and of its output; name: of the function."""

    id: str
    kind: str
    texts: list[str]
    call_id: str = ""
    name: str = ""


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """What was asked for. owner: whose it is; fits: the model that it was asked of; fields: those of the request that
    an answer repeats; items: the whole conversation; submit: None where it has ended; key, digest: of a request that
    brought an `Idempotency-Key`; reading: how its text is taken apart, None: it is one message."""

    id: str
    owner: str
    created: int
    background: bool
    model: str
    fits: str
    fields: dict[str, Any]
    items: list[ConversationItem]
    submit: Submit | None = None
    key: str = ""
    digest: str = ""
    reading: Reading | None = None

    @property
    def uid(self) -> str:
        return self.id.partition("_")[2]


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """status: completed, incomplete, cancelled or failed; error: why it failed; the rest: tokens, those of the
    prompt that came from the prefix cache and that went into it, and those of the output up to the reasoning's end."""

    status: str
    at: int
    error: str = ""
    prompt: int = 0
    output: int = 0
    cached: int = 0
    added: int = 0
    reasoning: int = 0


class PieceRecord(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """A piece: what a client is told at a time. weights: the number of those that drew its tokens."""

    tokens: list[int] = []
    text: str = ""
    end: Outcome | None = None
    weights: int = 0


class Again(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """Another process begins to go on with it."""


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """All that came of one that has ended. lengths: of the pieces of its text, in characters; weights: see
    `version_runs`; pieces: the same by pieces."""

    lengths: list[int]
    text: str
    end: Outcome
    weights: list[tuple[int, int]] = []
    pieces: list[tuple[int, int]] = []


Record = Head | PieceRecord | Again | Whole

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def drawn(versions: list[tuple[int, int]], have: int, number: int) -> None:
    """Another token, after `have`, is of weights of this number. versions: from which token on, and their number;
    before them it is 0."""
    if (versions[-1][1] if versions else 0) != number:
        versions.append((have, number))


def version_runs(versions: list[tuple[int, int]], first: int = 0) -> list[tuple[int, int]]:
    """From which token on, of those from `first` on, which weights."""
    before = next((number for at, number in reversed(versions) if at <= first), 0)
    return [(first, before), *(run for run in versions if run[0] > first)]


def frame(record: Record) -> bytes:
    payload = _encode(record)
    size = len(payload).to_bytes(4, "little")
    return size + zlib.crc32(payload, zlib.crc32(size)).to_bytes(4, "little") + payload


def scan(data: bytes) -> tuple[list[Record], int]:
    """The records of a file from its beginning, and where they end: at its end, or at the first that isn't whole."""
    found: list[Record] = []
    at = 0
    while at + FRAME <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        payload = data[at + FRAME : at + FRAME + size]
        if size > MAX_RECORD or len(payload) < size:
            break
        if zlib.crc32(payload, zlib.crc32(data[at : at + 4])) != int.from_bytes(data[at + 4 : at + FRAME], "little"):
            break
        try:
            found.append(_decode(payload))
        except msgspec.DecodeError:  # of another version
            break
        at += FRAME + size
    return found, at
