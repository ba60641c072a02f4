"""A request's body out of JSON. The library lets no other thread run while it reads, and others have their turn only
between two of its calls: a large body is read in pieces, each of which takes a millisecond or two.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.errors import RequestError

PIECE = 1 << 16  # bytes, or entries of a list
TRIES = 8  # to find the end of an entry near the end of a piece
MAX_NAMES = 1 << 14  # in an object that is a field, at any depth
_END = {b"[": b"],", b"{": b"},", b'"': b'",'}  # of an entry that begins so, and another follows

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_entries = msgspec.json.Decoder(list[Any]).decode


def decode(body: bytes) -> Any:
    """Raises RequestError, UnicodeDecodeError, RecursionError, msgspec.DecodeError."""
    if len(body) <= PIECE or body[:PIECE].lstrip()[:1] != b"{":
        return msgspec.json.decode(body)
    return {name: _value(name, bytes(raw)) for name, raw in _fields(body).items()}


def _value(name: str, raw: bytes, deep: bool = True) -> Any:
    if len(raw) <= PIECE or raw[:1] not in b"[{":
        return msgspec.json.decode(raw)
    if raw[:1] == b"[":
        return _list(raw)
    names = raw.count(b'":') - raw.count(b'\\":')  # not those in texts
    if names > MAX_NAMES:
        raise RequestError(f"{name} has {names} names; at most {MAX_NAMES}", param=name, code="invalid_value")
    return (
        {n: _value(name, bytes(part), False) for n, part in _fields(raw).items()} if deep else msgspec.json.decode(raw)
    )


def _list(raw: bytes) -> list[Any]:
    """A piece that ends anywhere but behind an entry can't be read, so one that can be is right."""
    found, start, tries = list[Any](), 1, 0
    end = start + PIECE
    while tries < TRIES:
        separator = _END.get(raw[start : start + PIECE].lstrip()[:1], b",")
        if (at := raw.find(separator, end)) < 0:
            break
        end = at + len(separator)
        try:
            found += _entries(b"[%b]" % raw[start : end - 1])
        except (msgspec.DecodeError, UnicodeDecodeError):
            tries += 1
        else:
            start, end, tries = end, end + PIECE, 0
    return found + _entries(b"[" + raw[start:])


def all_are(kind: type, values: list[Any]) -> bool:
    """Are they of this type, and of none derived from it?"""
    return all(set(map(type, values[i : i + PIECE])) <= {kind} for i in range(0, len(values), PIECE))
