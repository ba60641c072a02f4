"""Grammars to try an engine with: a set of JSON schemas made of the features that public ones have, and, by number,
schemas, expressions and grammars of which many are no good and some are meant to do harm.
"""

from __future__ import annotations

import json
import random
import string
from typing import Any

Schema = dict[str, Any]

FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "uri"]
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][a-z]+$", r"^\d{3}-\d{4}$", "^(red|green)$", "^#[0-9a-f]{6}$", r"^\+?[0-9 ]{4,9}$"]


def _object(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


CLOSED = {"additionalProperties": False}
SHORT = {"type": "string", "maxLength": 12}
# By feature. Each bounds what may come, so that answers of a random model end by themselves.
FEATURES: dict[str, Schema] = {
    "strings": _object({"a": SHORT, "b": {"type": "string", "minLength": 3, "maxLength": 5}}, **CLOSED),
    "numbers": _object({"i": {"type": "integer", "minimum": -5, "maximum": 70},
                        "x": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                        "m": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 995}}, **CLOSED),
    "enum and const": _object({"e": {"enum": ["a", 1, None, True, [1], {"k": "v"}]}, "c": {"const": "it"}}, **CLOSED),
    "booleans and null": _object({"b": {"type": "boolean"}, "n": {"type": "null"}}, **CLOSED),
    "types": _object({"v": {"type": ["boolean", "null"]}}, **CLOSED),
    "arrays": _object({"l": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}}, **CLOSED),
    "tuples": {"type": "array", "prefixItems": [{"type": "boolean"}, SHORT], "items": False, "minItems": 2},
    "nested": _object({"o": _object({"p": _object({"q": {"type": "boolean"}}, **CLOSED)}, **CLOSED)}, **CLOSED),
    "optional": {"type": "object", "properties": {k: {"type": "boolean"} for k in "abc"}, "required": ["c"], **CLOSED},
    "anyOf": _object({"v": {"anyOf": [{"type": "boolean"}, SHORT, {"type": "null"}]}}, **CLOSED),
    "oneOf of different ones": _object({"v": {"oneOf": [{"type": "boolean"}, {"type": "null"}]}}, **CLOSED),
    "allOf": {"allOf": [_object({"a": {"type": "boolean"}}), _object({"b": {"type": "null"}})], **CLOSED,
              "properties": {"a": {}, "b": {}}},
    "$ref and $defs": {"$defs": {"t": {"enum": ["x", "y"]}}, **_object({"a": {"$ref": "#/$defs/t"}}, **CLOSED)},
    "recursive": {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [
        {"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["v", "next"], **CLOSED}}, "$ref": "#/$defs/n"},
    "union by kind": _object({"s": {"anyOf": [
        _object({"kind": {"const": "circle"}, "r": {"type": "integer", "minimum": 1, "maximum": 9}}, **CLOSED),
        _object({"kind": {"const": "square"}, "side": {"enum": [1, 2]}}, **CLOSED)]}}, **CLOSED),
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "patternProperties": {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, **CLOSED,
                          "minProperties": 1, "maxProperties": 2},
    "any JSON": _object({"v": {}}, **CLOSED),
    "unicode": _object({"größe": {"enum": ["klein", "groß", "日本"]}, 'q"\\': {"type": "null"}}, **CLOSED),
    "titles and notes": {"title": "T", "description": "d", "$schema": "https://json-schema.org/draft/2020-12/schema",
                         "examples": [{}], "default": {}, **_object({"a": {"type": "null", "title": "A"}}, **CLOSED)},
    **{f"format {name}": _object({"v": {"type": "string", "format": name, "maxLength": 40} if name in ("email", "uri",
        "hostname") else {"type": "string", "format": name}}, **CLOSED) for name in FORMATS},
    **{f"pattern {pattern}": _object({"v": {"type": "string", "pattern": pattern}}, **CLOSED) for pattern in PATTERNS},
}  # fmt: skip


def drawn(number: int) -> dict[str, Any]:
    """`structured_outputs` of this number."""
    chance = random.Random(number)
    kind = chance.choices(["json", "broken", "harmful", "regex", "grammar", "choice", "tags"], [8, 4, 3, 3, 3, 1, 1])[0]
    match kind:
        case "json":
            return {"json": schema(chance, 3)}
        case "broken":
            return {"json": _broken(chance, schema(chance, 3))}
        case "harmful":
            return _harmful(chance)
        case "regex":
            return {"regex": _regex(chance, 4)}
        case "grammar":
            return {"grammar": _grammar(chance)}
        case "choice":
            return {"choice": [_word(chance) for _ in range(chance.choice([1, 2, 30, 2000]))]}
        case _:
            begin = _word(chance)
            structure = {"begin": f"<{begin}>", "schema": schema(chance, 2), "end": chance.choice(["", "</x>"])}
            return {"structural_tag": {"structures": [structure], "triggers": [chance.choice(["<", f"<{begin}", "?"])]}}


def schema(chance: random.Random, depth: int) -> Schema:
    """One that may well be right, so deep at most."""
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    match chance.choice(leaves if not depth else [*leaves, "object", "object", "object", "array", "anyOf", "allOf"]):
        case "string":
            low = chance.choice([0, 0, 1, 5])
            return {"type": "string", "minLength": low, "maxLength": low + chance.choice([0, 3, 20, 500])}
        case "integer" | "number" as kind:
            low = chance.choice([-100, 0, 1, 10**6])
            found: Schema = {"type": kind, chance.choice(["minimum", "exclusiveMinimum"]): low}
            if chance.random() < 0.6:
                found["maximum"] = low + chance.choice([0, 1, 99, 10**9])
            if chance.random() < 0.2:
                found["multipleOf"] = chance.choice([2, 7, 100, 997, 0.5, 0.01])
            return found
        case "boolean" | "null" as kind:
            return {"type": kind}
        case "enum":
            return {"enum": [chance.choice([_word(chance), chance.randrange(99), None]) for _ in range(3)]}
        case "const":
            return {"const": _word(chance)}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(PATTERNS)}
        case "format":
            return {"type": "string", "format": chance.choice(FORMATS)}
        case "object":
            names = list(dict.fromkeys(_word(chance) for _ in range(chance.choice([0, 1, 3, 12]))))
            found = {"type": "object", "properties": {name: schema(chance, depth - 1) for name in names}}
            found["required"] = [name for name in names if chance.random() < 0.6]
            if chance.random() < 0.6:
                found["additionalProperties"] = chance.choice([False, True, {"type": "boolean"}])
            return found
        case "array":
            low = chance.choice([0, 0, 2])
            return {"type": "array", "items": schema(chance, depth - 1), "minItems": low, "maxItems": low + 3}
        case kind:
            return {kind: [schema(chance, depth - 1) for _ in range(chance.choice([1, 2, 4]))]}


def _broken(chance: random.Random, given: Schema) -> Any:
    """With something in it that is wrong, or that nobody knows."""
    at: Any = given
    for _ in range(chance.randrange(4)):
        below = [v for v in (at.values() if isinstance(at, dict) else at) if isinstance(v, dict | list) and v]
        if not below:
            break
        at = chance.choice(below)
    wrong: Any = chance.choice([None, -1, 1e308, "", [], {}, True, "x" * 3000, [[]], {"$ref": "#"}, {"$ref": "#/no"}])
    if isinstance(at, dict):
        keys = [*at, "type", "properties", "items", "required", "enum", "pattern", "$ref", "not", "uniqueItems",
                "format", "minItems", "maxLength", "multipleOf", "x-guidance", "oneOf", "if", "$defs",
                _word(chance)]  # fmt: skip
        at[chance.choice(keys)] = wrong
    else:
        at.append(wrong)
    return given if chance.random() < 0.9 else wrong


def _harmful(chance: random.Random) -> dict[str, Any]:
    """Made to take long, or much."""
    n = chance.choice([10, 100, 1000, 10_000])
    times, upto = f"{{{n}}}", f"{{1,{n}}}"
    deep: Any = {}
    for _ in range(min(n, 200)):
        deep = chance.choice([{"items": deep}, {"properties": {"a": deep}}, {"anyOf": [deep, {}]}])
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"items": {"$ref": f"#/$defs/d{i + 1}"}}]}
             for i in range(min(n, 60))}  # fmt: skip
    chain = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(n))
    terms = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(min(n, 30)))
    return chance.choice([
        {"json": deep},
        {"json": {"$defs": {**twice, f"d{min(n, 60)}": {}}, "$ref": "#/$defs/d0"}},
        {"json": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(6)]}
                            for i in range(min(n, 9))]}},
        {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(min(n, 3000))}}},
        {"json": {"enum": [f"value {i}" for i in range(min(n, 5000))]}},
        {"json": {"type": "integer", "multipleOf": chance.choice([9973, 99_991, 9_999_991, 1e-9])}},
        {"json": {"type": "array", "minItems": 10 * n, "maxItems": 10**9, "items": {"type": "object"}}},
        {"json": {"type": "string", "minLength": 10 * n, "pattern": f"^(a?){times}a{times}$"}},
        {"regex": "(" * min(n, 60) + "a" + ")*" * min(n, 60)},
        {"regex": f"((a{upto}){upto}){upto}"},
        {"regex": f"(.*a){{{min(n, 500)}}}.{times}"},
        {"regex": rf"(\p{{L}}|\p{{N}}){times}[^\x00]{times}"},
        {"regex": f"(.|\n)*a(.|\n){times}"},
        {"grammar": f'start: r0\n{chain}\nr{n}: "a"'},
        {"grammar": f'start: T0\n{terms}\nT{min(n, 30)}: "a"'},
        {"grammar": 'start: x\nx: x x x | x x | "a" | ""'},
        {"grammar": 'start: a\na: "x" a'},
        {"grammar": f'start: ("a" | "b" | start){upto}'},
    ])  # fmt: skip


