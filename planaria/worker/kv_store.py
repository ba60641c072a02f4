"""KV blocks in files: one for a rank's part of a block, in a folder named by all that its bytes depend on but the key.

DIR/IDENTITY/xx/KEY, 64 bytes of head (magic, key, size, seal) and the payload. The seal is a SHA-256 over identity, key
and payload, so a file that is damaged, short, of another block or of another model is none. A file appears by a rename
of one that is whole; nothing is synced, for what a lost machine leaves half written has no seal that fits.

Several processes use a folder at a time: they publish equal bytes under equal names, a file that vanishes is a miss,
and who finds the folder too large takes a lock and removes what was used longest ago. Files are opened without
following links, looked at before they are read, and read no further than they must be long: nothing in them is ever
interpreted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

HEAD = struct.Struct("<8s16sQ32s")
MAGIC = b"planKV01"
KEY = 16
MAX_FILES = 1 << 18  # in a folder, of all identities
FULL = 0.9  # of the bound, that is left when files are removed
PART = 32  # of the bound: written between two looks at what there is
USED = 60.0  # seconds within which a use is not noted again
BURST = 10**9  # nanoseconds
ABANDONED = 600.0  # seconds after which a file that was never published goes
TICK = 10**8  # nanoseconds
BREATH = 0.001  # seconds after each folder, so that a look at many files keeps no step waiting

HexNames = frozenset("0123456789abcdef")
_WORK = re.compile(r"\.\d+-[0-9a-f]+-\d+\Z")  # names of files that aren't published yet: what else there is isn't ours


class StoreError(Exception):
    """A block that can't be brought back or kept, in words without a path: they are said in /health. `kind`: damaged,
    gone, read, write or full."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Uses:
    """When blocks were used, in nanoseconds. Of those that are used one after the other, which are the blocks of one
    history in order, the later ones count as older: without its beginning the end of a history is of no use."""

    def __init__(self) -> None:
        self._burst = 0, 0, 0  # when it began, when the last was, how many

    def stamp(self) -> int:
        now = time.time_ns()
        began, last, count = self._burst
        if now - last > BURST or now < last:
            began, count = now, 0
        self._burst = began, now, count + 1
        return began - 1000 * count


def head_of(identity: bytes, key: bytes, payload: bytearray | memoryview) -> bytes:
    """Of a file with this payload."""
    seal = hashlib.sha256(identity + key)
    seal.update(payload)
    return HEAD.pack(MAGIC, key, len(payload), seal.digest())


def is_whole(head: bytes, identity: bytes, key: bytes, payload: bytearray | memoryview) -> bool:
    """Is this the payload that was kept under this key, by a rank with this identity?"""
    return head == head_of(identity, key, payload)


