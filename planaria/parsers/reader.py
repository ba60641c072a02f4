"""Text that comes in pieces, read as if it were all there. Pure.

Every method that may have to wait for more text is a generator that yields until there is some: `yield from` it. What
is read doesn't depend on where one piece ended and the next began. Nothing is looked at twice but a few characters, so
the cost is linear in the text, also where most of it turns out to be no call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Put = Callable[[str], None]

_SPACES = re.compile(r"[ \t\r\n]*")


def nowhere(text: str) -> None:
    """Where text goes that is told to nobody."""


class TextReader:
    """`keep` begins to remember what is read, in case it has to be content after all (`kept`)."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        self.text, self.at = self.text[self.at :] + text, 0

    # -- what has been read

    def keep(self, *before: str) -> None:
        """From here on. before: what was read already and belongs to it."""
        self._kept = list(before)

    def drop(self) -> None:
        """What was kept is not needed."""
        self._kept = None

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def kept(self) -> str:
        """What was read since `keep`; "" where nothing was kept. Ends the keeping."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def back(self) -> None:
        """Have what was kept be read again. Once in an answer: it costs as much as the text that is here."""
        kept = self.kept()
        self.text, self.at = kept + self.text[self.at :], 0

    def take(self, count: int) -> str:
        """The next characters, which must be here."""
        taken = self.text[self.at : self.at + count]
        self.at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    # -- reading

    def need(self, count: int) -> Wait[str]:
        """Wait for so many characters: these, unread; fewer only at the end of all text."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def peek(self) -> Wait[str]:
        """The next character, unread; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def match(self, literal: str) -> Wait[bool]:
        """Read `literal` if it is what follows, else nothing. It waits no longer than it might be."""
        while True:
            here = self.text[self.at : self.at + len(literal)]
            if here == literal:
                self.take(len(literal))
                return True
            if self.ended or not literal.startswith(here):
                return False
            yield

    def close(self, literal: str) -> Wait[bool]:
        """As `match`; a text that is cut within `literal` has it, too."""
        found = yield from self.match(literal)
        rest = self.text[self.at :]
        if not found and self.ended and rest and literal.startswith(rest):
            self.take(len(rest))
            return True
        return found

    def run(self, pattern: re.Pattern[str], put: Put, most: int | None = None) -> Wait[bool]:
        """Read on while characters are of those that `pattern`, a class repeated, matches. False: there are more of
        them than `most`, which are not read."""
        count = 0
        while (yield from self.peek()):
            found = pattern.match(self.text, self.at)
            length = found.end() - self.at if found is not None else 0
            fits = length if most is None else min(length, most - count)
            if fits:
                put(self.take(fits))
                count += fits
            if fits < length:
                return False
            if self.at < len(self.text):
                break
        return True

    def word(self, pattern: re.Pattern[str], most: int) -> Wait[str]:
        """A run as a text; "" where there is none, or a longer one."""
        parts: list[str] = []
        fits = yield from self.run(pattern, parts.append, most)
        return "".join(parts) if fits else ""

    def spaces(self, put: Put = nowhere) -> Wait[bool]:
        return self.run(_SPACES, put)

    def until(self, markers: tuple[str, ...], put: Put) -> Wait[str]:
        """Give out text up to the first of `markers`, none of which is part of another, and read that: which it was, ""
        at the end of all text."""
        pattern, firsts, longest = _search(markers)
        while True:
            found = pattern.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    put(self.take(found.start() - self.at))
                return self.take(len(found.group()))
            held = 0
            if not self.ended:
                end = self.text[max(self.at, len(self.text) - longest + 1) :]
                if not firsts.isdisjoint(end):
                    held = max(_begun(end, marker) for marker in markers)
            count = len(self.text) - self.at - held
            if count:
                put(self.take(count))
            if self.ended:
                return ""
            yield


def _begun(end: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of `marker`."""
    for length in range(min(len(end), len(marker) - 1), 0, -1):
        if marker.startswith(end[-length:]):
            return length
    return 0


@lru_cache(maxsize=64)
def _search(markers: Sequence[str]) -> tuple[re.Pattern[str], frozenset[str], int]:
    return (
        re.compile("|".join(map(re.escape, markers))), frozenset(marker[0] for marker in markers),
        max(map(len, markers)),
    )  # fmt: skip
