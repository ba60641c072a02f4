"""Tokens to text as they arrive: exact, never a broken character, stop strings held back and found.

The rule to keep: the text doesn't depend on how tokens were cut into pushes, and pushes plus `finish` are the
one-shot decode of the output (cut at a stop string). So a stop string counts at the token that completes it, the
first one complete wins, and of several that end together the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from planaria.types import SamplingParams

if TYPE_CHECKING:
    from planaria.server.tokenise import Pieces, Tokenizer


class Detokenizer:
    """Text of one output sequence.

    `prompt_ids_tail`: the prompt's last tokens (a few are enough). They decide whether the first space of the output
    is kept, for tokenizers that drop one at the start of a text.

    `stop_reason`: the stop string found, or None; after it `push` gives "" and takes no more tokens. It isn't looked
    for while fewer than `min_tokens` tokens were taken: a stop string that a token before that one completes is
    ordinary text, one that begins before it and is completed at it or later counts.
    `num_tokens`: tokens taken, the one that completed the stop string included; a push may have brought more.
    `feed`: does what `push` does where nothing is looked for, and counts nothing; None: something is.
    `offsets`: for each token taken, where its text begins in the output's text, in characters; a token inside a
    character begins where the character does. None unless logprobs are asked for.
    """

    __slots__ = ("_decoder", "_held", "_include_stop", "_length", "_min_tokens", "_state", "_stops", "feed",
                 "num_tokens", "offsets", "stop_reason")  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, prompt_ids_tail: Sequence[int], params: SamplingParams) -> None:
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self.offsets: list[int] | None = [] if params.logprobs is not None else None
        self._stops = stop_strings(tuple(params.stop)) if params.stop else None
        self._state = 0
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""  # decoded, not given out: the longest end that may be the start of a stop string
        self._length = 0  # of the text decoded so far
        self._decoder: _Table | _Window
        if tokenizer.pieces is not None:
            starts_text = not any(tokenizer.pieces[True][t] for t in prompt_ids_tail)
            pieces = tokenizer.pieces[params.skip_special_tokens]
            self._decoder = _Table(pieces, strip_space=tokenizer.strip_space and starts_text)
        else:
            self._decoder = _Window(tokenizer, prompt_ids_tail, params.skip_special_tokens)
        plain = self._stops is None and self.offsets is None
        self.feed: Callable[[Sequence[int]], str] | None = self._decoder.feed if plain else None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be given out now. Complete characters only, nothing that may belong to a stop string."""
        if self.feed is not None:
            self.num_tokens += len(token_ids)
            return self.feed(token_ids)
        out = ""
        for token in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            if self.offsets is not None:
                self.offsets.append(self._length)
            out += self._scan(self._decoder.feed((token,)))
        return out

    def finish(self) -> str:
        """The rest of the text, once no token will follow."""
        if self.stop_reason is not None:
            return ""
        out = self._scan(self._decoder.end())
        out, self._held = out + self._held, ""
        return out

    def _scan(self, text: str) -> str:
        """Take new text; what of it (and of what was held) can be given out."""
        self._length += len(text)
        stops = self._stops
        if stops is None or not text:
            return text
        self._state, found = stops.scan(self._state, text, self.num_tokens >= self._min_tokens)
        text = self._held + text
        if found is not None:
            self.stop_reason, left = found
            self._held = ""
            end = len(text) - left
            return text[: end if self._include_stop else end - len(self.stop_reason)]
        cut = len(text) - stops.holds[self._state]
        self._held = text[cut:]
        return text[:cut]


