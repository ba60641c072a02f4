"""One response: what was asked for, what came of it, and which of its events may be told. Pure.

Three rules are kept here. An event's number follows from the records alone, so whoever reads them, now or after any
number of deaths, numbers alike. What is not yet written where it outlives this process is told to nobody. And one that
has ended is the same afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planaria.server.records import Again, Head, Outcome, PieceRecord, Record, Whole, frame

MAX_AGAIN = 10  # times that it is begun again without a piece in between
_PIECE = 160  # bytes of memory, about, that a piece takes besides its text


class Kept:
    """pieces: of its text, none empty; told: records that may be told; over: the end is among them."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.tokens: list[list[int]] = []  # of each record, until it has ended
        self.pieces: list[str] = []
        self.end: Outcome | None = None
        self.again = 0  # times that it was begun again since the last piece
        self.told = self.count = 0  # records after the head
        self._upto: list[int] = []  # pieces with each record
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
            self._note(PieceRecord([], whole.text[at : at + length]))
            at += length
        self._note(PieceRecord(end=whole.end))

    def add(self, record: PieceRecord) -> bytes:
        """Something came of it; returns what is to be written before it may be told."""
        assert self.end is None
        self._note(record)
        if self.end is None:
            self.tokens.append(record.tokens)
        return frame(record)

    def _note(self, record: PieceRecord) -> None:
        if record.text:
            self.pieces.append(record.text)
        self._upto.append(len(self.pieces))
        self.count += 1
        self.size += _PIECE + len(record.text.encode()) + 8 * len(record.tokens)
        if record.tokens:
            self.again = 0
        if record.end is not None:
            self.end = record.end
            self.tokens = []  # nor is the prompt needed any more
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
            return b"".join(
                [frame(head), *(frame(PieceRecord(*one)) for one in zip(self.tokens, self._texts(), strict=True))]
            )
        return frame(head) + frame(Whole([len(piece) for piece in self.pieces], "".join(self.pieces), self.end))

    def _texts(self) -> Iterable[str]:
        before = 0
        for upto in self._upto:
            yield self.pieces[before] if upto > before else ""
            before = upto

    # -- what is told

    @property
    def over(self) -> bool:
        return self.end is not None and self.told == self.count

    @property
    def num_pieces(self) -> int:
        """Pieces of its text that may be told."""
        return self._upto[self.told - 1] if self.told else 0

    @property
    def text(self) -> str:
        return "".join(self.pieces[: self.num_pieces])

    @property
    def status(self) -> str:
        """Of what may be told."""
        return self.end.status if self.end is not None and self.over else "in_progress"
