"""Tools and reasoning through the server, with what a model writes told to the fake engine."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import openai
import pytest

from planaria.checkpoint import resolve_checkpoint
from planaria.server import chat
from planaria.server.chat_calls import LONG_READING, InOrder
from planaria.server.stream import Piece
from planaria.server.tokenise import Tokenizer, load_tokenizer
from planaria.server.tools import Parsers
from tests.api.conftest import running
from tests.api.fake_engine import FakeEngine
from tests.pure.test_parsers import ARGUMENTS, TOOLS, WRITTEN

DECLARED: Any = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in TOOLS.items()
]
USER: Any = [{"role": "user", "content": "What is it like?"}]
TEMPLATE = """{%- if tools %}{{ tools | tojson }}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}{{ m.content }}
{%- for call in m.tool_calls or [] %}({{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }})
{%- endfor %}{% endfor %}[assistant]"""


class Scripted(FakeEngine):
    """Writes `said`, and ends."""

    said: list[int]

    def draw(self, m: Any, position: int) -> int:
        return self.said[position] if position < len(self.said) else m.eos_ids[0]


class Talk:
    def __init__(self, server: Any, tokenizer: Tokenizer) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.client = server.client()

    def says(self, text: str) -> None:
        self.server.engine.said = self.tokenizer.encode(text, add_special_tokens=False)

    async def ask(self, **fields: Any) -> Any:
        body = {"model": "smollm2", "messages": USER, "tools": DECLARED, **fields}
        return (await self.client.chat.completions.create(**body)).choices[0]

    async def stream(self, **fields: Any) -> tuple[list[Any], Any]:
        """Its events, and what OpenAI's client makes of them."""
        body = {"model": "smollm2", "messages": USER, "tools": DECLARED, **fields}
        events = []
        async with self.client.chat.completions.stream(**body) as stream:
            async for event in stream:
                if event.type == "chunk":
                    events.append(event.chunk)
            return events, (await stream.get_final_completion()).choices[0]

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.server.engine.submitted[-1].prompt, skip_special_tokens=False)


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """SmolLM2's, with a template for tools, and a mark among its special tokens."""
    tokenizer = load_tokenizer(resolve_checkpoint("smollm2"))
    tokenizer.backend.add_special_tokens(["[TOOL_CALLS]"])
    return Tokenizer(
        tokenizer.backend, name="smollm2", eos_ids=tokenizer.eos_ids, special_tokens=tokenizer.special_tokens,
        chat_template=TEMPLATE,
    )  # fmt: skip


@pytest.fixture
def talk(marked):
    @contextlib.asynccontextmanager
    async def start(template: str = TEMPLATE, **parsers: Any):
        marked.chat_template = template
        engine = Scripted(marked, max_model_len=8192, vocab_size=49200)
        async with running(engine, marked, parsers=Parsers(**parsers)) as server:
            yield Talk(server, marked)

    return start


async def test_calls_whole_and_streamed(talk) -> None:
    async with talk() as t:
        for text, content in WRITTEN["hermes"]:
            t.says(text)
            whole = await t.ask()
            assert whole.finish_reason == "tool_calls" and whole.message.content == (content or None)
            called = [(c.function.name, json.loads(c.function.arguments)) for c in whole.message.tool_calls]
            assert called == [("get_weather", ARGUMENTS), ("now", {})]
            assert len({c.id for c in whole.message.tool_calls}) == 2
            assert all(c.id.startswith("call_") for c in whole.message.tool_calls)
            events, put_together = await t.stream()
            assert put_together.finish_reason == "tool_calls"
            assert (put_together.message.content or None) == whole.message.content
            for ours, theirs in zip(put_together.message.tool_calls, whole.message.tool_calls, strict=True):
                assert (ours.function.name, ours.function.arguments) == (
                    theirs.function.name, theirs.function.arguments,
                )  # fmt: skip
            deltas = [c for e in events for c in (e.choices[0].delta.tool_calls or ())]
            for index in (0, 1):
                first, *others = [d for d in deltas if d.index == index]
                assert first.id and first.type == "function" and first.function.name and first.function.arguments == ""
                assert others and all(d.id is None and d.function.name is None for d in others)
            if content == "Let me see.":
                assert sum(d.index == 0 for d in deltas) > 20, "arguments come as they are written"
        assert json.dumps(DECLARED[0]["function"]["name"]) in t.prompt


