"""Items of a response and their events: whole in themselves, the same items however the text was cut, and the same
events whoever reads the records, after a death at any of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from planaria.parsers.output import CALL_FORMATS
from planaria.parsers.reading import Reading
from planaria.server.kept import Kept
from planaria.server.records import ConversationItem, Head, Outcome, PieceRecord, frame, scan
from planaria.server.response_shapes import event_bytes, num_events
from planaria.types import SamplingParams
from planaria.wire import Submit
from tests.pure.test_parsers import TOOLS, cuts, texts

CUTS = 5  # of each text


@cache
def openai_types() -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Of an event and of an item, as OpenAI's client knows them; made when they are needed, in half a second, after a
    second for the import."""
    from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

    return TypeAdapter(ResponseStreamEvent), TypeAdapter(ResponseOutputItem)


def check_types(kept: Kept) -> None:
    event_type, item_type = openai_types()
    events = events_of(kept)
    for event in events:
        event_type.validate_python(event)
    for item in put_together(events):
        item_type.validate_python(item)


def head(form: str | None, reasoning: str | None) -> Head:
    submit = Submit("x", [1], SamplingParams(), seed=1, max_tokens=9999)
    items = [ConversationItem("i", "user", ["x"])]
    reading = Reading(form, TOOLS if form else {}, reasoning, "", False)
    return Head("resp_" + "0" * 32, "", 1, True, "m", "m", {}, items, submit, reading=reading)


def events_of(kept: Kept) -> list[dict[str, Any]]:
    return [json.loads(event_bytes(kept, n).partition(b"data: ")[2]) for n in range(num_events(kept))]


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client makes of events alone, each of which must fit what came before."""
    items: list[dict[str, Any]] = []
    said = ""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        if "response" in event:
            continue
        kind, item = event["type"].removeprefix("response."), items[-1] if items else {}
        if kind == "output_item.added":
            assert not item or item["status"] != "in_progress"
            item, said = dict(event["item"]), ""
            items.append(item)
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        match kind.rpartition("."):
            case (_, _, "delta"):
                said += event["delta"]
            case ("content_part", _, "added"):
                item["content"] = [event["part"]]
            case ("content_part", _, "done"):
                assert event["part"]["text"] == said
                item["content"] = [event["part"]]
            case ("output_item", _, "done"):
                if item["type"] == "function_call":
                    item["arguments"] = said
                assert event["item"] == item | {"status": event["item"]["status"]}
                item["status"] = event["item"]["status"]
            case (_, _, "done"):
                assert event.get("text", event.get("arguments")) == said
    return items


def check_cuts(form: str, count: int, check: Callable[[Kept], None] = lambda kept: None) -> None:
    draw = random.Random(form)
    for text, _ in zip(texts(form, draw), range(count // CUTS), strict=False):
        text = draw.choice(["", "<think>Hm. </think>", "<think>\nno end"]) + text
        status = draw.choice(["completed", "incomplete"])
        whole: list[dict[str, Any]] | None = None
        for _ in range(CUTS):
            kept = Kept(head(form, "qwen3"))
            written = frame(kept.head)
            at_death = draw.randrange(len(text) + 1)
            before = None
            for piece in cuts(text, draw):
                written += kept.add(PieceRecord([1], piece))
                kept.written(kept.count)
                at_death -= len(piece)
                if before is None and at_death <= 0:  # another process goes on
                    before = events_of(kept)
                    again = Kept.of(scan(written)[0])
                    assert again is not None
                    kept = again
            written += kept.add(PieceRecord([1], "", Outcome(status, 2, output=9)))
            kept.written(kept.count)
            events = events_of(kept)
            assert before is None or events[: len(before)] == before
            for data in (written, kept.file()):
                again = Kept.of(scan(data)[0])
                assert again is not None and events_of(again) == events
            items = put_together(events)
            assert events[-1]["response"]["output"] == items
            if whole is None:
                check(kept)
            assert whole is None or items == whole
            whole = items


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_any_cut_gives_the_same_items(form: str) -> None:
    check_cuts(form, 15)


@pytest.mark.long
@pytest.mark.parametrize("form", CALL_FORMATS)
def test_ten_thousand_cuts_give_the_same_items(form: str) -> None:
    check_cuts(form, 10_000, check_types)
