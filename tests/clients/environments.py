"""A virtual environment for each client, made when it is first asked for, with exactly what its `pins.txt` lists."""

from __future__ import annotations

import fcntl
import hashlib
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
            ready.touch()
    return python