class StopStrings:
    """Several strings looked for at once, a character at a time (Aho and Corasick's automaton).

    A state stands for the longest end of the text so far that begins one of them; 0 for none. Linear in the strings'
    lengths: a few hundred bytes a character.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self.holds = [0]  # by state: how many characters may still become a string
        self._found: list[str | None] = [None]  # by state: the longest string that ends here
        self._firsts = frozenset(s[0] for s in strings)
        depths, parents = [0], [(0, "")]
        for string in dict.fromkeys(strings):
            state = 0
            for char in string:
                step = self._next.get((state, char))
                if step is None:
                    step = self._next[state, char] = len(depths)
                    depths.append(depths[state] + 1)
                    parents.append((state, char))
                    self._found.append(None)
                    self.holds.append(0)
                state = step
            self._found[state] = string
        self._fallback = [0] * len(depths)  # the state of the longest end that isn't the whole
        grows = {state for state, _ in self._next}
        for state in sorted(range(1, len(depths)), key=depths.__getitem__):
            parent, char = parents[state]
            back = self._fallback[state] = self._step(self._fallback[parent], char) if parent else 0
            self._found[state] = self._found[state] or self._found[back]
            self.holds[state] = depths[state] if state in grows else self.holds[back]

    def _step(self, state: int, char: str) -> int:
        step = self._next.get((state, char))
        while step is None and state:
            state = self._fallback[state]
            step = self._next.get((state, char))
        return step or 0

    def scan(self, state: int, text: str, stopping: bool) -> tuple[int, tuple[str, int] | None]:
        """The state after `text`, and, if `stopping`, the first string complete (of those that end together the
        longest) with the number of characters behind it."""
        if not state and self._firsts.isdisjoint(text):  # nearly always
            return 0, None
        for at, char in enumerate(text, 1):
            state = self._step(state, char)
            found = self._found[state]
            if found is not None and stopping:
                return state, (found, len(text) - at)
        return state, None


@lru_cache(maxsize=16)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """Built once for all choices and prompts of a request."""
    return StopStrings(strings)


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a whole text begins in it, in characters; a token inside a character begins where that does.

    Tokens that add nothing to `text` (special ones that the tokenizer put there) begin where the next does.
    """
    offsets: list[int] = []
    for skip in (False, True):
        whole = Detokenizer(tokenizer, (), SamplingParams(logprobs=0, skip_special_tokens=skip))
        decoded = whole.push(ids) + whole.finish()
        offsets = whole.offsets or []
        if decoded == text:
            break
    return [min(offset, len(text)) for offset in offsets]


class _Table:
    """Decoding by a table of each token's bytes."""

    __slots__ = ("_begun", "_pieces", "_strip_space", "_texts")

    def __init__(self, pieces: Pieces, strip_space: bool) -> None:
        self._pieces, self._texts, self._strip_space = pieces, pieces.texts, strip_space
        self._begun = b""  # of a character

    def feed(self, token_ids: Sequence[int]) -> str:
        alone = len(token_ids) == 1 and not self._begun
        text = self._texts.get(token_ids[0]) if alone else None
        if text is None:
            pieces = self._pieces
            data = self._begun + b"".join([pieces[t] for t in token_ids])
            text, used = codecs.utf_8_decode(data, "replace")
            self._begun = data[used:]
            if alone and not self._begun:
                self._texts[token_ids[0]] = text
        return self._first(text) if self._strip_space and text else text

    def end(self) -> str:
        text, self._begun = self._begun.decode("utf-8", "replace"), b""
        return text

    def _first(self, text: str) -> str:
        self._strip_space = False
        return text[1:] if text[0] == " " else text


class _Window:
    """Decoding by a library that only knows whole sequences: what a few last tokens decode to with and without the new
    ones. Exact as far as a token's text depends on no more than the tokens of one step before."""

    MOST_WAITING = 8  # tokens without a complete character; more of them means the text really has U+FFFD

    __slots__ = ("_ids", "_known", "_shown", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt_ids_tail)
        self._known = len(self._ids)  # how many of `_ids` were given out
        self._shown = self._text(self._ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        out = ""
        for token in token_ids:
            self._ids.append(token)
            text = self._text(self._ids)
            if not text.endswith("\ufffd") or len(self._ids) - self._known >= self.MOST_WAITING:
                out += self._advance(text)
        return out

    def end(self) -> str:
        return self._advance(self._text(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        del self._ids[: self._known]
        self._known = len(self._ids)
        self._shown = self._text(self._ids)
        return new

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)
