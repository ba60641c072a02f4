"""The threads that run a tape together. Helpers sleep in the kernel between runs and hold no interpreter lock."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.memory import Region

SPIN = 4000  # turns of a waiting loop inside a run, about 50 us
SPIN_CROWDED = 20  # where there are more threads than cores
SPIN_IDLE = 200  # between runs


def _help(entry: Any, control: Region, index: int) -> None:
    """A helper's life. It holds the control block, which must not go while a thread sleeps on it."""
    entry(control.address, index)


class Team:
    """`threads` threads, the caller's own included. Not for two callers at once: `run` is guarded by a lock."""

    def __init__(self, entry: Any, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads {threads}: at least 1 is needed")
        self.threads = threads
        self._entry = entry
        self._memory = Region(layout.CONTROL_WORDS * 8, huge=False)
        self.control = self._memory.array(0, "int64", (layout.CONTROL_WORDS,))
        self._lock = threading.Lock()
        self._closed = False
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        crowded = threads > (len(cores) or os.cpu_count() or 1)
        self.control[layout.THREADS] = threads
        self.control[layout.SPIN] = SPIN_CROWDED if crowded else SPIN
        self.control[layout.IDLE_SPIN] = 0 if crowded else SPIN_IDLE
        if threads == len(cores) > 1:
            self._keep_to(cores)
        self._helpers = [
            threading.Thread(target=_help, args=(entry, self._memory, i), name=f"planaria-kernel-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()

    def _keep_to(self, cores: list[int]) -> None:
        """Each thread has a core of its own while it computes: else the system has two of them on one, as soon as
        anything, of however low a priority, runs on another, and all wait for these two at each barrier."""
        size = -(-(cores[-1] + 1) // 64) * 8
        sets = [1 << core for core in cores] + [sum(1 << core for core in cores)]
        self._cores = np.frombuffer(b"".join(each.to_bytes(size, "little") for each in sets), np.uint8)
        self.control[layout.CORES] = self._cores.ctypes.data
        self.control[layout.CORES_BYTES] = size

    def run(self, words: dict[int, int], owners: object) -> None:
        """Run the tape that `words` (values of the control block) describe; returns when all of it is done.

        `owners` keeps alive what the tape names by address, for the length of the call at least.
        """
        del owners
        with self._lock:
            if self._closed:
                raise RuntimeError("these kernels were closed; make a new CpuOps")
            for word, value in words.items():
                self.control[word] = value
            # A run of no operations has no barrier: a helper that wakes late would take part in the next run twice.
            if self.control[layout.OPS]:
                self._entry(self._memory.address, 0)

    def close(self) -> None:
        """End the helpers and wait for them. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._helpers:
                self.control[layout.STOP] = 1
                # an empty run: helpers wake, see the word, and leave without a barrier
                self.control[layout.OPS] = 0
                self._wake()
        for helper in self._helpers:
            helper.join()

    def __del__(self) -> None:
        if hasattr(self, "_helpers"):
            self.close()

    def _wake(self) -> None:
        # thread 0 would wait in no barrier: a tape of no operations only announces the generation
        self._entry(self._memory.address, 0)
