"""The machine's limits, measured the way kernels meet them: read bandwidth and the bf16 matrix rate.

    python -m benchmarks.machine [--json]
    python -m benchmarks.machine --memories     ways of the system to have memory of several processes, in turns

Bandwidth: threads that each sum their own part of 1 GiB (far beyond any cache) with vector loads, the GIL released.
Matrix rate: torch's product of square bf16 matrices that fit the last cache, all threads.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks import proc
from planaria.hosts.mapping import HUGE, collapse, map_file
from planaria.kernels.cpu.memory import Region

READ_BYTES = 1 << 30
MATRIX_SIDE = 1024


@njit(nogil=True, cache=True)
def _sum(values):  # type: ignore[no-untyped-def]
    """Wrapping integer additions from index 0 up: LLVM makes unrolled vector loads of it, and prefetchers follow."""
    total = np.int64(0)
    for i in range(values.size):
        total += values[i]
    return total


def read_bandwidth(threads: int, repeat: int = 7, size: int = READ_BYTES) -> list[float]:
    """GB/s (10^9) of each repetition."""
    return reads({"": np.ones(size // 8, np.int64)}, threads, repeat)[""]


def reads(of: dict[str, npt.NDArray[np.int64]], threads: int, repeat: int) -> dict[str, list[float]]:
    """GB/s (10^9) of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in of}
    _sum(np.ones(64, np.int64))
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeat + 1):
            for name, values in of.items():
                since = time.perf_counter()
                list(pool.map(_sum, np.array_split(values, threads)))
                found[name].append(values.nbytes / (time.perf_counter() - since) / 1e9)
    return {name: rates[1:] for name, rates in found.items()}


def memories(size: int = READ_BYTES) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, float]]:
    """Of so many bytes each, a multiple of HUGE, written; and the seconds of CPU that it took. MFD_HUGETLB only where
    so many pages are reserved (/proc/sys/vm/nr_hugepages)."""

    def private() -> Any:
        return Region(size).bytes

    def of_a_file(huge: bool, flags: int = 0) -> Any:
        fd = os.memfd_create("planaria-benchmark", flags)
        try:
            os.ftruncate(fd, size)
            memory, address = map_file(fd, 0, size, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        if huge:
            for at in range(0, size, HUGE):
                memory[at] = 1
            collapse(address, size)
        return memory

    ways: dict[str, Callable[[], Any]] = {
        "private huge pages": private,
        "memory file, small pages": partial(of_a_file, huge=False),
        "memory file, collapsed": partial(of_a_file, huge=True),
        "memory file, MFD_HUGETLB": partial(of_a_file, huge=False, flags=getattr(os, "MFD_HUGETLB", 4)),
    }
    if int(Path("/proc/sys/vm/nr_hugepages").read_text()) * HUGE < size:
        print(f"MFD_HUGETLB is left out: fewer than {size // HUGE} pages are reserved (/proc/sys/vm/nr_hugepages)")
        del ways["memory file, MFD_HUGETLB"]
    made, took = {}, {}
    for name, way in ways.items():
        since = time.process_time()
        made[name] = np.frombuffer(way(), np.int64)
        made[name][:] = 1
        took[name] = time.process_time() - since
    return made, took


def matrix_rate(threads: int, repeat: int = 7, side: int = MATRIX_SIDE) -> list[float]:
    """GFLOP/s (10^9) of each repetition."""
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.randn(side, side).to(torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(repeat + 2):
        since = time.perf_counter()
        for _ in range(8):
            torch.mm(a, b)
        rates.append(8 * 2 * side**3 / (time.perf_counter() - since) / 1e9)
    return rates[2:]


def cpu_name() -> str:
    """The processor as the system names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def measure(threads: int, repeat: int, matrix: bool) -> dict[str, Any]:
    """Samples by name, and the CPU that others used meanwhile, in % of one core."""
    watch = proc.Foreign(os.getpid())
    result: dict[str, Any] = {
        "cpu": cpu_name(), "threads": threads, "read_1_thread": read_bandwidth(1, repeat),
        "read_all_threads": read_bandwidth(threads, repeat), "foreign": watch.percent(),
    }  # fmt: skip
    if matrix:
        result["bf16_gflops"] = matrix_rate(threads, repeat)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--no-matrix", action="store_true", help="bandwidth only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memories", action="store_true", help="the same in each kind of memory, and nothing else")
    options = parser.parse_args()
    if options.memories:
        made, took = memories()
        for name, rates in reads(made, options.threads, options.repeat).items():
            middle, low, high = statistics.median(rates), min(rates), max(rates)
            print(f"{name:28} {middle:8.1f} GB/s ({low:.1f}-{high:.1f}); written in {took[name]:.2f} s of CPU")
        return
    result = measure(options.threads, options.repeat, not options.no_matrix)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['cpu']}; others used {result['foreign']:.0f}% of a core meanwhile")
    for name, label, unit in (
        ("read_1_thread", "read, 1 thread", "GB/s"),
        ("read_all_threads", f"read, {options.threads} threads", "GB/s"),
        ("bf16_gflops", f"bf16 product, {options.threads} threads", "GFLOP/s"),
    ):
        if name in result:
            values = result[name]
            print(f"{label:28} {statistics.median(values):8.1f} {unit} ({min(values):.1f}-{max(values):.1f})")


if __name__ == "__main__":
    main()