async def test_what_tool_choice_does(talk) -> None:
    text, _ = WRITTEN["hermes"][0]
    async with talk() as t:
        t.says(text)
        plain = await t.ask(tool_choice="none")
        assert plain.message.tool_calls is None and plain.message.content == text and plain.finish_reason == "stop"
        assert "get_weather" not in t.prompt
        (one,) = (await t.ask(parallel_tool_calls=False)).message.tool_calls
        assert one.function.name == "get_weather"
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
        some = await t.ask(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        assert [c.function.name for c in some.message.tool_calls] == ["now"] and "get_weather" in some.message.content
        assert (await t.ask(tools=openai.NOT_GIVEN)).message.content == text
        choices = (await t.client.chat.completions.create(model="smollm2", messages=USER, tools=DECLARED, n=2)).choices
        assert len({c.id for choice in choices for c in choice.message.tool_calls}) == 4


async def test_what_is_cut_off(talk) -> None:
    text, _ = WRITTEN["hermes"][0]
    async with talk() as t:
        t.says(text)
        whole = await t.ask(max_tokens=40)
        assert whole.finish_reason == "length" and not text.endswith(whole.message.tool_calls[0].function.arguments)
        body = {"model": "smollm2", "messages": USER, "tools": DECLARED, "max_tokens": 40}
        deltas = [c.choices[0].delta async for c in await t.client.chat.completions.create(**body, stream=True)]
        said = "".join(c.function.arguments for delta in deltas for c in delta.tool_calls or ())
        assert said == whole.message.tool_calls[0].function.arguments
        t.says("Look: <tool_call> none")
        assert (await t.ask()).message.content == "Look: <tool_call> none"
        assert (await t.ask()).finish_reason == "stop"


async def test_marks_are_seen_and_other_special_tokens_are_not(talk) -> None:
    async with talk("{{ tools }} [TOOL_CALLS]") as t:
        t.says('Now:[TOOL_CALLS]now[ARGS]{"a": 1}')
        t.server.engine.said.insert(0, 1)  # <|im_start|>
        for found in (await t.ask(), (await t.stream())[1]):
            assert found.message.content == "Now:"
            (call,) = found.message.tool_calls
            assert call.function.arguments == '{"a": 1}' and len(call.id) == 9 and call.id.isalnum()
        assert (await t.ask(tool_choice="none")).message.content == 'Now:now[ARGS]{"a": 1}'


async def test_reasoning(talk) -> None:
    said = (
        '<think>\nI may <tool_call>{"name": "now"}</tool_call>\n</think>\n\nSo. <tool_call>{"name": "now"}</tool_call>'
    )
    async with talk(reasoning_parser="qwen3") as t:
        t.says(said)
        whole, (events, put_together) = await t.ask(), await t.stream()
        assert whole.message.reasoning == whole.message.reasoning_content
        assert whole.message.reasoning == 'I may <tool_call>{"name": "now"}</tool_call>'
        assert whole.message.content == "So." and len(whole.message.tool_calls) == 1
        pieces = [getattr(e.choices[0].delta, "reasoning", None) or "" for e in events]
        assert "".join(pieces) == whole.message.reasoning and put_together.message.content == "So."
        quiet = await t.ask(extra_body={"include_reasoning": False})
        assert not hasattr(quiet.message, "reasoning") and quiet.message.content == "So."
        plain = await t.ask(tools=openai.NOT_GIVEN)
        assert plain.message.reasoning == whole.message.reasoning
        assert plain.message.content == 'So. <tool_call>{"name": "now"}</tool_call>'
        assert plain.finish_reason == "stop"


async def test_a_conversation_with_tools(talk) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."}, *USER,
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sunny."}]},
    ]  # fmt: skip
    async with talk() as t:
        t.says("It is sunny.")
        assert (await t.ask(messages=messages)).message.content == "It is sunny."
        end = "[system]Be brief.[user]What is it like?[assistant]Hm.(call_1 get_weather Rome)[tool]Sunny.[assistant]"
        assert t.prompt.endswith(end)


