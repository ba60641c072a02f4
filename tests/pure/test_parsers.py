"""What models write becomes the same calls and the same content, however it is cut, and nothing of it is lost."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from planaria.parsers.found import OutputEvent
from planaria.parsers.output import CALL_FORMATS, OutputParser, formats_of
from planaria.parsers.text_calls import typed, types_of
from planaria.parsers.values import converted, json_value, python_value

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": ["object", "null"]},
            "flags": {"type": "array"}, "metric": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
    "file.write-2": {},
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "city": 'São "Paulo"\n</tool_call> [x] {y} \\ 🙂', "days": -3, "deep": {"a": [{}, [], 1.5e3, None], "": ""},
    "flags": [True, False, "]"], "metric": "yes",
}  # fmt: skip
ASKED = json.dumps(ARGUMENTS)
DS = {word: f"<｜tool▁{word}｜>" for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")}


def xml(name: str, arguments: dict[str, Any]) -> str:
    said = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in said.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def v3(name: str, arguments: str) -> str:
    return f"{DS['call▁begin']}function{DS['sep']}{name}\n```json\n{arguments}\n```{DS['call▁end']}"


def v31(name: str, arguments: str) -> str:
    return f"{DS['call▁begin']}{name}{DS['sep']}{arguments}{DS['call▁end']}"


def call(name: str, arguments: str, word: str = "arguments") -> str:
    return f'{{"name": "{name}", "{word}": {arguments}}}'


PYTHON = f"get_weather({', '.join(f'{key}={value!r}' for key, value in ARGUMENTS.items())})"
TWO = [("get_weather", ARGUMENTS), ("now", {})]
# format -> texts of the two calls, and the content there is besides
WRITTEN: dict[str, list[tuple[str, str]]] = {
    "hermes": [
        (f"Let me see.\n<tool_call>\n{call('get_weather', ASKED)}\n</tool_call>\n<tool_call>\n{call('now', '{}')}\n"
         "</tool_call>\n", "Let me see."),
        (f'<tool_call>{{"arguments":{json.dumps(ASKED)}, "id": 7, "name":"get_weather"}}\n{{"name": "now"}}</tool_call>'
         " Done. ", "Done. "),
    ],
    "llama3_json": [
        (f"{call('get_weather', ASKED, 'parameters')}; {call('now', '{}', 'parameters')}", ""),
        (f'Yes.<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {ASKED}}};\n{{"name": "now"}}',
         "Yes."),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{call('get_weather', ASKED)}, {call('now', 'null')}]", ""),
        (f"So: [TOOL_CALLS]get_weather[ARGS]{ASKED}[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{{}}", "So:"),
    ],
    "qwen3_coder": [
        (f"Ok.\n\n{xml('get_weather', ARGUMENTS)}\n{xml('now', {})}", "Ok."),
        (f"{xml('get_weather', ARGUMENTS)[len('<tool_call>'):]}<function=now></function> x", "x"),
    ],
    "pythonic": [
        (f"[{PYTHON}, now()]", ""),
        (f"Hm. <|python_start|>[ {PYTHON} , now( ), ]<|python_end|> !", "Hm.!"),
    ],
    "deepseek_v3": [
        (f"A{DS['calls▁begin']}{v3('get_weather', ASKED)}\n{v3('now', '{}')}{DS['calls▁end']}", "A"),
        (f"{DS['calls▁begin']}{v31('get_weather', ASKED)}{v31('now', '{}')}{DS['calls▁end']}", ""),
    ],
}  # fmt: skip
CHANNEL, SAYS, CALLED = "<|channel|>", "<|message|>", "<|call|><|start|>assistant"
WRITTEN["openai"] = [
    (f"{CHANNEL}commentary{SAYS}Let me see.<|end|><|start|>assistant{CHANNEL}commentary to=functions.get_weather "
     f"<|constrain|>json{SAYS}{ASKED}{CALLED} to=functions.now{CHANNEL}commentary json{SAYS}{{}}", "Let me see."),
    (f"Hm. <|start|>assistant to=functions.get_weather{CHANNEL}commentary{SAYS} {ASKED}{CALLED}{CHANNEL}commentary "
     f"to=functions.now{SAYS}{{}}<|end|><|start|>assistant{CHANNEL}final{SAYS} Done.", "Hm.Done."),
]  # fmt: skip
WRITTEN["qwen3_xml"] = WRITTEN["qwen3_coder"]


def read(parser: OutputParser, parts: list[str]) -> dict[str, Any]:
    """Content, reasoning, and of each call its name, its arguments and how it ended."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in (*(e for part in parts for e in parser.push(part)), *parser.finish()):
        if event.index < 0:
            found[event.kind] += event.text
        elif event.kind == "call":
            assert event.index == len(found["calls"])
            found["calls"].append([event.text, "", ""])
        else:
            assert event.index == len(found["calls"]) - 1 and not found["calls"][-1][2], "after its end"
            if event.kind == "arguments":
                found["calls"][-1][1] += event.text
            else:
                found["calls"][-1][2] = event.kind
    assert all(end for _, _, end in found["calls"])
    return found


