"""`planaria chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from planaria.cli.look import console, summary
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
        sys.stdout.write("\n")
        console.print(f"{tokens} tokens, {tokens / (time.perf_counter() - since):,.1f} tok/s", style="dim")
    return text


def run(model: str, engine: dict[str, Any], *, system: str | None, params: SamplingParams) -> None:
    began = time.perf_counter()
    from planaria.llm import AsyncLLM

    with console.status("loading") if console.is_terminal else _Quiet():
        llm = AsyncLLM(model, **engine)
    console.print(summary(llm.facts, {"total": time.perf_counter() - began}))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    interactive = sys.stdin.isatty()
    try:
        while True:
            try:
                line = input("> ") if interactive else sys.stdin.readline().rstrip("\n")
            except EOFError:
                break
            if not line.strip():
                break
            messages.append({"role": "user", "content": line})
            try:
                text = asyncio.run(answer(llm, messages, params))
            except KeyboardInterrupt:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": text})
    finally:
        llm.close()


class _Quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...
