"""One response: what was asked for, what came of it, and which of its events may be told. Pure.

Three rules are kept here. An event's number follows from the records alone, so whoever reads them, now or after any
number of deaths, numbers alike: items are derived from the texts of the records, as those came. What is not yet written
where it outlives this process is told to nobody. And one that has ended is the same afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planaria.server.records import Again, Head, Outcome, PieceRecord, Record, Whole, drawn, frame
from planaria.server.response_items import ResponseItems

MAX_AGAIN = 10  # times that it is begun again without a piece in between
_PIECE = 240  # bytes of memory, about, that a piece takes besides its text


class Kept:
    """texts: of each record; told: records that may be told; over: the end is among them."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.tokens: list[list[int]] = []  # of each record, until it has ended
        self.weights: list[int] = []  # likewise, the number of those that drew them
        self.versions: list[tuple[int, int]] = []  # see `version_runs`
        self.texts: list[str] = []
        self.pieces: list[tuple[int, int]] = []  # as versions, by texts that aren't empty
        self.end: Outcome | None = None
        self.again = 0  # times that it was begun again since the last piece
        self.told = self.count = 0  # records after the head
        self._items: ResponseItems | None = ResponseItems(head.reading)  # None: not read yet
        self._upto: list[int] = []  # events of its items with each record
        self._num_tokens = self._reasoning = 0  # of the output; and up to the reasoning's end
        self._num_pieces = 0  # texts that aren't empty
        self._head_size = len(frame(head))
        self.size = self._head_size + _PIECE  # bytes, about

    @classmethod
    def of(cls, records: Iterable[Record]) -> Kept | None:
        """From its file's; None: they are none of a response that can be given to anybody, or go on."""
        kept: Kept | None = None
        for record in records:
            match record:
                case Head() if kept is None:
                    kept = cls(record)
                case Again() if kept is not None:
                    kept.again += 1
                case PieceRecord() if kept is not None and kept.end is None:
                    kept.add(record)
                case Whole() if kept is not None and kept.end is None and not kept.count:
                    kept._fill(record)
                case _:
                    return None
        if kept is None or (kept.end is None and kept.head.submit is None):
            return None
        kept.told = kept.count
        return kept

    def _fill(self, whole: Whole) -> None:
        at = 0
        for length in whole.lengths:
            self.texts.append(whole.text[at : at + length])
            self._charge(self.texts[-1], 0)
            at += length
        self.count = len(self.texts) + 1
        self._items, self.versions, self.pieces = None, list(whole.weights), list(whole.pieces)
        self._end(whole.end)

    def add(self, record: PieceRecord) -> bytes:
        """Something came of it; returns what is to be written before it may be told."""
        assert self.end is None
        self._note(record)
        if self.end is None:
            self.tokens.append(record.tokens)
            self.weights.append(record.weights)
        elif self._reasoning:
            self.end = msgspec.structs.replace(self.end, reasoning=self._reasoning)
            record = msgspec.structs.replace(record, end=self.end)
        return frame(record)

    def _note(self, record: PieceRecord) -> None:
        items = self.items
        if record.tokens:
            drawn(self.versions, self._num_tokens, record.weights)
        if record.text:
            number = self.versions[-1][1] if self.versions else 0
            drawn(self.pieces, self._num_pieces, number)
            items.push(record.text, number)
            self._num_pieces += 1
        self._num_tokens += len(record.tokens)
        if items.reasons:
            self._reasoning = self._num_tokens
        if record.end is not None:
            items.finish(record.end.status)
        self.texts.append(record.text)
        self._upto.append(len(items.events))
        self.count += 1
        self._charge(record.text, len(record.tokens))
        if record.tokens:
            self.again = 0
        if record.end is not None:
            self._end(record.end)

    def _charge(self, text: str, num_tokens: int) -> None:
        again = self.head.reading is not None  # what is read is there twice
        self.size += _PIECE + (1 + again) * len(text.encode()) + 8 * num_tokens

    def _end(self, end: Outcome) -> None:
        self.end = end
        self.tokens, self.weights = [], []  # nor is the prompt needed any more
        self.head = msgspec.structs.replace(self.head, submit=None)
        before, self._head_size = self._head_size, len(frame(self.head))
        self.size += self._head_size - before

    def begin_again(self) -> bytes:
        """Another process goes on with it; returns what is to be written first."""
        self.again += 1
        return frame(Again())

    @property
    def hopeless(self) -> bool:
        """It was begun again and again, and nothing came of it: it may be what ends the process."""
        return self.again >= MAX_AGAIN

    def written(self, count: int) -> bool:
        """So many of its records are where they outlive this process. Is there anything new to tell?"""
        if count <= self.told:
            return False
        self.told = min(count, self.count)
        return True

    def file(self) -> bytes:
        """All of it, as short as it can be said."""
        head = self.head
        if self.end is None:
            pieces = zip(self.tokens, self.texts, self.weights, strict=True)
            return b"".join([frame(head), *(frame(PieceRecord(*one[:2], None, one[2])) for one in pieces)])
        texts = [text for text in self.texts if text]
        lengths = [len(text) for text in texts]
        return frame(head) + frame(Whole(lengths, "".join(texts), self.end, self.versions, self.pieces))

    # -- what is told

    @property
    def over(self) -> bool:
        return self.end is not None and self.told == self.count

    @property
    def unread(self) -> int:
        """Characters that `items` has to read first."""
        return sum(map(len, self.texts)) if self._items is None else 0

    @property
    def items(self) -> ResponseItems:
        """Of all records, also of those that may not be told yet."""
        if self._items is None:
            assert self.end is not None
            items = ResponseItems(self.head.reading)
            number, runs = 0, dict(self.pieces)
            for at, text in enumerate(self.texts):
                number = runs.get(at, number)
                items.push(text, number)
            items.finish(self.end.status)
            self._items = items
        return self._items

    @property
    def num_told(self) -> int:
        """Events of its items that may be told."""
        if self.over:
            return len(self.items.events)
        return self._upto[self.told - 1] if self.told else 0

    @property
    def status(self) -> str:
        """Of what may be told."""
        return self.end.status if self.end is not None and self.over else "in_progress"
