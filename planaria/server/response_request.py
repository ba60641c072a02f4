"""What an engine is asked for a response, and how its answer is read: from a request and the conversation it goes on
from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from planaria.errors import RequestError
from planaria.parsers.reading import Reading
from planaria.server.chat import held_form
from planaria.server.common import by_length, sampling_params, spelled
from planaria.server.inputs import room, submissions
from planaria.server.records import ConversationItem
from planaria.server.response_input import conversation_of, from_turn, turns
from planaria.server.schema_responses import ResponsesRequest
from planaria.server.service import Service
from planaria.server.tokenise import LONG_TEXT
from planaria.server.tools import Tools, check_tools, reading_of
from planaria.server.wrong import said, wrong
from planaria.types import SamplingParams, StructuredOutputsParams
from planaria.wire import EngineFacts, Submit

_ITEM = 32  # characters that an item more is as much work as
_OWN_FIELDS = ("type", "name", "description", "parameters", "strict")  # of a function


async def asked_of(
    service: Service, request: Request, body: ResponsesRequest, items: list[ConversationItem], facts: EngineFacts
) -> tuple[Submit, Reading | None]:
    """items: the conversation. Raises RequestError."""
    tokenizer = service.need_tokenizer("input")
    params = sampling_params(body, service.config.sampling_defaults, max_tokens=body.max_output_tokens, logprobs=None)
    try:
        tools = await by_length(service, request, lambda: _tools(body))
        _check_numbers(body)
        forced = tools is not None and tools.forced  # a call, which is no text
        params = await spelled(service, params, request, None if forced else _form(body), "text.format")
        ids = await _prompt(service, request, body, items, facts, _variables(body, tools))
        template = tokenizer.chat_template
        reading = reading_of(tools, service.config.parsers, template, tokenizer, ids)
        params = await held_form(service, request, params, tools, reading, template)
    except RequestError as e:
        raise _renamed(e) from None
    if len(ids) + (body.max_output_tokens or 0) > room(facts):
        params = msgspec.structs.replace(params, max_tokens=None)  # as many as there is room for
    (asked,) = submissions(
        f"resp-{request.scope['planaria'].uid}", ids, params, facts, eos_ids=tokenizer.eos_ids, tokenizer=tokenizer,
        seed=service.next_seed(), priority=body.priority or 0, cache_salt=body.cache_salt or "",
        adapter=service.adapter(body.model), param="input",
    )  # fmt: skip
    store = service.responses
    lasts = store.journal is not None and store.lasts and bool(body.background)
    return msgspec.structs.replace(asked, persist=lasts), reading  # its KV, where there is a tier on disk


def _check_numbers(body: ResponsesRequest) -> None:
    """Of what is kept as it was given. Raises RequestError."""
    form = body.text.format if body.text is not None else None
    given = {"tools": body.tools, "tool_choice": body.tool_choice, "text.format": form and form.json_schema}
    for place, value in given.items():
        try:
            msgspec.msgpack.encode(value)  # as it is kept
        except OverflowError:
            raise wrong(place, "has a number of more than 64 bits", "invalid_value") from None


def _tools(body: ResponsesRequest) -> Tools | None:
    """In the shape that chats have of them."""
    if body.tools is None and body.tool_choice is None:
        return None
    given, choice = body.tools, body.tool_choice
    if isinstance(given, list):
        given = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    if isinstance(choice, Mapping):
        match choice.get("type"):
            case "function":
                choice = {"type": "function", "function": {"name": choice.get("name")}}
            case "allowed_tools":
                allowed = choice.get("tools")
                if isinstance(allowed, list):
                    allowed = [_tool(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed)]
                named = {"mode": choice.get("mode"), "tools": allowed}
                choice = {"type": "allowed_tools", "allowed_tools": named}
            case kind:
                raise wrong(
                    "tool_choice.type", f"must be 'function' or 'allowed_tools': there are no tools of the server's "
                    f"own, got {said(kind)}", "unsupported_content",
                )  # fmt: skip
    return check_tools(given, choice, body.parallel_tool_calls)


def _tool(tool: Any, place: str) -> Any:
    if not isinstance(tool, Mapping):
        raise wrong(place, "must be an object with type and name")
    kind = tool.get("type")
    if kind != "function":
        raise wrong(
            f"{place}.type", f"must be 'function': there are no tools of the server's own, got {said(kind)}",
            "unsupported_content",
        )  # fmt: skip
    unknown = next((name for name in tool if name not in _OWN_FIELDS and tool[name] not in (None, False)), None)
    if unknown is not None:
        raise wrong(f"{place}.{unknown[:80]}", "is no field of a function", "unknown_parameter")
    function = {name: tool[name] for name in _OWN_FIELDS[1:] if name in tool}
    return {"type": "function", "function": function}


def _renamed(error: RequestError) -> RequestError:
    """With fields under the names that they have here."""
    param = error.param or ""
    if not param.startswith("tool"):
        return error
    message = error.message.replace(".function.", ".", 1).replace("tool_choice.allowed_tools", "tool_choice", 1)
    param = param.replace(".function.", ".", 1).replace("tool_choice.allowed_tools", "tool_choice", 1)
    return RequestError(message, param=param, code=error.code, status=error.status)


def _variables(body: ResponsesRequest, tools: Tools | None) -> dict[str, Any]:
    """Of the chat template."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    given: dict[str, Any] = {
        "verbosity": body.text.verbosity if body.text is not None else None, "reasoning_effort": effort,
        "enable_thinking": False if effort == "none" else None, "tools": tools.shown if tools is not None else None,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


