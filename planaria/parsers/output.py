"""The parser of one choice's text, and the formats there are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from planaria.parsers.channels import MARKS, channels
from planaria.parsers.found import Findings, OutputEvent
from planaria.parsers.json_calls import deepseek_v3, hermes, llama3_json, mistral
from planaria.parsers.reader import TextReader, Wait
from planaria.parsers.text_calls import pythonic, qwen3_coder

OPEN, CLOSE = "<think>", "</think>"


class CallFormat(msgspec.Struct, frozen=True):
    """How a model writes calls. read: gives what it finds to Findings; marks: special tokens among its text; shown_by:
    a chat template of models that write so has all texts of one of these."""

    read: Callable[[TextReader, Findings], Wait[None]]
    marks: tuple[str, ...]
    shown_by: tuple[tuple[str, ...], ...]


_TAGS = ("<tool_call>", "</tool_call>")
_QWEN = CallFormat(qwen3_coder, _TAGS, (("<function=", "<parameter="),))
CALL_FORMATS = {
    "hermes": CallFormat(hermes, _TAGS, (("<tool_call>", '"arguments"'), ("<tool_call>", "'arguments'"))),
    "llama3_json": CallFormat(
        llama3_json, ("<|python_tag|>",), (("<|python_tag|>",), ('"parameters": dictionary of',)),
    ),
    "mistral": CallFormat(mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), (("[TOOL_CALLS]",),)),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "pythonic": CallFormat(
        pythonic, ("<|python_start|>", "<|python_end|>"), (("func_name1(params_name1=",), ("<|python_start|>",)),
    ),
    "deepseek_v3": CallFormat(
        deepseek_v3,
        tuple(f"<｜tool▁{word}｜>" for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
        (("<｜tool▁call▁begin｜>",), ("<｜tool▁calls▁begin｜>",)),
    ),
    "openai": CallFormat(channels, MARKS, (("<|start|>assistant", "<|channel|>", "<|message|>"),)),
}  # fmt: skip


def formats_of(template: str) -> tuple[str, ...]:
    """Of the formats those that models with this chat template write, the likeliest first; none: it doesn't say."""
    found = [name for name, one in CALL_FORMATS.items() if any(_has(template, texts) for texts in one.shown_by)]
    if "qwen3_coder" in found:  # its tags are also those of hermes
        found = [name for name in found if CALL_FORMATS[name] is _QWEN]
    return tuple(found)


def _has(template: str, texts: tuple[str, ...]) -> bool:
    return all(text in template for text in texts)


def begun(reasoning: str, prompt: str) -> str:
    """Whether an answer in a format of reasoning begins with some: "begun": it does, "open": it may, "channels": in a
    channel, "": it doesn't. prompt: its end."""
    if reasoning == "openai_gptoss":
        return "channels"
    prompt = prompt.rstrip()
    if prompt.endswith(OPEN):
        return "begun"
    if prompt.endswith(CLOSE):
        return ""
    return "begun" if reasoning == "deepseek_r1" else "open"


class OutputParser:
    """tools: by name the JSON schema of each one's arguments; they are looked for where there is a `calls` format.
    reasoning: its format. prompt: its end, which may have begun or ended the reasoning. single: one call at most."""

    def __init__(
        self, *, calls: str | None = None, tools: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning: str | None = None, prompt: str = "", single: bool = False,
    ) -> None:  # fmt: skip
        self._reader, self._findings = TextReader(), Findings(tools or {}, single=single)
        self._running = self._read(calls if tools else None, begun(reasoning, prompt) if reasoning else "")
        next(self._running, None)

    def push(self, text: str) -> list[OutputEvent]:
        """What can be told now. Concatenated over all pushes and `finish`, it is the same however the text was cut."""
        self._reader.feed(text)
        next(self._running, None)
        return self._findings.drain()

    def finish(self) -> list[OutputEvent]:
        """The rest, once no text will follow."""
        self._reader.ended = True
        next(self._running, None)
        self._findings.finish()
        return self._findings.drain()

    def _read(self, calls: str | None, reasoning: str) -> Wait[None]:
        reader, out = self._reader, self._findings
        if reasoning == "channels":
            yield from channels(reader, out)
        elif reasoning:
            yield from _reasoning(reader, out, begun=reasoning == "begun")
        if calls is not None:
            yield from CALL_FORMATS[calls].read(reader, out)
        else:
            while (yield from reader.peek()):
                out.content(reader.take(len(reader.text) - reader.at))


def _reasoning(reader: TextReader, out: Findings, *, begun: bool) -> Wait[None]:
    """Text before </think>; it begins with <think>, or the prompt has `begun` it. Nothing in it is a call."""
    reader.keep()
    yield from reader.spaces()
    if (yield from reader.match(OPEN)):
        reader.drop()
    else:
        reader.back()
        if not begun:
            return
    out.bare()
    yield from reader.until((CLOSE,), out.reasoning)
    out.bare()
