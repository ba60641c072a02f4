"""Tokens exchanged through memory that all ranks of the group see: each is written once and read where it is needed.

Rule: what a rank writes is read after the group has met, and written over after it has met again: a dispatch and a
combine each meet once (twice where tensor ranks share the sums), and nobody is two of them ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.mesh.all2all.plain import AllGather, ByMessages, add_up, cut
from planaria.mesh.comm import Array, Comm

ALIGN = 4096
OTHER_BYTES = 1024  # of a token: slots and weights of up to 64 experts


def gathering(group: Comm, width: int, limits: tuple[int, int], *, dealt: bool) -> ByMessages:
    """Through shared memory where the group has it, else by messages."""
    return (Window if group.port else AllGather)(group, width, limits, dealt=dealt)


class Window(ByMessages):
    """limits: see `make`."""

    group: Any  # a NativeComm

    def __init__(self, group: Comm, width: int, limits: tuple[int, int], *, dealt: bool = False) -> None:
        super().__init__(group, width, dealt=dealt)
        tokens, row = limits
        self._most = tokens * self.lanes
        self._tokens = _up(2 * 8 * group.size)
        self._sums = self._tokens + _up(self._most * (row + OTHER_BYTES))
        self._part = _up(self._most * row)
        self._shared = self._sums + group.size * self._part
        self._memory: npt.NDArray[np.uint8] = self.group.window(self._shared + _up(self._most * row))
        self._numbers = self._view(0, np.dtype(np.int64), (2, group.size))
        self._step = 0

    def _view(self, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return self._memory[start : start + size].view(dtype).reshape(shape)

    def tell(self, number: int) -> list[int]:
        self._step += 1
        numbers = self._numbers[self._step % 2]  # a rank may read the last step's while another is in the next
        numbers[self.group.rank] = number
        self.group.meet()
        of_lanes: list[int] = numbers[:: self.at.width].tolist()
        return of_lanes

    def count(self, counts: Sequence[int]) -> int:
        total = super().count(counts)
        if total > self._most:
            raise ValueError(f"{total} tokens in a step of {self.lanes} lanes: there is room for {self._most}")
        return total

    def dispatch(self, parts: Sequence[Array], into: Sequence[Array]) -> None:
        at, rank, start = self.at, self.group.rank, self._tokens
        mine = at.part(rank) if at.dealt or rank % at.width == 0 else range(0)
        places = []
        for part in parts:
            place = self._view(start, part.dtype, (at.starts[-1], *part.shape[1:]))
            places.append(place)
            start += -(-place.nbytes // 64) * 64
            if mine:
                cut(place, mine)[...] = cut(part, at.within(rank))
        if start > self._sums:
            raise ValueError("more bytes of each token than there is room for")
        self.group.meet()
        for place, whole in zip(places, into, strict=True):
            whole[...] = place

    def combine(self, y: Array, out: Array) -> None:
        at, rank, shape = self.at, self.group.rank, tuple(y.shape)
        sums = [self._view(self._sums + r * self._part, np.dtype(np.float32), shape) for r in range(self.group.size)]
        sums[rank][...] = y
        self.group.meet()
        if not at.dealt:
            add_up([cut(part, at.own) for part in sums], out)
            return
        mine, whole = at.part(rank), self._view(self._shared, np.dtype(np.float32), shape)
        add_up([cut(part, mine) for part in sums], cut(whole, mine))
        self.group.meet()
        out[...] = cut(whole, at.own)


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
