"""What is wrong with a field of a request, in words: each API that takes conversations says it alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planaria.errors import RequestError


def wrong(place: str, rule: str, code: str = "invalid_type") -> RequestError:
    """To be raised. place: of the field, and the error's `param`; rule: what must be, in place of what is."""
    return RequestError(f"{place} {rule}", param=place, code=code)


def said(value: object) -> str:
    """What was given, for an error: a text as it is, of anything else the kind."""
    return repr(value[:80]) if isinstance(value, str) else kind_of(value)


def kind_of(value: object) -> str:
    return "null" if value is None else type(value).__name__


def listed(given: object, place: str, *, one: str, most: int, parts: str, most_parts: int) -> Sequence[Any]:
    """A list with something in it and no more than may be, nor in the lists that are its objects' `content`. one: what
    it is a list of; parts: what these have. Raises RequestError."""
    if not isinstance(given, (list, tuple)):
        raise wrong(place, f"must be a list of {one}s, got {kind_of(given)}")
    if not given:
        raise wrong(place, f"is empty: it needs at least one {one}")
    if len(given) > most:
        raise wrong(place, f"has {len(given)} entries; at most {most}", "invalid_value")
    inside = sum(len(x["content"]) for x in given if isinstance(x, Mapping) and isinstance(x.get("content"), list))
    if inside > most_parts:
        raise wrong(place, f"has {inside} {parts}; at most {most_parts}", "invalid_value")
    return given
