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
SETTLE = 0.5  # seconds between a process's end, as others notice it, and its code


def how_it_ended(code: int) -> str:
    """A process's return code in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class ProcessLauncher:
    """Runs `python -m MODULE PARENT` for each of `ranks`; its boots go to its standard input, which stays open.

    address: by which other nodes reach this one. spares: processes that get ready to replace one. `on_exit`, set by the
    owner, is called from a watcher's thread.
    """

    name = "mp"
    link, uses_ray, replaces = "queue", False, True

    def __init__(self, module: str, ranks: Sequence[int], address: str = "127.0.0.1", *, spares: int = 0) -> None:
        self.module, self.ranks, self.address, self.num_spares = module, tuple(ranks), address, spares
        self.on_exit: Callable[[], None] = lambda: None
        self.processes: dict[int, Rank] = {}
        self.spares: list[Rank] = []
        self._closing = False

    def start(self) -> list[Place]:
        """Start all processes. Called from a thread that outlives them."""
        for rank in self.ranks:
            self.processes[rank] = self._start()
        return self._places()

    def _start(self) -> Rank:
        return Rank([sys.executable, "-m", self.module, str(os.getpid())], self._ended)

    def _places(self) -> list[Place]:
        cores, devices = usable_cores(), accelerator_ids()
        return [
            Place(rank, home(), node_name(), self.address, process.pid, cores, tuple(devices[i : i + 1]))
            for i, (rank, process) in enumerate(sorted(self.processes.items()))
        ]

    def run(self, boots: Sequence[RankBoot]) -> None:
        """Tell each rank what it is; those that ended already are found by their watchers."""
        for boot in boots:
            self.processes[boot.rank].tell(boot)

    def replace(self, ranks: Sequence[int]) -> list[Place]:
        """End these for certain; a spare takes the place, or a new process. From the thread that called `start`."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].end()
            self.spares = [spare for spare in self.spares if spare.code is None]
            self.processes[rank] = self.spares.pop(0) if self.spares else self._start()
        return self._places()

    def stand_by(self, boot: RankBoot) -> None:
        """Start the spares that are missing; each gets ready by itself."""
        self.spares = [spare for spare in self.spares if spare.code is None]
        while len(self.spares) < self.num_spares:
            spare = self._start()
            spare.tell(boot)
            self.spares.append(spare)

    def _ended(self) -> None:
        if not self._closing:
            self.on_exit()

    def spare_pids(self) -> list[int]:
        return [spare.pid for spare in self.spares]

    def settle(self, ranks: Sequence[int]) -> None:
        """Wait a moment until it is known how these ended."""
        for rank in ranks:
            self.processes[rank].settle()

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended though nobody asked, and how."""
        if self._closing:
            return {}
        return {rank: how_it_ended(p.code) for rank, p in sorted(self.processes.items()) if p.code is not None}

    def closing(self) -> None:
        """From now on an end is no loss."""
        self._closing = True

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Idempotent."""
        self._closing = True
        for spare in self.spares:
            spare.kill()
        for process in [*self.processes.values(), *self.spares]:
            process.end(EXIT_TIMEOUT)
        self.processes, self.spares = {}, []

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""
        self._closing = True
        for process in self.processes.values():
            process.kill()
        self.close()


class Rank:
    """A process for a rank. `code` is its return code once it has ended; then `ended` is called, in a thread."""

    def __init__(self, command: list[str], ended: Callable[[], None]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self.pid, self.code, self._told = self._process.pid, None, ended
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{self.pid}", daemon=True)
        self._watcher.start()

    code: int | None

    def _watch(self) -> None:
        self.code = self._process.wait()
        self._told()

    def tell(self, boot: RankBoot) -> None:
        """Hand it a boot; it may have ended."""
        assert self._process.stdin is not None
        data = boot.encode()
        with contextlib.suppress(OSError):
            self._process.stdin.write(len(data).to_bytes(8, "little") + data)

    def settle(self) -> None:
        """It has ended, or is about to: wait a moment for its code."""
        self._watcher.join(SETTLE)

    def kill(self) -> None:
        self._process.kill()

    def end(self, timeout: float | None = None) -> None:
        """Wait for its end, for `timeout` seconds before it is killed."""
        self._watcher.join(timeout)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()
        assert self._process.stdin is not None
        self._process.stdin.close()