def parse(form: str | None, text: str, parts: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return read(OutputParser(calls=form, tools=TOOLS, **more), [text] if parts is None else parts)


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_calls_and_content(form: str) -> None:
    for text, content in WRITTEN[form]:
        for reasoning in (None, "qwen3"):
            found = parse(form, text, reasoning=reasoning)
            assert [(name, json.loads(said), end) for name, said, end in found["calls"]] == [
                (name, arguments, "end") for name, arguments in TWO
            ]
            assert (found["content"], found["reasoning"]) == (content, "")
        whole = parse(form, f"<think>\nI may {text}\n</think>\n\n{text}", reasoning="qwen3")
        assert len(whole["calls"]) == 2 and whole["content"] == content
        assert whole["reasoning"] == f"I may {text}".rstrip()
        assert [one[0] for one in parse(form, text, single=True)["calls"]] == ["get_weather"]
        assert parse(form, text.replace("get_weather", "rm_rf").replace("now", "later"))["calls"] == []


def cuts(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.choice((1, 2, 5, 20, 200)))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def texts(form: str, draw: random.Random) -> Iterator[str]:
    """Good ones, and ones in which something was left out, put in, doubled or cut off."""
    parts = [*CALL_FORMATS[form].marks, *WRITTEN, "<think>", "</think>", '"', "'", "{", "}", "[", "(", ",", "\\",
             "\\u", "\\ud83d", "\n", " ", "<", "é", "name", "now", "=", "```json", "<parameter=", "</parameter>",
             "\x00"]  # fmt: skip
    while True:
        text = "".join(draw.choice(WRITTEN[form])[0] for _ in range(draw.randint(1, 2)))
        for _ in range(draw.choice((0, 1, 1, 2, 4, 8))):
            at, end = sorted(draw.sample(range(len(text) + 1), 2)) if text else (0, 0)
            end = min(end, at + draw.choice((0, 1, 3, 30)))
            text = text[:at] + draw.choice(("", draw.choice(parts), text[at:end] * 2)) + text[end:]
        if draw.random() < 0.2:
            text = text[: draw.randrange(len(text) + 1)]
        yield draw.choice(("", "", "<think> ", "hm </think> ")) + text


def check_cuts(form: str, count: int) -> None:
    draw = random.Random(form)
    for text, _ in zip(texts(form, draw), range(count), strict=False):
        more: dict[str, Any] = {
            "reasoning": draw.choice((None, "qwen3", "deepseek_r1")),
            "prompt": draw.choice(("", "<think>\n", "</think>")),
            "single": draw.random() < 0.2,
        }  # fmt: skip
        whole = parse(form, text, **more)
        assert parse(form, text, cuts(text, draw), **more) == whole, text
        for _, said, end in whole["calls"]:
            assert end == "broken" or isinstance(json.loads(said), dict)
        if not whole["calls"] and form != "openai":  # where channels aren't told
            said = whole["reasoning"] + whole["content"]
            for mark in ("<think>", "</think>") if more["reasoning"] else ():
                said, text = said.replace(mark, ""), text.replace(mark, "")
            assert said.split() == text.split() or "".join(said.split()) == "".join(text.split())


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_any_cut_gives_the_same(form: str) -> None:
    check_cuts(form, 100)


@pytest.mark.long
@pytest.mark.parametrize("form", CALL_FORMATS)
def test_ten_thousand_cuts_give_the_same(form: str) -> None:
    check_cuts(form, 10_000)


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_letter_by_letter_a_call_is_told_as_it_comes(form: str) -> None:
    text, _ = WRITTEN[form][0]
    parser = OutputParser(calls=form, tools=TOOLS)
    told = [parser.push(char) for char in text]
    kinds = [event.kind for events in told for event in events]
    assert kinds.count("call") == kinds.count("end") == 2 and kinds.count("arguments") > 40
    first = [event for events in told for event in events if event.index == 0]
    assert first[0] == OutputEvent("call", "get_weather", 0) and first[-1].kind == "end"


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_what_closes_calls_may_be_cut(form: str) -> None:
    """By the limit of an answer's tokens: no part of a mark is content."""
    text, content = WRITTEN[form][0]
    whole = 0
    for end in range(len(text), 0, -1):
        found = parse(form, text[:end])
        if [end for *_, end in found["calls"]] != ["end", "end"]:
            break
        assert found["content"] == content, text[:end][-40:]
        whole += 1
    assert whole


BROKEN = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": fals}}</tool_call>', '{"a": ', "fals}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', '{"a": "b', ""),
    ("llama3_json", '{"name": "now", "parameters": {"a": [1}}', '{"a": [1', "}}"),
    ("mistral", '[TOOL_CALLS]now{"a": 1,}', '{"a": 1,', "}"),
    ("qwen3_coder", "<function=now><parameter=a>b</parameter><oops>", '{"a": "b"', "<oops>"),
    ("pythonic", "[now(a=1, b=lambda: 2)]", '{"a": 1, "b": ', "lambda: 2)]"),
    ("openai", f'{CHANNEL}commentary to=functions.now{SAYS}{{"a" 1}}', '{"a" ', "1}"),
    ("deepseek_v3", v31("now", '{"a" 1}'), '{"a" ', f"1}}{DS['call▁end']}"),
]


