"""Prompts in vLLM's forms, and its words that ask for nothing here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from planaria.errors import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: a name, and its folder as peft writes it. lora_int_id is vLLM's, and has no effect: an adapter is
    known by its bytes."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class _Text(TypedDict):
    prompt: str


class TextPrompt(_Text, total=False):
    """A prompt as text. cache_salt: its KV is used by prompts with the same one alone."""

    cache_salt: str


class _Ids(TypedDict):
    prompt_token_ids: list[int]


class TokensPrompt(_Ids, total=False):
    """A prompt as token ids; its text, where given, is only what the answer says. cache_salt: as of a text."""

    prompt: str
    cache_salt: str


Prompt = str | list[int] | TextPrompt | TokensPrompt | dict[str, Any]


def content_of(prompt: Prompt) -> Any:
    """The text or the token ids of a prompt. Raises RequestError for a dict that asks for more."""
    if not isinstance(prompt, dict):
        return prompt
    more = [name for name, value in prompt.items() if value is not None and name not in TokensPrompt.__annotations__]
    if more:
        raise RequestError(f"a prompt's {more[0]} is not supported; leave it out", param=more[0])
    ids = prompt.get("prompt_token_ids")
    return ids if ids is not None else prompt.get("prompt")


def salt_of(prompt: Prompt) -> str:
    """Empty: it has none. Raises RequestError."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"a prompt's cache_salt must be a string, not {salt!r}", param="cache_salt")
    return salt or ""


def refuse(**given: object) -> None:
    """Raise RequestError for the first of vLLM's arguments that asks for what isn't there yet."""
    for name, value in given.items():
        if value:
            raise RequestError(f"{name} is not supported yet; leave it out", param=name, code="unsupported_parameter")
