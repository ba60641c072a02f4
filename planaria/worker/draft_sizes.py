"""How many drafts each row gets in a step: as many as make the step's tokens come sooner, down to none.

Two things are measured: how long a step of so many tokens takes, and how often a row's drafts were right. What a row's
next draft is expected to bring, the chance that all before it and it are right, is weighed against what one more token
costs a step. No clock and no randomness of its own: who runs steps tells the times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

FIRST_GUESS = 0.15  # of a step of one token: what another costs, before it was seen
MEMORY = 0.9  # of an average: the weight of what was before
CHANCE = 0.6  # that a draft is right, of a row of which nothing is known
STEADY = 4.0  # drafts that this counts as
LOOK_AGAIN = 32  # steps without drafts, after which a row gets one; twice as many after each that was wrong
LONGEST = 8 * LOOK_AGAIN  # and never more
LEAST = 0.05  # chance of a draft that is thought of
GAIN = 1.15  # in tokens a second, that drafts must be expected to bring
MOST_TOKENS = 1 << 10
FORGOTTEN = 128  # steps after which a number of tokens that wasn't seen again is none that was seen


class StepTimes:
    """Seconds of a step by its number of tokens, from those that were seen lately: what steps took while something else
    had the processor would else be held against drafts for ever, which then nobody tries again."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._steps: OrderedDict[int, int] = OrderedDict()  # in which each was seen last, the longest ago first
        self._step = 0
        self._tokens: list[int] = []  # that were seen, in order
        self._seconds: list[float] | None = []  # of them, never less for more tokens; None: to be made

    def saw(self, tokens: int, seconds: float) -> None:
        if tokens > MOST_TOKENS:
            return
        # one slow step, when something else had the processor, counts as no more than twice the usual
        if before := self._seen.get(tokens):
            self._seen[tokens] = MEMORY * before + (1 - MEMORY) * min(seconds, 2 * before)
        else:
            self._seen[tokens] = min(seconds, 2 * (self.expected(tokens) or seconds))
            insort(self._tokens, tokens)
        self._step += 1
        self._steps[tokens] = self._step
        self._steps.move_to_end(tokens)
        while self._step - next(iter(self._steps.values())) >= FORGOTTEN:
            old, _ = self._steps.popitem(last=False)
            del self._seen[old]
            self._tokens.remove(old)
        self._seconds = None

    def expected(self, tokens: int) -> float:
        """Never less for more tokens: fewer take no longer than more did, and whatever else ran on a machine only adds.
        0.0: nothing was seen. On a line between those that were seen, and beyond them what a token cost so far."""
        known = self._tokens
        if not known:
            return 0.0
        if self._seconds is None:
            self._seconds = list(accumulate((self._seen[n] for n in reversed(known)), min))[::-1]
        seconds, first, last = self._seconds, known[0], known[-1]
        at = bisect_left(known, tokens)
        if at < len(known) and known[at] == tokens:
            return seconds[at]
        if 0 < at < len(known):
            share = (tokens - known[at - 1]) / (known[at] - known[at - 1])
            return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
        start, end = seconds[0], seconds[-1]
        one = start / (1 + FIRST_GUESS * (first - 1))
        slope = (end - start) / (last - first) if last > first else FIRST_GUESS * one
        return end + slope * (tokens - last) if at else max(start - slope * (first - tokens), one)


class DraftSizes:
    """Of one rank that draws tokens. Rows by number."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._right: dict[int, tuple[float, float]] = {}  # row -> drafts that were right, that counted, lately
        self._idle: dict[int, int] = {}  # row -> steps without drafts
        self._patience: dict[int, int] = {}  # row -> after how many of them it gets one

    def enter(self, row: int) -> None:
        self._right[row] = CHANCE * STEADY, STEADY
        self._idle[row] = 0
        self._patience[row] = LOOK_AGAIN

    def leave(self, row: int) -> None:
        self._right.pop(row, None)
        self._idle.pop(row, None)
        self._patience.pop(row, None)

    def checked(self, row: int, drafted: int, right: int) -> None:
        """Of so many drafts so many were right; those after the first wrong one tell nothing. Also of one that was only
        guessed."""
        if not drafted:
            return
        good, counted = self._right[row]
        tried = right + (right < drafted)
        keep = MEMORY**tried
        self._right[row] = good * keep + right, counted * keep + tried
        self._idle[row] = 0
        self._patience[row] = LOOK_AGAIN if right else min(2 * self._patience[row], LONGEST)

    def chance(self, row: int) -> float:
        good, counted = self._right[row]
        return good / counted

    def may_gain(self, rows: Sequence[int]) -> bool:
        """Could drafts bring what they must, if there were any number, and all took no longer than one? A no is
        certain, and takes a tenth of weighing them."""
        tokens = sum(1 / (1 - min(self.chance(row), 0.999)) for row in rows)
        now, then = self.times.expected(len(rows)), self.times.expected(len(rows) + 1)
        return not now or tokens * now > GAIN * len(rows) * then

    def dealt(self, rows: Sequence[int], most: int, room: int) -> dict[int, int]:
        """By row, how many drafts it is to have in a step of these rows, in which there is room for so many more
        tokens. Drafts that gain little are left out: they cost those who wait for the rows without any."""
        sizes = self._most_gaining(rows, most, room) if self.may_gain(rows) else {}
        for row in rows:
            if row not in sizes:
                self._idle[row] += 1
                if self._idle[row] % self._patience[row] == 0 and sum(sizes.values()) < room:
                    sizes[row] = 1
        return sizes

    def _most_gaining(self, rows: Sequence[int], most: int, room: int) -> dict[int, int]:
        found = np.array([self.chance(row) for row in rows])
        each = found[:, None] ** np.arange(1, most + 1)  # chance that a row's drafts are right up to this one
        each[each < LEAST] = 0.0
        order = (-each).ravel().argsort(kind="stable")[: min(room, int((each > 0).sum()))]
        tokens = len(rows) + np.cumsum(each.ravel()[order])
        times = np.array([self.times.expected(len(rows) + more) for more in range(len(order) + 1)])
        if not len(order):
            return {}
        rates = tokens / times[1:] if times[0] else tokens
        best = int(rates.argmax())
        if rates[best] <= (GAIN * len(rows) / times[0] if times[0] else 0.0):
            return {}
        counts = np.bincount(order[: best + 1] // most, minlength=len(rows)).tolist()
        return {row: count for row, count in zip(rows, counts, strict=True) if count}
