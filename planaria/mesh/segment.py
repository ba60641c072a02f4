"""The memory file of a group of ranks on one node: made by the first of them, mapped by all.

Its first word is the fence: writing it ends every wait on the file (`planaria.kernels.cpu.shared`).
"""

from __future__ import annotations

import fcntl
import os

FENCED = 1 << 32  # a fence raised on purpose; with 1 + a rank added: by that rank


def create_segment() -> int:
    """The descriptor of a new memory file, empty: it takes no memory before it is used, and never becomes shorter."""
    fd = os.memfd_create("planaria-mesh", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def fence_segment(fd: int) -> None:
    """End every wait of the segment's ranks, whoever they are and whatever they do. A file that has no size yet gets
    one, and never a smaller one than ranks give it meanwhile."""
    os.pwrite(fd, FENCED.to_bytes(8, "little"), 0)
