"""What a request asks its output to be, as something a grammar can be made of. Pure.

A refusal names the place: the path within the parameter.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from planaria.errors import RequestError
from planaria.types import StructuredOutputsParams

MAX_GRAMMAR = 1 << 17  # characters of a schema, expression or grammar
MAX_DEPTH = 64  # levels of a schema, and of parentheses in an expression or grammar
MAX_CHOICES = 4096
MAX_TAGS = 128  # structures of a structural tag, and triggers
_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})  # by names
_VALUES = frozenset({"const", "enum", "default", "examples"})  # that are no schemas
# Between the parts of JSON: a few blanks, or one line's end with its indentation. The library allows any number, which
# a model may go on with for ever.
WHITESPACE = r"[ \t]{1,8}|\r?\n[ \t]{0,64}"


class OutputForm(msgspec.Struct, frozen=True, array_like=True):
    """What a grammar is made of. kind: json (of a schema), regex, grammar, choice or tags; body: a schema, a text, or
    what `_tags` gives."""

    kind: str
    body: Any


def place_of(params: StructuredOutputsParams, place: str) -> str:
    """Of what is asked for, in a field that says it in its own way. Raises RequestError."""
    if place == "response_format" and params.form == "json":
        return f"{place}.json_schema.schema"
    if place == "text.format" and params.form == "json":
        return f"{place}.schema"
    return f"{place}.{params.form}" if place == "structured_outputs" else place


def field_of(place: str) -> str:
    """The field that an error is said to be in."""
    return "text.format" if place.startswith("text.format") else place.partition(".")[0]


def form_of(params: StructuredOutputsParams, place: str) -> OutputForm:
    """Raises RequestError; place: the field of a request that the parameters are in."""
    form, own = params.form, place_of(params, place)
    given: Any = getattr(params, form)
    if form == "json_object":
        return _schema({"type": "object"}, params, own)
    if form == "json":
        return _schema(given, params, own)
    for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(params, name):
            raise _refusal(place, f"{name} is for JSON, and this is {form}")
    if form == "choice":
        length = sum(map(len, given))
        if len(given) > MAX_CHOICES or length > MAX_GRAMMAR:
            raise _refusal(
                own, f"has {len(given)} strings of {length} characters; at most {MAX_CHOICES} of {MAX_GRAMMAR}"
            )
        if not given or not all(isinstance(text, str) and text for text in given):
            raise _refusal(own, "must be a list of one string or more, none empty")
        return OutputForm("choice", list(dict.fromkeys(given)))
    if form == "structural_tag":
        return OutputForm("tags", _tags(_decoded(given, own), params, own))
    if len(given) > MAX_GRAMMAR:
        raise _refusal(own, f"has {len(given)} characters; at most {MAX_GRAMMAR}")
    if (depth := _nesting(given)) > MAX_DEPTH:
        raise _refusal(own, f"has {depth} levels of parentheses; at most {MAX_DEPTH}")
    return OutputForm(form, given)


def _refusal(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}", param=field_of(place), code="invalid_value")


def _decoded(given: Any, place: str) -> Any:
    """JSON, if it is a text."""
    if not isinstance(given, str):
        return given
    if len(given) > MAX_GRAMMAR:
        raise _refusal(place, f"has {len(given)} characters; at most {MAX_GRAMMAR}")
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError) as e:
        raise _refusal(place, f"is not valid JSON: {e}") from None


def _schema(given: Any, params: StructuredOutputsParams, place: str) -> OutputForm:
    return OutputForm("json", _checked(_decoded(given, place), params, place))


def _checked(schema: Any, params: StructuredOutputsParams, place: str) -> dict[str, Any]:
    """A schema that is one by its size and its depth, with what may stand between its parts."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refusal(place, f"must be a JSON Schema, an object; it is {_kind(schema)}")
    if (found := _fault(schema)) is not None:
        way, what = found
        raise _refusal(".".join([place, *way[:8], *(["…"] if len(way) > 8 else [])]), what)
    try:
        size = len(msgspec.json.encode(schema))
    except (TypeError, ValueError, OverflowError) as e:
        raise _refusal(place, f"is not JSON: {e}") from None
    if size > MAX_GRAMMAR:
        raise _refusal(place, f"has {size} bytes as JSON; at most {MAX_GRAMMAR}")
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    own = schema.get("x-guidance")
    if params.disable_additional_properties:
        schema = _closed(schema)
    return {**schema, "x-guidance": {**options, **(own if isinstance(own, dict) else {})}}


