"""Folders of converted files, kept by content. A folder appears complete, by one rename, or not at all.

Two processes may fill the same key at once: the first rename wins and the other's work is thrown away. A folder
that was damaged afterwards (its manifest doesn't agree) is replaced.
"""

from __future__ import annotations

import atexit
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
        log.warning(
            "cache folder %s can't be written (%s): converting again at every start; set PLANARIA_CACHE to a "
            "folder that can", root, e.strerror,
        )  # fmt: skip
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


def recall(kind: str, key: str) -> str | None:
    """The text remembered under a key, or None."""
    try:
        return (env.cache_dir() / kind / key).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def remember(kind: str, key: str, text: str) -> None:
    """Keep a text under a key. Best effort: where the cache can't be written nothing is kept."""
    folder = env.cache_dir() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", dir=folder)
        with os.fdopen(handle, "w") as f:
            f.write(text)
        os.replace(name, folder / key)
    except OSError:
        return


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
