"""What is kept of a response: records as bytes, numbers of events, and the rule "durable", over a disk that fails,
tears what is being written and loses what was not synced, while servers die at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import RequestError
from planaria.server.journal_queue import JournalNews, Op, WriteQueue
from planaria.server.kept import Kept
from planaria.server.records import Again, ConversationItem, Head, Outcome, PieceRecord, Record, Whole, frame, scan
from planaria.server.response_shapes import event_bytes, num_events
from planaria.server.response_store import ResponseStore
from planaria.types import SamplingParams
from planaria.wire import Submit


def head(number: int, background: bool = True) -> Head:
    id = f"resp_{number:032x}"
    submit = Submit(id, [1, 2, 3], SamplingParams(temperature=0.5), seed=number, max_tokens=9)
    items = [ConversationItem("i", "user", ["x"])]
    return Head(id, "", 2**40, background, "m", "m", {"metadata": {"é": "日本"}}, items, submit)


texts = st.text(max_size=4)
outcomes = st.builds(Outcome, st.sampled_from(["completed", "incomplete", "cancelled", "failed"]), st.integers(0, 9))
records = st.lists(
    st.one_of(
        st.builds(PieceRecord, st.lists(st.integers(0, 2**31 - 1), max_size=3), texts, st.none() | outcomes),
        st.just(Again()), st.builds(Whole, st.lists(st.integers(0, 9), max_size=3), texts, outcomes),
    ), max_size=4,
).map(lambda more: [head(1), *more])  # fmt: skip


@given(records)
def test_what_is_torn_off_anywhere_is_no_record(given: list[Record]) -> None:
    parts = [frame(record) for record in given]
    data, ends = b"".join(parts), [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    assert scan(data) == (given, len(data))
    for cut in range(len(data)):
        whole = max(i for i, end in enumerate(ends) if end <= cut)
        assert scan(data[:cut]) == (given[:whole], ends[whole])


@given(records, st.integers(1, 255))
def test_a_wrong_byte_ends_what_can_be_read(given: list[Record], flip: int) -> None:
    parts = [frame(record) for record in given]
    data = b"".join(parts)
    before = 0
    for number, part in enumerate(parts):
        for at in range(before, before + len(part)):
            wrong = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            assert scan(wrong) == (given[:number], before)
        before += len(part)


@given(st.lists(st.tuples(texts, st.integers(0, 3)), max_size=6), outcomes, st.booleans(), st.data())
def test_events_are_numbered_by_the_records_alone(
    pieces: list[tuple[str, int]], outcome: Outcome, background: bool, data: st.DataObject
) -> None:
    one = Kept(head(1, background))
    written = frame(one.head)
    for text, tokens in pieces:
        written += one.add(PieceRecord(list(range(tokens)), text))
    half = written + one.file()[:0]
    written += one.add(PieceRecord([], "", outcome))
    for count in range(one.count + 1):  # told by and by, and never otherwise
        known = [event_bytes(one, n) for n in range(num_events(one))]
        one.written(count)
        assert [event_bytes(one, n) for n in range(len(known))] == known
    events = [event_bytes(one, n) for n in range(num_events(one))]
    for bytes_ in (written, one.file()):  # read again, also from the file that is as short as can be
        again = Kept.of(scan(bytes_)[0])
        assert again is not None and again.over
        assert [event_bytes(again, n) for n in range(num_events(again))] == events
    unfinished = Kept.of(scan(half)[0])
    assert unfinished is not None and unfinished.end is None and unfinished.told == len(pieces)
    assert Kept.of(scan(unfinished.file())[0]).tokens == [list(range(tokens)) for _, tokens in pieces]  # type: ignore[union-attr]
    cut = data.draw(st.integers(0, num_events(unfinished)))
    first = [event_bytes(unfinished, n) for n in range(cut)]
    assert first == events[:cut]


def test_records_that_make_no_response() -> None:
    told, whole = PieceRecord([1], "x"), Whole([], "", Outcome("completed", 1))
    done = PieceRecord([1], "", Outcome("completed", 1))
    for wrong in ([], [told], [head(1), head(1)], [head(1), done, told], [head(1), told, whole]):
        assert Kept.of(wrong) is None
    short = Kept(head(1))
    short.add(done)
    (only, _), _ = scan(short.file())
    assert isinstance(only, Head) and only.submit is None and Kept.of([only]) is None


# -- the rule "durable"

PIECES = 6  # of each response; the last brings the end


class Disk:
    """Files: what was written of each, and how much of it, and whether its name, is safe."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.safe: dict[str, bytes] = {}
        self.gone: set[str] = set()  # removed, which a power failure may undo

    def carry_out(self, op: Op, cut: int | None = None) -> None:
        """cut: bytes of it that are written."""
        before = self.files.get(op.id, b"")
        if op.kind == "remove":
            if self.files.pop(op.id, None) is not None:
                self.gone.add(op.id)
        elif op.kind == "append":
            self.files[op.id] = before + op.data[:cut]
        elif cut is None or not before:  # what replaces a file does so whole
            self.files[op.id] = op.data[:cut]

    def sync(self) -> None:
        self.safe = dict(self.files)
        self.gone.clear()

    def lose_power(self, draw: random.Random) -> None:
        found = {}
        for id in {*self.files, *self.safe} - (self.gone - set(self.safe)):
            safe, written = self.safe.get(id), self.files.get(id, b"")
            if safe is not None and not written.startswith(safe):  # replaced, or removed: one or the other
                found[id] = draw.choice([safe, written]) if written else safe
            elif written:
                found[id] = written[: draw.randint(len(safe or b""), len(written))]
        self.files = found
        self.sync()


