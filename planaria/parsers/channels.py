"""GPT-OSS's messages: reasoning, content and calls, each in a channel. Pure."""

from __future__ import annotations

import re

from planaria.parsers.found import Findings
from planaria.parsers.json_calls import told_arguments
from planaria.parsers.reader import TextReader, Wait, nowhere

CHANNEL, CONSTRAIN, MESSAGE = "<|channel|>", "<|constrain|>", "<|message|>"
START, END, CALL = "<|start|>", "<|end|>", "<|call|>"
MARKS = CHANNEL, CONSTRAIN, MESSAGE, START, END, CALL
_TO = " to="
_CALLED = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_THOUGHT = re.compile(r"<\|channel\|>\s*analysis")
_ROLE = re.compile(r"[A-Za-z]*")


def channels(reader: TextReader, out: Findings) -> Wait[None]:
    """<|start|>assistant<|channel|>NAME<|message|>text<|end|>, of which the prompt has written the first two words.
    Channel analysis is reasoning; a message to functions.NAME is a call, ended by <|call|>; the rest is content, as is
    a text without channels."""
    marker = ""
    while True:
        put, begin = out.content, marker if marker == CHANNEL else ""
        for mark in (CHANNEL, _TO):
            if not begin and (yield from reader.match(mark)):
                begin = mark
        if begin:
            header = [begin]
            if not (yield from reader.until((MESSAGE,), header.append)):
                return
            said = "".join(header)
            to = _CALLED.search(said)
            if to is not None and out.declared(to[1]) and (yield from _object_follows(reader)):
                if (yield from told_arguments(reader, out, to[1])):
                    put = nowhere
                    reader.drop()
                else:
                    out.content(reader.kept())
            elif _TO in said:
                out.content(said + MESSAGE)
            elif _THOUGHT.match(said):
                put = out.reasoning
        marker = yield from reader.until((END, CALL, START) if begin else (END, CALL, START, CHANNEL), put)
        if not marker:
            return
        out.bare()
        if marker == START or (yield from reader.match(START)):
            yield from reader.word(_ROLE, 32)


def _object_follows(reader: TextReader) -> Wait[bool]:
    yield from reader.spaces()
    return (yield from reader.peek()) == "{"
