"""`--journal DIR`: a file for each response, written by one thread, so that no disk holds up the event loop.

A file is appended to, and replaced by a shorter one when its response has ended; what is removed is gone at once, and
no file is ever cleaned of another's. What was written since the last time is synced every `SYNC` seconds, new files
before their requests are acknowledged, all that came meanwhile together. A write that fails is undone, up to the last
whole record, and tried again every `RETRY` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator

from planaria.errors import ConfigError
from planaria.server.journal_queue import News, Op, WriteQueue
from planaria.server.records import Record, scan

logger = logging.getLogger("planaria.server")

SYNC = 0.2  # seconds between two syncs of what came of responses
RETRY = 1.0  # seconds until what could not be written is tried again
STUCK = 5.0  # seconds of one call after which the disk counts as failing
MAX_DIRTY = 64  # files that are synced at a time, at most
VERSION = ".v1"  # what names of files end with; another version leaves them alone
_NAME = re.compile(r"resp_[0-9a-f]{32}\Z")
_NEW = ".new"


class Journal:
    """tell: hears, in the event loop, what has been done. Raises ConfigError where the folder can't be used."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._lock = _open_folder(folder)
        self.tell: Callable[[list[News]], None] = lambda news: None
        self.queue = WriteQueue()
        self.lengths: dict[str, int] = {}  # of files, in bytes
        self._changed = threading.Condition()
        self._closing = False
        self._began = 0.0  # time.monotonic() when the thread began what it does now; 0.0: it waits
        self._thread: threading.Thread | None = None
        self._open: dict[str, int] = {}  # descriptors of what is dirty
        self._names = False  # one is new or gone since the folder was synced

    # -- in the event loop

    def load(self) -> Iterator[tuple[str, list[Record]]]:
        """What is there, by response; tails that were torn are cut, and what has no whole record is removed."""
        for entry in sorted(os.scandir(self._lock), key=lambda entry: entry.name):
            id, name = entry.name.removesuffix(VERSION), entry.name
            if name.endswith(VERSION + _NEW) and entry.is_file(follow_symlinks=False):
                self._unlink(name)
            if not (name.endswith(VERSION) and _NAME.match(id) and entry.is_file(follow_symlinks=False)):
                continue
            try:
                records, length = self._read(name)
            except OSError as e:
                logger.error("journal: %s can't be read (%s): left alone", name, e.strerror)
                continue
            if records:
                self.lengths[id] = length
                yield id, records
            else:
                logger.warning("journal: %s has no whole record: removed", name)
                self._unlink(name)

    def _read(self, name: str) -> tuple[list[Record], int]:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._lock)
        with os.fdopen(fd, "r+b") as file:
            data = file.read()
            records, length = scan(data)
            if records and length < len(data):
                more = len(data) - length
                logger.warning("journal: %s ends with %d bytes that are no whole record: cut", name, more)
                file.truncate(length)
        return records, length

    def start(self) -> None:
        """Begin to write."""
        loop = asyncio.get_running_loop()

        def said(news: list[News]) -> None:
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

    async def close(self) -> None:
        """When all is written and synced, or fails, or the disk doesn't answer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STUCK)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._lock)

    # -- in the thread

    def _run(self, said: Callable[[list[News]], None]) -> None:
        due = retry = 0.0
        while True:
            with self._changed:
                self._began = 0.0
                while not self._closing and not self._ready(time.monotonic(), due, retry):
                    self._changed.wait(self._pause(time.monotonic(), due, retry))
                now = time.monotonic()
                batch = self.queue.batch(again=self._closing or now >= retry)
                closing = self._closing and not batch
                self._began = now
            news = self._carry_out(batch)
            if any(one.what == "failing" for one in news):
                retry = now + RETRY
                if self._closing:
                    closing = True
            if self._open or self._names:
                due = due or now + SYNC
            if news:
                said(news)
            if self.queue.unsafe or closing or len(self._open) >= MAX_DIRTY or 0.0 < due <= time.monotonic():
                news, due = self._sync(), 0.0
                if news:
                    said(news)
            if closing:
                return

    def _ready(self, now: float, due: float, retry: float) -> bool:
        queue = self.queue
        fresh = any(id not in queue.failing for id in queue.waiting)
        return fresh or (not queue.idle and now >= retry) or 0.0 < due <= now

    def _pause(self, now: float, due: float, retry: float) -> float | None:
        ends = [end for end, wanted in ((due, due > 0.0), (retry, not self.queue.idle)) if wanted]
        return max(0.0, min(ends) - now) if ends else None

    def _carry_out(self, batch: list[Op]) -> list[News]:
        news: list[News] = []
        broken: set[str] = set()
        for number, op in enumerate(batch):
            if op.id in broken:
                continue
            try:
                self._do(op)
            except _Torn as e:
                broken.add(op.id)
                news.append(News("lost", op.id, op.count, str(e)))
            except OSError as e:
                broken.add(op.id)
                later = [one for one in batch[number + 1 :] if one.id == op.id]
                with self._changed:
                    news += self.queue.failed(op, e.strerror or str(e), later)
            else:
                with self._changed:
                    news += self.queue.done(op)
        return news

    def _do(self, op: Op) -> None:
        name = op.id + VERSION
        if op.kind == "remove":
            self._forget(op.id)
            with contextlib.suppress(FileNotFoundError):
                self._unlink(name)
            self._names = True
        elif op.kind == "replace" and op.id in self.lengths:
            fd = self._make(name + _NEW)
            try:
                _write(fd, op.data)
                os.fsync(fd)
                os.rename(name + _NEW, name, src_dir_fd=self._lock, dst_dir_fd=self._lock)
            except OSError:
                os.close(fd)
                with contextlib.suppress(OSError):
                    self._unlink(name + _NEW)
                raise
            self._forget(op.id)
            self._open[op.id], self.lengths[op.id], self._names = fd, len(op.data), True
        elif op.kind in ("create", "replace"):
            fd = self._make(name)
            try:
                _write(fd, op.data)
            except OSError:
                os.close(fd)
                with contextlib.suppress(OSError):
                    self._unlink(name)
                raise
            self._open[op.id], self.lengths[op.id], self._names = fd, len(op.data), True
        else:
            self._append(op)

    def _append(self, op: Op) -> None:
        fd = self._open.get(op.id)
        if fd is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = self._open[op.id] = os.open(op.id + VERSION, flags, dir_fd=self._lock)
        try:
            _write(fd, op.data)
        except OSError as e:
            try:
                os.ftruncate(fd, self.lengths[op.id])
            except OSError:
                raise _Torn(e.strerror) from None
            raise
        self.lengths[op.id] += len(op.data)

    def _sync(self) -> list[News]:
        """All that is dirty, and the folder where a name is new or gone."""
        news: list[News] = []
        safe: list[str] = []
        for id, fd in list(self._open.items()):
            try:
                os.fsync(fd)
                safe.append(id)
            except OSError as e:
                with self._changed:
                    news += self.queue.unsynced(id, e.strerror or str(e))
            del self._open[id]
            os.close(fd)
        try:
            if self._names:
                os.fsync(self._lock)
            self._names = False
        except OSError as e:
            with self._changed:
                for id in safe:
                    news += self.queue.unsynced(id, e.strerror or str(e))
        else:
            with self._changed:
                news += self.queue.synced(safe)
        return news

    def _make(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._lock)

    def _unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._lock)

    def _forget(self, id: str) -> None:
        fd = self._open.pop(id, None)
        if fd is not None:
            os.close(fd)
        self.lengths.pop(id, None)


class _Torn(Exception):
    """A write failed, and what there is of it can't be undone."""


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open_folder(folder: str) -> int:
    """A descriptor that holds its lock: one server has it at a time."""

    def refuse(why: str, fix: str) -> ConfigError:
        return ConfigError("--journal", folder, why, fix)

    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise refuse(f"can't be used ({e.strerror})", "give a folder that this user may write to") from None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise refuse("is another user's, or others may enter it", "give one of your own with mode 0700")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise refuse("is used by a server that runs", "end that one, or give each a folder of its own") from None
    except OSError as e:
        os.close(fd)
        raise refuse(f"can't be locked ({e.strerror})", "give a folder on a disk of this machine") from None
    except ConfigError:
        os.close(fd)
        raise
    return fd
