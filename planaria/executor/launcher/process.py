"""Ranks as processes of this node: `mp`. What runs in them is named by a module, so nothing of it is imported here.

Each process has a thread that waits for its end, so that a death is known at once, also when nothing is being sent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

EXIT_TIMEOUT = 5.0  # seconds ranks get to end by themselves


def how_it_ended(code: int) -> str:
    """A process's return code in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class ProcessLauncher:
    """Starts `python -m MODULE FD RANK PARENT` for each of `boots`, which it gets on standard input.

    `fd` (of the link's memory) and `fds` (more for each rank) stay the caller's.
    `on_exit`, set by the owner, is called from a watcher's thread.
    """

    name = "mp"

    def __init__(self, module: str, boots: Sequence[bytes], fd: int, fds: Sequence[Sequence[int]]) -> None:
        self.module, self.boots, self.fd, self.fds = module, boots, fd, fds
        self.on_exit: Callable[[], None] = lambda: None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, int] = {}
        self._closing = False

    def launch(self) -> Sequence[int]:
        """Start all ranks; their pids. Called from a thread that outlives them."""
        for rank, fds in enumerate(self.fds):
            command = [sys.executable, "-m", self.module, str(self.fd), str(rank), str(os.getpid())]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(self.fd, *fds))
            self.processes.append(process)
        for rank, process in enumerate(self.processes):
            threading.Thread(target=self._watch, args=(rank, process), name=f"watch-{rank}", daemon=True).start()
            assert process.stdin is not None
            try:
                process.stdin.write(self.boots[rank])
                process.stdin.close()
            except BrokenPipeError:  # it ended already: its watcher says so
                pass
        return self.pids()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._ended[rank] = code
        if not self._closing:
            self.on_exit()

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended though nobody asked, and how."""
        return {} if self._closing else {rank: how_it_ended(code) for rank, code in sorted(self._ended.items())}

    def closing(self) -> None:
        """From now on an end is no loss."""
        self._closing = True

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Idempotent."""
        self._closing = True
        for process in self.processes:
            try:
                process.wait(EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""
        self._closing = True
        for process in self.processes:
            process.kill()
        self.close()