def _regex(chance: random.Random, depth: int) -> str:
    if not depth:
        return chance.choice(
            ["a", "b", ".", r"\d", r"\w", r"[^x-z]", "é", r"\.", "[[:alpha:]]", r"\p{Lu}", "(", "]", "\\"]
        )
    inner = _regex(chance, depth - 1)
    return chance.choice([
        inner + _regex(chance, depth - 1), f"({inner}|{_regex(chance, depth - 1)})", f"({inner})*", f"({inner})?",
        f"({inner}){{{chance.randrange(9)},{chance.randrange(20)}}}", f"(?i:{inner})", inner,
    ])  # fmt: skip


def _grammar(chance: random.Random) -> str:
    rules = ["start", "one", "two", "LETTERS", "DIGITS"]
    parts = [
        *rules,
        '"a"',
        '"b c"',
        "/[0-9]+/",
        "(",
        ")",
        "|",
        "*",
        "?",
        "{2,3}",
        '%json {"type": "boolean"}',
        "<|end|>",
    ]
    if chance.random() < 0.3:
        body = " ".join(chance.choice(['"a"', "[0-9]", "x", "|", "(", ")", "*"]) for _ in range(6))
        return f'root ::= x+ {body}\nx ::= "y" | "z"'
    lines = []
    for rule in rules:
        if chance.random() < 0.9:
            body = " ".join(chance.choice(parts) for _ in range(chance.choice([1, 2, 5])))
            lines.append(f"{rule}: {body if chance.random() < 0.7 else json.dumps(_word(chance))}")
    return "\n".join(lines)


def _word(chance: random.Random) -> str:
    return "".join(chance.choice(string.ascii_lowercase + '_- "é') for _ in range(chance.choice([1, 4, 9])))