class BlockStore:
    """identity: of what is in this rank's part; size: of its payload; most: bytes of the whole folder."""

    def __init__(self, folder: str, identity: bytes, size: int, most: int) -> None:
        self.folder, self.identity, self.size, self.most = Path(folder), identity, size, most
        self.own = self.folder / identity.hex()
        self.file_bytes = HEAD.size + size
        self._since = most  # bytes written since the folder was looked at; at once, the first time
        self._count = 0
        self._uses = Uses()
        self._seen: dict[str, int] = {}  # folders and when they were last changed
        self._names: dict[str, set[bytes]] = {}  # keys in them

    def keys(self) -> bytes:
        """Of all files there are, one behind the other; what is in them is not looked at."""
        self._seen.clear()
        self._names.clear()
        self.news(gently=False)
        return b"".join(key for names in self._names.values() for key in names)[: MAX_FILES * KEY]

    def news(self, *, gently: bool = True) -> tuple[set[bytes], set[bytes]]:
        """Keys of files that have come and gone since the last look. gently: beside steps. Only folders that changed
        are read."""
        came, went = set[bytes](), set[bytes]()
        there = {}
        for folder in self._folders(self.own):
            with contextlib.suppress(OSError):
                there[folder] = os.stat(folder).st_mtime_ns
        for folder in self._names.keys() - there.keys():
            went |= self._names.pop(folder)
        for folder, changed in there.items():
            if self._seen.get(folder) == changed:
                continue
            if gently:
                time.sleep(BREATH)
            names = {bytes.fromhex(entry.name) for entry in _entries(folder) if _is_key(entry.name)}
            before, self._names[folder] = self._names.get(folder, set()), names
            came, went = came | names - before, went | before - names
        # what changed just now may change again within the same tick of its clock
        self._seen = {folder: changed for folder, changed in there.items() if time.time_ns() - changed > TICK}
        return came, went

    def read(self, key: bytes, into: memoryview) -> None:
        """The payload of a block, into `size` bytes. Raises StoreError."""
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            raise StoreError("gone" if e.errno == errno.ENOENT else "read", e.strerror or repr(e)) from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self.file_bytes:
                raise StoreError("damaged", f"no file of {self.file_bytes} bytes")
            head = os.read(fd, HEAD.size)
            at = 0
            while at < self.size and (count := os.preadv(fd, [into[at:]], HEAD.size + at)):
                at += count
            if at < self.size or not is_whole(head, self.identity, key, into):
                raise StoreError("damaged", "not what its checksum says")
            if time.time() - found.st_mtime > USED:
                with contextlib.suppress(OSError):  # of a folder that can only be read
                    os.utime(fd, ns=(self._uses.stamp(),) * 2)
        except OSError as e:
            raise StoreError("read", e.strerror or repr(e)) from None
        finally:
            os.close(fd)

    def write(self, key: bytes, payload: bytearray) -> list[bytes]:
        """Publish a block, unless it is there. Returns keys of this store that had to go for it. Raises StoreError."""
        path = self._path(key)
        if path.exists():
            return []
        gone = self._make_room() if self._since >= self.most // PART else []
        self._count += 1
        work = self.folder / f".{os.getpid()}-{id(self):x}-{self._count}"  # see _WORK
        try:
            for folder in (self.folder, self.own, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, head_of(self.identity, key, payload), payload)
                os.utime(fd, ns=(self._uses.stamp(),) * 2)
            finally:
                os.close(fd)
            os.rename(work, path)
        except OSError as e:
            with contextlib.suppress(OSError):
                work.unlink()
            full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            raise StoreError("full" if full else "write", e.strerror or repr(e)) from None
        self._since += self.file_bytes
        return gone

    def remove(self, key: bytes) -> None:
        """What is no block any more."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _make_room(self) -> list[bytes]:
        """Remove what was used longest ago where the folder has too much. Nothing is done where another process is
        about it."""
        self._since = 0
        gone: list[bytes] = []
        try:
            lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return gone
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = sorted(self._files())
            size, count = sum(found for _, found, _ in files), len(files)
            if size <= self.most and count <= MAX_FILES:
                return gone
            for _, found, path in files:
                if size <= FULL * self.most and count <= FULL * MAX_FILES:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    size, count = size - found, count - 1
                    if path.startswith(f"{self.own}/"):
                        gone.append(bytes.fromhex(path[-2 * KEY :]))
        except OSError:  # another process has the lock
            pass
        finally:
            os.close(lock)
        return gone

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """When it was used, its bytes and its path, of each block of any store in the folder."""
        now = time.time()
        for entry in _entries(self.folder):
            if _WORK.match(entry.name):
                with contextlib.suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                        os.unlink(entry.path)
            elif HexNames.issuperset(entry.name):
                for folder in self._folders(Path(entry.path)):
                    for file in _entries(folder):
                        with contextlib.suppress(OSError):
                            if _is_key(file.name):
                                found = file.stat(follow_symlinks=False)
                                yield found.st_mtime, found.st_size, file.path
                    time.sleep(BREATH)

    @staticmethod
    def _folders(own: Path) -> Iterator[str]:
        for entry in _entries(own):
            if len(entry.name) == 2 and HexNames.issuperset(entry.name):
                yield entry.path

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.own / name[:2] / name


def _write(fd: int, head: bytes, payload: bytearray) -> None:
    at = os.writev(fd, [head, payload]) - len(head)
    view = memoryview(payload)
    while at < len(payload):  # a head is never cut: the file is new and a page long
        at += os.write(fd, view[at:])


def _is_key(name: str) -> bool:
    return len(name) == 2 * KEY and HexNames.issuperset(name)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """None where there is no such folder."""
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if not entry.is_symlink()]
    except OSError:
        return []
