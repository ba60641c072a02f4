"""What was converted or compiled, kept in files and folders named by content. Each appears complete, by one rename, or
not at all, and what was damaged afterwards (a file's checksum, a folder's manifest doesn't agree) is made again.

Two processes may fill the same key at once: of folders the first rename wins and the other's work is thrown away.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from planaria import env

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SEAL_BYTES = 32  # of the checksum in front of a kept file's data
_said: list[Path] = []


def cached_folder(kind: str, key: str, fill: Callable[[Path], None]) -> Path:
    """The folder `kind/key` of the cache, filled by `fill(folder)` if it isn't there.

    Where the cache can't be written a temporary folder is filled, which ends with this process, and a line says so.
    """
    root = env.cache_dir() / kind
    final = root / key
    if _whole(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-", dir=root))
    except OSError as e:
        work = Path(tempfile.mkdtemp(prefix="planaria-"))
        atexit.register(shutil.rmtree, work, ignore_errors=True)
        _say(root, e)
        fill(work)
        return work
    try:
        work.chmod(0o755)
        fill(work)
        sizes = {p.name: p.stat().st_size for p in work.iterdir()}
        (work / MANIFEST).write_text(json.dumps(sizes))
        try:
            os.rename(work, final)
        except OSError:
            if not _whole(final):  # damaged, or another process is replacing it: put ours in its place
                _move_away(final, root)
                os.rename(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def kept_folder(kind: str, key: str) -> Path | None:
    """The folder `kind/key` of the cache, None where it isn't there or not whole."""
    folder = env.cache_dir() / kind / key
    return folder if _whole(folder) else None


def kept_file(path: Path) -> bytes:
    """What `keep_file` put there; empty when there is nothing, or it is damaged."""
    try:
        sealed = path.read_bytes()
    except OSError:
        return b""
    seal, data = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
    return data if hashlib.sha256(data).digest() == seal else b""


def keep_file(path: Path, data: bytes) -> None:
    """Keep data in a file, which appears complete or not at all. Best effort: where the cache can't be written nothing
    is kept, and a line says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    except OSError as e:
        _say(path.parent, e)
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(name, path)
    except OSError as e:
        Path(name).unlink(missing_ok=True)
        _say(path.parent, e)


def _say(folder: Path, error: OSError) -> None:
    """Once in a process for all folders of the cache."""
    if not _said:
        _said.append(folder)
        log.warning(
            "cache folder %s can't be written (%s): compiling and converting again at every start; set "
            "PLANARIA_CACHE to a folder that can", folder, error.strerror,
        )  # fmt: skip


def _whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _move_away(folder: Path, root: Path) -> None:
    grave = Path(tempfile.mkdtemp(prefix=".old-", dir=root))
    try:
        os.rename(folder, grave / "folder")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(grave, ignore_errors=True)