@pytest.mark.parametrize(("form", "text", "arguments", "content"), BROKEN)
def test_what_breaks_off_a_call_is_content(form: str, text: str, arguments: str, content: str) -> None:
    found = parse(form, text)
    assert (found["calls"], found["content"]) == ([["now", arguments, "broken"]], content)


def test_what_is_no_call_is_content() -> None:
    for form, text in (
        ("hermes", "<tool_call> what is it? </tool_call>"), ("hermes", '<tool_call>{"name": "nobody"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}'), ("llama3_json", '{"answer": 42}'),
        ("llama3_json", 'As JSON: {"name": "now"}'), ("mistral", '[TOOL_CALLS] [1, 2]'), ("pythonic", "[1, 2, 3]"),
        ("pythonic", "Call [now()]"), ("qwen3_coder", "<function=nobody>x</function>"), ("hermes", "a < b <tool_"),
        ("deepseek_v3", f"{DS['calls▁begin']}?"), ("qwen3_coder", "  <tool_call>\n"), ("pythonic", "[now(1)]"),
    ):  # fmt: skip
        assert parse(form, text) == {"content": text, "reasoning": "", "calls": []}


def test_reasoning() -> None:
    said = "\nI think.\n\n</think>\n\nSo.\n"
    for reasoning, prompt, text, expected in (
        ("qwen3", "", "<think>" + said, ("I think.", "So.\n")), ("qwen3", "<think>\n", said, ("I think.", "So.\n")),
        ("qwen3", "", "So.", ("", "So.")), ("qwen3", "<think>\n\n</think>\n\n", "So.", ("", "So.")),
        ("deepseek_r1", "", said, ("I think.", "So.\n")), ("deepseek_r1", "", "<think>" + said, ("I think.", "So.\n")),
        ("deepseek_r1", "</think>", "So.", ("", "So.")), ("deepseek_r1", "", "no end\n", ("no end", "")),
        ("qwen3", "", "\n <think>a <think> b</think>c</think>", ("a <think> b", "c</think>")),
    ):  # fmt: skip
        for parts in ([text], list(text)):
            found = parse(None, "", parts, reasoning=reasoning, prompt=prompt)
            assert (found["reasoning"], found["content"]) == expected, (reasoning, prompt, text)


