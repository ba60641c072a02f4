"""A virtual environment for each client, made when it is first asked for, with what its `pins.txt` lists."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS = sorted(program.parent.name for program in HERE.glob("*/run.py"))


def cache() -> Path:
    return Path(os.environ.get("PLANARIA_CLIENTS") or "~/.cache/planaria-clients").expanduser()


def environment(client: str) -> Path:
    """Its interpreter. The folder is named by what is in it: other pins are another environment. Raises
    subprocess.CalledProcessError, whose output says what pip said."""
    pins = HERE / client / "pins.txt"
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = cache() / f"{client}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, ready = folder / "bin" / "python", folder / "ready"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=False, symlinks=True)
            subprocess.run(
                [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
                 "--no-compile", "--disable-pip-version-check", "-r", str(pins)],
                check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            borrow(client, folder)
            ready.touch()
    return python


def borrow(client: str, folder: Path) -> None:
    """Link what its `borrowed.txt` lists from the environment of the tests: what is too large to be had twice."""
    listed = HERE / client / "borrowed.txt"
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in listed.read_text().split() if listed.exists() else ():
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
