"""The memory file of a group of ranks on one node: made by the first of them, mapped by all.

Its first word is the fence: writing it ends every wait on the file (`planaria.kernels.cpu.shared`).
"""

from __future__ import annotations

import mmap
import os

FENCED = 1 << 32  # a fence raised on purpose; with 1 + a rank added: by that rank


def create_segment() -> int:
    """The descriptor of a new memory file, empty: it takes no memory before it is used."""
    return os.memfd_create("planaria-mesh", os.MFD_CLOEXEC)


def fence_segment(fd: int) -> None:
    """End every wait of the segment's ranks, whoever they are and whatever they do."""
    if os.fstat(fd).st_size < 8:
        os.ftruncate(fd, mmap.PAGESIZE)
    os.pwrite(fd, FENCED.to_bytes(8, "little"), 0)
