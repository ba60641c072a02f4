"""Incremental detokenising against definitions that look at the whole text at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from planaria.server.detokenise import Detokenizer, stop_strings, text_offsets
from planaria.server.tokenise import Tokenizer
from planaria.types import MAX_STOP, MAX_STOP_LENGTH, SamplingParams
from tests.pure.test_tokenise import ANY_TEXT, sentencepiece_like, word_pieces

WORDS = ["the", " cat", "sat", " on", "\n\n", "Q:", " A:", "é", "日本", "😀", " 12", "aaab", "aab", "ab", "."]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join)


def streamed(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Pushes of the given sizes, in turn, then `finish`."""
    out, at = [], 0
    while at < len(ids):
        size = sizes[len(out) % len(sizes)]
        out.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*out, detokenizer.finish()]


@cache
def made(make: Callable[[], Backend]) -> Tokenizer:
    return Tokenizer(make(), name="m")


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


@settings(max_examples=2 * settings.default.max_examples)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 260)), sizes=SIZES, skip=st.booleans())
def test_streamed_is_one_shot(smollm2: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    """Random tokens: special ones, and parts of characters that never become one."""
    detokenizer = Detokenizer(smollm2, [], SamplingParams(skip_special_tokens=skip))
    text = "".join(streamed(detokenizer, ids, sizes))
    assert text == smollm2.decode(ids, skip) == smollm2.backend.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(ids)


@given(text=ANY_TEXT)
def test_characters_come_out_whole_and_at_once(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    detokenizer = Detokenizer(smollm2, [], SamplingParams(skip_special_tokens=False))
    data, out = b"", ""
    for i in ids:
        data += smollm2.token_bytes(i)
        out += detokenizer.push([i])
        assert out == text[: whole_characters(text, len(data))]
    assert detokenizer.finish() == ""
    assert out == text


def whole_characters(text: str, num_bytes: int) -> int:
    """How many characters of the text are whole in its first bytes."""
    count = 0
    for c in text:
        num_bytes -= len(c.encode())
        if num_bytes < 0:
            break
        count += 1
    return count


@dataclass
class Expected:
    text: str
    stop: str | None
    num_tokens: int


def expected(tokenizer: Tokenizer, text: str, ids: list[int], params: SamplingParams) -> Expected:
    """By definition: of all occurrences of stop strings that end in text that token `min_tokens` or a later one
    gives, the one that ends first, the longest if several end there."""
    lengths, data = [], b""
    for i in ids:
        data += tokenizer.token_bytes(i)
        lengths.append(whole_characters(text, len(data)))
    before = lengths[params.min_tokens - 2] if 2 <= params.min_tokens <= len(ids) + 1 else 0
    if params.min_tokens > len(ids):
        before = len(text)
    found = [
        (at + len(s), -len(s), s)
        for s in params.stop
        for at in range(len(text) - len(s) + 1)
        if text.startswith(s, at) and at + len(s) > before
    ]
    if not found:
        return Expected(text, None, len(ids))
    end, _, s = min(found)
    kept = text[: end if params.include_stop_str_in_output else end - len(s)]
    return Expected(kept, s, next(n for n, length in enumerate(lengths, 1) if length >= end))


@st.composite
def stops_of(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A text, and strings some of which occur in it."""
    text = draw(TEXTS)

    def part() -> str:
        start = draw(st.integers(0, len(text) - 1))
        return text[start : start + draw(st.integers(1, 6))]

    stops = [part() if draw(st.booleans()) else draw(TEXTS)[:7] for _ in range(draw(st.integers(1, 4)))]
    return text, tuple(stops)


@settings(max_examples=2 * settings.default.max_examples)
@given(case=stops_of(), sizes=SIZES, include=st.booleans(), min_tokens=st.integers(0, 8))
def test_stop_strings(
    smollm2: Tokenizer,
    case: tuple[str, tuple[str, ...]],
    sizes: list[int],
    include: bool,
    min_tokens: int,
) -> None:
    text, stops = case
    ids = smollm2.encode(text)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    wanted = expected(smollm2, text, ids, params)
    detokenizer = Detokenizer(smollm2, [], params)
    got = "".join(streamed(detokenizer, ids, sizes))
    assert (got, detokenizer.stop_reason, detokenizer.num_tokens) == (wanted.text, wanted.stop, wanted.num_tokens)
    if wanted.stop is not None:
        assert detokenizer.push(ids) == detokenizer.finish() == ""
        assert detokenizer.num_tokens == wanted.num_tokens


@given(case=stops_of())
def test_no_more_is_held_back_than_could_begin_a_stop_string(
    smollm2: Tokenizer,
    case: tuple[str, tuple[str, ...]],
) -> None:
    text, stops = case
    detokenizer = Detokenizer(smollm2, [], SamplingParams(stop=stops))
    data, out = b"", ""
    for i in smollm2.encode(text):
        data += smollm2.token_bytes(i)
        out += detokenizer.push([i])
        if detokenizer.stop_reason is not None:
            break
        known = text[: whole_characters(text, len(data))]
        held = max(n for n in range(len(known) + 1) if n == 0 or any(s[:-1].startswith(known[-n:]) for s in stops))
        assert out == known[: len(known) - held]


def test_a_stop_string_across_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two\nUser: three")
    detokenizer = Detokenizer(smollm2, [], SamplingParams(stop=("\nUser:",)))
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) == "one two"
    assert detokenizer.stop_reason == "\nUser:"
    assert smollm2.decode(ids[: detokenizer.num_tokens]) == "one two\nUser:"


def test_a_stop_string_that_only_began_comes_out_in_the_end(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2, [], SamplingParams(stop=("\nUser:",)))
    assert detokenizer.push(smollm2.encode("so\nUser")) == "so"
    assert detokenizer.finish() == "\nUser"
    assert detokenizer.finish() == ""
    assert detokenizer.stop_reason is None


@given(text=TEXTS, sizes=SIZES, stop=st.sampled_from([(), ("zzz", "\n\n")]))
def test_offsets(smollm2: Tokenizer, text: str, sizes: list[int], stop: tuple[str, ...]) -> None:
    ids = smollm2.encode(text)
    detokenizer = Detokenizer(smollm2, [], SamplingParams(logprobs=0, stop=stop))
    streamed(detokenizer, ids, sizes)
    assert detokenizer.offsets is not None and len(detokenizer.offsets) == detokenizer.num_tokens
    data = b""
    for i, offset in zip(ids, detokenizer.offsets, strict=False):
        assert offset == whole_characters(text, len(data))
        data += smollm2.token_bytes(i)


def test_offsets_cost_nothing_unless_asked_for(smollm2: Tokenizer) -> None:
    assert Detokenizer(smollm2, [], SamplingParams()).offsets is None


@pytest.mark.parametrize("make", [sentencepiece_like, word_pieces])
@given(sizes=SIZES, text=st.sampled_from(["hello world", "the quick brown fox jumps", "a 12 dog", "lazy"]))
def test_other_tokenizers(make: Callable[[], Backend], sizes: list[int], text: str) -> None:
    tokenizer = made(make)
    ids = tokenizer.encode(text)
    assert "".join(streamed(Detokenizer(tokenizer, [], SamplingParams()), ids, sizes)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [sentencepiece_like, word_pieces])
def test_the_space_between_prompt_and_output(make: Callable[[], Backend]) -> None:
    """Such a tokenizer drops a text's first space; the output's is the one after the prompt's last word."""
    tokenizer = made(make)
    prompt, ids = tokenizer.encode("the quick"), tokenizer.encode("the quick brown fox")
    output = ids[len(prompt) :]
    assert ids[: len(prompt)] == prompt
    detokenizer = Detokenizer(tokenizer, prompt[-4:], SamplingParams())
    assert detokenizer.push(output) + detokenizer.finish() == " brown fox"


def test_the_first_space_is_dropped_after_special_tokens_only() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), name="m")
    ids = tokenizer.encode("hello")
    for tail in ([], [1]):  # nothing, or <s>
        detokenizer = Detokenizer(tokenizer, tail, SamplingParams())
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == "hello"


def test_a_window_stays_short() -> None:
    """The generic decoder's work per token doesn't grow with the output, nor wait for ever on U+FFFD."""
    seen: list[int] = []

    class Counting:
        pieces = None

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            seen.append(len(ids))
            return "".join("\ufffd" if i == 0 else chr(96 + i) for i in ids)

    detokenizer = Detokenizer(Counting(), [], SamplingParams())  # type: ignore[arg-type]
    ids = [1 + i % 20 for i in range(200)] + [0] * 50
    out = [detokenizer.push([i]) for i in ids]
    assert "".join(out) + detokenizer.finish() == "".join("\ufffd" if i == 0 else chr(96 + i) for i in ids)
    assert max(seen) <= 2 * 8
    assert "".join(out[200:]).count("\ufffd") >= 40


def test_stop_strings_cost_what_they_are_long(smollm2: Tokenizer) -> None:
    """Linear in memory, built once for all choices; and as long as may be, found over again and again."""
    stop_strings.cache_clear()
    text = "ab" * (MAX_STOP_LENGTH // 2)
    params = SamplingParams(stop=tuple(text[i:] for i in range(MAX_STOP)))
    tracemalloc.start()
    choices = [Detokenizer(smollm2, [], params) for _ in range(100)]
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 1000 * MAX_STOP * MAX_STOP_LENGTH and stop_strings.cache_info().misses == 1
    ids = smollm2.encode("x " + text)
    assert choices[0].push(ids) == "x " and choices[0].stop_reason == text[MAX_STOP - 2 :]


@given(text=TEXTS, special=st.booleans())
def test_where_tokens_of_a_prompt_begin(smollm2: Tokenizer, text: str, special: bool) -> None:
    ids = smollm2.encode(text)
    data, wanted = b"", []
    for i in ids:
        wanted.append(whole_characters(text, len(data)))
        data += smollm2.token_bytes(i)
    if special:  # as a tokenizer's post-processor does; it is no part of the text
        ids, wanted = [1, *ids], [0, *wanted]
    assert text_offsets(smollm2, ids, text) == wanted
