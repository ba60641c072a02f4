"""/v1/responses with tools, reasoning and items, driven by the official client; what a model writes is told to the fake
engine."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from planaria.server import responses
from planaria.server.kept import Kept
from planaria.server.records import ConversationItem, Outcome, PieceRecord
from planaria.server.response_input import conversation_of
from planaria.server.response_shapes import num_events, told_items
from planaria.server.service import Service
from planaria.server.tools import Parsers
from tests.api.conftest import running
from tests.api.test_journal import at_death, timeless
from tests.api.test_journal import stores as stores
from tests.api.test_responses import follow, strict
from tests.api.test_tools import TEMPLATE, Scripted, Talk
from tests.api.test_tools import marked as marked
from tests.pure.test_parsers import ARGUMENTS, TOOLS
from tests.pure.test_response_items import check_types, head, put_together
from tests.pure.test_response_items import events_of as events_of_kept

DECLARED: Any = [
    {"type": "function", "name": name, "description": "x", "parameters": schema, "strict": False}
    for name, schema in TOOLS.items()
]
ASKED: dict[str, Any] = {"model": "smollm2", "input": "What is it like?"}
CALLS = (
    "<think>\nI may.\n</think>\n\nLet me see.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
KINDS = ["reasoning", "message", "function_call", "function_call"]


@pytest.fixture
def talk(marked):
    @contextlib.asynccontextmanager
    async def start(said: str = CALLS, *, journal: Any = None, template: str = TEMPLATE, **parsers: Any):
        marked.chat_template = template
        engine = Scripted(marked, max_model_len=8192, vocab_size=49200)
        parsers = {"reasoning_parser": "qwen3", **parsers}
        options = {} if journal is None else {"journal": str(journal)}
        async with running(engine, marked, parsers=Parsers(**parsers), **options) as server:
            one = Talk(server, marked)
            one.says(said)
            yield one

    return start


async def events_of(stream: Any) -> list[dict[str, Any]]:
    return [strict(event) async for event in stream]


async def test_items_whole_and_streamed(talk) -> None:
    async with talk() as t:
        whole = await t.client.responses.create(**ASKED, tools=DECLARED, reasoning={"effort": "low", "summary": "auto"})
        given = strict(whole)
        assert whole.status == "completed" and [item.type for item in whole.output] == KINDS
        reasoning, message, first, second = whole.output
        assert reasoning.content[0].text == "I may." and reasoning.summary == []
        assert message.content[0].text == whole.output_text == "Let me see."
        assert [json.loads(call.arguments) for call in (first, second)] == [ARGUMENTS, {}]
        assert (first.name, second.name) == ("get_weather", "now") and first.call_id != second.call_id
        assert len({item.id for item in whole.output}) == 4
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
        assert given["reasoning"] == {"effort": "low", "summary": None} and given["tools"] == DECLARED
        assert json.dumps(DECLARED[0]["name"]) in t.prompt and "get_weather" in t.prompt
        stream = await t.client.responses.create(**ASKED, tools=DECLARED, stream=True)
        events = await events_of(stream)
        assert put_together(events) == events[-1]["response"]["output"]
        plain = [{k: v for k, v in item.items() if "id" not in k} for item in given["output"]]
        assert [{k: v for k, v in item.items() if "id" not in k} for item in put_together(events)] == plain
        assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 20
        async with t.client.responses.stream(**ASKED, tools=DECLARED) as helper:
            final = await helper.get_final_response()
        assert [item.type for item in final.output] == KINDS and final.output[2].parsed_arguments is None
        assert strict(await t.client.responses.retrieve(whole.id)) == given


async def test_what_tool_choice_does(talk) -> None:
    async with talk() as t:
        ask = t.client.responses.create
        plain = await ask(**ASKED, tools=DECLARED, tool_choice="none")
        assert [item.type for item in plain.output] == KINDS[:2] and "<tool_call>" in plain.output_text
        assert "get_weather" not in t.prompt
        one = await ask(**ASKED, tools=DECLARED, parallel_tool_calls=False, max_tool_calls=3)
        assert [item.type for item in one.output] == KINDS[:3]
        assert (one.parallel_tool_calls, one.max_tool_calls) == (False, 3)
        some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
        allowed = await ask(**ASKED, tools=DECLARED, tool_choice=some)
        assert [i.name for i in allowed.output if i.type == "function_call"] == ["now"]
        assert strict(allowed)["tool_choice"] == some
        for choice in ("required", {"type": "function", "name": "now"}):
            await ask(**ASKED, tools=DECLARED, tool_choice=choice)
            grammar = t.server.engine.submitted[-1].params.grammar
            assert ("get_weather" in grammar) == (choice == "required") and "now" in grammar and "</think>" in grammar


async def test_a_form_holds_for_what_comes_after_the_reasoning(talk) -> None:
    class Weather(BaseModel):
        sunny: bool

    async with talk('<think>Hm.</think>{"sunny": true}') as t:
        answer = await t.client.responses.parse(**ASKED, text_format=Weather)
        assert answer.output_parsed == Weather(sunny=True) and answer.output[0].content[0].text == "Hm."
        assert "</think>" in t.server.engine.submitted[-1].params.grammar
        await t.client.responses.create(**ASKED, text={"format": {"type": "json_object"}})
        assert "</think>" in t.server.engine.submitted[-1].params.grammar
        form = {"format": {"type": "json_object"}}
        await t.client.responses.create(**ASKED, text=form, tools=DECLARED, tool_choice="required")
        assert "get_weather" in t.server.engine.submitted[-1].params.grammar  # a call is no text


async def test_a_conversation_with_tools(talk) -> None:
    expected = (
        "[user]What is it like?[assistant]I may.Let me see.({0} get_weather {city})({1} now )"
        "[tool]Sunny.[tool]Noon.[assistant]"
    )
    async with talk() as t:
        first = await t.client.responses.create(**ASKED, tools=DECLARED)
        asked = t.prompt
        calls = [item.call_id for item in first.output[2:]]
        results = [
            {"type": "function_call_output", "call_id": call, "output": output}
            for call, output in zip(calls, ("Sunny.", [{"type": "input_text", "text": "Noon."}]), strict=True)
        ]
        rest = expected.format(*calls, city=ARGUMENTS["city"])
        t.says("It is sunny.")
        second = await t.client.responses.create(
            model="smollm2", previous_response_id=first.id, input=results, tools=DECLARED
        )
        assert t.prompt.endswith(rest) and t.prompt.startswith(asked[: asked.index("[user]")])
        user = {"role": "user", "content": ASKED["input"]}
        for items in (
            [user, *first.output, *results],
            [user, *({"type": "item_reference", "id": item.id} for item in first.output), *results],
        ):
            again = await t.client.responses.create(model="smollm2", input=items, tools=DECLARED, store=False)
            assert t.prompt.endswith(rest) and again.output_text == second.output_text == "It is sunny."
        listed = [item async for item in t.client.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in listed] == ["message", *KINDS, *["function_call_output"] * 2]
        assert listed[3].call_id == calls[0] and listed[-1].output == "Noon."


async def test_what_is_cut_off(talk) -> None:
    cut = set()
    async with talk() as t:
        for count in range(2, len(t.server.engine.said), 9):
            stream = await t.client.responses.create(**ASKED, tools=DECLARED, max_output_tokens=count, stream=True)
            events = await events_of(stream)
            items = put_together(events)
            assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["output"] == items
            assert all(item["status"] == "completed" for item in items[:-1])
            cut |= {item["type"] for item in items[-1:] if item["status"] == "incomplete"}
    assert cut == set(KINDS)


async def test_a_death_at_each_token_changes_no_event(talk, stores, tmp_path) -> None:
    said = '<think>So.</think>Now: <tool_call>{"name": "now", "arguments": {"a": [1, "é"]}}</tool_call> done'
    async with talk(said, journal=tmp_path / "a") as t:
        engine = t.server.engine
        engine.gate.clear()
        id = (await t.client.responses.create(**ASKED, tools=DECLARED, background=True)).id
        told = []
        for step in range(len(engine.said) + 1):
            await at_death(t.server, tmp_path / f"{step}", step > 0)
            told.append(num_events(engine.store.known[id].kept))
        engine.gate.set()
        events = await follow(t.client, id)
    assert [item["type"] for item in put_together(events)] == ["reasoning", "message", "function_call", "message"]
    assert told == sorted(told) and told[-1] > told[0]
    for step, count in enumerate(told):
        async with talk(said, journal=tmp_path / f"{step}") as t:
            later = await follow(t.client, id, count - 1)
            assert timeless([*events[:count], *later]) == timeless(events)
            assert strict(await t.client.responses.retrieve(id))["output"] == events[-1]["response"]["output"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tools[1].type": ({"tools": [DECLARED[0], {"type": "file_search"}]}, "file_search"),
    "tools[0].name": ({"tools": [{"type": "function", "name": "a b"}]}, "a b"),
    "tools[0].colour": ({"tools": [DECLARED[0] | {"colour": 1}]}, "colour"),
    "tools[0].parameters.type": ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "x"}}]}, "object"),
    "tools": ({"tools": "x"}, "list"), "tool_choice": ({"tool_choice": "required"}, "needs tools"),
    "tool_choice.type": ({"tools": DECLARED, "tool_choice": {"type": "mcp"}}, "mcp"),
    "tool_choice.name": ({"tools": DECLARED, "tool_choice": {"type": "function"}}, "required"),
    "tool_choice.mode": ({"tools": DECLARED, "tool_choice": {"type": "allowed_tools"}}, "auto or required"),
    "max_tool_calls": ({"max_tool_calls": 0}, "1"),
    "input[1].call_id": ({"input": [
        {"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]}, "'c' is of no function_call"),
    "input[0].output[0].type": ({"input": [
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
    ]}, "input_image"),
    "input[0].arguments": ({"input": [{"type": "function_call", "call_id": "c", "name": "x"}]}, "string"),
    "input[0].encrypted_content": ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "read"),
    "input[0].id": ({"input": [{"type": "item_reference", "id": "msg_" + "0" * 32}]}, "no item"),
}  # fmt: skip


async def test_refusals_name_what_is_refused(talk) -> None:
    async with talk() as t, t.server.http() as http:
        for param, (more, words) in REFUSED.items():
            answer = await http.post("/v1/responses", json={"input": "x", **more})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert words in error["message"] and error["message"].startswith(param), error
        odd = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\].parameters.properties.a"):
            await t.client.responses.create(**ASKED, tools=[odd], tool_choice="required")
        assert not t.server.engine.submitted


async def test_what_is_kept_is_bounded_and_of_its_key_alone(talk, monkeypatch) -> None:
    async with talk() as t:
        first = await t.client.responses.create(**ASKED, tools=DECLARED)
        reference = {"type": "item_reference", "id": first.output[1].id}
        await t.client.responses.create(model="smollm2", input=[reference] * 20)
        monkeypatch.setattr(responses, "MAX_CONVERSATION", 100)
        with pytest.raises(openai.BadRequestError, match="100 characters"):
            await t.client.responses.create(model="smollm2", input=[reference] * 20)
        with pytest.raises(openai.BadRequestError, match="no item"):
            await t.client.responses.create(model="smollm2", input=[{**reference, "id": reference["id"] + "9"}])


async def test_a_long_answer_of_before_is_taken_apart_in_a_thread(talk, tmp_path, monkeypatch) -> None:
    async with talk(journal=tmp_path / "a") as t:
        first = await t.client.responses.create(**ASKED, tools=DECLARED)
    monkeypatch.setattr(responses, "LONG_READING", 10)
    async with talk(journal=tmp_path / "a") as t:
        threads = []
        inner = Service.in_thread

        async def in_thread(self: Any, *given: Any) -> Any:
            threads.append(given)
            return await inner(self, *given)

        monkeypatch.setattr(Service, "in_thread", in_thread)
        for _ in range(2):
            assert strict(await t.client.responses.retrieve(first.id)) == strict(first)
        assert len(threads) == 1


def test_items_of_one_turn() -> None:
    text = (
        '<think>Hm.</think>Look: <tool_call>{"name": "now", "arguments": {}}</tool_call> so. <tool_call>{"name": "now"'
    )
    kept = Kept(head("hermes", "qwen3"))
    for letter in text:
        kept.add(PieceRecord([1], letter))
    kept.add(PieceRecord([1], "", Outcome("incomplete", 2)))
    kept.written(kept.count)
    check_types(kept)
    kinds = [(item["type"], item["status"]) for item in put_together(events_of_kept(kept))]
    assert kinds == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"), ("message", "incomplete"),
    ]  # fmt: skip
    assert kept.end is not None and kept.end.reasoning == len("<think>Hm.</think>")
    call = told_items(kept)[2]
    output = ConversationItem("o", "function_call_output", ["12:00"], call.call_id)
    asked = conversation_of([*kept.head.items, *told_items(kept), output], "Be brief.")
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool"]
    assert asked[2] == {
        "role": "assistant", "reasoning_content": "Hm.", "content": 'Look:so. <tool_call>{"name": "now"',
        "tool_calls": [{"id": call.call_id, "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }  # fmt: skip
