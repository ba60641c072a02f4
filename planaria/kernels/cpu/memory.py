"""Memory that kernels read by address: aligned, in huge pages where the system has them, freed with its owner."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGN = 64
CHUNK = 32 << 20
HUGE = 2 << 20


class Region:
    """One anonymous mapping, zeroed, pages taken when first written."""

    def __init__(self, size: int, huge: bool = True) -> None:
        self.size = -(-size // HUGE) * HUGE if huge else -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        # Room to start at a multiple of a huge page. Private: memory that could be shared has huge pages by another
        # setting of the system's, which is mostly off.
        size = self.size + (HUGE if huge else 0)
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(self._map, np.uint8)
        self._skip = -raw.ctypes.data % HUGE if huge else 0
        self.bytes: npt.NDArray[np.uint8] = raw[self._skip : self._skip + self.size]
        self.address: int = self.bytes.ctypes.data
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def array(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        count = int(np.prod(shape))
        size = count * np.dtype(dtype).itemsize
        out: npt.NDArray[Any] = self.bytes[offset : offset + size].view(dtype).reshape(shape)
        return out

    def forget(self, offset: int, size: int) -> None:
        """Give the system the whole pages of a part back, which are zeroed when they are touched again."""
        start = self._skip + offset
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


class MappedRegion(Region):
    """Memory that is mapped already, and stays when this process ends."""

    def __init__(self, mapped: memoryview) -> None:
        self.size = len(mapped)
        self.bytes = np.frombuffer(mapped, np.uint8)
        self.address = self.bytes.ctypes.data


class Arena:
    """Hands out aligned pieces of large regions; all are freed together, when the arena and its arrays are gone. A
    piece that was given back is handed out again to who asks for as much; until then it takes next to no memory."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._used = 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}  # by size

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """`size` zeroed bytes, aligned to a cache line."""
        size = -(-size // ALIGN) * ALIGN
        if self._free.get(size):
            return self._free[size].pop()
        if not self.regions or self._used + size > self.regions[-1].size:
            self.regions.append(Region(max(CHUNK, size)))
            self._used = 0
        start = self._used
        self._used += size
        return self.regions[-1].bytes[start : start + size]

    def give_back(self, piece: npt.NDArray[np.uint8]) -> None:
        """Nobody uses this piece any more. What is of other memory, which others may read, stays as it is."""
        address = int(piece.ctypes.data)
        for region in self.regions:
            if region.address <= address < region.address + region.size:
                piece[:] = 0
                region.forget(address - region.address, piece.nbytes)
                self._free.setdefault(piece.nbytes, []).append(piece)

    def clear(self) -> None:
        self.regions.clear()
        self._free.clear()
        self._used = 0
