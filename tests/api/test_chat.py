"""`planaria chat`: what its lines do, and a conversation through a running server."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import pytest

from planaria.cli import chat
from planaria.errors import PlanariaError, RequestError, UserError

USER = [{"role": "user", "content": "Hi"}]


class Parrot:
    """Answers "yes", and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    async def __call__(self, messages: list[dict[str, Any]]) -> AsyncIterator[tuple[str, int]]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        yield "yes", 1


def converse(monkeypatch: pytest.MonkeyPatch, text: str, system: str | None = None) -> list[list[tuple[str, str]]]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    parrot = Parrot()
    chat._converse(parrot, [{"role": "system", "content": system}] if system else [])
    return parrot.asked


def test_an_empty_line_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "one\n\n  \ntwo\n") == [
        [("user", "one")], [("user", "one"), ("assistant", "yes"), ("user", "two")],
    ]  # fmt: skip


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    brief, long = ("system", "Be brief."), ("system", "Be long, and\tkind.")
    assert converse(monkeypatch, "a\n/reset\nb\n/system Be long, and\tkind.\nc\n/exit\nd\n", "Be brief.") == [
        [brief, ("user", "a")], [brief, ("user", "b")],
        [long, ("user", "b"), ("assistant", "yes"), ("user", "c")],
    ]  # fmt: skip
    assert converse(monkeypatch, "/system x\na\n/system\nb") == [
        [("system", "x"), ("user", "a")], [("user", "a"), ("assistant", "yes"), ("user", "b")],
    ]  # fmt: skip
    assert converse(monkeypatch, "/etc/hosts is what?\n") == [[("user", "/etc/hosts is what?")]]
    with pytest.raises(UserError, match=r"^/rest is no command: /reset forgets"):
        converse(monkeypatch, "/rest\n")


async def talk(*args: Any) -> tuple[str, int]:
    pieces = [piece async for piece in chat.remote(*args)(USER)]
    return "".join(text for text, _ in pieces), sum(tokens for _, tokens in pieces)


async def test_through_a_server(start: Any) -> None:
    async with start(api_keys=("k",)) as server:
        client = server.client(api_key="k")
        body = {"model": "smollm2", "messages": USER, "max_tokens": 9, "temperature": 0}
        whole = await client.chat.completions.create(**body)
        found = await talk(server.url, None, "k", {"max_tokens": 9, "temperature": 0, "top_p": None})
        assert found == (whole.choices[0].message.content, whole.usage.completion_tokens)
        with pytest.raises(RequestError, match="an API key is needed, and none was sent"):
            await talk(server.url, None, None, {})
        with pytest.raises(RequestError, match="the key that was sent is not an API key"):
            await talk(server.url, None, "wrong", {})
        with pytest.raises(RequestError, match="model 'x' is not served here"):
            await talk(server.url, "x", "k", {})
    with pytest.raises(PlanariaError, match=f"no server answers at {server.url}"):
        await talk(server.url, None, "k", {})
