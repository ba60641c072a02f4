"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same conversations and generations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planaria.errors import RequestError
from planaria.parsers.found import OutputEvent
from planaria.parsers.reading import Reading, call_id
from planaria.server.anthropic_input import translated
from planaria.server.chat import chat_prompt, open_chat, tools_of
from planaria.server.chat_calls import LONG_READING, ChoiceReader, InOrder
from planaria.server.common import encode_json, read, usage_of, versions_of
from planaria.server.failure import ANTHROPIC, last_event
from planaria.server.generation import Answer, Generation
from planaria.server.schema import clip
from planaria.server.schema_anthropic import CountTokensRequest, MessagesRequest
from planaria.server.service import Service
from planaria.server.stream import Choices, Piece
from planaria.server.tools import format_of_reasoning
from planaria.types import FinishReason

_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}\Z", re.ASCII)
_NAMES = {
    "stop": "stop_sequences", "response_format": "output_config.format", "continue_final_message": "messages",
}  # fmt: skip
_BLOCKS = {"content": ("text", "text"), "reasoning": ("thinking", "thinking")}  # and their field


async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    _check_version(request)
    given = await read(request, MessagesRequest)
    facts = service.admit(given.model, "generate")
    tokenizer = service.tokenizer
    template = tokenizer.chat_template if tokenizer is not None else None
    body = translated(given, thinks=format_of_reasoning(service.config.parsers, template) is not None)
    try:
        stream, reading = await open_chat(service, request, body, facts, kind="msg", fits=True)
    except RequestError as e:
        raise _renamed(e) from None
    info = request.scope["planaria"]
    generation = Generation(service, info, [stream], stream=bool(given.stream))
    cut_short = stream.sequences[0].submit.max_tokens < given.max_tokens
    generation.writer = MessagesWriter(
        info.uid, given.model, stream, reading or Reading(None, {}, None, "", False), cut_short=cut_short
    )
    return Answer(generation)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    service: Service = request.app.state.service
    _check_version(request)
    given = await read(request, CountTokensRequest)
    service.admit(given.model)
    body = translated(given, thinks=True)
    tools = await tools_of(service, request, body)
    variables = {
        name: value for name in ("reasoning_effort", "continue_final_message")
        if (value := getattr(body, name)) is not None
    }  # fmt: skip
    if tools is not None and tools.shown is not None:
        variables["tools"] = tools.shown
    ids = await chat_prompt(service, request, body, variables=variables)
    return Response(encode_json({"input_tokens": len(ids)}), media_type="application/json")


def _renamed(error: RequestError) -> RequestError:
    """With fields under the names that they have here."""
    if error.param is not None and error.param.startswith("tools["):
        message = re.sub(r"^tools\[(\d+)\](\.function)?", r"tools.\1", error.message)
        message = re.sub(r"^(tools\.\d+)\.parameters", r"\1.input_schema", message)
        return RequestError(message, param=message.partition(":")[0], code=error.code, status=error.status)
    for name, here in _NAMES.items():
        if error.param is not None and error.param.startswith(name):
            param = here + error.param.removeprefix(name)
            return RequestError(error.message.replace(name, here, 1), param=param, code=error.code, status=error.status)
    return error


def _check_version(request: Request) -> None:
    """Any there has been is as good: what they differ in is not here."""
    version = request.headers.get("anthropic-version")
    if version is not None and not _VERSION.match(version):
        raise RequestError(
            f"anthropic-version {clip(version)!r} is no version; send 2023-06-01", param="anthropic-version",
            code="invalid_value",
        )  # fmt: skip


