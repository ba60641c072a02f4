"""The items of a response's output, and an event for each step of theirs, as its text comes. Pure.

    a message, or reasoning: item, part added | a delta for each piece of its text | text, part, item done
    a call of a function:    item added | a delta for each piece of its arguments | arguments, item done

One item ends before the next begins. They follow from the pieces of text alone, in which they come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.parsers.found import OutputEvent
from planaria.parsers.reading import call_id

if TYPE_CHECKING:
    from planaria.parsers.reading import Reading

_KINDS = {"content": "message", "reasoning": "reasoning"}  # of what a parser finds
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
ENDS = ("completed", "incomplete")  # of a response whose text has ended


class ResponseItem:
    """kind: message, reasoning or function_call; name: of the function, and which of the calls it is."""

    __slots__ = ("call", "kind", "name", "parts", "status")

    def __init__(self, kind: str, name: str = "", call: int = 0) -> None:
        self.kind, self.name, self.call = kind, name, call
        self.parts: list[str] = []
        self.status = "incomplete"  # unless it ends well

    @property
    def text(self) -> str:
        """Or arguments."""
        return "".join(self.parts)

    def id(self, uid: str, number: int) -> str:
        """Of a response's item with this number."""
        return f"{_PREFIXES[self.kind]}_{uid}" + (f"_{number}" if number else "")

    def call_id(self, uid: str, reading: Reading | None) -> str:
        return call_id(uid, 0, self.call, reading.calls if reading is not None else None)


class ResponseItems:
    """events: the name of each, the number of its item, what it adds to that, and the number of the weights that drew
    the last piece before it. reading: None: all is one message."""

    def __init__(self, reading: Reading | None) -> None:
        self.items: list[ResponseItem] = []
        self.events: list[tuple[str, int, str, int]] = []
        self._weights = 0
        self._parser = reading.parser() if reading is not None else None
        self._open = False  # the last item is

    @property
    def reasons(self) -> bool:
        """The last item is reasoning."""
        return bool(self.items) and self.items[-1].kind == "reasoning"

    def push(self, text: str, weights: int) -> None:
        """A piece, not empty, and the number of the weights that drew it."""
        self._weights = weights
        for event in self._parser.push(text) if self._parser is not None else [OutputEvent("content", text)]:
            self._take(event)

    def finish(self, status: str) -> None:
        """No text will follow. status: of the response."""
        if status in ENDS:
            for event in self._parser.finish() if self._parser is not None else ():
                self._take(event)
            if not self.items:
                self._begin(ResponseItem("message"))
            self._close(status)
        self._parser = None

    def _take(self, event: OutputEvent) -> None:
        match event.kind:
            case "call":
                self._begin(ResponseItem("function_call", event.text, event.index))
            case "arguments":
                self._add(event.text)
            case "end" | "broken":
                self._close("completed" if event.kind == "end" else "incomplete")
            case kind:
                if not self._open or self.items[-1].kind != _KINDS[kind]:
                    self._begin(ResponseItem(_KINDS[kind]))
                self._add(event.text)

    def _begin(self, item: ResponseItem) -> None:
        self._close("completed")
        self._open = True
        self.items.append(item)
        self._tell("output_item.added")
        if item.kind != "function_call":
            self._tell("content_part.added")

    def _add(self, text: str) -> None:
        if text:
            item = self.items[-1]
            item.parts.append(text)
            self._tell(f"{_TEXTS[item.kind]}.delta", text)

    def _close(self, status: str) -> None:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item.status = status
        self._tell(f"{_TEXTS[item.kind]}.done")
        if item.kind != "function_call":
            self._tell("content_part.done")
        self._tell("output_item.done")

    def _tell(self, kind: str, text: str = "") -> None:
        self.events.append((kind, len(self.items) - 1, text, self._weights))
