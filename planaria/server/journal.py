"""`--journal DIR`: what is written of responses, by one thread, so that no disk holds up the event loop.

What came of responses is synced every `SYNC` seconds; new files at once, all that came meanwhile together, before their
requests are acknowledged. One file is synced between two writes, so that no piece waits for the files of others. What
can't be written is tried again every `RETRY` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from planaria.server.journal_files import JournalFiles, Torn
from planaria.server.journal_queue import JournalNews, Op, WriteQueue
from planaria.server.records import Record

SYNC = 0.2  # seconds from a write to the sync of its file, at least
RETRY = 1.0  # seconds until what could not be written is tried again
LOOK = 0.005  # seconds between looks whether all is written
STUCK = 5.0  # seconds of one turn of the thread after which the disk counts as failing
_NAMES = ""  # in a round of syncs: the folder


class Journal:
    """tell: hears, in the event loop, what has been done. Raises ConfigError where the folder can't be used."""

    def __init__(self, folder: str) -> None:
        self.files, self.queue = JournalFiles(folder), WriteQueue()
        self.tell: Callable[[list[JournalNews]], None] = lambda news: None
        self._changed = threading.Condition()
        self._closing = False
        self._began = 0.0  # time.monotonic() when the thread began what it does now; 0.0: it waits
        self._thread: threading.Thread | None = None
        self._round: list[str] = []  # what is to be synced, in order
        self._synced: list[str] = []  # of it, but for their names
        self._due = self._retry = 0.0  # when the next round, and the next try, begin; 0.0: there is none

    # -- in the event loop

    def load(self) -> Iterator[tuple[str, list[Record]]]:
        """What is there, by response."""
        return self.files.load()

    def start(self) -> None:
        """Begin to write."""
        loop = asyncio.get_running_loop()

        def said(news: list[JournalNews]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears it
                loop.call_soon_threadsafe(lambda: self.tell(news))

        self._thread = threading.Thread(target=self._run, args=(said,), name="planaria-journal", daemon=True)
        self._thread.start()

    def put(self, op: Op) -> None:
        with self._changed:
            self.queue.add(op)
            self._changed.notify()

    @property
    def stuck(self) -> bool:
        """The disk doesn't answer."""
        return 0.0 < self._began < time.monotonic() - STUCK

    async def lend(self) -> bool:
        """Have another process take it, when all is written and synced; nothing is put until `take_back`. False: it is
        not, within `STUCK` seconds."""
        until = time.monotonic() + STUCK
        while not self._settled():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(LOOK)
        self.files.unlock()
        return True

    def _settled(self) -> bool:
        with self._changed:
            return self.queue.idle and not (self._began or self._round or self.files.dirty or self.files.names)

    def take_back(self) -> bool:
        """False: another process still has it."""
        return self.files.lock()

    async def close(self) -> None:
        """When all is written and synced, or fails, or the disk doesn't answer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STUCK)
        if self._thread is None or not self._thread.is_alive():
            self.files.close()

    # -- in the thread

    def _run(self, said: Callable[[list[JournalNews]], None]) -> None:
        goes_on = True
        while goes_on:
            with self._changed:
                self._began = 0.0
                while (seconds := self.pause(time.monotonic())) != 0.0:
                    self._changed.wait(seconds)
            goes_on = self.turn(said)

    def pause(self, now: float) -> float | None:
        """Seconds until there is something to do; None: until something is put."""
        queue = self.queue
        if self._closing or self._round or any(id not in queue.failing for id in queue.waiting):
            return 0.0
        ends = [end for end, wanted in ((self._due, self._due > 0.0), (self._retry, not queue.idle)) if wanted]
        return max(0.0, min(ends) - now) if ends else None

    def turn(self, said: Callable[[list[JournalNews]], None]) -> bool:
        """Write what there is to write, sync a file. False: it was the last turn."""
        with self._changed:
            now = self._began = time.monotonic()
            batch = self.queue.batch(again=self._closing or now >= self._retry)
        news = self._carry_out(batch)
        failing = any(one.what in ("failing", "lost") for one in news)
        if failing:
            self._retry = now + RETRY
        self._plan(time.monotonic())
        if self._round:
            news += self._sync(self._round.pop(0))
        if news:
            said(news)
        return not self._closing or bool(self._round) or (bool(batch) and not failing)

    def _carry_out(self, batch: list[Op]) -> list[JournalNews]:
        news: list[JournalNews] = []
        broken: set[str] = set()
        for number, op in enumerate(batch):
            if op.id in broken:
                continue
            try:
                self.files.carry_out(op)
            except Torn as e:
                broken.add(op.id)
                news.append(JournalNews("lost", op.id, op.count, str(e)))
            except OSError as e:
                broken.add(op.id)
                later = [one for one in batch[number + 1 :] if one.id == op.id]
                with self._changed:
                    news += self.queue.failed(op, e.strerror or str(e), later)
            else:
                with self._changed:
                    news += self.queue.done(op)
        return news

    def _plan(self, now: float) -> None:
        """What is to be synced next: new files, then in its time all the rest."""
        with self._changed:
            new = [id for id in self.queue.unsafe if id not in self._round and id not in self._synced]
        if new:
            self._round = [*new, _NAMES, *self._round]
        files = self.files
        if not self._round and (files.dirty or files.names):
            self._due = self._due or now + SYNC
            if self._closing or self._due <= now:
                self._round, self._due = [*files.dirty, _NAMES], 0.0

    def _sync(self, id: str) -> list[JournalNews]:
        files = self.files
        try:
            if id != _NAMES:
                files.sync(id)
                self._synced.append(id)
                return []
            files.sync_names()
        except OSError as e:
            self._due = time.monotonic() + RETRY
            lost = [id] if id != _NAMES else self._synced
            with self._changed:
                news = [one for each in lost for one in self.queue.unsynced(each, e.strerror or str(e))]
        else:
            with self._changed:
                news = list(self.queue.synced(self._synced))
        if id == _NAMES:
            self._synced = []
        return news
