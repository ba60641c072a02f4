"""Which weights these are: a version of the files that hold them, for what is computed with them and kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from planaria.cache import keep_file, kept_file
from planaria.checkpoint.shared import SCHEME, opened
from planaria.env import cache_dir

CHUNK = 32 << 20
READERS = 4  # threads

_known: dict[str, str] = {}  # digests, where the cache can't be written


def weights_version(files: Sequence[str]) -> str:
    """Changes with the files' sizes and times, as far as they can be looked at; says nothing outside of this node."""
    found = []
    for file in files:
        try:
            found.append(_look(file))
        except OSError:  # of another node
            found.append(())
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


def weights_digest(files: Sequence[str]) -> str:
    """Of the files' bytes, in order: the same on every node. They are read once, and again when one has changed by what
    the system says of it. Raises OSError."""
    if not files:  # nothing is computed with them
        return ""
    looks = [_look(file) for file in files]
    seen = hashlib.sha256(repr([(os.path.realpath(f), look) for f, look in zip(files, looks, strict=True)]).encode())
    name = seen.hexdigest()
    kept = cache_dir() / "digests" / name
    if name not in _known and (found := kept_file(kept)):
        _known[name] = found.decode()
    if name in _known:
        return _known[name]
    parts = [(file, at) for file, look in zip(files, looks, strict=True) for at in range(0, look[0], CHUNK)]
    with ThreadPoolExecutor(READERS) as pool:
        whole = hashlib.sha256(repr([look[0] for look in looks]).encode())
        for digest in pool.map(_digest, parts):
            whole.update(digest)
    _known[name] = whole.hexdigest()[:32]
    keep_file(kept, _known[name].encode())
    return _known[name]


def _look(file: str) -> tuple[int, ...]:
    if file.startswith(SCHEME):
        with opened(file) as memory:
            found = os.fstat(memory.fileno())
    else:
        found = os.stat(file)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _digest(part: tuple[str, int]) -> bytes:
    file, at = part
    with opened(file) as reading:
        reading.seek(at)
        data = bytearray(CHUNK)
        view, have = memoryview(data), 0
        while have < CHUNK and (count := reading.readinto(view[have:])):
            have += count
        return hashlib.sha256(view[:have]).digest()
