"""The input of a response: a text, or items (messages of texts, calls of functions and what came of them, reasoning),
as they are kept, and as a conversation for a chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planaria.server.records import ConversationItem
from planaria.server.wrong import listed, said, wrong

MAX_ITEMS = 16_384  # of an input, with those of the responses before it
MAX_TEXTS = 16_384  # content parts of all items together
MAX_ITEM_ID = 128  # characters of an item's id, a call's too
ROLES = ("user", "assistant", "system", "developer")
MAX_CONVERSATION = 8 << 20  # characters of the responses that another goes on from
_TEXT = {"input_text": "text", "output_text": "text", "refusal": "refusal", "reasoning_text": "text",
         "summary_text": "text"}  # and where their text is  # fmt: skip
_STATUSES = ("in_progress", "completed", "incomplete")
_FIELDS = {
    "message": frozenset({"type", "role", "content", "id", "status", "phase"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "arguments", "status"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
    "reasoning": frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
    "item_reference": frozenset({"type", "id"}),
}
_SHORT = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

Find = Callable[[str, str], ConversationItem]


def items_of(given: Any, uid: str, find: Find) -> list[ConversationItem]:
    """Of a request whose id is `uid`. find: an item that is kept, by its id, for the field at a place. Raises
    RequestError, whose `param` is the place of what is wrong."""
    if isinstance(given, str):
        return [ConversationItem(f"msg_{uid}0", "user", [given])]
    given = listed(given, "input", one="item", most=MAX_ITEMS, parts="content parts", most_parts=MAX_TEXTS)
    return [_item(one, f"input[{i}]", f"{uid}{i}", find) for i, one in enumerate(given)]


def refers(given: Any) -> bool:
    """Is anything in an input kept elsewhere?"""
    given = given if isinstance(given, list) else ()
    return any(isinstance(one, Mapping) and _kind(one) == "item_reference" for one in given)


def _kind(given: Mapping[str, Any]) -> Any:
    kind = given.get("type")
    if kind is None:
        kind = "item_reference" if "role" not in given and isinstance(given.get("id"), str) else "message"
    return kind


def _item(given: Any, place: str, number: str, find: Find) -> ConversationItem:
    if not isinstance(given, Mapping):
        raise wrong(place, "must be an object: a message, or an item of another type")
    kind = _kind(given)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise wrong(
            f"{place}.type", f"must be one of {', '.join(_FIELDS)} (items of no other type are supported), got "
            f"{said(kind)}", "unsupported_content",
        )  # fmt: skip
    unknown = next((name for name, value in given.items() if name not in _FIELDS[kind] and value is not None), None)
    if unknown is not None:
        raise wrong(f"{place}.{unknown[:80]}", f"is no field of a {kind}", "unknown_parameter")
    for name in ("id", "phase"):
        if not isinstance(given.get(name), str | None):
            raise wrong(f"{place}.{name}", "must be a string")
    if given.get("status") not in (None, *_STATUSES):
        raise wrong(f"{place}.status", f"must be one of {', '.join(_STATUSES)}", "invalid_value")
    if kind == "item_reference":
        return find(_string(given, "id", place, MAX_ITEM_ID), f"{place}.id")
    id = f"{_SHORT[kind]}_{number}"
    match kind:
        case "function_call":
            call, name = _string(given, "call_id", place, MAX_ITEM_ID), _string(given, "name", place, MAX_ITEM_ID)
            return ConversationItem(id, kind, [_string(given, "arguments", place)], call, name)
        case "function_call_output":
            call = _string(given, "call_id", place, MAX_ITEM_ID)
            return ConversationItem(id, kind, _texts(given, "output", ("input_text",), place, "an output"), call)
        case "reasoning":
            return ConversationItem(id, kind, _reasoning(given, place))
    role = given.get("role")
    if role not in ROLES:
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {said(role)}", "invalid_value")
    wanted = ("output_text", "refusal") if role == "assistant" else ("input_text",)
    return ConversationItem(id, role, _texts(given, "content", wanted, place, f"a message of role {role!r}"))


def _reasoning(given: Mapping[str, Any], place: str) -> list[str]:
    """Its own texts, where there are any, else what sums it up."""
    content = given.get("content")
    if content is None or content == []:
        summary = given.get("summary")
        if summary in (None, []):
            if given.get("encrypted_content") is not None:
                raise wrong(
                    f"{place}.encrypted_content", "can't be read by this server: send the item's content, or leave "
                    "the item out", "unsupported_content",
                )  # fmt: skip
            return []
        return _texts(given, "summary", ("summary_text",), place, "a summary")
    return _texts(given, "content", ("reasoning_text",), place, "reasoning")


def _texts(given: Mapping[str, Any], name: str, wanted: tuple[str, ...], place: str, of: str) -> list[str]:
    """A text, or those of parts. of: what has them, in words."""
    content, place = given.get(name), f"{place}.{name}"
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not content or len(content) > MAX_TEXTS:
        raise wrong(place, f"must be a string or a list of parts, not empty nor more than {MAX_TEXTS}")
    return [_text(part, wanted, f"{place}[{i}]", of) for i, part in enumerate(content)]


def _text(part: Any, wanted: tuple[str, ...], place: str, of: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in wanted:
        raise wrong(
            f"{place}.type", f"must be {' or '.join(map(repr, wanted))} in {of} (no other part is supported), got "
            f"{said(kind)}", "unsupported_content",
        )  # fmt: skip
    if not all(isinstance(part.get(name), str | None) for name in ("text", "refusal")):
        raise wrong(place, "has a text that is no string")
    return _string(part, _TEXT[kind], place)


def _string(given: Mapping[str, Any], name: str, place: str, most: int | None = None) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise wrong(f"{place}.{name}", "must be a string")
    if most is not None and not 0 < len(value) <= most:
        raise wrong(f"{place}.{name}", f"must have 1 to {most} characters, has {len(value)}", "invalid_value")
    return value


def check_outputs(items: list[ConversationItem], own: int) -> None:
    """Raise RequestError where what came of a call comes before it, or without one. own: how many of the last are of
    the request's input, if that is a list."""
    called: set[str] = set()
    for i, item in enumerate(items, own - len(items)):
        if item.kind == "function_call":
            called.add(item.call_id)
        elif item.kind == "function_call_output" and item.call_id not in called:
            raise wrong(f"input[{i}].call_id", f"{item.call_id!r} is of no function_call before it", "invalid_value")


