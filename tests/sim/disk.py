"""A disk, simulated, under the shipping code that writes files: what was written of each, how much of that is safe, and
what a death of every process or the loss of power leave of it.

A death of processes leaves what was written; a write that it interrupts is torn anywhere. Of what was not synced a loss
of power leaves any part, or other bytes in its place, and of names that were not synced the old or the new.
"""

from __future__ import annotations

import errno
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = 3  # the folder's descriptor
HOLDS = 0.3  # chance that an event loop goes on while a call waits for the disk


class TreeDied(BaseException):
    """Every process of the server has ended in this call."""


class File:
    """states: what it had in it since it was last synced, the first of them safe. lied: a sync of it has failed, and
    later ones say that all is well."""

    def __init__(self) -> None:
        self.states: list[bytes] = [b""]
        self.lied = False

    @property
    def data(self) -> bytes:
        return self.states[-1]


class SimDisk:
    """failing: of "write" and "sync" what fails now. dies_in: calls until every process ends in the midst of one; -1:
    never. meanwhile: is called while a call waits."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.names: dict[str, list[File | None]] = {}  # since the folder was last synced, the first of them safe
        self.failing, self.dies_in = set[str](), -1
        self.meanwhile: Callable[[], None] = lambda: None
        self.ended = False  # a process that has ended calls it
        self.cut: set[str] = set()  # names of files that a death has torn
        self._open: dict[int, tuple[File, str]] = {}
        self._next = ROOT + 1

    # -- what befalls it

    def lose_power(self) -> None:
        chance = self.chance
        for name, files in list(self.names.items()):
            file = chance.choice(files)
            if file is None:
                del self.names[name]
                continue
            self.names[name] = [file]
        for file in dict.fromkeys(file for (file,) in self.names.values() if file is not None):
            file.states, file.lied = [self._left_of(file)], False

    def _left_of(self, file: File) -> bytes:
        chance, (safe, *later) = self.chance, file.states
        if not later:
            return safe
        state = chance.choice(later)
        if not state.startswith(safe):
            return chance.choice([safe, state])
        cut = chance.randint(len(safe), len(state))
        rest = len(state) - cut
        one_wrong = chance.randbytes(min(rest, 1)) + state[cut + 1 :]
        return state[:cut] + chance.choice([b"", bytes(rest), chance.randbytes(rest), one_wrong])

    def safe(self, name: str) -> bytes:
        """What of a file is there whatever happens."""
        files = self.names.get(name, [None])
        found = {file.states[0] if file is not None else b"" for file in files}
        return found.pop() if len(found) == 1 else b""

    def begin(self) -> None:
        """Another process has it."""
        self.dies_in, self.failing, self.ended = -1, set(), False
        self._open.clear()

    def _call(self, what: str = "write") -> bool:
        """Raises OSError. True: the process ends in it."""
        if self.ended:
            raise OSError(errno.EIO, "the process has ended")
        if self.chance.random() < HOLDS:
            self.meanwhile()
        self.dies_in -= self.dies_in >= 0
        if self.dies_in == 0:
            self.ended = True
            return True
        if what in self.failing and self.chance.random() < 0.7:
            raise OSError(errno.ENOSPC, "No space left on device")
        return False

    # -- as `os` and `fcntl`

    def open(self, name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            return ROOT
        file = self._file(name)
        if file is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            if self._call():
                raise TreeDied
            file = File()
            self._name(name, file)
        elif flags & os.O_TRUNC:
            file.states.append(b"")
        self._next += 1
        self._open[self._next] = file, name
        return self._next

    def fdopen(self, fd: int, mode: str) -> _Reader:
        return _Reader(self, fd)

    def write(self, fd: int, data: memoryview) -> int:
        file, name = self._open[fd]
        try:
            dies = self._call()
        except OSError:
            some = self.chance.randint(0, len(data) - 1)
            if some == 0 or self.chance.random() < 0.5:
                raise
            file.states.append(file.data + bytes(data[:some]))  # then there is no more room
            return some
        if dies:
            file.states.append(file.data + bytes(data[: self.chance.randint(0, len(data))]))
            self.cut.add(name)
            raise TreeDied
        file.states.append(file.data + bytes(data))
        return len(data)

    def ftruncate(self, fd: int, length: int) -> None:
        self._open[fd][0].states.append(self._open[fd][0].data[:length])

    def fsync(self, fd: int) -> None:
        try:
            dies = self._call("sync")
        except OSError:
            if fd != ROOT:
                self._open[fd][0].lied = True
            raise OSError(errno.EIO, "Input/output error") from None
        if dies:
            raise TreeDied
        if fd == ROOT:
            self.names = {name: [files[-1]] for name, files in self.names.items() if files[-1] is not None}
        elif not (file := self._open[fd][0]).lied:
            file.states = [file.data]

    def rename(self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if self._call():
            raise TreeDied
        file = self._file(src)
        assert file is not None
        self._name(src, None)
        self._name(dst, file)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        if self._file(name) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if self._call("unlink"):
            raise TreeDied
        self._name(name, None)

    def close(self, fd: int) -> None:
        if fd != ROOT:
            del self._open[fd]

    def scandir(self, fd: int) -> Iterator[Any]:
        for name in self.there():
            yield SimpleNamespace(name=name, is_file=lambda follow_symlinks: True)

    def makedirs(self, folder: str, mode: int, exist_ok: bool) -> None: ...

    def fstat(self, fd: int) -> Any:
        return SimpleNamespace(st_uid=os.geteuid(), st_mode=stat.S_IFDIR | 0o700)

    def access(self, folder: str, how: int) -> bool:
        return True

    def flock(self, fd: int, how: int) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)  # constants

    def there(self) -> list[str]:
        return [name for name, files in self.names.items() if files[-1] is not None]

    def _file(self, name: str) -> File | None:
        return self.names.get(name, [None])[-1]

    def _name(self, name: str, file: File | None) -> None:
        self.names.setdefault(name, [None]).append(file)


class _Reader(io.BytesIO):
    def __init__(self, disk: SimDisk, fd: int) -> None:
        super().__init__(disk._open[fd][0].data)
        self.disk, self.fd = disk, fd

    def truncate(self, size: int | None = None) -> int:
        assert size is not None
        self.disk.ftruncate(self.fd, size)
        return size

    def close(self) -> None:
        if not self.closed:
            self.disk.close(self.fd)
        super().close()


@contextmanager
def under(module: ModuleType, disk: SimDisk) -> Iterator[None]:
    """A module's files are on this disk."""
    fcntl = SimpleNamespace(LOCK_EX=0, LOCK_NB=0, LOCK_UN=0, flock=disk.flock)
    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "os", disk))
        stack.enter_context(patch.object(module, "fcntl", fcntl))
        yield
