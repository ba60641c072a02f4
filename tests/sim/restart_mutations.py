"""Mistakes with what is to outlive a server."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from planaria.server import journal_files, records
from planaria.server.journal_files import JournalFiles
from planaria.server.journal_queue import JournalNews, Op, WriteQueue
from planaria.server.kept import Kept
from planaria.server.records import FRAME, PieceRecord, Record
from planaria.server.response_store import Entry, ResponseStore
from planaria.server.responses import Followed

OF = Kept.of.__func__  # type: ignore[attr-defined]


@contextmanager
def acknowledge_before_the_sync() -> Iterator[None]:
    done = WriteQueue.done

    def early(self: WriteQueue, op: Op) -> Iterator[JournalNews]:
        yield from done(self, op)
        if op.kind == "create":
            yield JournalNews("accepted", op.id)

    with patch.object(WriteQueue, "done", early):
        yield


@contextmanager
def acknowledge_at_once() -> Iterator[None]:
    async def accept(self: ResponseStore, entry: Entry) -> None:
        if self.journal is not None and entry.durable:
            self.journal.put(Op("create", entry.kept.head.id, entry.kept.file()))

    with patch.object(ResponseStore, "accept", accept):
        yield


@contextmanager
def leave_names_unsynced() -> Iterator[None]:
    def sync_names(self: JournalFiles) -> None:
        self.names = False

    with patch.object(JournalFiles, "sync_names", sync_names):
        yield


@contextmanager
def believe_what_could_not_be_synced() -> Iterator[None]:
    def unsynced(self: WriteQueue, id: str, why: str) -> Iterator[JournalNews]:
        return self.synced([id])

    with patch.object(WriteQueue, "unsynced", unsynced):
        yield


@contextmanager
def write_over_what_is_there() -> Iterator[None]:
    """What takes a file's place is written into it."""
    make = JournalFiles._make

    def into(self: JournalFiles, name: str, op: Op, then: str = "") -> None:
        make(self, then or name, op)

    with patch.object(JournalFiles, "_make", into):
        yield


@contextmanager
def remove_before_it_is_replaced() -> Iterator[None]:
    def rewrite(self: ResponseStore, entry: Entry) -> None:
        assert self.journal is not None
        id = entry.kept.head.id
        self.journal.put(Op("remove", id))
        self.journal.queue.waiting[id].append(Op("replace", id, entry.kept.file(), entry.kept.count))

    with patch.object(ResponseStore, "rewrite", rewrite):
        yield


@contextmanager
def leave_what_is_half_written() -> Iterator[None]:
    def append(self: JournalFiles, op: Op) -> None:
        fd = self._open.get(op.id)
        if fd is None:
            fd = self._reopen(op.id)
            self._note(op.id, fd)
        journal_files._write(fd, op.data)
        self.lengths[op.id] += len(op.data)

    with patch.object(JournalFiles, "_append", append):
        yield


@contextmanager
def leave_the_torn_tail() -> Iterator[None]:
    """What comes next is appended to it."""

    def read(self: JournalFiles, name: str) -> tuple[list[Record], int]:
        disk = vars(journal_files)["os"]
        with disk.fdopen(disk.open(name, os.O_RDONLY, dir_fd=self._folder), "rb") as file:
            data = file.read()
        return records.scan(data)[0], len(data)

    with patch.object(JournalFiles, "_read", read):
        yield


@contextmanager
def leave_records_unchecked() -> Iterator[None]:
    """The checksum of a record is not read."""

    def scan(data: bytes) -> tuple[list[Record], int]:
        found: list[Record] = []
        at = 0
        while at + FRAME <= len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            try:
                found.append(records._decode(data[at + FRAME : at + FRAME + size]))
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            at += FRAME + size
        return found, at

    with patch.object(journal_files, "scan", scan):
        yield


@contextmanager
def tell_before_it_is_written() -> Iterator[None]:
    add = Kept.add

    def early(self: Kept, record: PieceRecord) -> bytes:
        data = add(self, record)
        self.told = self.count
        return data

    with patch.object(Kept, "add", early):
        yield


@contextmanager
def leave_numbers_out_of_what_is_short() -> Iterator[None]:
    file = Kept.file

    def joined(self: Kept) -> bytes:
        if self.end is None:
            return file(self)
        twin = copy.copy(self)
        twin.texts = ["".join(self.texts)]
        return file(twin)

    with patch.object(Kept, "file", joined):
        yield


@contextmanager
def forget_what_was_drawn() -> Iterator[None]:
    def anew(cls: type[Kept], found: Any) -> Kept | None:
        kept: Kept | None = OF(cls, found)
        if kept is not None and kept.end is None:
            kept.tokens = [[] for _ in kept.tokens]
        return kept

    with patch.object(Kept, "of", classmethod(anew)):
        yield


@contextmanager
def end_it_twice() -> Iterator[None]:
    """What has ended goes on where its file is a long one still."""

    def endless(cls: type[Kept], found: Any) -> Kept | None:
        parts = (msgspec.structs.replace(one, end=None) if isinstance(one, PieceRecord) else one for one in found)
        kept: Kept | None = OF(cls, parts)
        return kept

    with patch.object(Kept, "of", classmethod(endless)):
        yield


@contextmanager
def drop_what_failed() -> Iterator[None]:
    def dropped(self: WriteQueue, op: Op, why: str, later: Any = ()) -> Iterator[JournalNews]:
        yield JournalNews("failing", op.id, op.count, why)

    with patch.object(WriteQueue, "failed", dropped):
        yield


@contextmanager
def tell_the_last_event_again() -> Iterator[None]:
    begin = Followed.__init__

    def again(self: Followed, entry: Entry, start: int, *more: Any) -> None:
        begin(self, entry, max(0, start - 1), *more)

    with patch.object(Followed, "__init__", again):
        yield


@contextmanager
def leave_the_key_out() -> Iterator[None]:
    """A request that is sent again is another one to the next server."""
    enlist = ResponseStore.enlist

    def keyless(self: ResponseStore, entry: Entry) -> None:
        enlist(self, entry)
        if entry.run is None and entry.kept.count:
            self.by_key.clear()

    with patch.object(ResponseStore, "enlist", keyless):
        yield