def conversation_of(items: list[ConversationItem], instructions: str | None) -> list[dict[str, Any]]:
    """As a chat template takes it: reasoning, what is said and calls that follow each other are one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's, which may still get more
    for item in items:
        text = "\n".join(item.texts)
        if item.kind not in ("assistant", "function_call", "reasoning"):
            turn = None
            if item.kind == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            else:
                messages.append({"role": item.kind, "content": text})
            continue
        if turn is None or (item.kind != "function_call" and "content" in turn and "tool_calls" not in turn):
            turn = {"role": "assistant"}
            messages.append(turn)
        if item.kind == "function_call":
            function = {"name": item.name, "arguments": text}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        else:
            name = "content" if item.kind == "assistant" else "reasoning_content"
            turn[name] = turn.get(name, "") + text
    return [{"role": "system", "content": instructions}, *messages] if instructions is not None else messages


def turns(items: list[ConversationItem]) -> list[int]:
    """Where a conversation may begin: at its beginning, and with each further message of the user's."""
    return [0, *[i for i, item in enumerate(items) if item.kind == "user" and i][bool(items[0].kind != "user") :]]


def from_turn(items: list[ConversationItem], at: int) -> list[ConversationItem]:
    """The conversation from there on, with what system and developer have said before."""
    return [*(item for item in items[:at] if item.kind in ("system", "developer")), *items[at:]]
