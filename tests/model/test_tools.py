"""Calls that have to be made: whatever a random model would rather say, they are calls of declared tools, in each
format, with arguments that their schemas allow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from planaria import LLM, SamplingParams, StructuredOutputsParams
from planaria.errors import RequestError
from planaria.parsers import TOOL_CALL_PARSERS
from planaria.parsers.grammar import after_reasoning, call_grammar, or_answer
from planaria.server.tools import Parsers, check_tools, reading_of, shown_marks
from tests.model import checkpoints

SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/place"}, "times": {"type": "integer", "minimum": 0, "maximum": 9},
            "how": {"enum": ["near", "far"]}, "really": {"type": "boolean"},
        },
        "required": ["times", "how"], "additionalProperties": False,
        "$defs": {"place": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    },
    "say": {
        "type": "object", "properties": {"what": {"type": "string", "maxLength": 5}}, "required": ["what"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
USER = [{"role": "user", "content": "Do it."}]
TEMPLATES = {
    "mistral": ("{# tools [TOOL_CALLS] #}", "{# tools [TOOL_CALLS] #} [ARGS]"),
    "deepseek_v3": ("{# tools #} <｜tool▁call▁begin｜>", "{# tools #} <｜tool▁call▁begin｜>```json"),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = checkpoints.write_talker(tmp_path_factory.mktemp("talker"))
    options: dict[str, Any] = {"kv_cache_memory": "16MiB", "threads": 1, "max_num_seqs": 16}
    with LLM(str(folder), max_model_len=256, reasoning_parser="qwen3", tool_call_parser="hermes", **options) as llm:
        yield llm


def asked(llm: LLM, parser: str, template: str, choice: Any, more: Any = None, **params: Any) -> list[Any]:
    llm.options = msgspec.structs.replace(llm.options, tool_call_parser=parser)
    given = SamplingParams(**{"max_tokens": 200, "n": 4, "seed": 3, **params})
    (found,) = llm.chat(USER, given, chat_template=template, tool_choice=choice, **(more or {"tools": TOOLS}))
    return found.outputs


def check(call: Any) -> bool:
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return True


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_a_call_that_has_to_be_made_is_made(llm: LLM, parser: str) -> None:
    ended = 0
    for template in TEMPLATES.get(parser, ("x{# tools #}",)):
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            outputs = asked(llm, parser, template + "<think></think>", choice)
            ended += sum(output.finish_reason == "stop" for output in outputs)
            assert any(call.complete for output in outputs for call in output.tool_calls)
            for output in outputs:
                whole = [call for call in output.tool_calls if call.complete]
                assert all(check(call) for call in whole)
                if output.finish_reason == "stop":
                    assert whole == output.tool_calls and len(whole) >= 1 and not output.content
                    if choice != "required":
                        assert [call.name for call in whole] == ["look"]
    assert ended or parser == "deepseek_v3"  # whose marks are most of what there is room for


def accepts(llm: LLM, grammar: str, text: str) -> bool:
    """The whole text, and that it ends there."""
    from llguidance import LLMatcher

    from planaria.structured.vocabulary import limits, make_vocabulary

    assert llm.tokenizer is not None
    vocabulary = make_vocabulary(llm.tokenizer.backend.to_str(), llm.tokenizer.vocab_size, llm.tokenizer.eos_ids[0])
    matcher = LLMatcher(vocabulary, grammar, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids := llm.tokenizer.encode(text, False)) == len(ids) and matcher.is_accepting()


def stopped(parser: str) -> str:
    """A call of "stop"."""
    return {
        "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "llama3_json": '{"name": "stop", "parameters": {}}',
        "mistral": '[TOOL_CALLS][{"name": "stop", "arguments": {}}]',
        "pythonic": "[stop()]",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "openai": "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}",
    }.get(parser, "<tool_call>\n<function=stop>\n</function>\n</tool_call>")  # fmt: skip


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_reasoning_may_come_first(llm: LLM, parser: str) -> None:
    call = stopped(parser)
    for reasoning, good, bad in (
        ("begun", "a <b\n</think>\n\n", ""), ("open", "", "a </think>"), ("open", "<think>\na</think>", "\n"),
        ("", "", "<think>a</think>"),
    ):  # fmt: skip
        grammar = call_grammar(parser, SCHEMAS, several=False)
        grammar = after_reasoning(grammar, reasoning) if reasoning else grammar
        assert accepts(llm, grammar, good + call) and not accepts(llm, grammar, bad + call), reasoning
        assert not accepts(llm, grammar, good + call.replace("stop", "go")) and not accepts(llm, grammar, good)


@pytest.mark.parametrize(
    "form", [{"regex": "a[b]"}, {"json": {"const": "ab"}}, {"choice": ("ab",)}, {"grammar": 'start: "ab"'}]
)
def test_any_form_may_come_after_reasoning(llm: LLM, form: Any) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(**form))
    said = '"ab"' if "json" in form else "ab"
    grammar = after_reasoning(llm._grammars.spelled(params).grammar, "begun")
    assert accepts(llm, grammar, f"hm</think>\n\n{said}") and not accepts(llm, grammar, said)
    (held,) = llm.chat(USER, params, chat_template="x</think>")
    (free,) = llm.chat(USER, params, chat_template="x<think>")
    assert held.outputs[0].content == said and held.outputs[0].reasoning is None
    assert free.outputs[0].reasoning and not free.outputs[0].content


def test_one_call_where_no_more_are_wanted(llm: LLM) -> None:
    more = {"tools": TOOLS[2:], "parallel_tool_calls": False}
    outputs = asked(llm, "llama3_json", "x{# tools #}</think>", "required", more)
    assert all(output.finish_reason == "stop" and len(output.tool_calls) == 1 for output in outputs)


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_a_call_may_be_made_in_place_of_another_form(llm: LLM, parser: str) -> None:
    """With tool_choice "auto", whatever that form is; also after reasoning."""
    for form, said in (({"json": {"type": "array", "items": {"const": 7}}}, "[7]"), ({"regex": "ab+"}, "abb")):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
        calls = call_grammar(parser, SCHEMAS, several=False)
        grammar = or_answer(calls, llm._grammars.spelled(params).grammar)
        said = f"<|channel|>final<|message|>{said}" if parser == "openai" else said
        assert accepts(llm, grammar, said) and accepts(llm, grammar, stopped(parser))
        assert not accepts(llm, grammar, said + stopped(parser)) and not accepts(llm, grammar, "x")
        assert accepts(llm, after_reasoning(grammar, "begun"), f"hm</think>{stopped(parser)}")
        assert accepts(llm, after_reasoning(grammar, "begun"), f"hm</think>{said}")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Its answers end with another token than its messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "END", "<|return|>")
        folder = checkpoints.write_talker(tmp_path_factory.mktemp("talker"))
    with LLM(str(folder), max_model_len=512, kv_cache_memory="16MiB", threads=1, max_num_seqs=16) as llm:
        yield llm


def test_forms_in_channels(gpt_oss: LLM) -> None:
    """GPT-OSS's: what has a form is in the last channel, or is a call, after any thought."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab+"))
    form, calls = gpt_oss._grammars.spelled(params).grammar, call_grammar("openai", SCHEMAS)
    thought = "<|channel|>analysis<|message|>a < b <|end|><|start|>assistant"
    final, call = "<|channel|>final<|message|>abb", stopped("openai")
    only, either = after_reasoning(form, "channels"), after_reasoning(or_answer(calls, form), "channels", calls=True)
    forced = after_reasoning(calls, "channels", calls=True)
    for before in ("", thought, thought * 2):
        for grammar, good in ((only, (final,)), (either, (final, call)), (forced, (call,))):
            assert [accepts(gpt_oss, grammar, before + text) for text in (final, call)] == [
                text in good for text in (final, call)
            ]
    assert not accepts(gpt_oss, only, "abb") and not accepts(gpt_oss, only, thought)


