"""A large body, read in pieces: nothing but what reading it at once would give."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import RequestError
from planaria.server import body
from planaria.server.schema import ChatCompletionRequest, CompletionRequest, parse

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.sampled_from([1.5, "", "a", '"', "],", '","', "},", "\\"]),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.sampled_from('ab,"]'), inner, max_size=4),
    max_leaves=40,
)


def outcome(data: bytes, decode: Any) -> Any:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "no JSON"


@given(
    st.dictionaries(st.sampled_from(["prompt", "messages", "x"]), values) | values,
    st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(list(b'[]{},":1\\\xff '))), max_size=2),
)
def test_in_pieces_is_at_once(value: Any, separators: Any, damage: list[tuple[int, int]]) -> None:
    data = bytearray(json.dumps(value, separators=separators).encode())
    for place, byte in damage:
        data[place % len(data)] = byte
    with pytest.MonkeyPatch.context() as small:
        small.setattr(body, "PIECE", 8)
        small.setattr(body, "MAX_NAMES", 1000)
        assert outcome(bytes(data), body.decode) == outcome(bytes(data), msgspec.json.decode)


@pytest.mark.parametrize(
    "prompt", [["a,b", '"],'] * 40_000, [12345] * 40_000, [[1, 2, 3]] * 16_000, "x" * 200_000], ids=type
)
def test_no_call_of_the_library_reads_more_than_a_piece(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first look for where fields end, and texts."""
    sizes, real = list[int](), body._entries

    def entries(data: bytes) -> list[Any]:
        sizes.append(len(data))
        return real(data)

    monkeypatch.setattr(body, "_entries", entries)
    data = json.dumps({"prompt": prompt}).encode()
    if isinstance(prompt, list) and len(prompt) > 16_384 and prompt[0] != 12345:
        with pytest.raises(RequestError, match="at most 16384"):
            parse(CompletionRequest, data)
    else:
        assert parse(CompletionRequest, data).prompt == prompt
    assert max(sizes, default=0) < body.PIECE + 100 and bool(sizes) == isinstance(prompt, list)


def test_an_object_of_too_many_names_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"messages": [], "chat_template_kwargs": {str(i): i for i in range(20_000)}}
    monkeypatch.setattr(body.msgspec.json, "decode", lambda data: pytest.fail("read") if len(data) > 9 else [])
    with pytest.raises(RequestError, match="chat_template_kwargs has 20000 names; at most 16384"):
        parse(ChatCompletionRequest, json.dumps(given, separators=(",", ":")).encode())