async def _prompt(
    service: Service, request: Request, body: ResponsesRequest, items: list[ConversationItem], facts: EngineFacts,
    variables: dict[str, Any],
) -> list[int]:  # fmt: skip
    """Token ids of the conversation, or of as much of its end as there is room for, where that was asked for."""
    tokenizer = service.need_tokenizer("input")
    auto = body.truncation == "auto"
    most = room(facts) - (body.max_output_tokens or 1)

    def render(items: list[ConversationItem]) -> list[int] | None:
        """None: it is too long, and may be cut."""
        text = tokenizer.apply_chat_template(conversation_of(items, body.instructions), True, **variables)
        if len(text) > LONG_TEXT:
            try:
                service.check_length(text, facts.max_model_len, "input")
            except RequestError:
                if auto:
                    return None
                raise
        ids = tokenizer.encode(text, False)
        return None if auto and len(ids) > most else ids

    def work() -> list[int]:
        ids = render(items)
        if ids is not None:
            return ids
        starts = turns(items)
        low, high = 1, len(starts) - 1  # the earliest beginning that fits is looked for between these
        while low <= high:
            middle = (low + high) // 2
            shorter = render(from_turn(items, starts[middle]))
            if shorter is None:
                low = middle + 1
            else:
                ids, high = shorter, middle - 1
        if ids is None:
            raise RequestError(
                f"the last turn alone, with max_output_tokens, is more than this model's length of {room(facts)} "
                "tokens", param="input", code="context_length_exceeded",
            )  # fmt: skip
        return ids

    size = sum(len(text) for item in items for text in item.texts) + len(body.instructions or "")
    if size + _ITEM * len(items) <= LONG_TEXT and len(await request.body()) <= LONG_TEXT:
        return work()
    return await service.in_thread(work, request.receive)


def _form(body: ResponsesRequest) -> StructuredOutputsParams | None:
    """What the answer must be. Raises RequestError."""
    given = body.text.format if body.text is not None else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if given.json_schema is None:
        raise RequestError(
            "text.format.schema is required", param="text.format", code="missing_required_parameter"
        )  # fmt: skip
    return StructuredOutputsParams(json=given.json_schema)


def fields_of(body: ResponsesRequest, params: SamplingParams, stored: bool) -> dict[str, Any]:
    """What the answer says of the request."""
    verbosity = body.text.verbosity if body.text is not None else None
    form = body.text.format if body.text is not None else None
    form_said = form.model_dump(by_alias=True, exclude_none=True) if form is not None else {"type": "text"}
    reasoning = body.reasoning
    return {
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls, "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id, "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier, "store": stored, "temperature": params.temperature,
        "text": {"format": form_said, **({"verbosity": verbosity} if verbosity is not None else {})},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        "top_p": params.top_p, "truncation": body.truncation or "disabled", "user": body.user,
    }  # fmt: skip
