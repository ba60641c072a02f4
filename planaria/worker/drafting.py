"""Drafts: tokens that a row may go on with, guessed from what was said before. The next step checks them.

A drafter never changes what is drawn, only how many steps it takes: each position is drawn as without drafts, and a
draft counts while it equals what was drawn. So it may guess as it likes, from whatever it has seen.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from planaria.config.machine import load_class
from planaria.config.options import EngineConfig, SpeculativeConfig
from planaria.errors import ConfigError

Ids = npt.NDArray[np.int32]
MOST_PLACES = 512  # that are voted over, the latest
KEPT = 1 << 17  # tokens of outputs that have ended, at most
END = -1  # of an output, among several
SHORT = 1 << 11  # tokens of a history that is sooner looked through as bytes: arrays take longer where caches are cold


class Drafter(Protocol):
    """Rows by number. Derive `--sd-worker-cls` from this: it is made with the engine's configuration, on each rank that
    draws tokens, and is used in the thread that carries out steps. One with a `looks_up` that is true is also asked for
    drafts that no step checks, to learn what they are worth."""

    def enter(self, row: int, tokens: Sequence[int], num_prompt: int) -> None:
        """A request (re)enters `row`, whoever was there before, with this history."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """These were drawn, in order."""

    def leave(self, row: int) -> None:
        """Forget `row`; it may be empty."""

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Of each of these rows up to so many tokens that may come next; a row may be left out."""

    def close(self) -> None:
        """End what it began."""


@runtime_checkable
class SharedDrafter(Protocol):
    """A drafter that tensor ranks share: those that draw nothing have one, too, and are where the first one is."""

    def follow(self) -> None:
        """Do what the first rank's `draft` wants."""


@runtime_checkable
class ReadsHidden(Protocol):
    """A drafter that goes on with the hidden states of the model that is served."""

    def catch_up(self) -> None:
        """Before a forward pass."""

    def saw(self, hidden: npt.NDArray[np.float32]) -> None:
        """After it: of all tokens of the batch, [T, H]."""


class _History:
    """Tokens of one row, in memory that grows."""

    __slots__ = ("_bytes", "_ids", "_length", "num_prompt")

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._length = len(tokens)
        self._hold(max(256, 2 * len(tokens)))
        self._ids[: len(tokens)] = tokens

    def _hold(self, tokens: int) -> None:
        self._bytes = bytearray(4 * tokens)
        self._ids: Ids = np.frombuffer(self._bytes, np.int32)

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._ids):
            before = self.ids
            self._hold(2 * end)
            self._ids[: len(before)] = before
        self._ids[self._length : end] = tokens
        self._length = end

    def repeats(self, count: int) -> bool:
        """Have its last so many tokens been there before? A no is certain."""
        if self._length <= SHORT:
            end = 4 * self._length
            return self._bytes.find(self._bytes[end - 4 * count : end], 0, end - 4) >= 0
        ids = self.ids
        return count < 2 or bool(((ids[:-2] == ids[-2:-1]) & (ids[1:-1] == ids[-1])).any())

    @property
    def ids(self) -> Ids:
        return self._ids[: self._length]


class _Rows:
    """Histories of rows; what is guessed from them is for derived classes."""

    looks_up = True  # a draft takes microseconds: also one that no step checks

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.histories: dict[int, _History] = {}

    def enter(self, row: int, tokens: Sequence[int], num_prompt: int) -> None:
        self.leave(row)
        self.histories[row] = _History(tokens, num_prompt)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.histories[row].extend(tokens)

    def leave(self, row: int) -> None:
        self.histories.pop(row, None)

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """See Drafter."""
        return {row: self._drafts(self.histories[row], most) for row, most in wanted.items()}

    def _drafts(self, history: _History, most: int) -> Sequence[int]:
        raise NotImplementedError

    def close(self) -> None:
        self.histories.clear()