async def test_many_tools_are_looked_at_beside_the_event_loop(talk, monkeypatch) -> None:
    threads = []

    def noted(work: Any) -> Any:
        def done(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*args)

        return done

    for name in ("check_tools", "call_form"):
        monkeypatch.setattr(chat, name, noted(getattr(chat, name)))
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "x" * 60}} for i in range(150)]
    async with talk() as t:
        t.says("x")
        await t.ask(tools=tools, tool_choice="required", max_tokens=1)
    assert len(threads) == 2 and all("text" in name for name in threads)


@pytest.mark.parametrize(
    ("template", "parsers", "param", "says"),
    [
        ("{{ messages }}", {}, "tools", "no place for tools"),
        ("{{ tools }}", {}, "tools", "--tool-call-parser"),
        ("{{ tools }} [TOOL_CALLS]", {"tool_call_parser": "hermes"}, "tools", "one of mistral"),
        (TEMPLATE, {"enable_auto_tool_choice": False}, "tool_choice", "--no-enable-auto-tool-choice"),
    ],
)
async def test_servers_that_cant(talk, template: str, parsers: dict[str, Any], param: str, says: str) -> None:
    async with talk(template, **parsers) as t:
        with pytest.raises(openai.BadRequestError) as e:
            await t.ask()
        assert e.value.param == param and says in e.value.message and not t.server.engine.submitted


async def test_an_unknown_template_with_a_parser(talk) -> None:
    async with talk("{{ tools }}", tool_call_parser="pythonic") as t:
        t.says("[now()]")
        assert (await t.ask()).message.tool_calls[0].function.name == "now"


async def test_a_step_brings_an_event_with_what_was_asked_of_it(talk) -> None:
    async with talk() as t:
        t.says(WRITTEN["hermes"][0][0])
        body = {"messages": USER, "tools": DECLARED, "stream": True, "return_token_ids": True, "logprobs": True}
        async with t.server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
        assert [i for c in choices for i in c.get("token_ids", ())] == [*t.server.engine.said, 2]
        assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == len(t.server.engine.said) + 1
        assert [c["finish_reason"] for c in choices][-2:] == [None, "tool_calls"]


async def test_calls_that_have_to_be_made_have_a_grammar(talk) -> None:
    async with talk(reasoning_parser="qwen3") as t:
        t.says('<tool_call>{"name": "now"}</tool_call>')
        named = {"type": "function", "function": {"name": "now"}}
        for choice, names in (("required", ["get_weather", "now"]), (named, ["now"])):
            assert (await t.ask(tool_choice=choice)).finish_reason == "tool_calls"
            grammar = t.server.engine.submitted[-1].params.grammar
            assert all(name in grammar for name in names)
            assert ("get_weather" in grammar) == (choice == "required") and "</think>" in grammar
        await t.ask(response_format={"type": "json_object"})  # a call, or an object
        grammar = t.server.engine.submitted.pop().params.grammar
        assert all(word in grammar for word in ("get_weather", "now", "</think>", "json_schema", "calls | @form"))
        odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
        for fields, param, says in (
            (
                {"tools": [DECLARED[1], odd], "tool_choice": "required"}, "tools[1]",
                "tools[1].function.parameters.properties.a: ",
            ),
            ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "another form"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as e:
                await t.ask(**fields)
            assert e.value.param == param and says in e.value.message
        assert len(t.server.engine.submitted) == 2


def test_what_is_long_is_read_in_a_thread_and_all_that_follows_after_it() -> None:
    order = InOrder(lambda piece: piece.text.encode())
    short, long = Piece(0, "a", []), Piece(0, "b" * (LONG_READING + 1), [])
    assert order.take(short, long=False) == b"a"
    later = [order.take(long, long=True), order.take(short, long=False)]
    assert all(callable(part) for part in later)
    assert [part() for part in later] == [long.text.encode(), b"a"]
    assert order.take(short, long=False) == b"a"
