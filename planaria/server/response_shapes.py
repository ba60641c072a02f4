"""A response and its events as OpenAI's API shapes them. Pure: all follows from what is kept of it, the number of each
event too.

    created, queued (in the background), in progress | those of its items (response_items) |
    completed, or incomplete, or failed

One that was cancelled has no event that says so: its stream ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.server.kept import Kept
from planaria.server.records import ConversationItem, version_runs
from planaria.server.response_items import ResponseItem

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


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
        "model": head.model, "output": _output(kept) if end is not None else [], "max_tool_calls": None,
        "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None}, "service_tier": "default",
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "usage": _usage(kept) if end is not None else None,
        **(_weights(kept) if end is not None else {}), **head.fields,
    }  # fmt: skip


def _weights(kept: Kept) -> Json:
    """Nothing, where they were not changed."""
    runs = version_runs(kept.versions)
    return {"weights_version": runs[-1][1], "weights_versions": runs} if kept.versions else {}


def _usage(kept: Kept) -> Json | None:
    end = kept.end
    if end is None or end.status in ("failed", "cancelled"):
        return None
    return {
        "input_tokens": end.prompt,
        "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": end.added},
        "output_tokens": end.output, "output_tokens_details": {"reasoning_tokens": end.reasoning},
        "total_tokens": end.prompt + end.output,
    }  # fmt: skip


def _output(kept: Kept) -> list[Json]:
    """Its items; of one that has ended."""
    return [_item(kept, number) for number in range(len(kept.items.items))]


def _item(kept: Kept, number: int, begun: bool = False) -> Json:
    """begun: as it was when it began."""
    item, uid = kept.items.items[number], kept.head.uid
    status, text = ("in_progress", "") if begun else (item.status, item.text)
    value: Json = {"id": item.id(uid, number), "type": item.kind, "status": status}
    match item.kind:
        case "function_call":
            call = item.call_id(uid, kept.head.reading)
            return {**value, "call_id": call, "name": item.name, "arguments": text}
        case "reasoning":
            return {**value, "summary": [], "content": [] if begun else [_part(item, text)]}
    return {**value, "role": "assistant", "content": [] if begun else [_part(item, text)]}


def _part(item: ResponseItem, text: str) -> Json:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def told_items(kept: Kept) -> list[ConversationItem]:
    """The output of one that has ended, as the input of another has it."""
    uid, reading, found = kept.head.uid, kept.head.reading, list[ConversationItem]()
    for number, item in enumerate(kept.items.items):
        id = item.id(uid, number)
        if item.kind == "function_call":
            found.append(ConversationItem(id, item.kind, [item.text], item.call_id(uid, reading), item.name))
        else:
            found.append(ConversationItem(id, "assistant" if item.kind == "message" else item.kind, [item.text]))
    return found


def item_of(item: ConversationItem) -> Json:
    """An item of the input."""
    value: Json = {"id": item.id, "status": "completed"}
    match item.kind:
        case "function_call":
            return {
                **value, "type": item.kind, "call_id": item.call_id, "name": item.name, "arguments": item.texts[0]
            }  # fmt: skip
        case "function_call_output":
            return {**value, "type": item.kind, "call_id": item.call_id, "output": "\n".join(item.texts)}
        case "reasoning":
            content = [{"type": "reasoning_text", "text": text} for text in item.texts]
            return {**value, "type": item.kind, "summary": [], "content": content}
    kind = "output_text" if item.kind == "assistant" else "input_text"
    more: Json = {"annotations": [], "logprobs": []} if item.kind == "assistant" else {}
    content = [{"type": kind, "text": text, **more} for text in item.texts]
    return {**value, "type": "message", "role": item.kind, "content": content}


def num_events(kept: Kept) -> int:
    """That may be told now."""
    return _first(kept) + kept.num_told + (kept.over and kept.status != "cancelled")


def _first(kept: Kept) -> int:
    """Events before those of items."""
    return 3 if kept.head.background else 2


def event_bytes(kept: Kept, number: int) -> bytes:
    """The event with this number, one of `num_events`, as a server sends it."""
    kind, fields = _event(kept, number)
    value = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return b"event: response.%s\ndata: %s\n\n" % (kind.encode(), _encode(value))


def _event(kept: Kept, number: int) -> tuple[str, Json]:
    first = _first(kept)
    if number < first:
        kind = ("created", "queued", "in_progress")[number if first == 3 or not number else 2]
        begun = kind == "in_progress" or first == 2
        return kind, {"response": response_of(kept, "in_progress" if begun else "queued")}
    if number - first == kept.num_told:
        return kept.status, {"response": response_of(kept)}
    kind, index, text, weights = kept.items.events[number - first]
    if kind == "output_item.added" or kind == "output_item.done":
        return kind, {"output_index": index, "item": _item(kept, index, begun=kind.endswith("added"))}
    item = kept.items.items[index]
    place: Json = {"item_id": item.id(kept.head.uid, index), "output_index": index}
    drawn_by: Json = {"weights_version": weights} if weights else {}
    match kind:
        case "function_call_arguments.delta":
            return kind, {**place, "delta": text, **drawn_by}
        case "function_call_arguments.done":
            return kind, {**place, "name": item.name, "arguments": item.text}
    place["content_index"] = 0
    more: Json = {"logprobs": []} if item.kind == "message" else {}
    match kind:
        case "content_part.added" | "content_part.done":
            return kind, {**place, "part": _part(item, item.text if kind.endswith("done") else "")}
        case "output_text.done" | "reasoning_text.done":
            return kind, {**place, "text": item.text, **more}
    return kind, {**place, "delta": text, **more, **drawn_by}
