"""What a rank can do with the other ranks of one axis, and the axis of one rank, which does nothing.

Rule: every rank of a group calls the same operations in the same order. Each wait ends: with the data, or with
CollectiveAborted, which names the rank that did not come. After a CollectiveAborted the group is of no more use; a new
epoch makes new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from planaria.errors import PlanariaError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Array = Any  # NumPy's in main memory; a tensor on a group's device

DEADLINE = 60.0  # seconds a rank waits for another


class CollectiveAborted(PlanariaError):
    """A rank of a group did not come. `ranks` are world ranks; empty when the group was fenced for another reason."""

    def __init__(self, ranks: tuple[int, ...], what: str) -> None:
        self.ranks = ranks
        super().__init__(what)


class Comm(Protocol):
    """One axis's group as one of its ranks sees it. Arrays are contiguous, in main memory or on `device`; the two ends
    of a message have it in the same kind of memory. A message is bytes, whatever numbers they are."""

    rank: int
    size: int
    device: str  # where this group takes large arrays without a copy through main memory: "cpu", "cuda"
    members: tuple[int, ...]  # world ranks, by rank in the group
    port: int  # what native code needs to know to do these itself (see SharedComm), or 0

    def all_reduce(self, x: Array) -> None:
        """Add up float32 `x` over the group, in place: the same bits on every rank."""

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        """Float32 [n, len(columns)] of each rank, side by side: [n, size] on rank 0, valid until the next gather; on
        others anything of that shape."""

    def send(self, x: Array, to: int) -> None:
        """Hand `x` on; returns when it may be overwritten, not when it was received (see each group for its limit)."""

    def receive(self, x: Array, source: int) -> None:
        """The next message from `source` into `x`, which has its size."""

    def broadcast(self, x: Array, source: int = 0) -> None:
        """`x` of `source` into `x` of all others."""

    def abort(self, reason: str) -> None:
        """End all waits of this rank, from another thread, and where it can be done those of the others."""

    def close(self) -> None: ...


class NativeComm(Comm, Protocol):
    """A `Comm` with a port: native code takes part in it by itself."""

    lanes: int  # threads of each rank that take part

    def window(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory of `size` bytes or more that all ranks see. All call it together."""

    def place(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        """The same, of what has this name alone."""

    def meet(self) -> None:
        """Wait for all ranks."""

    def check(self) -> None:
        """Raise CollectiveAborted if native code gave up."""


class Solo:
    """The group of one rank."""

    rank, size, port, device = 0, 1, 0, "cpu"

    def __init__(self, member: int = 0) -> None:
        self.members: tuple[int, ...] = (member,)

    def all_reduce(self, x: Array) -> None:
        pass

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        return x

    def send(self, x: Array, to: int) -> None:
        raise ValueError("a group of one has nobody to send to")

    def receive(self, x: Array, source: int) -> None:
        raise ValueError("a group of one has nobody to receive from")

    def broadcast(self, x: Array, source: int = 0) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def broadcast_by_messages(comm: Comm, x: Array, source: int) -> None:
    """`Comm.broadcast` of a group that has messages and nothing better."""
    if comm.rank != source:
        comm.receive(x, source)
        return
    for rank in range(comm.size):
        if rank != source:
            comm.send(x, rank)


def flat(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array in main memory as one row; it must be contiguous."""
    if not x.flags.c_contiguous:
        raise ValueError("an array sent over a mesh must be contiguous")
    return x.reshape(-1)
