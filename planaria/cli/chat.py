"""`planaria chat`: a conversation in the terminal, with a model of its own or through a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from planaria.cli.admin import server_of
from planaria.cli.look import console, started
from planaria.env import api_keys
from planaria.errors import PlanariaError, RequestError, UserError
from planaria.logs import held
from planaria.types import SamplingParams

Messages = list[dict[str, Any]]
Asking = Callable[[Messages], AsyncIterator[tuple[str, int]]]  # pieces of an answer's text, and how many tokens each is

COMMANDS = "/reset forgets the conversation, /system TEXT changes the system message, /exit or Ctrl-D ends it"
SILENCE = 600.0  # seconds a server may take for the next piece


def local(llm: Any, params: SamplingParams) -> Asking:
    async def ask(messages: Messages) -> AsyncIterator[tuple[str, int]]:
        ids = llm.tokenizer.encode(llm.chat_prompt(messages), add_special_tokens=False)
        async for piece in llm.generate(ids, params):
            yield piece.text, len(piece.token_ids)
            if piece.error:
                console.print(f"\nerror: {piece.error}")

    return ask


def remote(url: str, model: str | None, key: str | None, given: dict[str, Any]) -> Asking:
    """Through a server. given: fields of its requests."""
    server = server_of(url)
    host = f"[{server.host}]" if ":" in server.host else server.host
    address = f"{server.scheme}://{host}:{server.port}"
    key = key or next(iter(api_keys()), None)
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    fields = {name: value for name, value in {"model": model, **given}.items() if value is not None} | options

    async def ask(messages: Messages) -> AsyncIterator[tuple[str, int]]:
        import httpx2

        headers, known = {"Authorization": f"Bearer {key}"} if key else {}, 0
        body = {"messages": messages, **fields}
        try:
            async with (
                httpx2.AsyncClient(headers=headers, timeout=SILENCE) as client,
                client.stream("POST", f"{address}/v1/chat/completions", json=body) as answer,
            ):
                if answer.status_code != 200:
                    raise RequestError(_reason(await answer.aread(), answer.status_code))
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RequestError(event["error"]["message"])
                    tokens = (event.get("usage") or {}).get("completion_tokens", known)
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or "", tokens - known
                        known = tokens
        except httpx2.HTTPError as e:
            raise PlanariaError(f"no server answers at {address}: {e}") from None

    return ask


def _reason(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"


async def answer(pieces: AsyncIterator[tuple[str, int]]) -> str:
    """Stream the answer to standard output; returns it."""
    text, tokens, since = "", 0, time.perf_counter()
    try:
        async for piece, count in pieces:
            text, tokens = text + piece, tokens + count
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        if text:
            sys.stdout.write("\n")
            sys.stdout.flush()
            console.print(f"{tokens} tokens, {tokens / (time.perf_counter() - since):,.1f} tok/s", style="dim")
    return text


def run(
    model: str | None, engine: dict[str, Any], *, url: str | None, api_key: str | None, system: str | None, **given: Any
) -> None:
    """given: sampling parameters, None where the model's own are wanted."""
    SamplingParams(**{"max_tokens": None, **given}).verify()
    messages: Messages = [{"role": "system", "content": system}] if system else []
    if url is not None:
        _converse(remote(url, model, api_key, given), messages)
        return
    if model is None:
        raise UserError("MODEL is missing: give one, or --url of a server that runs")
    kept = {"max_tokens": None, **{name: value for name, value in given.items() if value is not None}}
    with started("AsyncLLM", model, **engine) as llm:
        _converse(local(llm, msgspec.structs.replace(llm.get_default_sampling_params(), **kept)), messages)


def _converse(ask: Asking, messages: Messages) -> None:
    """Until its user ends it."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` a line that can be edited)
        console.print(f"{COMMANDS}; Ctrl-C stops an answer.", style="dim")
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            break
        if not (interactive or line) or line.strip() == "/exit":
            break
        line = line.rstrip("\n")
        if not line.strip():
            continue
        try:
            if not _command(line, messages):
                messages.append({"role": "user", "content": line})
                with held():
                    messages.append({"role": "assistant", "content": asyncio.run(answer(ask(messages)))})
        except KeyboardInterrupt:
            messages.pop()
        except UserError as e:  # such as a conversation that has grown too long
            if not interactive:
                raise
            if messages and messages[-1]["role"] == "user":
                messages.pop()
            console.print(f"error: {e}")


def _command(line: str, messages: Messages) -> bool:
    """Do what a line that begins with a slash says; False for one that is for the model. Raises UserError."""
    found = re.match(r"/([a-z]+)(?:\s+(.*))?$", line, re.DOTALL)
    if found is None:
        return False
    first = messages[:1] if messages and messages[0]["role"] == "system" else []
    match found[1]:
        case "reset":
            messages[:] = first
        case "system":
            messages[: len(first)] = [{"role": "system", "content": found[2]}] if found[2] else []
        case word:
            raise UserError(f"/{word} is no command: {COMMANDS}")
    return True
