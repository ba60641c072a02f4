"""JSON as models write it, and Python's literals, given out as JSON while they are read. Pure.

JSON is as strict as `json.loads`, but for what models often get wrong within strings and what can be put right without
guessing: a line's end, a tab, a backslash before a character that needs none, half of a surrogate pair.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from planaria.parsers.reader import Put, TextReader, Wait

MAX_NESTING = 48  # levels of arguments
MAX_SCALAR = 320  # characters of a number or a word
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_PLAIN_OF = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", **_WORDS}
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "",
                   "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"{": "}", "[": "]", "(": "]"}


def escaped(text: str) -> str:
    """As it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_value(reader: TextReader, put: Put) -> Wait[bool]:
    """Read a value and give it out. False: what follows is none, or no more of one; what was read of it, but not given
    out, is kept."""
    return _value(reader, put, json_string, _json_scalar, "[{", ":")


def python_value(reader: TextReader, put: Put) -> Wait[bool]:
    """Likewise a literal: tuples are lists, keys of a dict are strings."""
    return _value(reader, put, python_string, _python_scalar, "[{(", ":")


def _value(
    reader: TextReader, put: Put, string: Callable[[TextReader, Put], Wait[bool]],
    scalar: Callable[[str], str | None], opening: str, colon: str,
) -> Wait[bool]:  # fmt: skip
    """No recursion: `stack` has what closes the lists and objects that are open, as they close in the text."""
    stack: list[str] = []
    while True:
        yield from reader.spaces(put)
        char = yield from reader.peek()
        if char and char in opening and len(stack) < MAX_NESTING:
            reader.take(1)
            stack.append(")" if char == "(" else _CLOSING[char])
            put("[" if char == "(" else char)
            yield from reader.spaces(put)
            if (yield from reader.peek()) != stack[-1]:
                if char == "{" and not (yield from _key(reader, put, string, colon)):
                    return False
                continue
        elif char and char in "\"'":
            if not (yield from string(reader, put)):
                return False
        else:
            known = reader.keeps
            if not known:
                reader.keep()
            said = scalar((yield from reader.word(_SCALAR, MAX_SCALAR)))
            if said is None:
                return False
            if not known:
                reader.drop()
            put(said)
        while True:  # a value is complete
            if not stack:
                return True
            yield from reader.spaces(put)
            char = yield from reader.peek()
            if char == ",":
                reader.take(1)
                put(char)
                yield from reader.spaces(put)
                if stack[-1] == "}" and not (yield from _key(reader, put, string, colon)):
                    return False
                break
            if not char or char != stack[-1]:
                return False
            reader.take(1)
            stack.pop()
            put("]" if char == ")" else char)


def _key(reader: TextReader, put: Put, string: Callable[[TextReader, Put], Wait[bool]], colon: str) -> Wait[bool]:
    if not (yield from string(reader, put)):
        return False
    yield from reader.spaces(put)
    if not (yield from reader.match(colon)):
        return False
    put(colon)
    return True


def _json_scalar(word: str) -> str | None:
    return _WORDS.get(word) or (word if _NUMBER.fullmatch(word) else None)


def _python_scalar(word: str) -> str | None:
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    if not _PYTHON_NUMBER.fullmatch(word):
        return None
    word = word.lstrip("+")
    if _NUMBER.fullmatch(word):
        return word
    if word.lstrip("-").isdigit():
        return str(int(word))
    number = float(word)
    return json.dumps(number) if math.isfinite(number) else None


def json_string(reader: TextReader, put: Put) -> Wait[bool]:
    """Read a string and give it out, quotes and all. False: there is none, or the text ends within it."""
    if not (yield from reader.match('"')):
        return False
    put('"')
    while True:
        yield from reader.run(_PLAIN, put)
        char = yield from reader.peek()
        if char == '"':
            put(reader.take(1))
            return True
        if char == "\\":
            if not (yield from _json_escape(reader, put)):
                return False
        elif char:
            put(escaped(reader.take(1)))
        else:
            return False


def _json_escape(reader: TextReader, put: Put) -> Wait[bool]:
    two = yield from reader.need(2)
    if len(two) < 2:
        return False
    if two[1] in '"\\/bfnrt':
        put(reader.take(2))
    elif two[1] == "'":
        reader.take(2)
        put("'")
    elif two[1] == "u" and _UNICODE.fullmatch((yield from reader.need(6))):
        code = int((yield from reader.need(6))[2:], 16)
        if not 0xD800 <= code < 0xE000:
            put(reader.take(6))
            return True
        pair = yield from reader.need(12)
        low = int(pair[8:], 16) if _UNICODE.fullmatch(pair[6:]) else 0
        whole = code < 0xDC00 <= low < 0xE000
        said = reader.take(12 if whole else 6)
        put(said if whole else "\\ufffd")
    else:
        reader.take(1)
        put("\\\\")
    return True


def python_string(reader: TextReader, put: Put) -> Wait[bool]:
    """Read a string of either quotes, single or triple, and give it out as one of JSON. False as of `json_string`."""
    quote = yield from reader.peek()
    if not quote or quote not in "\"'":
        return False
    end = quote
    if (yield from reader.match(quote * 3)):
        end = quote * 3
    else:
        reader.take(1)
    put('"')
    while True:
        yield from reader.run(_PLAIN_OF[quote], lambda text: put(escaped(text)))
        char = yield from reader.peek()
        if char == quote:
            if (yield from reader.match(end)):
                put('"')
                return True
            put(escaped(reader.take(1)))
        elif char == "\\":
            if not (yield from _python_escape(reader, put)):
                return False
        else:
            return False


def _python_escape(reader: TextReader, put: Put) -> Wait[bool]:
    two = yield from reader.need(2)
    if len(two) < 2:
        return False
    if two[1] in _PYTHON_ESCAPES:
        reader.take(2)
        put(escaped(_PYTHON_ESCAPES[two[1]]))
        return True
    digits = _HEX_ESCAPES.get(two[1], 0)
    whole = yield from reader.need(2 + digits)
    if digits and len(whole) == 2 + digits and re.fullmatch("[0-9a-fA-F]+", whole[2:]):
        code = int(whole[2:], 16)
        reader.take(2 + digits)
        put(escaped(chr(code)) if code < 0xD800 or 0xDFFF < code < 0x110000 else "\\ufffd")
    else:
        reader.take(1)
        put("\\\\")
    return True


def converted(text: str, value: Callable[[TextReader, Put], Wait[bool]] = json_value) -> str | None:
    """A whole text as JSON; None where it is no value, or more than one."""
    reader, parts = TextReader(), list[str]()
    reader.feed(text)
    reader.ended = True

    def read() -> Wait[bool]:
        whole = yield from value(reader, parts.append)
        yield from reader.spaces()
        return whole and reader.at == len(reader.text)

    try:
        next(read())  # nothing has to be waited for
    except StopIteration as end:
        return "".join(parts).strip() if end.value else None
    raise AssertionError
