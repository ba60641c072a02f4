"""A response and its events as OpenAI's API shapes them. Pure: all follows from what is kept of it, the number of each
event too.

    created, queued (in the background), in progress | item added, part added | a delta for each piece of its text |
    text done, part done, item done | completed, or incomplete, or failed

The second group begins with the first piece, or with an end that isn't a failure. One that was cancelled has no event
that says so: its stream ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.server.kept import Kept
from planaria.server.records import InputMessage

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_CLOSING = 3  # events between the last piece and the end


def response_of(kept: Kept, status: str = "") -> Json:
    """The object. status: as of then, without an output; "": as it is now."""
    head, end = kept.head, kept.end if kept.over and not status else None
    now = status or kept.status
    failed = end is not None and end.status == "failed"
    return {
        "id": head.id, "object": "response", "created_at": head.created, "status": now, "background": head.background,
        "completed_at": end.at if end is not None and end.status == "completed" else None,
        "error": {"code": "server_error", "message": end.error} if end is not None and failed else None,
        "incomplete_details": {"reason": "max_output_tokens"} if now == "incomplete" else None,
        "model": head.model, "output": _output(kept) if end is not None else [], "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None}, "service_tier": "default", "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "usage": _usage(kept) if end is not None else None, **head.fields,
    }  # fmt: skip


def _usage(kept: Kept) -> Json | None:
    end = kept.end
    if end is None or end.status in ("failed", "cancelled"):
        return None
    return {
        "input_tokens": end.prompt,
        "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": end.added},
        "output_tokens": end.output, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt + end.output,
    }  # fmt: skip


def _output(kept: Kept) -> list[Json]:
    status = kept.status
    if status in ("failed", "cancelled") and not kept.pieces:
        return []
    return [_item(kept, "completed" if status == "completed" else "incomplete", [_part(kept.text)])]


def _item(kept: Kept, status: str, content: list[Json]) -> Json:
    return {
        "id": f"msg_{kept.head.uid}", "type": "message", "role": "assistant", "status": status, "content": content,
    }  # fmt: skip


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item_of(item: InputMessage) -> Json:
    """A message of the input."""
    kind = "output_text" if item.role == "assistant" else "input_text"
    more: Json = {"annotations": [], "logprobs": []} if item.role == "assistant" else {}
    return {
        "id": item.id, "type": "message", "role": item.role, "status": "completed",
        "content": [{"type": kind, "text": text, **more} for text in item.texts],
    }  # fmt: skip


def num_events(kept: Kept) -> int:
    """That may be told now."""
    first = 3 if kept.head.background else 2
    pieces = kept.num_pieces
    if not kept.over:
        return first + (2 + pieces if pieces else 0)
    if kept.status in ("failed", "cancelled"):
        return first + (2 + pieces if pieces else 0) + (kept.status == "failed")
    return first + 2 + pieces + _CLOSING + 1


def event_bytes(kept: Kept, number: int) -> bytes:
    """The event with this number, one of `num_events`, as a server sends it."""
    kind, fields = _event(kept, number)
    value = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return b"event: response.%s\ndata: %s\n\n" % (kind.encode(), _encode(value))


def _event(kept: Kept, number: int) -> tuple[str, Json]:
    first = 3 if kept.head.background else 2
    if number < first:
        kind = ("created", "queued", "in_progress")[number if first == 3 or not number else 2]
        begun = kind == "in_progress" or first == 2
        return kind, {"response": response_of(kept, "in_progress" if begun else "queued")}
    pieces, place = kept.num_pieces, {"item_id": f"msg_{kept.head.uid}", "output_index": 0, "content_index": 0}
    at = number - first
    if kept.over and number == num_events(kept) - 1 and kept.status != "cancelled":
        return kept.status, {"response": response_of(kept)}
    if at == 0:
        return "output_item.added", {"output_index": 0, "item": _item(kept, "in_progress", [])}
    if at == 1:
        return "content_part.added", {**place, "part": _part("")}
    if at < 2 + pieces:
        return "output_text.delta", {**place, "delta": kept.pieces[at - 2], "logprobs": []}
    match at - 2 - pieces:
        case 0:
            return "output_text.done", {**place, "text": kept.text, "logprobs": []}
        case 1:
            return "content_part.done", {**place, "part": _part(kept.text)}
        case _:
            return "output_item.done", {"output_index": 0, "item": _output(kept)[0]}
