"""Tools of a request: what may be said of them, and how its answer's texts are read. Used by `LLM` and the server.

A model's format of calls is an option, or chosen from its chat template. Where a request has no tools to look for and
no reasoning is taken apart, there is no `Reading`, and nothing here costs anything.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from planaria.parsers.reading import Reading
from planaria.server.messages import check_depth
from planaria.server.wrong import said, wrong
from planaria.types import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from planaria.parsers.found import OutputEvent
    from planaria.server.tokenise import Tokenizer

MAX_TOOLS = 512
MAX_TOOLS_SIZE = 256 << 10  # bytes of all of them, as JSON
MAX_TOOL_NAME = 128  # characters
CHANNELS, IN_CHANNELS = "openai", "openai_gptoss"  # GPT-OSS's formats of calls and of reasoning
PROMPT_END = 8  # tokens of the prompt that may begin, or end, its answer's reasoning
_NAME = re.compile(r"[a-zA-Z0-9_.-]+\Z")
_READS_TOOLS = re.compile(r"\btools\b")
_MODES = ("none", "auto", "required")


class Parsers(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the same names. None: of a server that says nothing of it."""

    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool | None = None
    reasoning_parser: str | None = None


class Tools(msgspec.Struct, frozen=True):
    """Of one request. given: for the chat template; schemas: by name, of those that may be called; mode: none, auto,
    required or named (`schemas` has that one)."""

    given: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    mode: str
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """A call has to be made."""
        return self.mode in ("required", "named")

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """To the chat template."""
        return self.given if self.given and self.mode != "none" else None


def check_tools(
    tools: object, choice: object = None, parallel: bool | None = None, place: str = "tools",
    choice_place: str = "tool_choice",
) -> Tools:  # fmt: skip
    """Tools and what is said of them, in OpenAI's shape. Raises RequestError, whose `param` is the place of what is
    wrong, which begins with `place` or `choice_place`."""
    given, names = _declared(tools, place)
    mode, only = _choice(choice, choice_place)
    if mode is None:
        mode = "auto" if given else "none"
    elif mode not in ("none", "auto") and not given:
        raise wrong(choice_place, f"needs tools to choose from, and {place} has none", "invalid_value")
    for name in only or ():
        if name not in names:
            known = ", ".join(names)[:200]
            raise wrong(
                choice_place,
                f"names {name[:MAX_TOOL_NAME]!r}, which is not declared; there is: {known}",
                "invalid_value",
            )
    schemas = names if only is None else {name: names[name] for name in only}
    return Tools(given, schemas if mode != "none" else {}, mode, parallel is not False)


