"""As much of Go's templates as the chart uses, so that it can be rendered where there is no helm.

Pipelines with parentheses, `if`, `else`, `range`, `define`, and helm's functions below. Anything else is a ValueError:
then the chart needs a real helm to be tested with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

TAG = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.S)
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\(|\)|\||[^\s()|]+')


def render(chart: Path, values: dict[str, Any], release: str = "release") -> list[dict[str, Any]]:
    """The documents that `helm template RELEASE CHART` prints with these values over the chart's own."""
    own = yaml.safe_load((chart / "values.yaml").read_text())
    meta = yaml.safe_load((chart / "Chart.yaml").read_text())
    scope = {
        "Values": _merged(own, values), "Release": {"Name": release, "Namespace": "default"},
        "Chart": {"Name": meta["name"], "AppVersion": meta["appVersion"], "Version": meta["version"]},
    }  # fmt: skip
    defined: dict[str, list[Any]] = {}
    files = sorted((chart / "templates").iterdir(), key=lambda path: path.suffix != ".tpl")
    texts = [_run(_parse(path.read_text(), defined), scope, defined) for path in files]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def _merged(own: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return own | {k: _merged(own[k], v) if isinstance(own.get(k), dict) else v for k, v in values.items()}


def _parse(text: str, defined: dict[str, list[Any]]) -> list[Any]:
    """Nodes: text, ("print", pipeline), (word, pipeline, body, else body)."""
    parts = TAG.split(text)
    texts = parts[::4]
    for i, (before, after) in enumerate(zip(parts[1::4], parts[3::4], strict=True)):
        if before:
            texts[i] = texts[i].rstrip()
        if after:
            texts[i + 1] = texts[i + 1].lstrip()
    items: list[Any] = [texts[0]]
    for tag, after in zip(parts[2::4], texts[1:], strict=True):
        items += [(tag,), after]
    return _block(iter(items), defined)[0]


def _block(items: Iterator[Any], defined: dict[str, list[Any]]) -> tuple[list[Any], str]:
    nodes: list[Any] = []
    for item in items:
        if isinstance(item, str):
            nodes.append(item)
            continue
        word, _, rest = item[0].partition(" ")
        if word in ("end", "else"):
            return nodes, word
        if word in ("if", "range", "define"):
            body, ended = _block(items, defined)
            other, _ = _block(items, defined) if ended == "else" else ([], "")
            if word == "define":
                defined[json.loads(rest)] = body
            else:
                nodes.append((word, rest, body, other))
        elif not word.startswith("/*"):
            nodes.append(("print", item[0], [], []))
    return nodes, ""


def _run(nodes: list[Any], scope: Any, defined: dict[str, list[Any]], root: Any = None) -> str:
    root = scope if root is None else root
    out = []
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
            continue
        word, rest, body, other = node
        value = _pipeline(TOKEN.findall(rest), scope, defined, root)
        if word == "print":
            out.append(str(value).lower() if isinstance(value, bool) else str(value))
        elif word == "if":
            out.append(_run(body if value else other, scope, defined, root))
        else:
            out += [_run(body, each, defined, root) for each in value]
    return "".join(out)


def _pipeline(tokens: list[str], scope: Any, defined: dict[str, list[Any]], root: Any) -> Any:
    stages: list[list[Any]] = [[]]
    while tokens:
        token = tokens.pop(0)
        if token == "(":
            depth, inner = 1, []
            while depth:
                inner.append(tokens.pop(0))
                depth += {"(": 1, ")": -1}.get(inner[-1], 0)
            stages[-1].append(_pipeline(inner[:-1], scope, defined, root))
        elif token == "|":
            stages.append([])
        else:
            stages[-1].append(_atom(token, scope, root))
    value: Any = None
    for i, stage in enumerate(stages):
        args = [*stage[1:], *([value] if i else [])]
        if not callable(stage[0]):
            value = stage[0]
        elif stage[0] is _include:
            value = _run(defined[args[0]], args[1], defined)
        else:
            value = stage[0](*args)
    return value


def _atom(token: str, scope: Any, root: Any) -> Any:
    if token in FUNCTIONS:
        return FUNCTIONS[token]
    if token[0] == '"':
        return json.loads(token)
    if re.fullmatch(r"-?\d+", token):
        return int(token)
    if token[0] not in ".$":
        raise ValueError(f"{token!r}: a function that this renderer has not")
    value = root if token[0] == "$" else scope
    for name in token.lstrip("$").split("."):
        if name:
            value = value.get(name, "") if isinstance(value, dict) else ""
    return value


def _include() -> None: ...


def _required(message: str, value: Any) -> Any:
    if not value:
        raise ValueError(message)
    return value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "include": _include,
    "required": _required,
    "quote": lambda value: json.dumps(str(value)),
    "default": lambda instead, value: value or instead,
    "int": int,
    "eq": lambda a, b: a == b,
    "gt": lambda a, b: a > b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a // b,
    "toYaml": lambda value: yaml.safe_dump(value, sort_keys=False).rstrip(),
    "nindent": lambda count, text: "\n" + "\n".join(" " * count + line for line in str(text).splitlines()),
}
