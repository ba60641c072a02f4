"""`planaria chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import msgspec

from planaria.cli.look import console, started
from planaria.errors import RequestError
from planaria.logs import held
from planaria.types import SamplingParams


async def answer(llm: Any, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Stream the answer to standard output; returns it."""
    text, tokens, since = "", 0, time.perf_counter()
    ids = llm.tokenizer.encode(llm.chat_prompt(messages), add_special_tokens=False)
    try:
        async for piece in llm.generate(ids, params):
            text += piece.text
            tokens += len(piece.token_ids)
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if piece.error:
                console.print(f"\nerror: {piece.error}", markup=False)
    finally:
        if tokens:
            sys.stdout.write("\n")
            sys.stdout.flush()
            console.print(f"{tokens} tokens, {tokens / (time.perf_counter() - since):,.1f} tok/s", style="dim")
    return text


def run(model: str, engine: dict[str, Any], *, system: str | None, **given: Any) -> None:
    """given: sampling parameters, None where the model's own are wanted."""
    given = {"max_tokens": None, **{name: value for name, value in given.items() if value is not None}}
    SamplingParams(**given).verify()
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    with started("AsyncLLM", model, **engine) as llm:
        _converse(llm, messages, msgspec.structs.replace(llm.get_default_sampling_params(), **given))


def _converse(llm: Any, messages: list[dict[str, Any]], params: SamplingParams) -> None:
    """Until there is nothing more to answer."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` a line that can be edited)
        console.print("An empty line or Ctrl-D ends it; Ctrl-C stops an answer.", style="dim")
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline().rstrip("\n")
        except EOFError:
            break
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        try:
            with held():
                text = asyncio.run(answer(llm, messages, params))
        except KeyboardInterrupt:
            messages.pop()
            continue
        except RequestError as e:  # such as a conversation that has grown too long
            if not interactive:
                raise
            messages.pop()
            console.print(f"error: {e}", markup=False)
            continue
        messages.append({"role": "assistant", "content": text})