def test_channels() -> None:
    """GPT-OSS's: reasoning in one, also several times; what isn't a call of a declared tool is content."""
    thought, final = f"{CHANNEL}analysis{SAYS}I think.<|end|><|start|>assistant", f"{CHANNEL}final{SAYS}So.\n"
    for text, expected in (
        (thought + final, ("I think.", "So.\n")), (thought + thought + final, ("I think.I think.", "So.\n")),
        (final, ("", "So.\n")), ("No channel.", ("", "No channel.")),
        (f"{CHANNEL}analysis{SAYS}no end", ("no end", "")), (f"{CHANNEL}analy", ("", "")),
        (f"{CHANNEL}commentary to=functions.rm{SAYS}{{}}", ("", f"{CHANNEL}commentary to=functions.rm{SAYS}{{}}")),
        (f"{CHANNEL}commentary to=functions.now{SAYS}no", ("", f"{CHANNEL}commentary to=functions.now{SAYS}no")),
    ):  # fmt: skip
        for parts in ([text], list(text)):
            found = parse(None, "", parts, reasoning="openai_gptoss")
            assert (found["reasoning"], found["content"], found["calls"]) == (*expected, []), text
    called = f"{thought}{CHANNEL}commentary to=functions.now <|constrain|>json{SAYS}{{}}"
    found = parse("openai", called, reasoning="openai_gptoss")
    assert (found["reasoning"], found["content"], found["calls"]) == ("I think.", "", [["now", "{}", "end"]])


