"""Formats whose calls are objects of JSON: hermes, llama3_json, mistral. Pure."""

from __future__ import annotations

import json
import re

from planaria.parsers.found import Findings
from planaria.parsers.reader import TextReader, Wait, nowhere
from planaria.parsers.values import converted, json_string, json_value

MAX_NAME = 128  # characters of a tool's name
NAME = re.compile(r"[A-Za-z0-9_.-]*")
_ARGUMENTS = ("arguments", "parameters")


def call_object(reader: TextReader, out: Findings) -> Wait[bool]:
    """Read {"name": ..., "arguments": {...}}: names in any order, others are skipped. The reader keeps what isn't told;
    it still does afterwards. False: there is no call, or none that is whole."""
    if not (yield from reader.match("{")):
        return False
    name, early, told = "", "", False
    while True:
        yield from reader.spaces()
        key = yield from _text(reader)
        yield from reader.spaces()
        if key is None or not (yield from reader.match(":")):
            return False
        yield from reader.spaces()
        if key == "name" and not name:
            name = (yield from _text(reader)) or ""
            if not out.declared(name):
                return False
        elif key in _ARGUMENTS and not early and not told:
            if name and (yield from reader.peek()) == "{":
                if not (yield from told_arguments(reader, out, name)):
                    return False
                told = True
            elif (found := (yield from _early(reader))) is not None:
                early = found
            else:
                return False
        elif not (yield from json_value(reader, nowhere)):
            return False
        if name and early and not told:
            _tell(reader, out, name, early)
            told = True
        yield from reader.spaces()
        if (yield from reader.match(",")):
            continue
        if not (name and (yield from reader.match("}"))):
            return False
        if not told:
            _tell(reader, out, name, "{}")
        reader.keep()
        return True


def told_arguments(reader: TextReader, out: Findings, name: str) -> Wait[bool]:
    """Read the object that follows as the arguments of a call, told while it is read."""
    reader.drop()
    out.call(name)
    whole = yield from json_value(reader, out.arguments)
    out.end(whole=whole)
    if whole:
        reader.keep()
    return whole


def _tell(reader: TextReader, out: Findings, name: str, arguments: str) -> None:
    out.call(name)
    out.arguments(arguments)
    out.end()
    reader.keep()


def _early(reader: TextReader) -> Wait[str | None]:
    """Arguments whose tool isn't known yet, or that are an object written as a string, or null."""
    char = yield from reader.peek()
    if char == "{":
        parts: list[str] = []
        return "".join(parts) if (yield from json_value(reader, parts.append)) else None
    if char == '"':
        found = converted((yield from _text(reader)) or "")
        return found if found is not None and found.startswith("{") else None
    return "{}" if (yield from reader.match("null")) else None


def _text(reader: TextReader) -> Wait[str | None]:
    parts: list[str] = []
    if not (yield from json_string(reader, parts.append)):
        return None
    text: str = json.loads("".join(parts))
    return text


def hermes(reader: TextReader, out: Findings) -> Wait[None]:
    """<tool_call>{...}</tool_call>, and content around it. What closes a call may be missing."""
    while marker := (yield from reader.until(("<tool_call>",), out.content)):
        reader.keep(marker)
        yield from reader.spaces()
        while (yield from call_object(reader, out)):
            yield from reader.spaces()
            closed = yield from reader.close("</tool_call>")
            reader.keep()
            if closed or (yield from reader.peek()) != "{":
                break
        out.content(reader.kept())


def llama3_json(reader: TextReader, out: Findings) -> Wait[None]:
    """{...}; {...} as the whole of an answer, or after <|python_tag|>."""
    marker = ""
    while True:
        reader.keep(marker)
        yield from reader.spaces()
        if (yield from reader.peek()) == "{":
            yield from _objects(reader, out, ";")
        out.content(reader.kept())
        marker = yield from reader.until(("<|python_tag|>",), out.content)
        if not marker:
            return


def _objects(reader: TextReader, out: Findings, between: str) -> Wait[bool]:
    """Calls with a separator between them; what follows is kept."""
    while (yield from call_object(reader, out)):
        yield from reader.spaces()
        if not (yield from reader.match(between)):
            return True
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            return False
    return False


def mistral(reader: TextReader, out: Findings) -> Wait[None]:
    """[TOOL_CALLS] and a list of objects, or (newer) the name of one tool, [ARGS] or nothing, and its arguments."""
    while marker := (yield from reader.until(("[TOOL_CALLS]",), out.content)):
        reader.keep(marker)
        yield from reader.spaces()
        if (yield from reader.match("[")):
            yield from reader.spaces()
            if (yield from _objects(reader, out, ",")) and (yield from reader.match("]")):
                reader.drop()
        elif (yield from reader.peek()) == "{":
            yield from _objects(reader, out, ",")
        else:
            yield from _named(reader, out)
        out.content(reader.kept())


def _named(reader: TextReader, out: Findings) -> Wait[None]:
    name = yield from reader.word(NAME, MAX_NAME)
    if not out.declared(name):
        return
    if (yield from reader.match("[CALL_ID]")):
        yield from reader.word(NAME, MAX_NAME)
    yield from reader.match("[ARGS]")
    yield from reader.spaces()
    if (yield from reader.peek()) == "{":
        yield from told_arguments(reader, out, name)


_V3_NAME = re.compile(r"[^\s<`]*")


def deepseek_v3(reader: TextReader, out: Findings) -> Wait[None]:
    """Calls between marks: <begin>function<sep>NAME and arguments in a block of ```json, or (3.1)
    <begin>NAME<sep>arguments."""
    begins, begin, sep = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    while marker := (yield from reader.until((begins, begin), out.content)):
        reader.keep(marker)
        yield from reader.spaces()
        if marker == begin or (yield from reader.match(begin)):
            name = yield from reader.word(_V3_NAME, MAX_NAME)
            fenced = False
            if name and (yield from reader.match(sep)):
                if (yield from reader.peek()) != "{":
                    name = yield from reader.word(_V3_NAME, MAX_NAME)
                    yield from reader.spaces()
                    fenced = yield from reader.match("```json")
                    yield from reader.spaces()
                follows = (yield from reader.peek()) == "{"
                if follows and out.declared(name) and (yield from told_arguments(reader, out, name)):
                    yield from reader.spaces()
                    if fenced and (yield from reader.close("```")):
                        reader.keep()
                        yield from reader.spaces()
                    if (yield from reader.close("<｜tool▁call▁end｜>")):
                        reader.keep()
                        yield from reader.spaces()
                        if (yield from reader.close("<｜tool▁calls▁end｜>")):
                            reader.drop()
        out.content(reader.kept())