@pytest.mark.parametrize("tools", [False, True])
def test_a_template_of_channels_has_them_read(gpt_oss: LLM, tools: bool) -> None:
    """Without any option: no text of such a model can be read otherwise."""
    template = "{# tools <|channel|> <|message|> #}<|start|>assistant"
    assert gpt_oss.tokenizer is not None
    reading = reading_of(check_tools(TOOLS if tools else None), Parsers(), template, gpt_oss.tokenizer, [5])
    assert reading is not None and (reading.reasoning, reading.calls) == ("openai_gptoss", "openai" if tools else None)
    assert "<|channel|>" in shown_marks(reading)
    form = SamplingParams(max_tokens=60, n=4, seed=1, structured_outputs=StructuredOutputsParams(regex="[ab]*"))
    more: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto"} if tools else {}
    (found,) = gpt_oss.chat(USER, form, chat_template=template, **more)
    for output in found.outputs:
        assert output.text.startswith("<|channel|>")
        assert output.reasoning or output.tool_calls or set(output.content) <= set("ab")


def test_answers_are_calls_or_of_the_form(llm: LLM) -> None:
    form = StructuredOutputsParams(json={"type": "array", "items": {"const": 7}, "maxItems": 3})
    more = {"tools": TOOLS[2:], "parallel_tool_calls": False}
    template = "x{# tools #}</think>"
    outputs = asked(llm, "llama3_json", template, "auto", more, n=16, temperature=2, structured_outputs=form)
    assert all(output.finish_reason == "stop" for output in outputs)
    called = [output for output in outputs if output.tool_calls]
    assert all(len(output.tool_calls) == 1 and output.tool_calls[0].complete for output in called)
    assert all(set(json.loads(output.content)) <= {7} for output in outputs if not output.tool_calls)
    assert 0 < len(called) < len(outputs)


def test_a_call_and_another_form_exclude_each_other(llm: LLM) -> None:
    with pytest.raises(RequestError, match="another form"):
        asked(llm, "hermes", "x{# tools #}", "required", structured_outputs=StructuredOutputsParams(regex="x"))
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}]
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.chat(USER, chat_template="x{# tools #}", tools=odd, tool_choice="required")