HOSTILE = [
    ("hermes", '<tool_call>{"name":"now","arguments":{"a":x', 0), ("hermes", '<tool_call>{"arguments":', '{"a":['),
    ("hermes", "<tool_call>", " "), ("llama3_json", '{"name":"now","parameters":{"s":"', "x"), ("hermes", "", "<"),
    ("pythonic", "[now(a=", "'"), ("qwen3_coder", "<function=now><parameter=a>", "\n"),
    ("mistral", "[TOOL_CALLS]", "["),
    ("hermes", '<tool_call>{"name":"now","arguments":{"a":"', "\\"), ("pythonic", "[now(a=", "[("),
    ("qwen3_coder", "", "<function=now><parameter=a>"), ("deepseek_v3", "", DS["call▁begin"] + "now" + DS["sep"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "begin", "again"), HOSTILE)
def test_the_cost_is_linear(form: str, begin: str, again: Any) -> None:
    """Counted in calls of functions, Python's and C's; and by what is left unread, which each push copies."""

    def cost(size: int) -> int:
        text = begin + again * (size // len(again)) if again else begin * (size // len(begin))
        parser, calls = OutputParser(calls=form, tools=TOOLS), 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for at in range(0, len(text), 8):
                parser.push(text[at : at + 8])
                assert len(parser._reader.text) - parser._reader.at < 64
            parser.finish()
        finally:
            sys.setprofile(None)
        return calls

    assert cost(8000) < 2.3 * cost(4000)


def test_nesting_is_bounded() -> None:
    deep = "[" * 47 + "]" * 47
    good = parse("hermes", f"<tool_call>{call('now', '{' + chr(34) + 'a' + chr(34) + ':' + deep + '}')}</tool_call>")
    assert good["calls"][0][2] == "end"
    worse = parse("hermes", f"<tool_call>{call('now', '{' + chr(34) + 'a' + chr(34) + ':[' + deep + ']}')}</tool_call>")
    assert worse["calls"][0][2] == "broken"


@pytest.mark.parametrize("value", [
    None, True, -0.5, 1e300, 12345678901234567890, "a\n\t'\"\\ \x00 é🙂", [], {}, [1, [2, {"a": {"b": []}}]], "",
])  # fmt: skip
def test_values(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        said = converted(text)
        assert said is not None and json.loads(said) == value
    said = converted(repr(value), python_value)
    assert said is not None and json.loads(said) == value


def test_odd_values() -> None:
    for text, expected in (
        ('"a\nb\\d\\\'"', "a\nb\\d'"), (r'"\ud83d\ude00\ud83d"', "😀\ufffd"), ("1e5", 1e5), (" [1 , 2] ", [1, 2]),
    ):  # fmt: skip
        said = converted(text, json_value)
        assert said is not None and json.loads(said) == expected
    for text, expected in (
        ("(1, 'a')", [1, "a"]), ("'''a'b\n'''", "a'b\n"), (".5", 0.5), ("007", 7), ("+1", 1),
        (r"'\x41\u00e9\U0001f600'", "Aé😀"),
        ("''", ""), (r"'\q\ud800'", "\\q\ufffd"), ("true", True),
    ):  # fmt: skip
        said = converted(text, python_value)
        assert said is not None and json.loads(said) == expected
    for text in ("", "01", "1.", "tru", "{1: 2}", "[1,]", '{"a"}', "1 2", '"', "nan", "{'a': 1}", "[1)"):
        assert converted(text) is None
    for text in ("1e999.5", "9" * 400, "{1: 2}", "(1]", "f()", "'", "-"):
        assert converted(text, python_value) is None


def test_values_by_their_schema() -> None:
    for text, schema, expected in (
        ("3", {"type": "integer"}, 3), ("3", {"type": "string"}, "3"), ("3", {}, "3"), ("3.5", {"type": "number"}, 3.5),
        ("True", {"type": "boolean"}, True), ("[1, 'a']", {"type": "array"}, [1, "a"]), ("x", {"type": "integer"}, "x"),
        ("null", {"type": ["string", "null"]}, None), ("[1]", {"type": "object"}, "[1]"),
        ("a", {"enum": ["a", 1]}, "a"), ("2", {"enum": ["a", 1]}, 2), ('{"a": 1}', {"$ref": "#/x"}, {"a": 1}),
        ("5", {"oneOf": [{"type": "integer"}]}, 5),
    ):  # fmt: skip
        assert json.loads(typed(text, types_of(schema))) == expected, (text, schema)


def test_formats_of_templates() -> None:
    for template, expected in (
        ("{{ '<tool_call>' }} {\"name\": x, \"arguments\": y}", ("hermes",)), ("[TOOL_CALLS]", ("mistral",)),
        ("<tool_call><function=a><parameter=b> \"arguments\"", ("qwen3_coder", "qwen3_xml")), ("plain", ()),
        ("<|python_tag|>", ("llama3_json",)), ("[func_name1(params_name1=params_value1)]", ("pythonic",)),
        (DS["calls▁begin"], ("deepseek_v3",)), ("'<|start|>assistant<|channel|>final<|message|>'", ("openai",)),
    ):  # fmt: skip
        assert formats_of(template) == expected
