"""From what a launcher hands a rank to its mesh. The launcher makes one `MeshBoot` per rank and epoch.

On one node: `create_segment()` (planaria.mesh.shared) once for every tensor group and every pipeline of more than one
rank, its descriptor given to all members. Otherwise, or where the plain collective is asked for: one TCP store that
all ranks reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planaria.mesh.comm import DEADLINE, Comm, Solo
from planaria.mesh.mesh import Mesh, pp_members, tp_members


@dataclass(frozen=True)
class MeshBoot:
    """tp, pp: the sizes of the axes. tp_fd, pp_fd: segments of this rank's groups, None for gloo. store: host and port
    of a torch TCPStore that somebody serves. lanes: threads of the rank with the least. crowded: the node has fewer
    cores than its ranks have threads."""

    rank: int = 0
    tp: int = 1
    pp: int = 1
    epoch: int = 0
    tp_fd: int | None = None
    pp_fd: int | None = None
    store: tuple[str, int] | None = None
    lanes: int = 1
    crowded: bool = False
    deadline: float = DEADLINE


def open_mesh(boot: MeshBoot, kernels: Callable[[], Any]) -> Mesh:
    """Meet the other ranks. kernels: gives the compiled kernels' entry; called only for shared memory. Raises PeerLost
    when a rank does not come within the deadline."""
    tp = _group(boot, "tp", tp_members(boot.rank, boot.tp), boot.tp_fd, boot.lanes, kernels)
    pp = _group(boot, "pp", pp_members(boot.rank, boot.tp, boot.pp), boot.pp_fd, 1, kernels)
    return Mesh(boot.rank, tp, pp)


def _group(
    boot: MeshBoot, axis: str, members: tuple[int, ...], fd: int | None, lanes: int, kernels: Callable[[], Any]
) -> Comm:
    rank = members.index(boot.rank)
    if len(members) == 1:
        return Solo(boot.rank)
    if fd is not None:
        from planaria.mesh.shared import SharedComm

        return SharedComm(
            fd, rank, members, kernels(), lanes=lanes, crowded=boot.crowded, deadline=boot.deadline
        )  # fmt: skip
    if boot.store is None:
        raise ValueError(f"rank {boot.rank}: the {axis} group of ranks {members} has neither a segment nor a store")
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    from planaria.mesh.gloo import GlooComm

    store = TCPStore(*boot.store, is_master=False, timeout=timedelta(seconds=boot.deadline))
    return GlooComm(store, f"{boot.epoch}/{axis}/{members[0]}", rank, members, deadline=boot.deadline)