class SimulatedJournal:
    """In place of `Journal`: nothing is done but when it is told to."""

    stuck = False

    def __init__(self, disk: Disk) -> None:
        self.disk, self.queue, self.batch = disk, WriteQueue(), list[Op]()
        self.tell: Callable[[list[JournalNews]], None] = lambda news: None

    def put(self, op: Op) -> None:
        self.queue.add(op)

    def load(self) -> Iterator[tuple[str, list[Record]]]:
        for id, data in list(self.disk.files.items()):
            found, length = scan(data)
            self.disk.files[id] = data[:length]
            if found:
                yield id, found
            else:
                del self.disk.files[id]

    def start(self) -> None:
        pass

    def next(self) -> Op | None:
        self.batch = self.batch or self.queue.batch(again=True)
        return self.batch.pop(0) if self.batch else None

    def write(self, fails: bool = False) -> None:
        if (op := self.next()) is None:
            return
        if not fails:
            self.disk.carry_out(op)
            self.tell(list(self.queue.done(op)))
            return
        later = [one for one in self.batch if one.id == op.id]
        self.batch = [one for one in self.batch if one.id != op.id]
        self.tell(list(self.queue.failed(op, "full", later)))

    def sync(self) -> None:
        self.disk.sync()
        self.tell(list(self.queue.synced(list(self.queue.unsafe))))


