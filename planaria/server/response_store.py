"""The responses of a server: which there are, whose they are, how long they are kept, and what runs on behind them.

They are held in memory, and with a journal in its files too. `MAX_BYTES` bounds them: whoever has most makes room, the
oldest first, and what still runs for nobody. What runs in the background at the death of a server goes on in the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from planaria.errors import RequestError
from planaria.server.background import Background
from planaria.server.journal_queue import JournalNews, Op
from planaria.server.kept import Kept
from planaria.server.records import Head, Outcome, PieceRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from planaria.server.journal import Journal
    from planaria.server.response_passing import RunElsewhere
    from planaria.server.response_run import ResponseRun
    from planaria.server.service import Service

logger = logging.getLogger("planaria.server")

AGE = 30 * 86400.0  # seconds from its creation that a response is kept, once it has ended
MAX_STORED = 10_000  # responses
MAX_BYTES = 256 << 20  # of all of them, about
MAX_RESPONSE = 32 << 20  # of one, when it begins
MAX_BACKGROUND = 1024  # that run, or wait to
ACCEPTED = 10.0  # seconds in which a file must be safe, or its request is refused
WATCH = 1.0  # seconds between two looks whether the disk answers
DELETED = "deleted"  # why what ran behind one ended
SWEEP = 600.0  # seconds between two looks at what is too old


class Entry:
    """A response and who waits for more of it. durable: its records are in the journal's file as they come; listed: it
    can be asked for; cut: nothing more will come of it in this process."""

    def __init__(self, kept: Kept, durable: bool) -> None:
        self.kept, self.durable = kept, durable
        self.listed = self.cut = False
        self.run: ResponseRun | RunElsewhere | None = None
        self.more = asyncio.Event()  # replaced each time that it is set
        self.accepted: asyncio.Future[str] | None = None  # "", or why it is not
        self.charged = 0  # bytes that it counts for

    def wake(self) -> None:
        self.more.set()
        self.more = asyncio.Event()


def refuse_too_many(kept: Kept, running: Collection[Entry], num_keys: int) -> None:
    """Half of all room for what runs is for whoever comes; of the rest each API key has its share, whatever others do.
    Raises RequestError where there is none for another."""
    counts, sizes = Counter[str](), Counter[str]()
    for entry in running:
        counts[entry.kept.head.owner] += 1
        sizes[entry.kept.head.owner] += entry.charged
    owner = kept.head.owner
    counts[owner] += 1
    sizes[owner] += kept.size
    used = (counts, MAX_BACKGROUND), (sizes, MAX_BYTES // 2)
    if any(of.total() > room for of, room in used):
        raise RequestError(
            f"{len(running)} responses run already, with as much text as there is room for; try again later",
            param="background", code="overloaded", status=503,
        )  # fmt: skip
    for of, room in used:
        share = room // (2 * num_keys)
        over = sum(max(0, size - share) for size in of.values())
        if of[owner] > share and over > room - share * num_keys:
            raise RequestError(
                f"{counts[owner] - 1} responses of this API key run already, and what is left is for others; try again "
                "later", param="background", code="too_many_background", status=429,
            )  # fmt: skip


class ResponseStore:
    """num_keys: API keys, each of which has a share of the places for what runs. lasts: what is in the journal outlives
    the server, and not only this process. journal: None: all of it is in memory. failing: responses that can't be
    written now."""

    def __init__(self, service: Service, num_keys: int = 1, *, lasts: bool = True) -> None:
        self.service, self.num_keys, self.lasts = service, max(1, num_keys), lasts
        self.journal: Journal | None = None
        self.elsewhere: list[int] = []  # `numbers` of the process that keeps them
        self.known: dict[str, Entry] = {}
        self.by_key: dict[tuple[str, str], Entry] = {}  # owner, Idempotency-Key
        self.unfinished: dict[str, Entry] = {}  # of them
        self.sizes: Counter[str] = Counter()  # by owner
        self.size = 0
        self.failing: set[str] = set()
        self.over: dict[str, dict[str, Entry]] = {}  # of each owner those that have ended, the first one first
        self.tasks = Background()
        self.lent: Journal | None = None  # the journal, while another server has it
        self.at_rest: set[str] = set()  # responses that had ended before that
        self.gone: list[str] = []  # responses that were forgotten meanwhile
        self.on_kept: Callable[[Entry], None] | None = None  # hears of what another server is to have
        self.on_gone: Callable[[str], None] | None = None  # and of what it is to forget
        self._sweeping: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None

    @property
    def numbers(self) -> list[int]:
        """Of responses that run and that are over, of bytes, and of what can't be written; none: there are none."""
        if not self.known and self.journal is None:
            return self.elsewhere
        return [len(self.unfinished), len(self.known) - len(self.unfinished), self.size, len(self.failing)]

    # -- the journal

    def use(self, journal: Journal) -> None:
        """Take over what is in there, and keep it from now on."""
        self.journal, journal.tell = journal, self._hear
        found: list[Kept] = []
        long: set[str] = set()  # of them those that ended just before the other server did
        for id, records in journal.load():
            kept = Kept.of(records)
            if kept is not None and kept.head.id == id and not self._old(kept):
                found.append(kept)
                if kept.end is not None and len(records) > 2:
                    long.add(id)
                continue
            if kept is None or kept.head.id != id:
                logger.warning("journal: what is kept of %s can't be used: removed", id)
            journal.put(Op("remove", id))
        for kept in sorted(found, key=lambda kept: kept.head.created):
            entry = Entry(kept, durable=kept.end is None)
            self.enlist(entry)
            if kept.head.id in long:
                self.rewrite(entry)
        self.make_room(0, 0)
        journal.start()

    async def go_on(self) -> None:
        """Engines are ready: whatever ran in the background of another server goes on, the oldest first."""
        from planaria.server.response_run import ResponseRun

        open_ones = [entry for entry in self.unfinished.values() if entry.run is None]
        if open_ones:
            tokens = sum(len(part) for entry in open_ones for part in entry.kept.tokens)
            logger.info("%d responses go on; they have %d tokens", len(open_ones), tokens)
        for entry in sorted(open_ones, key=lambda entry: entry.kept.head.created):
            if entry.listed and entry.kept.end is None and not entry.cut:
                ResponseRun.again(self, entry)
            await asyncio.sleep(0)  # each has its text made again

    def _hear(self, news: list[JournalNews]) -> None:
        """What the journal has done."""
        for one in news:
            entry = self.known.get(one.id)
            if entry is None:
                continue
            match one.what:
                case "accepted":
                    self._accept(entry, "")
                case "written":
                    self.failing.discard(one.id)
                    self.now_told(entry, one.count)
                case "failing" if entry.accepted is not None and not entry.accepted.done():
                    self._accept(entry, one.why)
                case "failing":
                    self._fails(entry, one.why)
                case "lost":
                    self._fails(entry, one.why)
                    self.rewrite(entry)

    def _accept(self, entry: Entry, why: str) -> None:
        if entry.accepted is not None and not entry.accepted.done():
            entry.accepted.set_result(why)

    def _fails(self, entry: Entry, why: str) -> None:
        """What runs goes on, and is told as it comes: it is the next death alone that may lose of it."""
        if not self.failing:
            logger.error("journal: %s can't be written: %s; what runs goes on without it", entry.kept.head.id, why)
        self.failing.add(entry.kept.head.id)
        self.now_told(entry, entry.kept.count)

    def rewrite(self, entry: Entry) -> None:
        assert self.journal is not None
        self.journal.put(Op("replace", entry.kept.head.id, entry.kept.file(), entry.kept.count))

    def now_told(self, entry: Entry, count: int) -> None:
        kept = entry.kept
        if kept.written(count):
            entry.wake()
            if kept.over and entry.durable and entry.listed and self.journal is not None:
                entry.durable = False  # it has come to rest: from now on its file is as short as can be
                self.rewrite(entry)

    # -- what comes of one

    async def accept(self, entry: Entry) -> None:
        """Have a new one last, before its request is acknowledged. Raises RequestError."""
        if self.journal is None or not entry.durable:
            return
        id = entry.kept.head.id
        entry.accepted = asyncio.get_running_loop().create_future()
        self.journal.put(Op("create", id, entry.kept.file()))
        try:
            why = await asyncio.wait_for(entry.accepted, ACCEPTED)
        except TimeoutError:
            why = f"the disk doesn't answer within {ACCEPTED:g} s"
        if why:
            self.forget(entry)
            raise RequestError(
                f"the request can't be kept in the journal: {why}; nothing in the background is taken meanwhile",
                param="background", code="journal_failed", status=503,
            )  # fmt: skip

    def record(self, entry: Entry, told: PieceRecord) -> None:
        """Something came of it: written first, then told."""
        kept, journal = entry.kept, self.journal
        data = kept.add(told)
        if entry.listed:
            if kept.end is not None:
                self.note_end(entry)
            self.charge(entry)
            self.make_room(0, 0)
        if journal is None or not entry.listed or not (entry.durable or kept.end is not None):
            self.now_told(entry, kept.count)
            if self.on_kept is not None and entry.listed and kept.end is not None:
                self.on_kept(entry)
            return
        if entry.durable:
            journal.put(Op("append", kept.head.id, data, kept.count))
        else:
            self.rewrite(entry)
        if kept.head.id in self.failing:
            self.now_told(entry, kept.count)
        elif self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(WATCH, self._watch)

    def _watch(self) -> None:
        """A disk that doesn't answer holds up nobody for long."""
        self._watching = None
        if self.journal is None:  # another server has it
            return
        behind = [entry for entry in self.known.values() if entry.kept.told < entry.kept.count]
        if self.journal.stuck:
            for entry in behind:
                self._fails(entry, "the disk doesn't answer")
        elif behind:
            self._watching = asyncio.get_running_loop().call_later(WATCH, self._watch)

    def append(self, entry: Entry, data: bytes) -> None:
        """To its file, which has no more records to tell of with it."""
        if self.journal is not None and entry.durable:
            self.journal.put(Op("append", entry.kept.head.id, data, entry.kept.count))

    def end(self, entry: Entry, status: str, error: str = "") -> None:
        """It ends without another piece."""
        if entry.kept.end is None:
            self.record(entry, PieceRecord(end=Outcome(status, int(time.time()), error)))

    # -- which there are

    def add(self, head: Head, *, stored: bool) -> Entry:
        """A new one. Raises RequestError where there is no room for it."""
        kept = Kept(head)
        entry = Entry(kept, durable=self.journal is not None and head.background)
        if stored:
            if kept.size > MAX_RESPONSE:
                raise RequestError(
                    f"the request has {kept.size} bytes; at most {MAX_RESPONSE} are stored: send store: false",
                    param="store", code="request_too_large", status=413,
                )  # fmt: skip
            if head.background:
                refuse_too_many(kept, self.unfinished.values(), self.num_keys)
            self.make_room(1, kept.size)
            self.enlist(entry)
            if self.on_kept is not None and head.background:
                self.on_kept(entry)
        return entry

    def enlist(self, entry: Entry) -> None:
        head = entry.kept.head
        self.known[head.id] = entry
        entry.listed = True
        if head.key:
            self.by_key[head.owner, head.key] = entry
        self.unfinished[head.id] = entry
        if entry.kept.end is not None:
            self.note_end(entry)
        self.charge(entry)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP, self._sweep)

    def find(self, id: str, owner: str) -> Entry:
        """Raises RequestError."""
        entry = self.known.get(id)
        if entry is None or entry.kept.head.owner != owner or self._old(entry.kept):
            raise RequestError(
                f"response {id[:80]!r} is not known: not stored, deleted, too old, or of another API key",
                param="response_id", code="response_not_found", status=404,
            )  # fmt: skip
        return entry

    def forget(self, entry: Entry) -> None:
        """It is gone, from the disk too."""
        head = entry.kept.head
        if not entry.listed:
            return
        entry.listed = False
        del self.known[head.id]
        if head.key and self.by_key.get((head.owner, head.key)) is entry:
            del self.by_key[head.owner, head.key]
        self.unfinished.pop(head.id, None)
        own = self.over.get(head.owner, {})
        if own.pop(head.id, None) is not None and not own:
            del self.over[head.owner]
        self.charge(entry)
        self.failing.discard(head.id)
        if self.journal is not None:
            self.journal.put(Op("remove", head.id))
        if self.on_gone is not None:
            self.on_gone(head.id)
        if entry.run is not None and entry.kept.head.background:
            entry.run.cancel(DELETED)

    def charge(self, entry: Entry) -> None:
        size = entry.kept.size if entry.listed else 0
        owner = entry.kept.head.owner
        self.sizes[owner] += size - entry.charged
        self.size += size - entry.charged
        entry.charged = size
        if not self.sizes[owner]:
            del self.sizes[owner]

    def note_end(self, entry: Entry) -> None:
        self.unfinished.pop(entry.kept.head.id, None)
        self.over.setdefault(entry.kept.head.owner, {})[entry.kept.head.id] = entry

    def make_room(self, count: int, size: int) -> None:
        """For so many more, of so many bytes."""
        while self.over and (len(self.known) + count > MAX_STORED or self.size + size > MAX_BYTES):
            most = max(self.over, key=self.sizes.__getitem__)
            self.forget(next(iter(self.over[most].values())))

    @staticmethod
    def _old(kept: Kept) -> bool:
        return kept.end is not None and time.time() > kept.head.created + AGE

    def _sweep(self) -> None:
        self._sweeping = None
        for entry in [entry for entry in self.known.values() if self._old(entry.kept)]:
            self.forget(entry)
        if self.known:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP, self._sweep)

    async def close(self) -> None:
        """What runs in the background is set aside, what is to be written is."""
        for timer in (self._sweeping, self._watching):
            if timer is not None:
                timer.cancel()
        for entry in list(self.known.values()):
            if entry.run is not None:
                entry.run.set_aside()
        if self.journal is not None:
            await self.journal.close()
