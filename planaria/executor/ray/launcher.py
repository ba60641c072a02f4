"""Ranks as Ray actors. Translates a placement; decides nothing.

`start` makes the actors, light, and asks where they came up; `run` completes them: each becomes its rank, and the
reference of that run is watched. A lost rank is replaced by a spare, in its own place, or on another node; where Ray
does not answer any more, by processes of this node (see `alone`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError
from planaria.executor.boot import RankBoot
from planaria.executor.ray.alone import Alone
from planaria.executor.ray.cluster import Connection, connect
from planaria.executor.ray.groups import Group
from planaria.executor.ray.members import KILL_TIMEOUT, Member, Members, Missing, await_ends
from planaria.executor.ray.names import actor_name
from planaria.executor.ray.recruits import Recruits
from planaria.executor.ray.seats import Seat, Seats
from planaria.executor.ray.waiting import Waiting
from planaria.executor.ray.watch import Watcher
from planaria.hosts.host import Place
from planaria.hosts.pool import LONGEST_TRY, TRY_AGAIN
from planaria.topology import Cluster, Infeasible, LaneGroup, Layout, Node, shrink
from planaria.wire import Placed

logger = logging.getLogger("planaria.ray")

EXIT_TIMEOUT = 5.0  # seconds ranks get to end by themselves
REPLACE_LIMIT = 20.0  # seconds an actor that replaces another gets to come up, before another place is tried
CHANGE_LIMIT = 60.0  # the same where nothing is lost: another place would not be better
NO_PLACE = 60.0  # seconds to wait for a place where not one rank has any
LOOK = 1.0


class RayLauncher:
    """entry: `package.module:class` of a rank's life (planaria.worker.main). device: "cpu" or an accelerator's name.
    spares: actors that get ready to replace one."""

    name = "ray"
    link, uses_ray, replaces = "queue", True, True

    def __init__(
        self, parallel: ParallelConfig, device: str, entry: str, settings: RaySettings | None = None, *,
        spares: int = 0,
    ) -> None:  # fmt: skip
        self.parallel, self.device, self.entry, self.num_spares = parallel, device, entry, spares
        self.settings = settings or RaySettings()
        self.layout, self.lane_groups = parallel.layout, parallel.lane_groups
        self.instance = secrets.token_hex(3)
        self.epoch = 0  # of names
        self.on_exit: Callable[[], None] = lambda: None
        self.on_placed: Callable[[Placed], None] = lambda message: None
        self.address = "127.0.0.1"  # of this node, for those elsewhere
        self.before_leaving: list[Callable[[], None]] = []  # what needs Ray to end; called when the ranks have
        self.connection: Connection | None = None
        self.ranks: dict[int, Member] = {}
        self.alone: Alone | None = None  # instead, once Ray is gone
        self._bad: list[Seat] = []  # what was started there did not come up, again and again
        self._try_at, self._pause = 0.0, TRY_AGAIN  # when these may be tried
        self._last: dict[int, Seat] = {}  # of each rank
        self._closing = False
        # with a connection:
        self.seats: Seats
        self.members: Members
        self.recruits: Recruits
        self.watcher: Watcher

    # -- starting

    def start(self) -> list[Place]:
        """Raises ConfigError for a rule that is broken, CapacityError when the cluster stays too small."""
        self._equip(connect(self.settings.address, self.layout.size + self.num_spares, self.parallel.ray_runtime_env))
        if self.parallel.lane_groups:
            seats = self.seats.obtain_lanes(self.parallel.lane_groups, self.layout)
        else:
            seats = self.seats.obtain(self.parallel.placement_group, self.layout)
        self.on_placed(self._placed())
        for lane, each in enumerate(self.groups):
            for group in each.placement.spanning():
                first = lane * each.placement.layout.size
                logger.warning(
                    "tensor ranks %s are on several nodes: each layer's sums cross the network",
                    ", ".join(str(first + slot.rank) for slot in group),
                )
        names = [actor_name(self.instance, self.layout, rank, self.epoch) for rank in range(self.layout.size)]
        try:
            self.ranks = dict(enumerate(self.members.make(seats, names, self.settings.wait)))
        except Missing as e:
            self.ranks = dict(enumerate(e.members))  # to be ended
            raise
        return self._places()

    def _equip(self, connection: Connection) -> None:
        self.connection, self.address = connection, connection.address
        try:
            resource = connection.resource(self.device)
            self.seats = Seats(connection, resource, self.settings, f"planaria-{self.instance}")
            self.members = Members(connection, self.parallel, self.settings, resource, self.entry, self.instance)
            self.watcher = Watcher(connection.ray, self._on_end)
            self.recruits = Recruits(self.members, self.seats, self.watcher.add)
        except Exception:
            self.connection = None
            connection.close()
            raise

    def _placed(self) -> Placed:
        """Where the ranks are to come up."""
        connection, groups = self.seats.connection, self.groups
        rows = connection.nodes()
        names = () if groups[0].owned or groups[0].lent else (self.parallel.placement_group or "the enclosing group",)
        return Placed(connection.source(self.seats.resource, names), self.layout, [
            (slot.node, rows[slot.node]["NodeManagerAddress"] if slot.node in rows else "", slot.device, bundle)
            for group in groups
            for slot, bundle in zip(group.placement.slots, group.bundles, strict=True)
        ])  # fmt: skip

    @property
    def group(self) -> Group:
        """The first, which came into being as one."""
        return self.seats.groups[0]

    @property
    def groups(self) -> list[Group]:
        """The first, or one for each lane."""
        return [group for group in self.seats.groups if not group.added]

    def lend(self, groups: Sequence[LaneGroup]) -> Sequence[LaneGroup]:
        """See Borrower. Without Ray there is nothing to lend."""
        if self.alone is None:
            self.seats.lend(groups, self.layout)
        before, self.lane_groups = self.lane_groups, tuple(groups)
        return before

    @property
    def leaving(self) -> Sequence[int]:
        """Ranks on nodes that Ray has given up: none once there is no Ray to move to."""
        return [rank for rank, member in sorted(self.ranks.items()) if member.adrift]

    @property
    def graph(self) -> bool:
        """Do steps travel through a compiled graph?"""
        return self.parallel.ray_link == "compiled-graph" and self.alone is None

    @property
    def actors(self) -> list[object]:
        return [member.actor for _, member in sorted(self.ranks.items())]

    def _places(self) -> list[Place]:
        self._last |= {rank: member.seat for rank, member in self.ranks.items()}
        groups = [group.handle.id.hex() for group in self.groups]
        return [member.place(rank, groups) for rank, member in sorted(self.ranks.items())]

    def run(self, boots: Sequence[RankBoot]) -> None:
        if self.alone is not None:
            self.alone.run(boots)
            return
        for boot in boots:
            member = self.ranks[boot.rank]
            new = member.run is None
            self.members.begin(member, boot, self.ranks.values())
            if new:
                self.watcher.add(member)

    # -- replacing

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """See Launcher. Where steps come by a compiled graph all are replaced: survivors sit inside its loop. Those
        that Ray has given up are, too: they can't be told of another epoch."""
        if self.alone is not None:
            return self.alone.replace(ranks, layout)
        connection = self.connection
        assert connection is not None
        if self.graph:
            ranks = list(self.ranks)
        self._end([rank for rank, m in self.ranks.items() if rank in ranks or m.adrift or m.ended])
        self._leave()
        self.epoch += 1
        if not connection.answers():
            return self._go_alone(layout)
        try:
            self._fill(layout, REPLACE_LIMIT if ranks else CHANGE_LIMIT)
        except TimeoutError:  # meanwhile
            return self._go_alone(layout)
        self.layout = layout
        return self._places()

    def _end(self, ranks: Sequence[int]) -> None:
        """For certain, and forget them."""
        ending = [self.ranks.pop(rank) for rank in ranks]
        self._dismiss(ending)
        self.seats.back([member.seat for member in ending if member.seat not in self._bad])

    def _dismiss(self, members: Sequence[Member]) -> None:
        for member in members:
            self.watcher.forget(member)
        self.members.end(members)
        for member in members:
            member.forget()

    def _fill(self, layout: Layout, limit: float) -> None:
        """Have exactly these: who lives keeps its number, or takes one that nobody has, or ends; then recruits; then
        new actors, which get `limit` seconds to come up. Raises Infeasible, CapacityError; TimeoutError when Ray does
        not answer."""
        waiting, began = Waiting("a place for any rank", NO_PLACE), time.monotonic()
        while True:
            staff = self._staff(layout)
            try:
                seats = self.seats.find(layout, {rank: member.seat for rank, member in staff.items()})
            except Infeasible as e:
                if e.nearest is not None:
                    raise
                elapsed = time.monotonic() - began
                if waiting.over(elapsed):
                    raise CapacityError(f"{e.why}; nothing came in {elapsed:.0f} s") from None
                for line in waiting.lines(elapsed, e.why):
                    logger.warning("%s", line)
                time.sleep(LOOK)
                continue
            names = [actor_name(self.instance, layout, rank, self.epoch) for rank in seats]
            try:
                new = self.members.make(list(seats.values()), names, limit) if seats else []
            except Missing as e:
                logger.warning("%s; trying another place", e)
                for member in e.members:
                    self.recruits.add(member)
                self.seats.distrust({seat.node for seat in e.seats})
                self.seats.back(e.seats)
                self.epoch += 1  # names are used once
                continue
            staff |= dict(zip(seats, new, strict=True))
            for member in staff.values():
                self.recruits.drop(member)
            left = [rank for rank, member in self.ranks.items() if member not in staff.values()]
            self._end(left)
            self.ranks = staff
            self.seats.trim()
            return

    def _staff(self, layout: Layout) -> dict[int, Member]:
        """Who of those that are there would be which rank."""
        staff = {rank: member for rank, member in self.ranks.items() if rank < layout.size}
        others = [member for rank, member in sorted(self.ranks.items()) if rank >= layout.size]
        others += self.recruits.there()
        missing = [rank for rank in range(layout.size) if rank not in staff]
        return staff | dict(zip(missing, others, strict=False))

    def give_up(self, ranks: Sequence[int]) -> None:
        """See Launcher."""
        if self.alone is not None:
            self.alone.give_up(ranks)
            return
        self._bad += [self._last[rank] for rank in ranks if rank in self._last]
        self._try_at = time.monotonic() + self._pause

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        """See Launcher."""
        if self.alone is not None:
            return self.alone.prepare(layout, boot)
        self._recruit(layout, boot)
        staying = len(self.ranks) - len(self.leaving)
        ready = sum(self.recruits.ready(member) for member in self.recruits.there())
        return shrink(Cluster((Node.of("", staying + ready),)), layout)

    def room_for(self, layout: Layout) -> bool:
        """See Launcher. A cluster may have to grow first, or turn out to be too small: the change itself finds out."""
        return self.alone is not None and self.alone.room_for(layout)

    def stand_by(self, boot: RankBoot) -> None:
        """See Launcher."""
        if self.alone is None:
            self._recruit(self.layout, boot)

    def _recruit(self, layout: Layout, boot: RankBoot) -> None:
        if self._bad and time.monotonic() >= self._try_at:
            bad, self._bad = self._bad, []
            self.seats.back([seat for seat in bad if seat not in (member.seat for member in self.ranks.values())])
            self._pause = min(LONGEST_TRY, 2 * self._pause)
            self._try_at = time.monotonic() + self._pause
        staying = {rank: member for rank, member in self.ranks.items() if not member.adrift}
        self.recruits.want(self.num_spares + layout.size - len(staying), boot, layout, staying)

    def spare_pids(self) -> list[int]:
        """Of this node."""
        if self.alone is not None:
            return self.alone.spare_pids()
        return [member.at.pid for member in self.recruits.there() if member.here]

    def _go_alone(self, layout: Layout) -> list[Place]:
        """Without Ray from now on. Raises Infeasible, CapacityError."""
        here = [seat for seat in self.members.here if seat not in self._bad]
        devices = [id for seat in here for id in self.members.here[seat]]
        self._dismiss(list(self.ranks.values()))
        self.ranks = {}
        self._dismiss(self.recruits.stop())
        self.watcher.stop()
        if not here:
            raise CapacityError("Ray does not answer any more, and none of its ranks was on this node")
        logger.warning("Ray does not answer: ranks go on as processes of this node, which has room for %d", len(here))
        self.alone = Alone(self.entry.partition(":")[0], self.address, len(here), devices, self._exited)
        return self.alone.replace((), layout)

    # -- ends

    def _on_end(self, member: Member) -> None:
        if self._closing:
            return
        if self.recruits.drop(member):
            logger.warning("an actor in reserve %s", member.ended or "is on a node that Ray has given up")
            proven = self.recruits.ready(member)
            self._dismiss([member])
            if proven:
                self.seats.back([member.seat])
            else:
                self._bad.append(member.seat)
        elif member.adrift:
            logger.warning("Ray has given up the node of process %d, which lives on", member.at.pid)
        else:
            self.on_exit()

    def _exited(self) -> None:
        self.on_exit()

    def lost(self) -> dict[int, str]:
        """Ranks that have ended though nobody asked, and how."""
        if self._closing:
            return {}
        if self.alone is not None:
            return self.alone.lost()
        return {rank: how for rank, member in sorted(self.ranks.items()) if (how := _how(member))}

    def settle(self, ranks: Sequence[int]) -> None: ...

    def closing(self) -> None:
        self._closing = True
        if self.alone is not None:
            self.alone.closing()

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""
        self._closing = True
        if self.alone is not None:
            self.alone.kill()
        if self.connection is not None:
            self.members.end(list(self.ranks.values()))
        self.close()

    def close(self) -> None:
        """Let ranks end by themselves for a while, then end what is left; no actor, no placement group made here and no
        process of theirs remains. Idempotent."""
        self._closing = True
        if self.alone is not None:
            self.alone.close()
        connection, self.connection = self.connection, None
        if connection is None:
            return
        self._end_all(connection)
        connection.close()

    def _end_all(self, connection: Connection) -> None:
        recruits, ranks = self.recruits.stop(), list(self.ranks.values())
        self.members.end(recruits)
        answers = connection.answers()
        if not answers:
            self.members.end(ranks)
        else:
            runs = [member.run for member in ranks if member.run is not None]
            if runs:
                with contextlib.suppress(Exception):
                    connection.ray.wait(runs, num_returns=len(runs), timeout=EXIT_TIMEOUT)
            self.members.kill_actors([member.actor for member in ranks])
        self.watcher.stop()
        await_ends(ranks, (KILL_TIMEOUT, KILL_TIMEOUT), Member.kill)
        for member in [*recruits, *ranks]:
            member.forget()
        self.ranks = {}
        self._leave()
        if answers:
            self.members.close()
            self.seats.remove()

    def _leave(self) -> None:
        for end in self.before_leaving:
            end()
        self.before_leaving.clear()


def _how(member: Member) -> str:
    """A rank's end, in words; empty as long as it lives."""
    return member.ended or ("ended after Ray had given up its node" if member.adrift and member.gone() else "")