def _declared(tools: object, place: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    if tools is None:
        return [], {}
    if not isinstance(tools, (list, tuple)):
        raise wrong(place, "must be a list of tools", "invalid_type")
    if len(tools) > MAX_TOOLS:
        raise wrong(place, f"has {len(tools)} entries; at most {MAX_TOOLS}", "invalid_value")
    names: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        name, schema = _tool(tool, f"{place}[{i}]")
        if name in names:
            raise wrong(f"{place}[{i}].function.name", f"{name!r} is declared twice", "invalid_value")
        names[name] = schema
    given = [_plain(tool, f"{place}[{i}]") for i, tool in enumerate(tools)]
    try:
        size = len(msgspec.json.encode(given))
    except (TypeError, ValueError) as e:
        raise wrong(place, f"can't be written as JSON: {e}", "invalid_value") from None
    if size > MAX_TOOLS_SIZE:
        raise wrong(place, f"is {size} bytes of JSON; at most {MAX_TOOLS_SIZE}", "invalid_value")
    return given, names


def _tool(tool: object, place: str) -> tuple[str, dict[str, Any]]:
    """A tool's name and the schema of its arguments."""
    if not isinstance(tool, Mapping):
        raise wrong(place, "must be an object with type and function", "invalid_type")
    kind = tool.get("type", "function")
    if kind != "function":
        raise wrong(f"{place}.type", f"must be 'function' (no other is supported), got {said(kind)}", "invalid_value")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise wrong(f"{place}.function", "must be an object with a name", "invalid_type")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or len(name) > MAX_TOOL_NAME or not _NAME.match(name):
        raise wrong(
            f"{place}.function.name",
            f"must be 1 to {MAX_TOOL_NAME} letters, digits, '_', '-' and '.', got {said(name)}",
            "invalid_value",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise wrong(f"{place}.function.description", "must be a string", "invalid_type")
    if not isinstance(schema, Mapping | None):
        raise wrong(f"{place}.function.parameters", "must be an object, a JSON schema", "invalid_type")
    if schema is not None and schema.get("type", "object") != "object":
        raise wrong(f"{place}.function.parameters.type", "must be 'object': arguments have names", "invalid_value")
    return name, dict(schema or {})


def _plain(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """As templates read it: what is null is left out."""
    check_depth(tool, place)
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {**tool, "type": "function", "function": function}


def _choice(choice: object, place: str) -> tuple[str | None, list[str] | None]:
    """Its mode, and the names it is limited to."""
    if choice is None or (isinstance(choice, str) and choice in _MODES):
        return choice, None
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "function":
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str):
                return "named", [name]
            raise wrong(f"{place}.function.name", "is required", "missing_required_parameter")
        allowed = choice.get("allowed_tools")
        if kind == "allowed_tools" and isinstance(allowed, Mapping):
            return _allowed(allowed, f"{place}.allowed_tools")
    rule = "must be none, auto, required, or an object with type 'function' or 'allowed_tools'"
    raise wrong(place, f"{rule}, got {said(choice)}", "invalid_value")


def _allowed(allowed: Mapping[str, Any], place: str) -> tuple[str, list[str]]:
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{place}.mode", "must be auto or required", "invalid_value")
    if not isinstance(tools, (list, tuple)) or not tools or len(tools) > MAX_TOOLS:
        raise wrong(f"{place}.tools", f"must be a list of 1 to {MAX_TOOLS} tools", "invalid_value")
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    named = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
    names = [name for name in named if isinstance(name, str)]
    if len(names) < len(tools):
        raise wrong(f"{place}.tools", "must be objects with type 'function' and a function's name", "invalid_value")
    return mode, list(dict.fromkeys(names))


def reading_of(
    tools: Tools | None, parsers: Parsers, template: str | None, tokenizer: Tokenizer, prompt: Sequence[int], *,
    place: str = "tools", choice_place: str = "tool_choice",
) -> Reading | None:  # fmt: skip
    """How answers of a request are read; None: as they are. template: the chat template that made `prompt`. Raises
    RequestError where calls could not be made or not be found."""
    calls = None
    if tools is not None and tools.shown is not None:
        calls = _format_of(tools, parsers, template or "", place, choice_place)
    reasoning = IN_CHANNELS if calls == CHANNELS else format_of_reasoning(parsers, template)
    if calls is None and reasoning is None:
        return None
    end = tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False) if reasoning else ""
    schemas = tools.schemas if tools is not None and calls is not None else {}
    return Reading(calls, schemas, reasoning, end, tools is not None and not tools.parallel)


def format_of_reasoning(parsers: Parsers, template: str | None) -> str | None:
    """What an option says, else channels where the template has them: no text of such a model can be read without."""
    return parsers.reasoning_parser or (IN_CHANNELS if CHANNELS in about(template or "")[0] else None)


def _format_of(tools: Tools, parsers: Parsers, template: str, place: str, choice_place: str) -> str:
    formats, reads_tools = about(template)
    if not reads_tools:
        raise wrong(
            place, "can't be told to this model: its chat template has no place for tools; give --chat-template one "
            "that has", "unsupported_parameter",
        )  # fmt: skip
    name = parsers.tool_call_parser
    if name is None:
        if not formats:
            raise wrong(
                place, "can't be used: how this model writes calls can't be seen in its chat template; start the "
                "server with --tool-call-parser", "unsupported_parameter",
            )  # fmt: skip
        name = formats[0]
    elif formats and name not in formats:
        raise wrong(
            place, f"can't be used: this server reads calls as --tool-call-parser {name} says, and its chat template "
            f"is one of {formats[0]}", "unsupported_parameter",
        )  # fmt: skip
    if tools.mode == "auto" and parsers.enable_auto_tool_choice is False:
        raise wrong(
            choice_place, "'auto' is off on this server (--no-enable-auto-tool-choice)", "unsupported_parameter"
        )
    return name


@lru_cache(maxsize=8)
def about(template: str) -> tuple[tuple[str, ...], bool]:
    """The formats of calls that a chat template is one of, and whether it reads tools at all."""
    from planaria.parsers.output import formats_of

    return formats_of(template), _READS_TOOLS.search(template) is not None


@dataclass
class CalledTool:
    """A call in an answer. arguments: JSON, as the model wrote it; complete: it is not cut off."""

    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Told:
    """A whole text, taken apart. content, reasoning: "" for none."""

    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)


