"""What a parser tells: events in the order of the text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, Literal

import msgspec


class OutputEvent(msgspec.Struct, frozen=True, array_like=True):
    """kind: reasoning and content: `text`; call: number `index` begins, of the tool `text`; arguments: more of the JSON
    that call has; end: it is complete, or (broken) what followed was no part of a call."""

    kind: Literal["reasoning", "content", "call", "arguments", "end", "broken"]
    text: str = ""
    index: int = -1


class Findings:
    """Where a format says what it found. tools: by name the JSON schema of each one's arguments. single: calls after
    the first are not told.

    Spaces around calls, and at the ends of reasoning, are no part of what is told. A call that has begun and is
    followed by what can't belong to it is broken: its arguments stay as they are, the rest is content.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, single: bool = False) -> None:
        self.tools, self.single = tools, single
        self.num_calls = 0
        self._found: list[OutputEvent] = []
        self._spaces: list[str] = []  # at the end of what was read, told if something follows
        self._bare = False  # no space is told until something else was
        self._open = False  # a call is

    def content(self, text: str) -> None:
        self._prose("content", text)

    def reasoning(self, text: str) -> None:
        self._prose("reasoning", text)

    def _prose(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        said = text.rstrip()
        if said:
            self._found += [OutputEvent(kind, part) for part in (*self._spaces, said)]
            self._spaces.clear()
        if len(said) < len(text):
            self._spaces.append(text[len(said) :])

    def bare(self) -> None:
        """Spaces before and after here are told to nobody."""
        self._spaces.clear()
        self._bare = True

    def declared(self, name: str) -> bool:
        return name in self.tools

    @property
    def muted(self) -> bool:
        """The call that is read now is one too many."""
        return self.single and self.num_calls > 1

    def call(self, name: str) -> None:
        """One begins."""
        self.num_calls += 1
        self._open = True
        self.bare()
        self._call("call", name)

    def arguments(self, text: str) -> None:
        self._call("arguments", text)

    def end(self, *, whole: bool = True) -> None:
        """The call that is open, if one is, ends."""
        if self._open:
            self._open = False
            self._call("end" if whole else "broken")

    def _call(self, kind: Literal["call", "arguments", "end", "broken"], text: str = "") -> None:
        if not self.muted:
            self._found.append(OutputEvent(kind, text, self.num_calls - 1))

    def finish(self) -> None:
        """No text will follow."""
        self.end(whole=False)
        if not self._bare:
            self._found += [OutputEvent("content", part) for part in self._spaces]
        self._spaces.clear()

    def drain(self) -> list[OutputEvent]:
        """What was found since the last time; texts of one kind that follow each other are one."""
        found, self._found = self._found, []
        if len(found) < 2:
            return found
        joined: list[OutputEvent] = []
        for (kind, index), group in groupby(found, lambda event: (event.kind, event.index)):
            parts = list(group)
            joined.append(parts[0] if len(parts) == 1 else OutputEvent(kind, "".join(p.text for p in parts), index))
        return joined
