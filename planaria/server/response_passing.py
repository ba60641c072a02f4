"""Responses that one process has and another is to have: `planaria serve --replace`. What runs goes on where it began;
the other has what ended, and hears of what runs when it ends."""

from __future__ import annotations

from collections.abc import Callable

from planaria.server.kept import Kept
from planaria.server.records import Record
from planaria.server.response_store import Entry, ResponseStore


class RunElsewhere:
    """What runs behind a response in another process. end: has that one end it, by id, and why."""

    def __init__(self, entry: Entry, end: Callable[[str, str], None]) -> None:
        self.entry, self.end = entry, end

    def cancel(self, why: str) -> None:
        self.end(self.entry.kept.head.id, why)

    def set_aside(self) -> None:
        self.entry.cut = True
        self.entry.wake()


async def lend(store: ResponseStore, on_kept: Callable[[Entry], None]) -> bool:
    """Have another server keep them. What runs goes on here, and is told as it comes; on_kept: hears of each that
    has ended since, or has begun in the background. False: the journal can't be written."""
    journal, store.journal, store.on_kept = store.journal, None, on_kept
    if journal is not None and not await journal.lend():
        store.journal, store.on_kept = journal, None
        _write_open(store)
        return False
    store.lent = journal
    for entry in store.known.values():
        store.now_told(entry, entry.kept.count)
    return True


def take_back(store: ResponseStore) -> bool:
    """False: the other has not let go of the journal yet."""
    if store.lent is not None and not store.lent.take_back():
        return False
    store.journal, store.lent, store.on_kept = store.lent, None, None
    _write_open(store)
    return True


def _write_open(store: ResponseStore) -> None:
    """What came meanwhile."""
    if store.journal is not None:
        for entry in store.known.values():
            if entry.durable:
                entry.durable = entry.kept.end is None
                store.rewrite(entry)


def runs_elsewhere(store: ResponseStore, id: str, end: Callable[[str, str], None]) -> None:
    """See RunElsewhere."""
    if (entry := store.unfinished.get(id)) is not None and entry.run is None:
        entry.run = RunElsewhere(entry, end)


def bring(store: ResponseStore, records: list[Record], end: Callable[[str, str], None]) -> None:
    """All that another process has of one, which has ended there, or runs. end: see RunElsewhere."""
    kept = Kept.of(records)
    if kept is None:
        return
    entry = store.known.get(kept.head.id)
    if entry is None:
        entry = Entry(kept, durable=store.journal is not None and kept.end is None)
        store.enlist(entry)
    elif entry.kept.end is None:
        entry.kept = kept
    else:
        return
    if kept.end is None:
        entry.run = RunElsewhere(entry, end)
    else:
        entry.run, entry.durable = None, False
        store.note_end(entry)
    store.charge(entry)
    store.make_room(0, 0)
    if store.journal is not None and entry.listed:
        store.rewrite(entry)
    entry.wake()


def none_elsewhere(store: ResponseStore) -> None:
    """The other process has ended: what it has not ended goes on here."""
    for entry in store.unfinished.values():
        if isinstance(entry.run, RunElsewhere):
            entry.run = None
    store.tasks.start(store.go_on())