def gathered(events: Iterable[OutputEvent]) -> Told:
    """What the events of a whole text come to."""
    told, parts = Told(), defaultdict[tuple[str, int], list[str]](list)
    for event in events:
        if event.kind == "call":
            told.calls.append(CalledTool(event.text))
        elif event.kind == "end":
            told.calls[event.index].complete = True
        else:
            parts[event.kind, event.index].append(event.text)
    told.content, told.reasoning = ("".join(parts[kind, -1]) for kind in ("content", "reasoning"))
    for index, call in enumerate(told.calls):
        call.arguments = "".join(parts["arguments", index])
    return told


def shown_marks(reading: Reading) -> tuple[str, ...]:
    """Special tokens that must be seen to read so."""
    from planaria.parsers.output import CALL_FORMATS, CLOSE, OPEN

    if reading.reasoning == IN_CHANNELS:
        return CALL_FORMATS[CHANNELS].marks
    marks = CALL_FORMATS[reading.calls].marks if reading.calls is not None else ()
    return (*marks, OPEN, CLOSE) if reading.reasoning is not None else marks


def _mark(tokenizer: Tokenizer, text: str) -> str:
    """As a grammar names it: a special token is no text."""
    from planaria.parsers.grammar import quoted

    id = tokenizer.backend.token_to_id(text)
    return f"<[{id}]>" if id in tokenizer.special_ids else quoted(text)


def has_form(tools: Tools | None, reading: Reading | None, params: SamplingParams) -> bool:
    """Is an answer held to the form of calls: since it must make one, or may, and has another form where it doesn't?
    Raises RequestError where it would have to be both."""
    if tools is None or reading is None or reading.calls is None:
        return False
    if tools.forced and params.grammar:
        rule = "can't force a call in an answer that has to have another form (response_format, ...)"
        raise wrong("tool_choice", rule, "invalid_value")
    return tools.forced or bool(params.grammar)


def with_calls(params: SamplingParams, calls: str) -> SamplingParams:
    """`params` for an answer that is a call by this grammar, or what they hold it to already, where they do."""
    from planaria.parsers.grammar import or_answer

    grammar = or_answer(calls, params.grammar) if params.grammar else calls
    return msgspec.structs.replace(params, grammar=grammar, structured_outputs=None)


def call_form(tools: Tools, reading: Reading, template: str | None, tokenizer: Tokenizer) -> StructuredOutputsParams:
    """What an answer must be, after its reasoning, that makes a call."""
    from planaria.parsers.grammar import call_grammar
    from planaria.structured.spec import WHITESPACE

    assert reading.calls is not None
    several = tools.parallel and tools.mode != "named"
    return StructuredOutputsParams(
        grammar=call_grammar(
            reading.calls, tools.schemas, template=template or "", several=several,
            mark=lambda text: _mark(tokenizer, text), whitespace=WHITESPACE,
        )
    )  # fmt: skip


def tool_forms(tools: Tools) -> Iterator[tuple[str, StructuredOutputsParams]]:
    """The place of each tool's schema, and the arguments that it is of."""
    for i, tool in enumerate(tools.given):
        schema = tool["function"].get("parameters") or {}
        yield f"tools[{i}].function.parameters", StructuredOutputsParams(json={"type": "object", **schema})


def thinking_first(params: SamplingParams, reading: Reading | None, tokenizer: Tokenizer) -> SamplingParams:
    """Where a grammar holds an answer that may begin with reasoning, it holds what comes after that."""
    if reading is None or reading.reasoning is None or not params.grammar:
        return params
    from planaria.parsers.grammar import after_reasoning
    from planaria.parsers.output import begun

    state = begun(reading.reasoning, reading.prompt)
    if not state:
        return params
    calls = reading.calls is not None
    grammar = after_reasoning(params.grammar, state, lambda text: _mark(tokenizer, text), calls=calls)
    return msgspec.structs.replace(params, grammar=grammar)
