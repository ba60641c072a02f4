"""Ranks as processes of this node: `mp`. What runs in them is named by a module, so nothing of it is imported here.

Each process has a thread that waits for its end, so that a death is known at once, also when nothing is being sent.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from planaria.config.machine import accelerator_ids, usable_cores
from planaria.executor.boot import Place, RankBoot
from planaria.node import home, node_name

EXIT_TIMEOUT = 5.0  # seconds ranks get to end by themselves


def how_it_ended(code: int) -> str:
    """A process's return code in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class ProcessLauncher:
    """Runs `python -m MODULE PARENT` for each of `ranks`; its boot goes to its standard input, which stays open.

    address: by which other nodes reach this one. `on_exit`, set by the owner, is called from a watcher's thread.
    """

    name = "mp"
    link, uses_ray = "queue", False

    def __init__(self, module: str, ranks: Sequence[int], address: str = "127.0.0.1") -> None:
        self.module, self.ranks, self.address = module, tuple(ranks), address
        self.on_exit: Callable[[], None] = lambda: None
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, int] = {}
        self._closing = False

    def start(self) -> list[Place]:
        """Start all processes. Called from a thread that outlives them."""
        for rank in self.ranks:
            command = [sys.executable, "-m", self.module, str(os.getpid())]
            self.processes[rank] = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        for rank, process in self.processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name=f"watch-{rank}", daemon=True).start()
        cores, devices = usable_cores(), accelerator_ids()
        return [
            Place(rank, home(), node_name(), self.address, process.pid, cores, tuple(devices[i : i + 1]))
            for i, (rank, process) in enumerate(self.processes.items())
        ]

    def run(self, boots: Sequence[RankBoot]) -> None:
        """Tell each rank what it is; those that ended already are found by their watchers."""
        for boot in boots:
            stdin = self.processes[boot.rank].stdin
            assert stdin is not None
            data = boot.encode()
            with contextlib.suppress(BrokenPipeError):
                stdin.write(len(data).to_bytes(8, "little") + data)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._ended[rank] = code
        if not self._closing:
            self.on_exit()

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended though nobody asked, and how."""
        return {} if self._closing else {rank: how_it_ended(code) for rank, code in sorted(self._ended.items())}

    def closing(self) -> None:
        """From now on an end is no loss."""
        self._closing = True

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Idempotent."""
        self._closing = True
        for process in self.processes.values():
            try:
                process.wait(EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self.processes = {}

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""
        self._closing = True
        for process in self.processes.values():
            process.kill()
        self.close()