class PromptLookup(_Rows):
    """What came after the longest of a history's last `prompt_lookup_min` to `prompt_lookup_max` tokens the last time
    they were there (https://github.com/apoorvumang/prompt-lookup-decoding)."""

    def _drafts(self, history: _History, most: int) -> Sequence[int]:
        if not history.repeats(self.config.prompt_lookup_min):
            return []  # most steps, and most of what they cost
        ids = history.ids
        places, length = matches(ids[:-1], ids, self.config.prompt_lookup_max)
        if length < self.config.prompt_lookup_min:
            return []
        return _following(ids, int(places[-1]) + 1, most)


class SuffixLookup(_Rows):
    """What came after the longest suffix that has been there before, in the same history or in recent outputs of
    others; where several things came, the one that came most often, as long as that is likely
    (https://arxiv.org/abs/2411.04975). Places are found by comparing arrays: 10 us for each 50,000 tokens, where an
    automaton would take an insertion for each token of a prompt before its first step."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._ended: deque[Ids] = deque()
        self._others: Ids = np.zeros(0, np.int32)  # outputs that have ended, each followed by END

    def leave(self, row: int) -> None:
        history = self.histories.pop(row, None)
        if history is None or self.config.suffix_decoding_max_cached_requests == 0:
            return
        output = history.ids[history.num_prompt :][-KEPT:]
        if len(output) > 1:
            self._ended.append(np.append(output, np.int32(END)))
            while len(self._ended) > self.config.suffix_decoding_max_cached_requests or (
                sum(map(len, self._ended)) > KEPT and len(self._ended) > 1
            ):
                self._ended.popleft()
            self._others = np.concatenate(self._ended)

    def _drafts(self, history: _History, most: int) -> Sequence[int]:
        ids, others = history.ids, len(self._others) > 0
        if not others and not history.repeats(2 if most == 1 else 1):
            return []  # one draft after one token that was there before is seldom right, and most tokens were
        depth = self.config.suffix_decoding_max_tree_depth
        found = [(ids, *matches(ids[:-1], ids, depth))]
        if others:
            found.append((self._others, *matches(self._others, ids, depth)))
        longest = max(length for _, _, length in found)
        most = min(most, int(longest * self.config.suffix_decoding_max_spec_factor))
        after = [(tokens, places + 1) for tokens, places, length in found if length == longest]
        drafts: list[int] = []
        likely = 1.0
        while len(drafts) < most:
            after = [(tokens, places[places < len(tokens)]) for tokens, places in after]
            counts = Counter(itertools.chain(*(tokens[places].tolist() for tokens, places in after)))
            all = counts.total()
            del counts[END]
            if not counts:
                break
            best = min(counts, key=lambda token: (-counts[token], token))
            likely *= counts[best] / all
            if likely < self.config.suffix_decoding_min_token_prob:
                break
            drafts.append(best)
            after = [(tokens, places[tokens[places] == best] + 1) for tokens, places in after]
        return drafts


def matches(among: Ids, ids: Ids, most: int) -> tuple[npt.NDArray[np.int64], int]:
    """Where in `among` the longest suffix of `ids` ends, and its length, up to `most`."""
    places = np.flatnonzero(among == ids[-1])[-MOST_PLACES:]
    length = min(1, len(places))
    while 0 < length < min(most, len(ids)):
        longer = places[places >= length]
        longer = longer[among[longer - length] == ids[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return places, length


def _following(ids: Ids, start: int, count: int) -> list[int]:
    """So many tokens from `start` on; behind the last one it begins again: what repeats itself goes on to."""
    drafts: list[int] = ids[start : start + count].tolist()
    while len(drafts) < count:
        drafts += drafts[: count - len(drafts)]
    return drafts


METHODS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {"ngram": PromptLookup, "suffix": SuffixLookup}


def make_drafter(config: EngineConfig) -> Drafter:
    """The one that is configured. Raises ConfigError for a class that isn't there or lacks a method."""
    assert config.speculative is not None
    path = config.parallel.sd_worker_cls
    if path == "auto":
        return METHODS[config.speculative.method](config.speculative)
    made = load_class("--sd-worker-cls", path)
    if lacking := [name for name in ("enter", "extend", "leave", "draft", "close") if not hasattr(made, name)]:
        raise ConfigError("--sd-worker-cls", path, f"has no {', '.join(lacking)}", f"see {__name__}.Drafter")
    drafter: Drafter = made(config)
    return drafter
