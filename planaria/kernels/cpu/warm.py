"""Compiles the CPU kernels ahead: `python -m planaria.kernels.cpu.warm [--dtype D] [--cache-dir DIR]`.

Imports neither torch nor the rest of the engine, so it can run beside the loading of weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from planaria.kernels.cpu.build import cache_file, default_cache, ensure, target_for


def warm(cache_dir: Path | None = None, dtypes: tuple[str, ...] = ("bfloat16",)) -> None:
    """Compile what the cache in cache_dir (default ~/.cache/planaria) lacks for these dtypes."""
    for dtype in dtypes:
        ensure(target_for(dtype), cache_dir)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m planaria.kernels.cpu.warm", description=__doc__)
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float32"))
    parser.add_argument("--cache-dir", type=Path)
    args = parser.parse_args()
    for dtype in args.dtype or ("bfloat16", "float32"):
        start = time.perf_counter()
        path = cache_file(target_for(dtype), args.cache_dir or default_cache())
        there = path.exists()
        warm(args.cache_dir, (dtype,))
        print(f"{dtype}: {'in' if there else 'compiled to'} {path} ({time.perf_counter() - start:.2f} s)")


if __name__ == "__main__":
    main()
