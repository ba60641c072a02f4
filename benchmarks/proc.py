"""What a tree of processes costs, read from /proc (Linux): CPU time, proportional memory; and stopping it meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

SETTLED_PERCENT = 5.0
_TICK = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """`root` and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat(int(entry))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        if _stat(pid) is not None:
            found.append(pid)
        todo += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None for a process that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def cpu_seconds(root: int) -> float:
    """CPU time of the tree's threads so far, to the nanosecond where the kernel keeps it."""
    total = 0.0
    for pid in tree(root):
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0]) / 1e9
        except (OSError, IndexError, ValueError):
            fields = _stat(pid)
            total += (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0
    return total


def idle_percent(root: int, seconds: float) -> float:
    """CPU of the whole tree over `seconds` in which nothing is asked of it, in % of one core."""
    before, since = cpu_seconds(root), time.perf_counter()
    time.sleep(seconds)  # the quantity measured is a rate over time
    return 100 * (cpu_seconds(root) - before) / (time.perf_counter() - since)


def settle(root: int, limit: float = 60.0) -> float:
    """Wait until the tree has been idle for two seconds (what an engine finishes in the background, a spinning reader),
    at most `limit` seconds. Returns how long it was busy."""
    since = time.perf_counter()
    while (busy := time.perf_counter() - since) < limit:
        if idle_percent(root, 2.0) < SETTLED_PERCENT:
            return busy
    return busy


def pss_bytes(root: int) -> int:
    """Proportional set size of the tree: a page shared with n processes counts as 1/n. So processes of another tree
    that share libraries with this one must not be alive."""
    total = 0
    for pid in tree(root):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def machine_busy_seconds() -> float:
    """CPU time of everything on this machine so far."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICK


class Foreign:
    """CPU that others used while one tree was measured, in % of one core."""

    def __init__(self, root: int) -> None:
        self.root, self.since = root, time.perf_counter()
        self.own, self.all = cpu_seconds(root), machine_busy_seconds()

    def percent(self) -> float:
        own, every = cpu_seconds(self.root) - self.own, machine_busy_seconds() - self.all
        return max(0.0, 100 * (every - own) / (time.perf_counter() - self.since))


def pause(root: int) -> None:
    """Stop every process of the tree, so that it can't disturb another's turn."""
    for pid in tree(root):
        _signal(pid, signal.SIGSTOP)


def resume(root: int) -> None:
    """Let a paused tree go on."""
    for pid in tree(root):
        _signal(pid, signal.SIGCONT)


def kill(root: int) -> None:
    """End the tree now."""
    for pid in reversed(tree(root)):
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
