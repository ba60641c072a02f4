"""Formats whose calls are no JSON: tags around each value (qwen3_coder, qwen3_xml), and Python (pythonic). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from planaria.parsers.found import Findings
from planaria.parsers.json_calls import MAX_NAME, NAME
from planaria.parsers.reader import TextReader, Wait
from planaria.parsers.values import converted, escaped, python_value

MAX_KEY = 256  # characters of a parameter's name
_TO_BRACKET = re.compile(r"[^>\n]*")
_IDENTIFIER = re.compile(r"\w*")


def qwen3_coder(reader: TextReader, out: Findings) -> Wait[None]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>; the outer tags may be
    missing. A value is text, or JSON where the tool's schema doesn't say that it is a string."""
    while marker := (yield from reader.until(("<tool_call>", "<function="), out.content)):
        reader.keep(marker)
        if marker == "<tool_call>":
            yield from reader.spaces()
            if not (yield from reader.match("<function=")):
                out.content(reader.kept())
                continue
        name = (yield from reader.word(_TO_BRACKET, MAX_NAME)).strip()
        if out.declared(name) and (yield from reader.match(">")):
            reader.drop()
            out.call(name)
            out.arguments("{")
            whole = yield from _parameters(reader, out, out.tools[name])
            if whole:
                out.arguments("}")
            out.end(whole=whole)
            if whole:
                reader.keep()
                yield from reader.spaces()
                if (yield from reader.close("</tool_call>")):
                    reader.drop()
        out.content(reader.kept())


def _parameters(reader: TextReader, out: Findings, schema: Mapping[str, Any]) -> Wait[bool]:
    """False: the call is broken; what was read and not told is kept."""
    known = schema.get("properties")
    seen: set[str] = set()
    while True:
        reader.keep()
        yield from reader.spaces()
        if (yield from reader.match("</function>")):
            reader.drop()
            return True
        if not (yield from reader.match("<parameter=")):
            return False
        key = (yield from reader.word(_TO_BRACKET, MAX_KEY)).strip()
        if not key or key in seen or not (yield from reader.match(">")):
            return False
        out.arguments(f"{', ' if seen else ''}{json.dumps(key, ensure_ascii=False)}: ")
        seen.add(key)
        reader.drop()
        types = types_of(known.get(key)) if isinstance(known, Mapping) else {"string"}
        if not (yield from _parameter(reader, out, types)):
            return False


def _parameter(reader: TextReader, out: Findings, types: set[str]) -> Wait[bool]:
    """A value up to </parameter>, without the line's end at either end of it."""
    value = _Lines()
    parts: list[str] = []
    plain = types == {"string"}
    if plain:
        out.arguments('"')
    put = (lambda text: out.arguments(escaped(text))) if plain else parts.append
    found = yield from reader.until(("</parameter>",), lambda text: put(value.inner(text)))
    if plain and found:
        out.arguments('"')
    elif not plain:
        text = "".join(parts)
        out.arguments(typed(text, types) if found else text)
    return bool(found)


class _Lines:
    """Text without the first and the last line's end."""

    def __init__(self) -> None:
        self.begun, self.held = False, ""

    def inner(self, text: str) -> str:
        text = self.held + text
        if not self.begun:
            self.begun = True
            text = text.removeprefix("\n")
        self.held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")


def types_of(schema: Any) -> set[str]:
    """The types of JSON that a schema says a value may have; {"string"} where it says nothing."""
    found: set[str] = set()
    waiting = [schema]
    for _ in range(256):
        if not waiting:
            break
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        kind = part.get("type")
        found.update(k for k in (kind if isinstance(kind, list) else [kind]) if isinstance(k, str))
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(part.get(name), list):
                waiting += part[name]
        if isinstance(part.get("enum"), list):
            found.update("string" if isinstance(value, str) else "other" for value in part["enum"])
        if "$ref" in part:
            found.add("other")
    return found or {"string"}


def typed(text: str, types: set[str]) -> str:
    """A value as JSON: one of `types` if it reads so, else a string."""
    word = text.strip()
    lower = word.lower()
    if "boolean" in types and lower in ("true", "false"):
        return lower
    found = converted(word)
    if found is None and types & {"array", "object"}:
        found = converted(word, python_value)
    if found is None or (found.startswith('"') and "string" in types) or not _fits(found, types):
        return f'"{escaped(text)}"'
    return found


def _fits(value: str, types: set[str]) -> bool:
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    kind = kinds.get(value[0], "number")
    return bool(types & {kind, "other"}) or (kind == "number" and "integer" in types)


def pythonic(reader: TextReader, out: Findings) -> Wait[None]:
    """[NAME(KEY=VALUE, ...), ...] as the beginning of an answer, or after <|python_start|>."""
    marker = ""
    while True:
        reader.keep(marker)
        yield from reader.spaces()
        if (yield from reader.match("[")) and (yield from _python_calls(reader, out)):
            yield from reader.spaces()
            if (yield from reader.match("<|python_end|>")):
                reader.drop()
        out.content(reader.kept())
        marker = yield from reader.until(("<|python_start|>",), out.content)
        if not marker:
            return


def _python_calls(reader: TextReader, out: Findings) -> Wait[bool]:
    """Calls up to the bracket that closes their list. False: not whole; what was read and not told is kept."""
    while True:
        yield from reader.spaces()
        name = yield from reader.word(NAME, MAX_NAME)
        if not out.declared(name) or not (yield from reader.match("(")):
            return False
        if not (yield from _python_arguments(reader, out, name)):
            out.end(whole=False)
            return False
        reader.keep()
        yield from reader.spaces()
        if (yield from reader.match(",")):
            yield from reader.spaces()
            if (yield from reader.peek()) != "]":
                continue
        if (yield from reader.match("]")):
            reader.keep()
            return True
        return False


def _python_arguments(reader: TextReader, out: Findings, name: str) -> Wait[bool]:
    """What is between a call's parentheses. It begins to be told with its first argument's name."""
    seen: set[str] = set()
    while True:
        yield from reader.spaces()
        if (yield from reader.match(")")):
            if not seen:
                out.call(name)
                out.arguments("{")
            out.arguments("}")
            out.end()
            return True
        key = yield from reader.word(_IDENTIFIER, MAX_KEY)
        yield from reader.spaces()
        if not key or key in seen or not (yield from reader.match("=")):
            return False
        reader.drop()
        if not seen:
            out.call(name)
        out.arguments(f"{', ' if seen else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        seen.add(key)
        yield from reader.spaces()
        if not (yield from python_value(reader, out.arguments)):
            return False
        reader.keep()
        yield from reader.spaces()
        if (yield from reader.match(",")):
            continue
        if (yield from reader.peek()) != ")":
            return False