class MessagesWriter:
    """A message, or its events: content is a list of blocks, which are told one after another. cut_short: there is room
    for less than was asked for."""

    def __init__(self, uid: str, model: str, stream: Choices, reading: Reading, *, cut_short: bool) -> None:
        self.uid, self.model, self.stream, self.reading, self.cut_short = uid, model, stream, reading, cut_short
        self.sequence = stream.sequences[0]
        self._reader = ChoiceReader(reading)
        self._pieces = InOrder(self._events)
        self._begun = False
        self._block = -1  # the last that began
        self._kind = ""  # of the block that is open

    @property
    def heavy(self) -> bool:
        return self.sequence.text_length > LONG_READING

    def event(self, piece: Piece) -> bytes | Callable[[], bytes]:
        return self._pieces.take(piece, long=len(piece.text) > LONG_READING)

    def _events(self, piece: Piece) -> bytes:
        said = []
        if not self._begun:
            self._begun = True
            said.append(_event("message_start", message=self._message([], None, None)))
        for found in self._reader.take(piece.text, last=piece.finish is not None):
            said += self._told(found)
        if piece.finish is not None:
            said += self._close()
            stop_reason, stop_sequence = self._why()
            said.append(_event(
                "message_delta", delta={"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                usage=self._usage(), **versions_of(self.sequence),
            ))  # fmt: skip
        return b"".join(said)

    def _told(self, found: OutputEvent) -> list[bytes]:
        match found.kind:
            case "call":
                said = self._close()
                return [*said, self._open("tool_use", self._tool_use(found.index, found.text, {}))]
            case "arguments":
                return [self._delta("input_json_delta", "partial_json", found.text)] if found.text else []
            case "end" | "broken":
                return self._close()
        kind, field = _BLOCKS[found.kind]
        said = []
        if self._kind != kind:
            said = [*self._close(), self._open(kind, self._text_block(kind, ""))]
        return [*said, self._delta(f"{kind}_delta", field, found.text)]

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        self._kind, self._block = kind, self._block + 1
        return _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta={"type": kind, field: text})

    def _close(self) -> list[bytes]:
        if not self._kind:
            return []
        self._kind = ""
        return [_event("content_block_stop", index=self._block)]

    def tail(self) -> bytes:
        return _event("message_stop")

    def failed(self, message: str, status: int, code: str) -> bytes:
        return last_event(ANTHROPIC, message, status, code)

    def whole(self) -> bytes:
        blocks: list[dict[str, Any]] = []
        kind, parts, index = "", list[str](), 0
        reader = self._reader

        def close() -> None:
            """What there is of a block becomes one."""
            nonlocal kind
            if kind in ("text", "thinking"):
                blocks.append(self._text_block(kind, "".join(parts)))
            kind = ""
            parts.clear()

        name = ""
        for event in reader.take(self.sequence.text, last=True):
            match event.kind:
                case "call":
                    close()
                    kind, name, index = "tool_use", event.text, event.index
                case "arguments":
                    parts.append(event.text)
                case "end" | "broken":
                    blocks.append(self._called(index, name, "".join(parts)))
                    kind = ""
                    parts.clear()
                case _:
                    if kind != _BLOCKS[event.kind][0]:
                        close()
                        kind = _BLOCKS[event.kind][0]
                    parts.append(event.text)
        close()
        return encode_json(self._message(blocks, *self._why()) | versions_of(self.sequence))

    def _called(self, index: int, name: str, arguments: str) -> dict[str, Any]:
        """A call; where its arguments are no JSON object, because they break off, what there is of it as a text."""
        try:
            found = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return self._text_block("text", f"{name}: {arguments}")
        return self._tool_use(index, name, found)

    def _text_block(self, kind: str, text: str) -> dict[str, Any]:
        return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}

    def _tool_use(self, index: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        id = call_id(self.uid, 0, index, self.reading.calls, "toolu_")
        return {"type": "tool_use", "id": id, "name": name, "input": given}

    def _why(self) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        sequence = self.sequence
        if sequence.finish is FinishReason.LENGTH:
            return ("model_context_window_exceeded" if self.cut_short else "max_tokens"), None
        if isinstance(sequence.stop_reason, str):
            return "stop_sequence", sequence.stop_reason
        return ("tool_use" if self._reader.calls else "end_turn"), None

    def _message(self, blocks: list[dict[str, Any]], why: str | None, stop_sequence: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self.uid}", "type": "message", "role": "assistant", "model": self.model, "content": blocks,
            "stop_reason": why, "stop_sequence": stop_sequence, "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, int]:
        counts = usage_of([self.stream])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": counts["completion_tokens"],
        }  # fmt: skip


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode_json({"type": kind, **fields}) + b"\n\n"
