"""The machine's limits, measured the way kernels meet them: read bandwidth and the bf16 matrix rate.

    python -m benchmarks.machine [--json]

Bandwidth: threads that each sum their own part of 1 GiB (far beyond any cache) with vector loads, the GIL released.
Matrix rate: torch's product of square bf16 matrices that fit the last cache, all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from benchmarks import proc

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
    values = np.ones(size // 8, np.int64)
    parts = np.array_split(values, threads)
    _sum(values[:64])
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeat + 1):
            since = time.perf_counter()
            list(pool.map(_sum, parts))
            rates.append(size / (time.perf_counter() - since) / 1e9)
    return rates[1:]


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
    options = parser.parse_args()
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
