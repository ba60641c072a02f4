"""Conversations and tools in Anthropic's shape, as the chat routes take them. Places in errors are Anthropic's, too:
`messages.0.content.1`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planaria.server.messages import MAX_MESSAGES, MAX_PARTS
from planaria.server.schema import ChatCompletionRequest, ResponseFormat
from planaria.server.schema_anthropic import CountTokensRequest, MessagesRequest
from planaria.server.tools import MAX_TOOLS
from planaria.server.wrong import listed, said, wrong

ROLES = ("user", "assistant", "system")


def translated(body: MessagesRequest | CountTokensRequest, *, thinks: bool) -> ChatCompletionRequest:
    """thinks: reasoning of the model's can be told apart. Raises RequestError."""
    messages = _conversation(body)
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body)}
    if messages[-1]["role"] == "assistant" and messages[-1]["content"] and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True  # the answer's beginning
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type != "adaptive":
        if body.thinking.type == "enabled" and not thinks:
            raise wrong("thinking", "can't be enabled on a server without --reasoning-parser", "unsupported_parameter")
        kwargs.setdefault("enable_thinking", body.thinking.type == "enabled")
    fields["chat_template_kwargs"] = kwargs or None
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"schema": config.format.json_schema}
            fields["response_format"] = ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})
    if isinstance(body, MessagesRequest):
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        fields |= {name: getattr(body, name) for name in same}
        fields["stop"] = body.stop_sequences or None
    return ChatCompletionRequest.model_construct(**fields)


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    tools, choice = body.tools, body.tool_choice
    found: dict[str, Any] = {}
    if tools is not None:
        if not isinstance(tools, list):
            raise wrong("tools", "must be a list of tools")
        if len(tools) > MAX_TOOLS:
            raise wrong("tools", f"has {len(tools)} entries; at most {MAX_TOOLS}", "invalid_value")
        found["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]
    if choice is not None:
        if choice.type == "tool" and choice.name is None:
            raise wrong("tool_choice.name", "is required", "missing_required_parameter")
        named = {"type": "function", "function": {"name": choice.name}}
        found["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return found


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise wrong(place, "must be an object with name and input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise wrong(
            f"{place}.type", f"must be 'custom': tools of a server's own are not here, got {said(kind)}",
            "unsupported_content",
        )  # fmt: skip
    if not isinstance(tool.get("input_schema"), Mapping):
        raise wrong(f"{place}.input_schema", "must be an object, a JSON schema")
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _conversation(body: CountTokensRequest) -> list[dict[str, Any]]:
    given = listed(
        body.messages, "messages", one="message", most=MAX_MESSAGES, parts="content blocks", most_parts=MAX_PARTS
    )  # fmt: skip
    messages = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(given):
        messages += _message(message, f"messages.{i}")
    return messages


def _message(message: Any, place: str) -> list[dict[str, Any]]:
    """A message with results of tools is several: one for each result, before what else it says."""
    if not isinstance(message, Mapping):
        raise wrong(place, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {said(role)}", "invalid_value")
    place = f"{place}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong(place, "must be a string or a list of blocks")
    results: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": role}
    texts: list[str] = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        at = f"{place}.{i}"
        if kind == "text":
            texts.append(_string(block, "text", at))
        elif kind == "tool_result" and role == "user":
            texts_of = block.get("content")
            results.append({
                "role": "tool", "tool_call_id": _string(block, "tool_use_id", at),
                "content": "" if texts_of is None else _text(texts_of, f"{at}.content"),
            })  # fmt: skip
        elif kind == "tool_use" and role == "assistant":
            own.setdefault("tool_calls", []).append(_call(block, at))
        elif kind == "thinking" and role == "assistant":
            own["reasoning_content"] = own.get("reasoning_content", "") + _string(block, "thinking", at)
        elif kind != "redacted_thinking" or role != "assistant":
            raise wrong(at, f"must be a block of text, or of a tool, that a message of role {role!r} may have, got "
                             f"{said(kind)}", "unsupported_content")  # fmt: skip
    if texts or len(own) > 1 or not results:
        results.append({**own, "content": "\n".join(texts)})
    return results


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise wrong(f"{place}.input", "must be an object")
    function = {"name": _string(block, "name", place), "arguments": given}
    return {"id": _string(block, "id", place), "type": "function", "function": function}


def _text(content: Any, place: str) -> str:
    """Of a string, or of blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise wrong(place, f"must be a string or a list of at most {MAX_PARTS} blocks")
    texts = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise wrong(
                f"{place}.{i}", f"must be a block of type 'text' (no other is supported), got {said(kind)}",
                "unsupported_content",
            )  # fmt: skip
        texts.append(_string(block, "text", f"{place}.{i}"))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{place}.{name}", "must be a string")
    return value
