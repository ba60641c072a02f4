"""Memory files at addresses where the system can have huge pages of them, and putting them there: it does so where
there is a page already, whatever its setting for shared memory says.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from typing import Any

HUGE = 2 << 20
_MAP_SHARED_FIXED, _MADV_COLLAPSE = 0x11, 25


class _Mapped(mmap.mmap):
    """Addresses, at which a part of a file is. holds: what lives as long."""

    holds: object


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def map_file(fd: int, start: int, size: int, access: int, holds: object = None) -> tuple[memoryview, int]:
    """Of a file, from `start` on, a multiple of HUGE, at such an address: else there are no huge pages. And the
    address. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    mapped = _Mapped(-1, size + HUGE, flags=flags)
    mapped.holds = holds
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    skip = -base % HUGE
    if _libc().mmap(base + skip, size, access, _MAP_SHARED_FIXED, fd, start) != base + skip:
        raise OSError(ctypes.get_errno(), "memory of the node can't be mapped")
    return memoryview(mapped)[skip : skip + size], base + skip


def collapse(address: int, size: int) -> None:
    """Put what is at these addresses, multiples of HUGE, into huge pages; there is a page in each HUGE bytes. Raises
    OSError: it stays in small ones, at least in part."""
    if _libc().madvise(address, size, _MADV_COLLAPSE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def for_good(error: OSError) -> bool:
    """Will the system refuse huge pages again, as an older one does, or one that is told never to have any?"""
    return error.errno == errno.EINVAL
