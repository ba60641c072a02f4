"""The journal's files, in one folder that one server has at a time. Everything here may wait for the disk.

A file is appended to, and replaced by a shorter one when its response has ended; what is removed is gone at once, and
no file is ever cleaned of another's. A write that fails is undone, up to the last whole record.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator

from planaria.errors import ConfigError
from planaria.server.journal_queue import Op
from planaria.server.records import Record, scan

logger = logging.getLogger("planaria.server")

MAX_OPEN = 64  # descriptors of files that are to be synced
VERSION = ".v1"  # what names of files end with; another version leaves them alone
_NAME = re.compile(r"resp_[0-9a-f]{32}\Z")
_NEW = ".new"


class Torn(Exception):
    """A write failed, and what there is of it can't be undone."""


class JournalFiles:
    """dirty: files with anything that isn't synced; names: one is new or gone since the folder was. Raises ConfigError
    where the folder can't be used."""

    def __init__(self, folder: str) -> None:
        self._folder = _open_folder(folder)
        self.lengths: dict[str, int] = {}  # in bytes
        self.dirty: dict[str, None] = {}
        self.names = False
        self._open: dict[str, int] = {}  # descriptors of some that are dirty

    def load(self) -> Iterator[tuple[str, list[Record]]]:
        """What is there, by response; tails that were torn are cut, and what has no whole record is removed."""
        for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
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
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        with os.fdopen(fd, "r+b") as file:
            data = file.read()
            records, length = scan(data)
            if records and length < len(data):
                more = len(data) - length
                logger.warning("journal: %s ends with %d bytes that are no whole record: cut", name, more)
                file.truncate(length)
        return records, length

    def carry_out(self, op: Op) -> None:
        """Raises OSError, and all is as before; or Torn."""
        name = op.id + VERSION
        if op.kind == "remove":
            self._forget(op.id)
            self.lengths.pop(op.id, None)
            self.names = True
            with contextlib.suppress(FileNotFoundError):
                self._unlink(name)
        elif op.kind == "append":
            self._append(op)
        elif op.id in self.lengths:
            self._make(name + _NEW, op, then=name)
        else:
            self._make(name, op)

    def _make(self, name: str, op: Op, then: str = "") -> None:
        """A file with this in it. then: its name when it is whole, in place of another."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._folder)
        try:
            _write(fd, op.data)
            if then:
                os.fsync(fd)
                os.rename(name, then, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._unlink(name)
            raise
        self._forget(op.id)
        self.lengths[op.id], self.names = len(op.data), True
        self._note(op.id, fd)

    def _append(self, op: Op) -> None:
        fd = self._open.get(op.id)
        if fd is None:
            fd = self._reopen(op.id)
            self._note(op.id, fd)
        try:
            _write(fd, op.data)
        except OSError as e:
            try:
                os.ftruncate(fd, self.lengths[op.id])
            except OSError:
                raise Torn(e.strerror) from None
            raise
        self.lengths[op.id] += len(op.data)

    def _reopen(self, id: str) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(id + VERSION, flags, dir_fd=self._folder)

    def _note(self, id: str, fd: int) -> None:
        """It is dirty. A descriptor is kept from the first write to the sync, so that none of its errors is missed; of
        a few that are too many the kernel keeps the error for whoever opens the file next."""
        self.dirty[id] = None
        self._open[id] = fd
        if len(self._open) > MAX_OPEN:
            os.close(self._open.pop(next(iter(self._open))))

    def sync(self, id: str) -> None:
        """A file, if it is dirty. Raises OSError: what was written to it may be gone."""
        if id not in self.dirty:
            return
        del self.dirty[id]
        fd = self._open.pop(id, None)
        fd = self._reopen(id) if fd is None else fd
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_names(self) -> None:
        """The folder. Raises OSError."""
        if self.names:
            os.fsync(self._folder)
            self.names = False

    def unlock(self) -> None:
        """Let another have the folder, and keep it open."""
        fcntl.flock(self._folder, fcntl.LOCK_UN)

    def lock(self) -> bool:
        """False: another has it."""
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let another have the folder."""
        for fd in self._open.values():
            os.close(fd)
        os.close(self._folder)

    def _unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._folder)

    def _forget(self, id: str) -> None:
        self.dirty.pop(id, None)
        fd = self._open.pop(id, None)
        if fd is not None:
            os.close(fd)


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
        if not os.access(folder, os.W_OK):
            raise refuse("can't be written", "give a folder that this user may write to, on a disk that takes it")
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
