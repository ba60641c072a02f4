"""Conversations: what a list of messages must be, and the form chat templates are written for.

The only check there is: whatever renders a chat template (the server's routes, `LLM.chat`) goes through it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from planaria.server.wrong import kind_of, listed, said, wrong

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 16_384
MAX_PARTS = 16_384  # of all messages together
MAX_DEPTH = 64  # of lists and objects in a message's further fields
_FLAT = frozenset({str, int, float, bool, type(None)})  # what has nothing in it, which is quickly seen


def check_messages(messages: object, place: str = "messages") -> list[dict[str, Any]]:
    """The messages as a chat template takes them: `content` a string ("" for null), a tool call's arguments an object.

    Fields that are not named here are the template's to read and pass unchanged; those that are null are left out.
    `place`: what an error calls the list. Raises RequestError, whose `param` is the place of what is wrong.
    """
    given = listed(messages, place, one="message", most=MAX_MESSAGES, parts="content parts", most_parts=MAX_PARTS)
    return [_message(message, f"{place}[{i}]") for i, message in enumerate(given)]


def _message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise wrong(place, f"must be an object with role and content, got {kind_of(message)}")
    for name in message:
        if not isinstance(name, str):
            raise wrong(place, f"has a field whose name is {kind_of(name)}; names are strings")
    role = message.get("role")
    if role is None:
        raise wrong(f"{place}.role", f"is required: one of {', '.join(ROLES)}", "missing_required_parameter")
    if role not in ROLES:
        given = said(role)
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {given}", "invalid_value")
    if not isinstance(message.get("name", ""), str | None):
        raise wrong(f"{place}.name", f"must be a string, got {kind_of(message['name'])}")
    out = {name: value for name, value in message.items() if value is not None}
    out["content"] = _content(message.get("content"), role, f"{place}.content")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
            raise wrong(f"{place}.tool_calls", "must be a list of objects")
        out["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name, older in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if name in out:
            out.setdefault(older, out[name])
    for name, value in out.items():
        if isinstance(value, (list, tuple, Mapping)):
            check_depth(value, f"{place}.{name[:80]}")
    return out


def _content(content: object, role: str, place: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role != "assistant":  # whose turn may be tool calls alone
            raise wrong(place, f"is required for role {role!r}", "missing_required_parameter")
        return ""
    if not isinstance(content, (list, tuple)):
        raise wrong(place, f"must be a string or a list of parts, got {kind_of(content)}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            shown = said(kind) if isinstance(kind, str) else kind_of(part)
            rule = f"must be a part of type 'text' with a text (no other is supported), got {shown}"
            raise wrong(f"{place}[{i}]", rule, "unsupported_content")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A tool call with its arguments as an object, where they are one written as JSON."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except ValueError:
        return call
    except RecursionError:
        raise wrong(f"{place}.function.arguments", "is nested too deeply", "invalid_value") from None


def check_depth(value: object, place: str) -> None:
    """Raise RequestError for more than `MAX_DEPTH` levels of lists and objects."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, (dict, Mapping)) else value)  # type: ignore[attr-defined]
            if type(child) not in _FLAT and isinstance(child, (list, tuple, Mapping))
        ]
        if not level:
            return
    raise wrong(place, f"is nested too deeply: at most {MAX_DEPTH} levels", "invalid_value")
