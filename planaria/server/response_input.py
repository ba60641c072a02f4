"""The input of a response: a text, or messages of texts, as items and as a conversation for a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planaria.errors import RequestError
from planaria.server.records import InputMessage

MAX_ITEMS = 16_384  # of an input, with those of the responses before it
MAX_TEXTS = 16_384  # content parts of all items together
ROLES = ("user", "assistant", "system", "developer")
MAX_CONVERSATION = 8 << 20  # characters of the responses that another goes on from
_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # and where their text is
_STATUSES = ("in_progress", "completed", "incomplete")
_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})


def items_of(given: Any, uid: str) -> list[InputMessage]:
    """Of a request whose id is `uid`. Raises RequestError, whose `param` is the place of what is wrong."""
    if isinstance(given, str):
        return [InputMessage(f"msg_{uid}0", "user", [given])]
    if not isinstance(given, list):
        raise _wrong("input", "must be a string or a list of items")
    if not given:
        raise _wrong("input", "is empty: it needs at least one item", "invalid_value")
    if len(given) > MAX_ITEMS:
        raise _wrong("input", f"has {len(given)} items; at most {MAX_ITEMS}", "invalid_value")
    parts = sum(len(one["content"]) for one in given if type(one) is dict and type(one.get("content")) is list)
    if parts > MAX_TEXTS:
        raise _wrong("input", f"has {parts} content parts; at most {MAX_TEXTS}", "invalid_value")
    return [_item(one, f"input[{i}]", f"msg_{uid}{i}") for i, one in enumerate(given)]


def _item(given: Any, place: str, id: str) -> InputMessage:
    if not isinstance(given, Mapping):
        raise _wrong(place, "must be an object with role and content")
    kind = given.get("type")
    if kind is not None and kind != "message":
        raise _wrong(
            f"{place}.type", f"must be 'message' (items of no other type are supported), got {_said(kind)}",
            "unsupported_content",
        )  # fmt: skip
    unknown = next((name for name, value in given.items() if name not in _FIELDS and value is not None), None)
    if unknown is not None:
        raise _wrong(f"{place}.{unknown[:80]}", "is no field of a message", "unknown_parameter")
    for name in ("id", "phase"):
        if not isinstance(given.get(name), str | None):
            raise _wrong(f"{place}.{name}", "must be a string")
    if given.get("status") not in (None, *_STATUSES):
        raise _wrong(f"{place}.status", f"must be one of {', '.join(_STATUSES)}", "invalid_value")
    role = given.get("role")
    if role not in ROLES:
        raise _wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {_said(role)}", "invalid_value")
    content = given.get("content")
    if isinstance(content, str):
        return InputMessage(id, role, [content])
    if not isinstance(content, list) or not content:
        raise _wrong(f"{place}.content", "must be a string or a list of parts, not empty")
    return InputMessage(id, role, [_text(part, role, f"{place}.content[{i}]") for i, part in enumerate(content)])


def _text(part: Any, role: str, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    wanted = ("output_text", "refusal") if role == "assistant" else ("input_text",)
    if not isinstance(kind, str) or kind not in wanted:
        raise _wrong(
            f"{place}.type", f"must be {' or '.join(map(repr, wanted))} in a message of role {role!r} (no other part "
            f"is supported), got {_said(kind)}", "unsupported_content",
        )  # fmt: skip
    if not all(isinstance(part.get(name), str | None) for name in _PARTS.values()):
        raise _wrong(place, "has a text that is no string")
    text = part.get(_PARTS[kind])
    if not isinstance(text, str):
        raise _wrong(f"{place}.{_PARTS[kind]}", "must be a string")
    return text


def conversation_of(items: list[InputMessage], instructions: str | None) -> list[dict[str, Any]]:
    """As a chat template takes it."""
    messages = [{"role": item.role, "content": "\n".join(item.texts)} for item in items]
    return [{"role": "system", "content": instructions}, *messages] if instructions is not None else messages


def turns(items: list[InputMessage]) -> list[int]:
    """Where a conversation may begin: at its beginning, and with each further message of the user's."""
    return [0, *[i for i, item in enumerate(items) if item.role == "user" and i][bool(items[0].role != "user") :]]


def from_turn(items: list[InputMessage], at: int) -> list[InputMessage]:
    """The conversation from there on, with what system and developer have said before."""
    return [*(item for item in items[:at] if item.role in ("system", "developer")), *items[at:]]


def _said(value: object) -> str:
    return repr(value[:80]) if isinstance(value, str) else "null" if value is None else type(value).__name__


def _wrong(place: str, rule: str, code: str = "invalid_type") -> RequestError:
    return RequestError(f"{place} {rule}", param=place, code=code)
