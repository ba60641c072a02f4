"""Which process has which number, and where: slots, those that were given up, processes in reserve. Pure: time comes
from a clock that it is given, and processes from a host.

A slot whose processes end again and again is not used any more until one that was started in it, in reserve, says that
it is ready. Processes go to nodes by `placed`; on a node whoever lives keeps its number, or takes one with the same
part of the model.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from planaria.hosts.host import NOWHERE, Child, Host, News, Place, Program, Slot
from planaria.topology import Cluster, Infeasible, Layout, Node, Placement, RankSlot, place, shrink

logger = logging.getLogger("planaria.hosts")

EXIT_TIMEOUT = 5.0  # seconds processes get to end by themselves
KILL_TIMEOUT = 10.0  # seconds killed ones get to be gone
START_TIMEOUT = 60.0  # seconds one gets to be started
TRY_AGAIN = 5.0  # seconds before something that failed is tried again; then ever more
LONGEST_TRY = 300.0

Deal = Callable[[Layout, Mapping[str, int], Placement | None], Placement]
BootFor = Callable[[Place], bytes]  # what a process in reserve is told, by where it is


class BackOff:
    """Something that fails is tried after a pause, which doubles from time to time. Seconds."""

    def __init__(self, longest: float = LONGEST_TRY, first: float = TRY_AGAIN) -> None:
        self.at, self.first, self.longest, self.pause = 0.0, first, longest, first

    def failed(self, now: float) -> None:
        self.at, self.pause = now + self.pause, min(self.longest, 2 * self.pause)

    def worked(self) -> None:
        self.at, self.pause = 0.0, self.first


class Capacity(msgspec.Struct, frozen=True, array_like=True):
    """On a node, counted in processes: all that it has; those that aren't given up; those where one has a number, or
    could have at once. failing: one in reserve ended before it was ready, so that others had better wait."""

    slots: int
    good: int
    ready: int
    failing: bool = False


def placed(layout: Layout, counts: Mapping[str, int], before: Placement | None) -> Placement:
    """With so many places on each node. Tensor groups on one node count most, then that ranks stay where they are, if
    only the number of lanes changes (else they hold other weights), then that nodes have as many. Raises Infeasible."""
    share = -(-layout.size // max(1, len(counts)))
    even = cluster_of({node: min(share, count) for node, count in counts.items()})
    clusters = [cluster for cluster in (even, cluster_of(counts)) if cluster.num_devices >= layout.size]
    found = [
        place(cluster, layout, keep=keep, span=True)
        for cluster in clusters or [cluster_of(counts)]
        for keep in (before, None)
    ]
    return min(found, key=lambda placement: (len(placement.spanning()), _moved(placement, before)))


def _moved(placement: Placement, before: Placement | None) -> int:
    """Ranks on other nodes than before, which the present ones could have been."""
    if before is None or _degrees(placement) != _degrees(before):
        return 0
    return sum(now.node != then.node for now, then in zip(placement.slots, before.slots, strict=False))


def _degrees(placement: Placement) -> tuple[int, int]:
    """By which the model is cut."""
    return placement.layout.tp, placement.layout.pp


def _part(seat: RankSlot) -> tuple[int, int]:
    """Of the model, that the rank there has."""
    return seat.coords.pp, seat.coords.tp


def cluster_of(counts: Mapping[str, int]) -> Cluster:
    return Cluster(tuple(Node.of(node, count) for node, count in counts.items()), "0")


class Pool:
    """spares: that there should be, on each node or in all. news: see Host. deal: as `placed`. longest: seconds between
    tries, at most."""

    def __init__(
        self, host: Host, entry: Program, clock: Callable[[], float], news: News, *, spares: int = 0,
        on_each: bool = True, deal: Deal = placed, longest: float = LONGEST_TRY,
    ) -> None:  # fmt: skip
        self.host, self.entry, self.clock, self.news, self.num_spares = host, entry, clock, news, spares
        self.on_each, self.deal = on_each, deal
        self.ranks: dict[int, Child] = {}
        self.spares: list[Child] = []
        self.others: list[Child] = []  # beside ranks
        self.bad: set[Slot] = set()
        self.placement: Placement | None = None
        self._numbered: Placement | None = None  # whose numbers ranks have
        self.tries = BackOff(longest)  # of slots that were given up
        self.longest = longest
        self._last: dict[int, Slot] = {}  # of each rank
        self._tried: Counter[Slot] = Counter()  # one that stays bad does not keep others from it
        self._reserve: dict[str, BackOff] = {}  # of each node's spares, if some never got ready

    # -- what there is

    @property
    def leaving(self) -> list[int]:
        """Ranks that work, on nodes that are going."""
        return [rank for rank, child in sorted(self.ranks.items()) if child.leaving and not child.ended]

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended, and how."""
        return {rank: child.ended for rank, child in sorted(self.ranks.items()) if child.ended}

    def living(self) -> set[int]:
        return {rank for rank, child in self.ranks.items() if not child.ended}

    def rooms(self) -> dict[str, Capacity]:
        """By node, of those that are here."""
        self._look_at_spares()
        found = {}
        for node in self.host.slots().nodes:
            ranks, spares = self._ranks_on(node.id), self._spares_on(node.id)
            good = len(ranks) + len(spares) + len(self._free(node))
            ready = sum(not child.ended for child in ranks.values()) + sum(map(is_ready, spares))
            failing = self.clock() < self._back_off(node.id).at
            found[node.id] = Capacity(len(node.devices), good, ready, failing)
        return found

    def _ranks_on(self, node: str) -> dict[int, Child]:
        ranks = sorted(self.ranks.items())
        return {rank: child for rank, child in ranks if child.slot[0] == node and not child.leaving}

    def _spares_on(self, node: str) -> list[Child]:
        """Those that are ready first."""
        return sorted((spare for spare in self.spares if spare.slot[0] == node), key=lambda spare: not is_ready(spare))

    def _free(self, node: Node) -> list[Slot]:
        used = {child.slot for child in [*self.ranks.values(), *self.spares]} | self.bad
        return [slot for device in node.devices if (slot := (node.id, device.id)) not in used]

    def _back_off(self, node: str) -> BackOff:
        return self._reserve.setdefault(node, BackOff(self.longest))

    def _look_at_spares(self) -> None:
        """Forget those that have ended, or were stopped and are of no use, or are to leave."""
        for spare in list(self.spares):
            stopped = not spare.ended and spare.stopped
            if not (spare.ended or stopped or spare.leaving):
                continue
            self.spares.remove(spare)
            logger.warning("a spare %s", spare.ended or ("is stopped: killed" if stopped else "is on a node that goes"))
            if spare.said:
                self._back_off(spare.slot[0]).worked()
            elif not spare.leaving:  # the next may fare no better
                self._back_off(spare.slot[0]).failed(self.clock())
            self._dismiss([spare])

    # -- ranks

    def replace(self, ranks: Iterable[int], layout: Layout) -> None:
        """See Launcher."""
        self.end([*ranks, *self.leaving])
        self.host.need(layout.size, self.num_spares)
        while True:
            placement = self._place(layout)
            new = self._arrange(placement)
            self.host.await_starts(new, START_TIMEOUT)
            here = {node.id for node in self.host.slots().nodes}
            unborn = [child for child in new if child.ended and not child.place.pid]
            self.ranks = {rank: child for rank, child in self.ranks.items() if child not in unborn}
            if failed := next((child for child in unborn if child.slot[0] in here), None):
                raise OSError(failed.ended)
            if here.issuperset(placement.nodes):
                self.placement = placement
                return

    def end(self, ranks: Iterable[int]) -> None:
        """End these for certain, and forget them."""
        self._dismiss([self.ranks.pop(rank) for rank in sorted({*ranks}) if rank in self.ranks])

    def _dismiss(self, children: Sequence[Child]) -> None:
        """Where the kernel doesn't let go of one its slot is not used again."""
        for child in children:
            child.kill()
        for child in self.host.await_ends(children, KILL_TIMEOUT):
            logger.error("process %d was killed and is still there: its slot can't be used again", child.place.pid)
            self.bad.add(child.slot)

    def _place(self, layout: Layout) -> Placement:
        """Where its ranks are, or could be at once; else where there is room. Raises Infeasible."""
        rooms, before = self.rooms(), self._standing()
        with contextlib.suppress(Infeasible):
            return self.deal(layout, {node: room.ready for node, room in rooms.items()}, before)
        try:
            return self.deal(layout, {node: room.good for node, room in rooms.items()}, before)
        except Infeasible as e:
            raise Infeasible("; ".join([*self.host.absent(), e.why]), e.nearest, e.needed, e.found) from None

    def _standing(self) -> Placement | None:
        """The placement of before, on each node those that live first."""
        if self.placement is None:
            return None
        alive = self.living()
        on: Counter[str] = Counter()
        seats: dict[int, RankSlot] = {}
        for seat in sorted(self.placement.slots, key=lambda seat: (seat.rank not in alive, seat.rank)):
            seats[seat.rank] = seat._replace(device=on[seat.node])
            on[seat.node] += 1
        return Placement(self.placement.layout, [seats[rank] for rank in sorted(seats)])

    def _arrange(self, placement: Placement) -> list[Child]:
        """Have exactly these: who lives keeps its number where that has the same part of the model, else takes one that
        nobody has, with the same part if there is one, or ends. Returns those that are new. Raises OSError."""
        before, self._numbered = self._numbered, placement
        same = before is not None and _degrees(before) == _degrees(placement)
        new: list[Child] = []
        moving: dict[str, list[tuple[Child, tuple[int, int] | None]]] = {}
        for rank, child in sorted(self.ranks.items()):
            part = _part(before.slots[rank]) if before is not None and same else None
            seat = placement.slots[rank] if rank < placement.layout.size else None
            if seat is None or seat.node != child.slot[0] or part not in (None, _part(seat)):
                moving.setdefault(child.slot[0], []).append((self.ranks.pop(rank), part))
        try:
            for node in self.host.slots().nodes:
                free = [seat for seat in placement.on(node.id) if seat.rank not in self.ranks]
                others = moving.get(node.id, [])
                for seat in list(free):
                    if found := next((each for each in others if each[1] == _part(seat)), None):
                        self._seat(seat.rank, found[0])
                        others.remove(found)
                        free.remove(seat)
                for seat in free:
                    self._seat(seat.rank, others.pop(0)[0] if others else self._take(seat.rank, node, new))
        finally:
            self._dismiss([child for others in moving.values() for child, _ in others])
        return new

    def _seat(self, rank: int, child: Child) -> None:
        self.ranks[rank], self._last[rank] = child, child.slot

    def _take(self, rank: int, node: Node, new: list[Child]) -> Child:
        """One in reserve, or a new one, where this rank was if it can be. Raises OSError."""
        if spares := self._spares_on(node.id):
            self.spares.remove(spares[0])
            return spares[0]
        free = self._free(node)
        slot = last if (last := self._last.get(rank)) in free else free[0]
        new.append(self.host.spawn(slot, self.entry, None, self.news, rank=rank))
        return new[-1]

    def give_up(self, ranks: Iterable[int]) -> None:
        """See Launcher. Spares take their places before it comes to that."""
        self.bad.update(self._last[rank] for rank in ranks if rank in self._last)
        self.tries.at = self.clock() + self.tries.pause

    # -- those in reserve

    def stand_by(self, boot_for: BootFor) -> None:
        """Start the spares that are missing; each gets ready by itself. Raises OSError."""
        self._look_at_spares()
        nodes = self.host.slots().nodes
        wanted = self._spares_by_node(nodes)
        for node in nodes:
            if self.clock() >= self._back_off(node.id).at:
                self._fill(node.id, wanted[node.id], self._free(node), boot_for)

    def _spares_by_node(self, nodes: Sequence[Node]) -> dict[str, int]:
        """How many there should be on each: if not so many on every one, where there are some, then where there is
        room."""
        if self.on_each:
            return {node.id: self.num_spares for node in nodes}
        left, wanted = self.num_spares, {}
        for node in sorted(nodes, key=lambda node: not self._spares_on(node.id)):
            wanted[node.id] = min(left, len(self._spares_on(node.id)) + len(self._free(node)))
            left -= wanted[node.id]
        return wanted

    def prepare(self, layout: Layout, boot_for: BootFor) -> Layout | None:
        """See Launcher. Slots that were given up are tried now and then."""
        self.host.need(layout.size, self.num_spares)
        before, slots = self._standing(), {node: room.slots for node, room in self.rooms().items()}
        if (largest := shrink(cluster_of(slots), layout, span=True)) is None:
            return None
        wanted = self.deal(largest, slots, before)
        again, nodes = self._to_try_again(), self.host.slots().nodes
        spares = self._spares_by_node(nodes)
        for node in nodes:
            missing = spares[node.id] + len(wanted.on(node.id)) - len(self._ranks_on(node.id))
            slots_here = self._free(node) + [slot for slot in again if slot[0] == node.id]
            with contextlib.suppress(OSError):  # not now
                self._fill(node.id, missing, slots_here, boot_for)
        for spare in filter(is_ready, self.spares):
            self.bad.discard(spare.slot)
            self.tries.pause = self.tries.first
        return shrink(cluster_of({node: room.ready for node, room in self.rooms().items()}), layout, span=True)

    def _to_try_again(self) -> list[Slot]:
        if not self.bad or self.clock() < self.tries.at:
            return []
        self.tries.failed(self.clock())
        used = {child.slot for child in [*self.ranks.values(), *self.spares]}
        there = {(node.id, device.id) for node in self.host.slots().nodes for device in node.devices}
        return sorted((self.bad - used) & there, key=lambda slot: (self._tried[slot], slot))

    def _fill(self, node: str, wanted: int, slots: list[Slot], boot_for: BootFor) -> None:
        for slot in slots[: max(0, wanted - len(self._spares_on(node)))]:
            self._tried[slot] += 1
            spare = self.host.spawn(slot, self.entry, None, self.news)
            spare.tell(boot_for(spare.place))
            self.spares.append(spare)

    def room_for(self, layout: Layout) -> bool:
        """See Launcher."""
        self.host.need(layout.size, self.num_spares)
        rooms = self.rooms()
        counts = [{node: room.ready for node, room in rooms.items()}]
        if not any(room.failing for room in rooms.values()):
            counts.append({node: room.good for node, room in rooms.items()})
        return any(shrink(cluster_of(each), layout, span=True) == layout for each in counts)

    def beside(self, node: str, news: News) -> Child:
        """A process on a node of a rank's that has no place of its own: it takes no accelerator. Raises OSError."""
        self.others = [child for child in self.others if not child.ended]
        self.others.append(self.host.spawn((node, NOWHERE), self.entry, None, news))
        return self.others[-1]

    # -- ending

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Idempotent."""
        for child in [*self.spares, *self.others]:
            child.kill()
        children = [*self.ranks.values(), *self.spares, *self.others]
        self._dismiss(self.host.await_ends(children, EXIT_TIMEOUT))
        self.ranks, self.spares, self.others = {}, [], []

    def kill(self) -> None:
        """End all for certain."""
        for child in self.ranks.values():
            child.kill()
        self.close()


def is_ready(spare: Child) -> bool:
    return bool(spare.said) and not spare.ended