def _closed(schema: Any) -> Any:
    """Objects whose properties are listed have no others, unless their schema says which. No deeper than MAX_DEPTH."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS and isinstance(value, dict):
            found[name] = {key: _closed(one) for key, one in value.items()}
        elif name not in _VALUES:
            found[name] = _closed(value)
    if "properties" in found or "patternProperties" in found:
        found.setdefault("additionalProperties", False)
    return found


def _fault(schema: dict[str, Any]) -> tuple[list[str], str] | None:
    """The way to a part that can't be in a schema, and what is wrong with it. Not recursive; objects of Python may hold
    themselves, and others any number of times."""
    left: list[tuple[Any, int, Any]] = [(schema, 0, None)]  # a part, its level, and its place as `_way` has it
    seen = 0
    while left:
        node, depth, at = left.pop()
        seen += 1
        if isinstance(node, float) and not math.isfinite(node):
            return _way(at), f"is {node}, and JSON has no such number"
        if not isinstance(node, dict | list | tuple):
            continue
        if depth > MAX_DEPTH:
            return _way(at), f"is deeper than {MAX_DEPTH} levels"
        if seen + len(node) > MAX_GRAMMAR:
            return _way(at), f"has more than {MAX_GRAMMAR} values in all"
        left += [(below, depth + 1, (name, at)) for name, below in (
            node.items() if isinstance(node, dict) else enumerate(node))
            if isinstance(below, dict | list | tuple | float)]  # fmt: skip
    return None


def _way(at: Any) -> list[str]:
    """at: a name and, of what that is in, the same; None: the whole."""
    names: list[str] = []
    while at is not None:
        name, at = at
        names.append(str(name)[:40])
    return names[::-1]


def _nesting(text: str) -> int:
    """Levels of parentheses, at most: those of literals count, too, but only what closes is taken away."""
    depth = most = 0
    for char in text:
        if char in "([{":
            depth += 1
            most = max(most, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return most


def _tags(given: Any, params: StructuredOutputsParams, place: str) -> list[list[Any]]:
    """[trigger, what follows it before the schema, the schema, what comes after it] for each structure: text is free
    until a trigger comes, and from there on must be one of the structures that begin with it."""
    if not isinstance(given, dict):
        raise _refusal(place, f"must be an object; it is {_kind(given)}")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise _refusal(place, "must have lists `structures` and `triggers`, none empty")
    if len(structures) > MAX_TAGS or len(triggers) > MAX_TAGS:
        raise _refusal(place, f"has {len(structures)} structures and {len(triggers)} triggers; at most {MAX_TAGS}")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _refusal(f"{place}.triggers", "must be strings, none empty")
    found = []
    for i, structure in enumerate(structures):
        at = f"{place}.structures.{i}"
        begin, end = (structure.get(name) for name in ("begin", "end")) if isinstance(structure, dict) else (None, None)
        if not isinstance(begin, str) or not isinstance(end, str):
            raise _refusal(at, "must have strings `begin` and `end`, and a `schema`")
        trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise _refusal(f"{at}.begin", "begins with no trigger")
        schema = _checked(_decoded(structure.get("schema", {}), f"{at}.schema"), params, f"{at}.schema")
        found.append([trigger, begin[len(trigger) :], schema, end])
    return found


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", type(None): "null"}
    return names.get(type(value), type(value).__name__)
