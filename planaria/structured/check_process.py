"""The process in which grammars are compiled first: whatever they make of the library, a fork of it ends alone.

A line on standard input for each, its number and JSON, a line on standard output in answer. The fork that reads and
answers them ends with standard input, with a grammar that takes too much of a processor or of memory, and with one that
the library fails on; then there is another, which says so.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from planaria.processes import die_with_parent, leave_signals_to_parent
from planaria.structured.check import MEMORY, NICE, UP, Asked, Verdict, Vocabulary
from planaria.structured.spec import OutputForm

STACK = 16 << 20  # bytes: a quarter of what those have who follow a grammar
LOOKING = 0.2  # seconds for the place of a mistake
NESTED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # objects of schemas
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
# By what the library's text begins with, where that doesn't say what is wrong.
IN_OUR_WORDS = {
    "NoExtensionBias": "a $ref leads back to itself with nothing in between, which says nothing of a value; refer to "
        "it from within properties, items or anyOf, or take it away",
    "circular references with sibling keys": "a $ref to a schema that this one is a part of can't have further "
        "keywords beside it, nor beside an allOf, anyOf or oneOf that it is in; put them into the schema it refers to",
    "schema too large": "its combinations of allOf, anyOf, oneOf and $ref are too many once they are multiplied out",
}  # fmt: skip


class Compiler:
    """Of grammars over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from planaria.structured.vocabulary import make_vocabulary

        self.tokens = make_vocabulary(vocabulary.tokenizer, vocabulary.size, vocabulary.eos_id)

    def verdict(self, source: OutputForm) -> Verdict:
        try:
            grammar = self.grammar(source)
        except Exception as e:  # whatever the library's converters raise
            return Verdict(error=f"can't be read: {_line(str(e) or type(e).__name__)}")
        error = self.error(grammar)
        if error and source.kind == "json":
            return Verdict(error=error, place=".".join(self.place(source.body)))
        if error and source.kind == "tags":
            return self.in_tags(source.body) or Verdict(error=error)
        return Verdict(grammar="" if error else grammar, error=error)

    def in_tags(self, tags: list[list[Any]]) -> Verdict | None:
        """Which of their schemas is wrong, if one is by itself."""
        for i, (_, _, schema, _) in enumerate(tags):
            if error := self.error(of_schema(schema)):
                return Verdict(error=error, place=".".join(["structures", str(i), "schema", *self.place(schema)]))
        return None

    def grammar(self, source: OutputForm) -> str:
        """As the library takes it."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        match source.kind:
            case "json":
                return of_schema(source.body)
            case "regex":
                return str(LLMatcher.grammar_from_regex(source.body))
            case "choice":
                return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, source.body))
            case "tags":
                return self.tags(source.body)
            case _:
                return str(any_to_lark(source.body))

    def tags(self, tags: list[list[Any]]) -> str:
        """Free text, and what begins with a trigger is one of its structures."""
        rules = [f"tag_{i}" for i in range(len(tags))]
        lines = [f"start: ({' | '.join(rules)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
        for rule, (trigger, begin, schema, end) in zip(rules, tags, strict=True):
            before, after = (json.dumps(text) if text else "" for text in (begin, end))
            body = f"{before} %json {json.dumps(schema, ensure_ascii=False)} {after}"
            if self.is_special(trigger):
                lines.append(f"{rule}: TEXT {trigger} {body}")
            else:
                lines += [f"{rule}_trigger[lazy]: TEXT {json.dumps(trigger)}", f"{rule}: {rule}_trigger {body}"]
        return "\n".join(lines)

    def is_special(self, text: str) -> bool:
        """Is it one token, of those that no text is made of?"""
        ids = self.tokens.tokenize_str(text, parse_special=True)
        return len(ids) == 1 and self.tokens.is_special_token(ids[0]) and text.startswith("<") and text.endswith(">")

    def error(self, grammar: str) -> str:
        """What is wrong with it, up to its first token; empty: nothing."""
        from llguidance import LLMatcher

        from planaria.structured.vocabulary import limits

        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error():
                return "" if any(mask) else "allows no output"
        return _line(matcher.get_error())

    def place(self, schema: Any) -> list[str]:
        """The way to the smallest part of a schema that can't be compiled by itself."""
        end = time.perf_counter() + LOOKING
        way: list[str] = []
        root = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        found = True
        while found and isinstance(schema, dict):
            found = False
            for path, part in _parts(schema):
                if time.perf_counter() > end:
                    return way
                whole = {**part, **{name: value for name, value in root.items() if path[0] not in root}}
                if self.error(of_schema(whole)):
                    way, schema, found = way + path, part, True
                    break
        return way


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of JSON that follows it."""
    return json.dumps({"grammars": [{"json_schema": schema}]}, ensure_ascii=False)


def _parts(schema: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """Schemas that are right within one, and the way to each."""
    found: list[tuple[list[str], Any]] = []
    for name in NESTED:
        if isinstance(below := schema.get(name), dict):
            found += [([name, key], value) for key, value in below.items()]
    for name in LISTS:
        if isinstance(below := schema.get(name), list):
            found += [([name, str(i)], value) for i, value in enumerate(below)]
    found += [([name], schema[name]) for name in SINGLE if name in schema]
    return [(path, part) for path, part in found if isinstance(part, dict)]


def _line(text: str) -> str:
    """An error's text, without the grammar that the library may show in it."""
    text = " ".join(text.replace("<non-verbose/>", "").split())
    text = next((said for begin, said in IN_OUR_WORDS.items() if text.startswith(begin)), text)
    return text if len(text) <= 500 else text[:499] + "…"


def serve(compiler: Compiler, cpu: float) -> None:
    """To the end of standard input. cpu: seconds of a processor for each grammar."""
    hear, say = sys.stdin.buffer, sys.stdout.buffer
    say.write(b"%b %d\n" % (UP, os.getpid()))
    say.flush()
    while line := hear.readline():
        number, _, asked = line.partition(b" ")
        source = msgspec.json.decode(asked, type=Asked).source
        signal.setitimer(signal.ITIMER_PROF, cpu)  # nobody handles its signal, which ends the process
        verdict = compiler.verdict(source)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say.write(b"%b %b\n" % (number, msgspec.json.encode(verdict)))
        say.flush()
    os._exit(0)


def fork(compiler: Compiler, cpu: float) -> int:
    """The id of one that serves: with a lower priority, and with a thread for its stack."""
    parent = os.getpid()
    if child := os.fork():
        return child
    die_with_parent(parent)
    os.nice(NICE)
    thread = threading.Thread(target=serve, args=[compiler, cpu])
    thread.start()
    thread.join()
    os._exit(1)


def main() -> None:
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    cpu, compiler = float(sys.argv[1]), Compiler(msgspec.json.decode(sys.stdin.buffer.readline(), type=Vocabulary))
    while status := os.waitpid(fork(compiler, cpu), 0)[1]:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:  # from outside: no grammar does that
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