class World:
    """Servers, one after the other, over one disk; and a client for each response, which reads on where it was."""

    def __init__(self, seed: int) -> None:
        self.draw, self.disk = random.Random(seed), Disk()
        self.number = 0
        self.read: dict[str, list[bytes]] = {}  # of those that were acknowledged, what each client has been told
        self.lossy = False  # a failing disk, or power, may have cost pieces that were told
        self.begin()

    def begin(self) -> None:
        self.store = ResponseStore(None)  # type: ignore[arg-type]
        self.journal = SimulatedJournal(self.disk)
        self.store.use(self.journal)  # type: ignore[arg-type]
        self.asked: dict[str, asyncio.Task[None]] = {}
        for entry in self.store.known.values():
            self.store.append(entry, entry.kept.begin_again())
        for id, read in self.read.items():
            assert id in self.store.known, "durable: what was acknowledged is not there"
            if not self.lossy:
                assert num_events(self.store.known[id].kept) >= len(read), "durable: what was told is not there"
        self.look()

    async def act(self) -> None:
        draw = self.draw
        match draw.choice(["ask", *["piece"] * 4, *["write"] * 6, "sync", "fail", "kill", "power"]):
            case "ask" if len(self.store.known) < 3:
                self.number += 1
                entry = self.store.add(head(self.number), stored=True)
                self.asked[entry.kept.head.id] = asyncio.create_task(self.store.accept(entry))
            case "piece":
                self.piece()
            case "write":
                self.journal.write()
            case "fail" if draw.random() < 0.7:
                self.lossy = True
                self.journal.write(fails=True)
            case "sync":
                self.journal.sync()
            case "kill" | "power" as what if draw.random() < 0.5:
                self.die(what)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for id, task in list(self.asked.items()):
            if task.done():
                del self.asked[id]
                with contextlib.suppress(RequestError):
                    task.result()
                    self.read[id] = []
        self.look()

    def piece(self) -> None:
        """Its engine's tokens depend on the seed and the place alone."""
        open_ones = [e for e in self.store.known.values() if e.kept.end is None and e.kept.head.id not in self.asked]
        if not open_ones:
            return
        entry = self.draw.choice(open_ones)
        at = sum(len(tokens) for tokens in entry.kept.tokens)
        end = Outcome("completed", 1) if at == PIECES - 1 else None
        self.store.record(entry, PieceRecord([at], f"{entry.kept.head.submit.seed}.{at} ", end))  # type: ignore[union-attr]

    def die(self, how: str) -> None:
        for task in self.asked.values():
            task.cancel()
        op = self.journal.next()
        if op is not None and self.draw.random() < 0.7:  # it was being written
            self.disk.carry_out(op, self.draw.randint(0, len(op.data)))
        if how == "power":
            self.lossy = True
            self.disk.lose_power(self.draw)
        self.begin()

    def look(self) -> None:
        for id, read in self.read.items():
            kept = self.store.known[id].kept
            now = [event_bytes(kept, number) for number in range(num_events(kept))]
            assert read[: len(now)] == now[: len(read)], "durable: an event is another"
            read += now[len(read) :]

    async def finish(self) -> None:
        """All go on to their end, and were told what they would have been told without a death."""
        while any(entry.kept.end is None for entry in self.store.known.values()) or not self.journal.queue.idle:
            for _ in range(3):
                self.journal.write()
            self.journal.sync()
            await self.settle()
            self.piece()
        for _ in range(9):
            self.journal.write()
        await self.settle()
        self.die("kill")
        for id, read in self.read.items():
            calm = Kept(self.store.known[id].kept.head)
            for at in range(PIECES):
                last = Outcome("completed", 1) if at == PIECES - 1 else None
                calm.add(PieceRecord([at], f"{int(calm.head.uid, 16)}.{at} ", last))
            calm.written(calm.count)
            assert read == [event_bytes(calm, number) for number in range(num_events(calm))], "durable: another text"


SEEDS = 60


async def run(seed: int) -> None:
    world = World(seed)
    for _ in range(80):
        await world.act()
    await world.finish()
    if world.store._sweeping is not None:
        world.store._sweeping.cancel()


def test_durable() -> None:
    for seed in range(SEEDS):
        asyncio.run(run(seed))


def acknowledged_when_written() -> Any:
    done = WriteQueue.done

    def early(self: WriteQueue, op: Op) -> Iterator[JournalNews]:
        yield from done(self, op)
        if op.kind == "create":
            yield JournalNews("accepted", op.id)

    return patch.object(WriteQueue, "done", early)


def told_before_it_is_written() -> Any:
    add = Kept.add

    def early(self: Kept, record: PieceRecord) -> bytes:
        data = add(self, record)
        self.told = self.count
        return data

    return patch.object(Kept, "add", early)


def numbers_left_out_of_what_is_short() -> Any:
    def joined(self: Kept) -> bytes:
        if self.end is None:
            return file(self)
        twin = copy.copy(self)
        twin.texts = ["".join(self.texts)]
        return file(twin)

    file = Kept.file
    return patch.object(Kept, "file", joined)


def tokens_forgotten() -> Any:
    of = Kept.of.__func__  # type: ignore[attr-defined]

    def anew(cls: type[Kept], found: Any) -> Kept | None:
        kept: Kept | None = of(cls, found)
        if kept is not None and kept.end is None:
            kept.tokens = []
        return kept

    return patch.object(Kept, "of", classmethod(anew))


def what_failed_is_dropped() -> Any:
    def dropped(self: WriteQueue, op: Op, why: str, later: Any = ()) -> Iterator[JournalNews]:
        yield JournalNews("failing", op.id, op.count, why)

    return patch.object(WriteQueue, "failed", dropped)


@pytest.mark.parametrize("mistake", [
    acknowledged_when_written, told_before_it_is_written, numbers_left_out_of_what_is_short, tokens_forgotten,
    what_failed_is_dropped,
])  # fmt: skip
def test_mistakes_are_found(mistake: Callable[[], Any]) -> None:
    with mistake(), pytest.raises(AssertionError, match="durable"):
        test_durable()
