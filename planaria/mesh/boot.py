"""What a rank brings to the groups of an epoch, and how it meets the others from what all of them brought.

The first rank of a group makes its memory file; ranks of the same home open it. A group that spans nodes, that has no
shared memory, or that was asked to do without (`disable_custom_all_reduce`) meets at a store that rank 0 hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from planaria.mesh.comm import DEADLINE, Comm, Solo
from planaria.mesh.mesh import Mesh
from planaria.node import Shared
from planaria.protocol import Hello
from planaria.topology import Layout


def axes(rank: int, tp: int, pp: int) -> dict[str, tuple[int, ...]]:
    """World ranks of the groups that `rank` is in, by axis."""
    layout = Layout(tp=tp, pp=pp)
    return {axis: layout.group(rank, axis) for axis in ("tp", "pp")}


def create_segments(rank: int, tp: int, pp: int) -> dict[str, tuple[int, int]]:
    """(descriptor, inode) of a new memory file for each group of several that this rank is the first of. They belong to
    the caller, who closes them with the groups."""
    found: dict[str, tuple[int, int]] = {}
    for axis, members in axes(rank, tp, pp).items():
        if sys.platform == "linux" and len(members) > 1 and members[0] == rank:
            fd = os.memfd_create("planaria-mesh", os.MFD_CLOEXEC)  # takes no memory before it is used
            found[axis] = fd, os.fstat(fd).st_ino
    return found


def open_mesh(
    rank: int, tp: int, pp: int, epoch: int, members: Sequence[Hello], *, fast: bool, kernels: Callable[[], Any],
    lanes: int = 1, crowded: bool = False, cuda: bool = False, deadline: float = DEADLINE,
) -> Mesh:  # fmt: skip
    """Meet the other ranks. fast: use shared memory where it can be. kernels: gives the compiled kernels' entry, called
    only for shared memory; lanes, crowded: see RankBoot. Raises PeerLost when a rank does not come within the deadline,
    Gone when one has ended already."""

    def group(axis: str, ranks: tuple[int, ...]) -> Comm:
        if len(ranks) == 1:
            return Solo(rank)
        own, first = members[rank], members[ranks[0]]
        place = ranks.index(rank)
        if fast and not cuda and axis in first.segments and all(members[r].home == own.home for r in ranks):
            from planaria.mesh.shared import SharedComm

            fd = Shared(first.pid, *first.segments[axis]).open()
            try:
                return SharedComm(
                    fd, place, ranks, kernels(), lanes=lanes if axis == "tp" else 1, crowded=crowded, deadline=deadline
                )  # fmt: skip
            finally:
                os.close(fd)
        store = members[0].store
        if store is None:
            raise ValueError(f"rank {rank}: the {axis} group of ranks {ranks} has neither shared memory nor a store")
        from planaria.mesh import nccl
        from planaria.mesh.gloo import GlooComm, join_store

        kind = nccl.NcclComm if cuda and nccl.available() else GlooComm
        met = join_store(*store, deadline=deadline)
        return kind(met, f"{epoch}/{axis}/{ranks[0]}", place, ranks, host=own.address, deadline=deadline)

    return Mesh(rank, **{axis: group(axis, ranks) for axis, ranks in axes(rank, tp, pp).items()})
