"""Responses that one process has and another is to have: `planaria serve --replace`. What runs goes on where it began;
the other has what ended, and hears of what runs when it ends."""

from __future__ import annotations

from collections.abc import Callable

from planaria.server.journal import Journal
from planaria.server.journal_queue import Op
from planaria.server.kept import Kept
from planaria.server.records import Record
from planaria.server.response_store import DELETED, Entry, ResponseStore


class RunElsewhere:
    """What runs behind a response in another process. end: has that one end it, by id, and why."""

    def __init__(self, entry: Entry, end: Callable[[str, str], None]) -> None:
        self.entry, self.end = entry, end

    def cancel(self, why: str) -> None:
        self.end(self.entry.kept.head.id, why)

    def set_aside(self) -> None:
        self.entry.cut = True
        self.entry.wake()


async def lend(store: ResponseStore, on_kept: Callable[[Entry], None], on_gone: Callable[[str], None]) -> bool:
    """Have another server keep them. What runs goes on here, and is told as it comes; on_kept: hears of each that
    has ended since, or has begun in the background; on_gone: of each that is kept no longer. False: the journal can't
    be written."""
    store.at_rest, gone = {id for id, entry in store.known.items() if entry.kept.end is not None}, store.gone

    def forgotten(id: str) -> None:
        gone.append(id)
        on_gone(id)

    journal, store.journal, store.on_kept, store.on_gone = store.journal, None, on_kept, forgotten
    if journal is not None and not await journal.lend():
        _keep_again(store, journal)
        return False
    store.lent = journal
    for entry in store.known.values():
        store.now_told(entry, entry.kept.count)
    return True


def take_back(store: ResponseStore) -> bool:
    """False: the other has not let go of the journal yet."""
    if store.lent is not None and not store.lent.take_back():
        return False
    _keep_again(store, store.lent)
    store.lent = None
    return True


def _keep_again(store: ResponseStore, journal: Journal | None) -> None:
    """And write what has come meanwhile, also of those that began."""
    store.journal, store.on_kept, store.on_gone = journal, None, None
    if journal is not None:
        for id in store.gone:
            journal.put(Op("remove", id))
        for id, entry in store.known.items():
            ended = entry.kept.end is not None
            if id not in store.at_rest and (ended or entry.kept.head.background):
                entry.durable = not ended
                store.rewrite(entry)
    store.gone.clear()


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


def withdraw(store: ResponseStore, id: str, why: str) -> None:
    """End what runs here, as another process says that has it, too; and forget it, where that one has."""
    entry = store.known.get(id)
    if entry is not None and why == DELETED:
        store.forget(entry)
    elif entry is not None and entry.run is not None:
        entry.run.cancel(why)


def forget(store: ResponseStore, id: str) -> None:
    """Another process that has it has been told to."""
    if (entry := store.known.get(id)) is not None:
        store.forget(entry)


def none_elsewhere(store: ResponseStore) -> None:
    """The other process has ended: what it has not ended goes on here."""
    for entry in store.unfinished.values():
        if isinstance(entry.run, RunElsewhere):
            entry.run = None
    store.tasks.start(store.go_on())
