"""Programs of tests that begin as forks of a process that has imported what they are made of: nine tenths of what a
server takes of a core, from its start to its end, are imports, and tests start some hundred.

A fork runs what `python -m` would, from `__main__` on, in the same folder, with the same environment, arguments and
streams; only modules are there already. Where that makes a difference (another folder than at first, variables that are
read once), it is `python -m`, as it is for tests of what a command or a start is.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from setproctitle import setproctitle

from planaria import preload
from planaria.hosts.forkserver import READ_ONCE, ForkServer, _concerns

SERVER = (
    "planaria.cli.app", "planaria.cli.serve", *preload.of_an_api_process(), *preload.OF_BOTH,
    *preload.before_it_is_known(),
)  # fmt: skip
LIMIT = 60.0  # seconds, for the imports


def _concern() -> tuple[str, dict[str, str]]:
    """The folder, and variables that are read once, but for one that torch sets where it is imported."""
    _, folder, variables = _concerns(())
    return folder, {name: value for name, value in variables.items() if name != "TORCHINDUCTOR_CACHE_DIR"}


AT_FIRST = _concern()


class Forks:
    """From one process, which is a thread's here, and ends with it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules, self.here, self.over = [__name__, *modules], os.getpid(), False
        self.one, self.heard, begun = threading.Lock(), threading.Condition(), threading.Event()
        threading.Thread(target=self._run, args=(begun,), daemon=True, name="forks").start()
        assert begun.wait(LIMIT)

    def _run(self, begun: threading.Event) -> None:
        self.server = ForkServer(self.modules)
        begun.set()
        self.server.port.setblocking(True)
        while not self.over:
            self.over = not self.server.hear()
            with self.heard:
                self.heard.notify_all()

    @property
    def fit(self) -> bool:
        return self.here == os.getpid() and not self.over and not self.server._fails


class Forked:
    """As a subprocess.Popen of it, with text on pipes. Raises OSError."""

    def __init__(self, forks: Forks, command: Sequence[str], env: dict[str, str], together: bool) -> None:
        self.args, self._forks = list(command), forks
        self.returncode: int | None = None
        (out, says), (err, complains) = os.pipe(), os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        if together:
            self.stderr.close()
        given = nothing, says, says if together else complains
        try:
            with forks.one:
                self.pid, exit_fd = forks.server.fork(__name__, command, env, given)
        finally:
            for fd in (nothing, says, complains):
                os.close(fd)
        self._exit = os.fdopen(exit_fd, "rb", buffering=0)

    def poll(self) -> int | None:
        codes = self._forks.server._codes
        if self.returncode is None and (self.pid in codes or self._forks.over):
            self.returncode = codes.get(self.pid, -signal.SIGKILL)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        with self._forks.heard:
            if not self._forks.heard.wait_for(lambda: self.poll() is not None, timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._exit.fileno(), number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Raises subprocess.TimeoutExpired."""
        streams: list[IO[str]] = [stream for stream in (self.stdout, self.stderr) if not stream.closed]
        pool = concurrent.futures.ThreadPoolExecutor(len(streams))
        read = [pool.submit(stream.read) for stream in streams]
        try:
            self.wait(timeout)
            return read[0].result(timeout), read[-1].result(timeout) if len(read) > 1 else ""
        finally:
            pool.shutdown(wait=False)


_forks: dict[tuple[str, ...], Forks] = {}
_making = threading.Lock()


def begin(
    command: Sequence[str], env: dict[str, str] | None = None, *, together: bool = False,
    modules: tuple[str, ...] = SERVER,
) -> Any:  # fmt: skip
    """`python -m COMMAND`, with what it says on a pipe, or two: together with what it complains of. env: besides this
    process's."""
    environment = {**os.environ, **(env or {})}
    if _concern() == AT_FIRST and not any(name.startswith(READ_ONCE) for name in env or ()):
        with _making:
            forks = _forks.get(modules)
            if forks is None:
                forks = _forks[modules] = Forks(modules)
        if forks.fit:
            return Forked(forks, command, environment, together)
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, env=environment,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
    )  # fmt: skip


def keepers() -> set[int]:
    """Pids of what forks are made from, which stays as long as this process."""
    return {forks.server._process.pid for forks in _forks.values()}


def main() -> int:
    """What a fork does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module, *words = sys.argv[2:]
    setproctitle(" ".join([sys.executable, "-m", module, *words]))
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if not isinstance(e.code, str):
            _end(e.code or 0)
        raise
    return 0


def _end(code: int) -> None:
    """As the interpreter does, but that what was imported is given back with the process: object by object, each of
    its pages would be copied first, which takes as long as a command does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
