"""The input of a response: a text, or messages of texts, as items and as a conversation for a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planaria.server.records import InputMessage
from planaria.server.wrong import listed, said, wrong

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
    given = listed(given, "input", one="item", most=MAX_ITEMS, parts="content parts", most_parts=MAX_TEXTS)
    return [_item(one, f"input[{i}]", f"msg_{uid}{i}") for i, one in enumerate(given)]


def _item(given: Any, place: str, id: str) -> InputMessage:
    if not isinstance(given, Mapping):
        raise wrong(place, "must be an object with role and content")
    kind = given.get("type")
    if kind is not None and kind != "message":
        raise wrong(
            f"{place}.type", f"must be 'message' (items of no other type are supported), got {said(kind)}",
            "unsupported_content",
        )  # fmt: skip
    unknown = next((name for name, value in given.items() if name not in _FIELDS and value is not None), None)
    if unknown is not None:
        raise wrong(f"{place}.{unknown[:80]}", "is no field of a message", "unknown_parameter")
    for name in ("id", "phase"):
        if not isinstance(given.get(name), str | None):
            raise wrong(f"{place}.{name}", "must be a string")
    if given.get("status") not in (None, *_STATUSES):
        raise wrong(f"{place}.status", f"must be one of {', '.join(_STATUSES)}", "invalid_value")
    role = given.get("role")
    if role not in ROLES:
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {said(role)}", "invalid_value")
    content = given.get("content")
    if isinstance(content, str):
        return InputMessage(id, role, [content])
    if not isinstance(content, list) or not content:
        raise wrong(f"{place}.content", "must be a string or a list of parts, not empty")
    return InputMessage(id, role, [_text(part, role, f"{place}.content[{i}]") for i, part in enumerate(content)])


def _text(part: Any, role: str, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    wanted = ("output_text", "refusal") if role == "assistant" else ("input_text",)
    if not isinstance(kind, str) or kind not in wanted:
        raise wrong(
            f"{place}.type", f"must be {' or '.join(map(repr, wanted))} in a message of role {role!r} (no other part "
            f"is supported), got {said(kind)}", "unsupported_content",
        )  # fmt: skip
    if not all(isinstance(part.get(name), str | None) for name in _PARTS.values()):
        raise wrong(place, "has a text that is no string")
    text = part.get(_PARTS[kind])
    if not isinstance(text, str):
        raise wrong(f"{place}.{_PARTS[kind]}", "must be a string")
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
