"""Calls that must be made, as a grammar of the format in which the model writes them. Pure.

What follows the grammar is read by that format's parser as calls of declared tools, with arguments that follow their
schemas. Texts are written as templates show them to models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from planaria.parsers.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from planaria.parsers.output import CLOSE, OPEN
from planaria.parsers.text_calls import types_of

Schemas = Mapping[str, Mapping[str, Any]]
Mark = Callable[[str], str]
ANY_TEXT = r"/(.|\n)*/"
MAX_LENGTH = 1000  # of a text whose length is held to where it stands without quotes
_DEFINITIONS = ("$defs", "definitions")


def quoted(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


def call_grammar(
    calls: str, schemas: Schemas, *, template: str = "", several: bool = True, mark: Mark = quoted, whitespace: str = ""
) -> str:
    """Lark, for calls of any of the tools, one or `several`.

    template: the chat template, where a format has several forms. mark: how the grammar names a special token.
    whitespace: between the parts of JSON, as a regular expression.
    """
    lines = Lines(schemas, mark, template, whitespace)
    FORMS[calls](lines, several)
    return "\n".join(["start: calls", *lines.said, f"ANY_TEXT: {ANY_TEXT}"])


def after_reasoning(grammar: str, reasoning: str, mark: Mark = quoted, *, calls: bool = False) -> str:
    """What an answer must be after its reasoning, in the form that the library takes. reasoning: "begun", "open" or
    "channels", as `output.begun` says. calls: `grammar` has them, and says where what it is of begins."""
    if reasoning == "channels":
        lines = [
            f"start: thought* {'' if calls else 'final'} @answer",
            f'thought: {mark(CHANNEL)} "analysis" {mark(MESSAGE)} closed {mark(START)} "assistant"',
            f"closed{_up_to(mark, END)}", f"final: {_final(mark)}", f"ANY_TEXT: {ANY_TEXT}",
        ]  # fmt: skip
        return _with_named("\n".join(lines), "answer", grammar)
    before = {"begun": "thought", "open": f"({mark(OPEN)} thought)?"}[reasoning]
    first = f'start: {before} @answer\nthought: closed "\\n\\n"?\nclosed{_up_to(mark, CLOSE)}\nANY_TEXT: {ANY_TEXT}'
    return _with_named(first, "answer", grammar)


def _up_to(mark: Mark, end: str) -> str:
    """Any text and what ends it, which may be a special token, as the rest of a rule."""
    return f"[lazy]: ANY_TEXT {quoted(end)}" if mark(end) == quoted(end) else f": ANY_TEXT {mark(end)}"


def _final(mark: Mark) -> str:
    return f'{mark(CHANNEL)} "final" {mark(MESSAGE)}'


def or_answer(calls: str, grammar: str) -> str:
    """Either calls, as `call_grammar` has them, or an answer of another form, in the form that the library takes."""
    begins = "final @form" if "\nfinal: " in calls else "@form"
    return _with_named(calls.replace("start: calls", f"start: calls | {begins}", 1), "form", grammar)


def _with_named(first: str, name: str, grammar: str) -> str:
    """Lark that speaks of another grammar by this name, with that."""
    own = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": first}, {**own[0], "name": name}, *own[1:]]})


class Lines:
    """Rules of a grammar, and what they are made of."""

    def __init__(self, schemas: Schemas, mark: Mark, template: str, whitespace: str) -> None:
        self.schemas, self.mark, self.template = schemas, mark, template
        self._more = {"x-guidance": {"whitespace_pattern": whitespace}} if whitespace else {}
        self.said: list[str] = []

    def add(self, line: str) -> None:
        self.said.append(line)

    def json(self, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> str:
        """root: of whose definitions `schema` may speak."""
        shared = {name: root[name] for name in _DEFINITIONS if root and name in root}
        return f"%json {json.dumps({**shared, **schema, **self._more}, ensure_ascii=False)}"

    def arguments(self, name: str) -> str:
        return self.json({"type": "object", **self.schemas[name]})

    def each(self, rule: Callable[[str], str]) -> None:
        """Rule `call`: one of the tools, as `rule` writes it."""
        names = [f"call_{i}" for i in range(len(self.schemas))]
        self.add(f"call: {' | '.join(names)}")
        for rule_name, name in zip(names, self.schemas, strict=True):
            self.add(f"{rule_name}: {rule(name)}")

    def object(self, word: str) -> None:
        """Rule `call`: {"name": ..., word: ...}."""

        def rule(name: str) -> str:
            begin = f'{{"name": {quoted(name)}, "{word}": '
            return f'{quoted(begin)} {self.arguments(name)} "}}"'

        self.each(rule)

    def repeated(self, one: str, between: str = "", *, several: bool) -> str:
        return f"{one} ({between} {one})*" if several else one


def _hermes(lines: Lines, several: bool) -> None:
    begin, end = lines.mark("<tool_call>"), lines.mark("</tool_call>")
    lines.add(f"calls: {lines.repeated('marked', quoted(chr(10)), several=several)}")
    lines.add(f'marked: {begin} "\\n" call "\\n" {end}')
    lines.object("arguments")


def _llama3_json(lines: Lines, several: bool) -> None:
    lines.add(f"calls: {lines.repeated('call', quoted('; '), several=several)}")
    lines.object("parameters")


def _mistral(lines: Lines, several: bool) -> None:
    begin = lines.mark("[TOOL_CALLS]")
    if "[ARGS]" in lines.template:
        lines.add(f"calls: {lines.repeated('marked', several=several)}")
        lines.add(f"marked: {begin} call")
        lines.each(lambda name: f"{quoted(name)} {lines.mark('[ARGS]')} {lines.arguments(name)}")
    else:
        lines.add(f'calls: {begin} "[" {lines.repeated("call", quoted(", "), several=several)} "]"')
        lines.object("arguments")


def _deepseek_v3(lines: Lines, several: bool) -> None:
    begins, begin, sep, end, ends = (
        lines.mark(f"<｜tool▁{word}｜>") for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
    )
    fenced = "```json" in lines.template
    between = quoted("\n") if fenced else ""
    lines.add(f"calls: {begins} {lines.repeated('marked', between, several=several)} {ends}")
    lines.add(f"marked: {begin} call {end}")
    if fenced:
        lines.each(
            lambda name: (
                f'"function" {sep} {quoted(name + chr(10) + "```json" + chr(10))} {lines.arguments(name)} '
                f"{quoted(chr(10) + '```')}"
            )
        )
    else:
        lines.each(lambda name: f"{quoted(name)} {sep} {lines.arguments(name)}")


def _qwen3_coder(lines: Lines, several: bool) -> None:
    begin, end = lines.mark("<tool_call>"), lines.mark("</tool_call>")
    lines.add(f"calls: {lines.repeated('marked', quoted(chr(10)), several=several)}")
    lines.add(f'marked: {begin} "\\n" call "\\n" {end}')
    lines.add('text[lazy]: ANY_TEXT "\\n</parameter>\\n"')

    def value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        if "string" not in types_of(schema):
            return f'{lines.json(schema, root)} "\\n</parameter>\\n"'
        texts = schema.get("enum")
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts) and texts:
            return f'({" | ".join(quoted(text) for text in texts)}) "\\n</parameter>\\n"'
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if isinstance(most, int) and isinstance(least, int) and 0 <= least <= most <= MAX_LENGTH:
            return f'/[^<]{{{least},{most}}}/ "\\n</parameter>\\n"'  # what ends it can't be within it
        return "text"

    def one(name: str) -> str:
        root = lines.schemas[name]
        parts = [
            optional(quoted(f"<parameter={key}>\n") + " " + value(schema, root), needed)
            for key, schema, needed in parameters(root)
        ]
        begin = quoted(f"<function={name}>\n")
        return f'{begin} {" ".join(parts)} "</function>"'

    lines.each(one)


def _pythonic(lines: Lines, several: bool) -> None:
    lines.add(f'calls: "[" {lines.repeated("call", quoted(", "), several=several)} "]"')
    count = iter(range(1 << 30))

    def one(name: str) -> str:
        root = lines.schemas[name]
        rest, first = '""', '""'
        for key, schema, needed in reversed(list(parameters(root))):
            argument, after, begin = (f"{kind}_{next(count)}" for kind in ("argument", "after", "begin"))
            lines.add(f"{argument}: {quoted(key + '=')} {lines.json(schema, root)}")
            lines.add(f"{after}: " + optional(f'", " {argument}', needed) + f" {rest}")
            lines.add(f"{begin}: {argument} {rest}{'' if needed else f' | {first}'}")
            rest, first = after, begin
        return f'{quoted(name + "(")} {first} ")"'

    lines.each(one)


def _openai(lines: Lines, several: bool) -> None:
    """One call: what ends it ends the answer."""
    lines.add("calls: call")
    lines.add(f"final: {_final(lines.mark)}")
    begin, form, then = f'{lines.mark(CHANNEL)} "commentary to=functions.', lines.mark(CONSTRAIN), lines.mark(MESSAGE)
    lines.each(lambda name: f'{begin}{name} " {form} "json" {then} {lines.arguments(name)}')


def optional(rule: str, needed: bool) -> str:
    return rule if needed else f"({rule})?"


def parameters(schema: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it must be there, of those that can be written without being JSON."""
    known, needed = schema.get("properties"), schema.get("required")
    for key, value in (known if isinstance(known, Mapping) else {}).items():
        if isinstance(value, Mapping):
            yield key, value, isinstance(needed, (list, tuple)) and key in needed


FORMS: dict[str, Callable[[Lines, bool], None]] = {
    "hermes": _hermes, "llama3_json": _llama3_json, "mistral": _mistral, "qwen3_coder": _qwen3_coder,
    "qwen3_xml": _qwen3_coder, "pythonic": _pythonic, "deepseek_v3": _deepseek_v3, "openai": _openai,
}  # fmt: skip
