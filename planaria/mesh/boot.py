"""What a rank brings to the groups of an epoch, and how it meets the others from what all of them brought.

The first rank of a group makes its memory file; ranks of the same home open it. A group that spans nodes, that has no
shared memory, or that was asked to do without (`disable_custom_all_reduce`) meets at a store that rank 0 hosts. Ranks
on devices meet there by NCCL, where it takes them (ways).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from planaria.mesh.comm import DEADLINE, CollectiveAborted, Comm, Solo
from planaria.mesh.mesh import Mesh
from planaria.mesh.segment import create_segment, fence_segment
from planaria.mesh.ways import MEMORY, choose
from planaria.node import Shared
from planaria.protocol import Hello
from planaria.topology import Layout

logger = logging.getLogger("planaria.mesh")

FEW = 4  # messages of experts that are on their way: each is large


def axes(rank: int, layout: Layout, *, experts: bool = False, micro_batches: int = 1) -> dict[str, tuple[int, ...]]:
    """World ranks of the groups that `rank` is in, by axis. "shares" are the tensor ranks of all prefill context ranks,
    where there are several. "ep", those that share a stage's experts, is a group of its own only where these have
    tokens of their own, in lanes or shares: else they are the tensor ranks. "experts" are the same ranks, where
    `experts` are dealt to them whole. Each further micro-batch has such a group of its own, "ep1" and so on, so that
    one can exchange tokens while another does."""
    sharing = layout.group(rank, "dp", "pcp", "tp")
    apart = layout.dp > 1 or (experts and layout.pcp > 1)
    spread, travels = sharing if apart else (rank,), sharing if experts else (rank,)
    shares = {"shares": layout.group(rank, "pcp", "tp")} if layout.pcp > 1 else {}
    further = {f"ep{i}": spread for i in range(1, micro_batches) if apart}
    first = {"tp": layout.group(rank, "tp"), "pp": layout.group(rank, "pp")}
    return {**first, **shares, "ep": spread, "experts": travels, **further}


def create_segments(
    rank: int, layout: Layout, *, experts: bool = False, micro_batches: int = 1
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """(descriptor, inode) of a new memory file for each group of several that this rank is the first of. They belong to
    the caller, who closes them with the groups."""
    found: dict[str, tuple[int, int]] = {}
    for axis, members in axes(rank, layout, experts=experts, micro_batches=micro_batches).items():
        if sys.platform == "linux" and len(members) > 1 and members[0] == rank:
            fd = create_segment()
            found[axis] = fd, os.fstat(fd).st_ino
    return found


class Opening:
    """What `open_mesh` waits for, so that another thread can end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason = ""
        self._end: Callable[[], Any] | None = None

    def abort(self, reason: str) -> None:
        """End the wait that is on, and any later one, with CollectiveAborted."""
        with self._lock:
            self._reason = self._reason or reason
            if self._end is not None:
                self._end()

    def check(self) -> None:
        """Raise CollectiveAborted if it was aborted: called once the mesh is where `abort` is passed on to, so that
        none is missed."""
        if self._reason:
            raise CollectiveAborted((), self._reason)

    @contextlib.contextmanager
    def waiting(self, end: Callable[[], Any]) -> Iterator[None]:
        """While the block waits, `end()` would end that. It is never called after the block."""
        with self._lock:
            self.check()
            self._end = end
        try:
            yield
        except CollectiveAborted:
            self.check()
            raise
        finally:
            with self._lock:
                self._end = None


def _say(way: str, line: str, ranks: Sequence[int], place: int, usual: str) -> str:
    """The way that a group has, which its first rank tells people of, if it isn't the usual one."""
    level = logging.WARNING if place == 0 and way != usual else logging.DEBUG
    logger.log(level, "ranks %s meet by %s", ", ".join(map(str, ranks)), line)
    return way


def open_mesh(
    rank: int, layout: Layout, epoch: int, members: Sequence[Hello], *, fast: bool,
    shared: Callable[[], Callable[..., Comm]], lanes: int = 1, crowded: bool = False, collective: str = MEMORY,
    deadline: float = DEADLINE, opening: Opening | None = None, experts: bool = False, micro_batches: int = 1,
) -> Mesh:  # fmt: skip
    """Meet the other ranks. fast: use memory that all see where it can be. shared: gives what makes a group there (a
    SharedComm with its kernels), called only then; lanes, crowded: see RankBoot. collective: the
    platform's; shared memory: ranks compute in main memory. opening: by which another thread ends this. experts,
    micro_batches: as for `axes`. Raises CollectiveAborted when a rank does not come within the deadline or the opening
    is aborted, Gone when a rank has ended already."""
    opening, on_devices = opening or Opening(), collective != MEMORY

    def group(axis: str, ranks: tuple[int, ...]) -> Comm:
        if len(ranks) == 1:
            return Solo(rank)
        theirs = [members[r] for r in ranks]
        if on_devices:
            from planaria.mesh.nccl import available
            from planaria.mesh.staged import StagedComm

            way = _say(*choose(theirs, collective, available()), ranks, ranks.index(rank), collective)
            if way == collective:
                return by_store(axis, ranks, direct=True)
            return StagedComm(by_memory(axis, ranks) if way == MEMORY else by_store(axis, ranks))
        if fast and axis in theirs[0].segments and all(each.home == members[rank].home for each in theirs):
            return by_memory(axis, ranks)
        return by_store(axis, ranks)

    def by_memory(axis: str, ranks: tuple[int, ...]) -> Comm:
        first, place = members[ranks[0]], ranks.index(rank)
        fd = Shared(first.pid, *first.segments[axis]).open()
        try:
            make = shared()
            with opening.waiting(lambda: fence_segment(fd)):
                if axis == "experts":
                    return make(fd, place, ranks, deadline=deadline, crowded=True, ring=FEW)
                many = lanes if axis == "tp" and not on_devices else 1
                return make(fd, place, ranks, deadline=deadline, crowded=crowded, lanes=many)
        finally:
            os.close(fd)

    def by_store(axis: str, ranks: tuple[int, ...], *, direct: bool = False) -> Comm:
        store, place = members[0].store, ranks.index(rank)
        if store is None:
            raise ValueError(f"rank {rank}: the {axis} group of ranks {ranks} has neither shared memory nor a store")
        from planaria.mesh.gloo import IN_FLIGHT, GlooComm, join_store, leave_store
        from planaria.mesh.nccl import NcclComm

        met = join_store(*store, deadline=deadline)
        with opening.waiting(lambda: leave_store(met)):
            name, most = f"{epoch}/{axis}/{ranks[0]}", FEW if axis == "experts" else IN_FLIGHT
            options: dict[str, Any] = {"host": members[rank].address, "deadline": deadline, "in_flight": most}
            if not direct:
                return GlooComm(met, name, place, ranks, **options)
            near = len({members[each].home for each in ranks}) == 1
            return NcclComm(met, name, place, ranks, custom=fast and axis == "tp" and near, **options)

    groups: dict[str, Comm] = {}
    try:
        for axis, ranks in axes(rank, layout, experts=experts, micro_batches=micro_batches).items():
            groups[axis] = group(axis, ranks)
    except Exception:  # nobody else has those that were made
        for made in groups.values():
            made.close()
        raise
    first = {axis: groups.pop(axis) for axis in ("tp", "pp", "shares", "ep", "experts") if axis in groups}
    return Mesh(rank, **first, further=tuple(groups.values()))
