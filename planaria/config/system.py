"""What this system has: Linux on the processors that the kernels know, or less."""

from __future__ import annotations

import platform
import sys

MACHINES = ("x86_64", "AMD64", "aarch64")  # whose numbers of system calls the kernels know


def no_kernels() -> str:
    """Why this package's own kernels can't run here, or nothing."""
    if sys.platform != "linux":
        return f"the threads of this package's kernels sleep on Linux's futexes, and this is {sys.platform}"
    if platform.machine() not in MACHINES:
        return f"this package's kernels know the processors {' and '.join(MACHINES[::2])}, not {platform.machine()}"
    return ""


def no_processes() -> str:
    """Why nothing can be kept in processes of its own here, or nothing."""
    if sys.platform == "linux":
        return ""
    return f"processes are kept by Linux's pidfds and share its memory files, and this is {sys.platform}"
