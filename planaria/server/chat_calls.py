"""chat.completion objects whose texts are taken apart: reasoning, content, calls of tools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from planaria.parsers.found import OutputEvent
from planaria.parsers.reading import Reading, call_id
from planaria.server.chat import ChatWriter
from planaria.server.common import event_of
from planaria.server.schema import ChatCompletionRequest
from planaria.server.service import Service
from planaria.server.stream import Choices, Piece
from planaria.server.tools import gathered
from planaria.types import FinishReason

LONG_READING = 1 << 14  # characters from which a text is read in a thread


class ChoiceReader:
    """One choice's text, read as it comes. calls: how many have ended whole."""

    def __init__(self, reading: Reading) -> None:
        self._parser = reading.parser()
        self.calls = 0

    def take(self, text: str, *, last: bool) -> list[OutputEvent]:
        """What is found in the next text; in the last also what is left."""
        found = self._parser.push(text)
        if last:
            found = [*found, *self._parser.finish()]
        self.calls += sum(event.kind == "end" for event in found)
        return found

    def finish(self, finish: FinishReason | None) -> str | None:
        """Why the choice ended, in OpenAI's words."""
        return "tool_calls" if finish is FinishReason.STOP and self.calls else finish


class InOrder:
    """What is done piece by piece, in the event loop where it is short; what is long, and all that comes before that
    is done, in a thread, one after another."""

    def __init__(self, work: Callable[[Piece], bytes]) -> None:
        self._work = work
        self._waiting: deque[Piece] = deque()

    def take(self, piece: Piece, *, long: bool) -> bytes | Callable[[], bytes]:
        if not self._waiting and not long:
            return self._work(piece)
        self._waiting.append(piece)
        return self._next

    def _next(self) -> bytes:
        done = self._work(self._waiting[0])
        self._waiting.popleft()
        return done


class ReadChatWriter(ChatWriter):
    """With the pieces of a stream come events for what they brought, in its order; at least one."""

    def __init__(
        self, service: Service, uid: str, body: ChatCompletionRequest, stream: Choices, reading: Reading
    ) -> None:
        super().__init__(service, uid, body, stream)
        self.uid, self.reading = uid, reading
        self.told = body.include_reasoning is not False
        self._readers = [ChoiceReader(reading) for _ in stream.sequences]
        self._pieces = InOrder(self.event_now)

    @property
    def heavy(self) -> bool:
        return super().heavy or sum(s.text_length for s in self.stream.sequences) > LONG_READING

    def event(self, piece: Piece) -> bytes | Callable[[], bytes]:
        return self._pieces.take(piece, long=self.is_long(piece) or len(piece.text) > LONG_READING)

    def _event(self, piece: Piece, opening: bytes) -> bytes:
        reader = self._readers[piece.choice]
        found = reader.take(piece.text, last=piece.finish is not None)
        deltas = [delta for event in found if (delta := self._delta(event, piece.choice)) is not None] or [{}]
        written = [opening]
        for delta in deltas[:-1]:
            choice = {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": None}
            written.append(event_of(self.envelope.value([choice])))
        choice = self._choice(piece, deltas[-1])
        choice["finish_reason"] = reader.finish(piece.finish)
        return b"".join([*written, event_of(self.envelope.value([choice]))])

    def _delta(self, event: OutputEvent, choice: int) -> dict[str, Any] | None:
        match event.kind:
            case "content":
                return {"content": event.text}
            case "reasoning":
                return {"reasoning": event.text, "reasoning_content": event.text} if self.told else None
            case "call":
                call = {"index": event.index, **self._call(choice, event.index, event.text)}
                return {"tool_calls": [call]}
            case "arguments":
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None

    def _call(self, choice: int, index: int, name: str, arguments: str = "") -> dict[str, Any]:
        id = call_id(self.uid, choice, index, self.reading.calls)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def message(self, index: int, text: str) -> tuple[dict[str, Any], str | None]:
        reader = ChoiceReader(self.reading)
        told = gathered(reader.take(text, last=True))
        said = self.echo + told.content
        message: dict[str, Any] = {
            "role": "assistant", "content": said if said or not told.calls else None, "refusal": None,
        }  # fmt: skip
        if self.reading.reasoning is not None and self.told:
            message["reasoning"] = message["reasoning_content"] = told.reasoning or None
        if told.calls:
            message["tool_calls"] = [
                self._call(index, number, call.name, call.arguments) for number, call in enumerate(told.calls)
            ]
        return message, reader.finish(self.stream.sequences[index].finish)
