"""Which actor of an engine is which rank, and in which bundle: who is lost, who takes its place, who gets ready to.

A lost rank is replaced by a spare, in its own bundle, or on another node. A bundle whose actors end again and again is
not used any more until its time comes to be tried.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError
from planaria.executor.boot import RankBoot
from planaria.executor.ray.bundles import BundlePool, HeldBundle
from planaria.executor.ray.cluster import Connection
from planaria.executor.ray.members import KILL_TIMEOUT, Member, Members, Missing, await_ends
from planaria.executor.ray.names import actor_name
from planaria.executor.ray.spares import Spares
from planaria.executor.ray.waiting import Waiting
from planaria.executor.ray.watch import Watcher
from planaria.hosts.host import Place
from planaria.hosts.pool import LONGEST_TRY, TRY_AGAIN
from planaria.topology import Cluster, Infeasible, Layout, Node, shrink

logger = logging.getLogger("planaria.ray")

EXIT_TIMEOUT = 5.0  # seconds ranks get to end by themselves
NO_PLACE = 60.0  # seconds to wait for a place where not one rank has any
LOOK = 1.0


class Staff:
    """entry, instance: as of Members. spares: how many actors get ready to replace one. on_lost: called from any thread
    when a rank has ended unasked."""

    def __init__(
        self, connection: Connection, parallel: ParallelConfig, settings: RaySettings, device: str, entry: str,
        instance: str, spares: int, on_lost: Callable[[], None],
    ) -> None:  # fmt: skip
        resource = connection.resource(device)
        self.connection, self.instance, self.num_spares, self.on_lost = connection, instance, spares, on_lost
        self.bundles = BundlePool(connection, resource, settings, f"planaria-{instance}")
        self.members = Members(connection, parallel, settings, resource, entry, instance)
        self.watcher = Watcher(connection.ray, self._on_end)
        self.spares = Spares(self.members, self.bundles, self.watcher.add)
        self.ranks: dict[int, Member] = {}
        self.epoch = 0  # of names
        self.closing = False  # an end is no loss any more
        self._bad: list[HeldBundle] = []  # what was started there did not come up, again and again
        self._try_at, self._pause = 0.0, TRY_AGAIN  # when these may be tried
        self._last: dict[int, HeldBundle] = {}  # of each rank

    def start(self, bundles: Sequence[HeldBundle], layout: Layout, limit: float) -> None:
        """A rank in each. Raises Missing."""
        try:
            self.ranks = dict(enumerate(self.members.make(bundles, self._names(layout, range(layout.size)), limit)))
        except Missing as e:
            self.ranks = dict(enumerate(e.members))  # to be ended
            raise

    def _names(self, layout: Layout, ranks: Sequence[int]) -> list[str]:
        return [actor_name(self.instance, layout, rank, self.epoch) for rank in ranks]

    def places(self) -> list[Place]:
        self._last |= {rank: member.bundle for rank, member in self.ranks.items()}
        groups = [group.handle.id.hex() for group in self.bundles.first]
        return [member.place(rank, groups) for rank, member in sorted(self.ranks.items())]

    def run(self, boots: Sequence[RankBoot]) -> None:
        for boot in boots:
            member = self.ranks[boot.rank]
            new = member.run is None
            self.members.begin(member, boot, self.ranks.values())
            if new:
                self.watcher.add(member)

    @property
    def leaving(self) -> list[int]:
        """Ranks on nodes that Ray has given up."""
        return [rank for rank, member in sorted(self.ranks.items()) if member.adrift]

    # -- replacing

    def end(self, ranks: Sequence[int]) -> None:
        """These, and whoever has ended or can't be told of another epoch: for certain, and forget them."""
        self._end([rank for rank, m in self.ranks.items() if rank in ranks or m.adrift or m.ended])

    def _end(self, ranks: Sequence[int]) -> None:
        ending = [self.ranks.pop(rank) for rank in ranks]
        self._dismiss(ending)
        self.bundles.back([member.bundle for member in ending if member.bundle not in self._bad])

    def _dismiss(self, members: Sequence[Member]) -> None:
        for member in members:
            self.watcher.forget(member)
        self.members.end(members)
        for member in members:
            member.forget()

    def fill(self, layout: Layout, limit: float) -> None:
        """Have exactly these: who lives keeps its number, or takes one that nobody has, or ends; then spares; then
        new actors, which get `limit` seconds to come up. Raises Infeasible, CapacityError; TimeoutError when Ray does
        not answer."""
        waiting, began = Waiting("a place for any rank", NO_PLACE), time.monotonic()
        self.epoch += 1
        while True:
            chosen = self._chosen(layout)
            try:
                bundles = self.bundles.find(layout, {rank: member.bundle for rank, member in chosen.items()})
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
            try:
                names = self._names(layout, list(bundles))
                new = self.members.make(list(bundles.values()), names, limit) if bundles else []
            except Missing as e:
                logger.warning("%s; trying another place", e)
                for member in e.members:
                    self.spares.add(member)
                self.bundles.distrust({bundle.node for bundle in e.bundles})
                self.bundles.back(e.bundles)
                self.epoch += 1  # names are used once
                continue
            chosen |= dict(zip(bundles, new, strict=True))
            for member in chosen.values():
                self.spares.drop(member)
            self._end([rank for rank, member in self.ranks.items() if member not in chosen.values()])
            self.ranks = chosen
            self.bundles.trim()
            return

    def _chosen(self, layout: Layout) -> dict[int, Member]:
        """Who of those that are there would be which rank."""
        chosen = {rank: member for rank, member in self.ranks.items() if rank < layout.size}
        others = [member for rank, member in sorted(self.ranks.items()) if rank >= layout.size]
        others += self.spares.there()
        missing = [rank for rank in range(layout.size) if rank not in chosen]
        return chosen | dict(zip(missing, others, strict=False))

    def give_up(self, ranks: Sequence[int]) -> None:
        """See Launcher."""
        self._bad += [self._last[rank] for rank in ranks if rank in self._last]
        self._try_at = time.monotonic() + self._pause

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        """See Launcher."""
        self.keep_spares(layout, boot)
        staying = len(self.ranks) - len(self.leaving)
        ready = sum(self.spares.ready(member) for member in self.spares.there())
        return shrink(Cluster((Node.of("", staying + ready),)), layout)

    def keep_spares(self, layout: Layout, boot: RankBoot) -> None:
        """As many as were asked for, and for whoever is missing. Bundles that are no good are tried now and then."""
        if self._bad and time.monotonic() >= self._try_at:
            bad, self._bad = self._bad, []
            held = {member.bundle for member in self.ranks.values()}
            self.bundles.back([bundle for bundle in bad if bundle not in held])
            self._pause = min(LONGEST_TRY, 2 * self._pause)
            self._try_at = time.monotonic() + self._pause
        staying = {rank: member for rank, member in self.ranks.items() if not member.adrift}
        self.spares.want(self.num_spares + layout.size - len(staying), boot, layout, staying)

    def go(self) -> tuple[int, list[int]]:
        """Ray is gone: everybody ends. How many ranks this node has room for, and their accelerators."""
        here = [bundle for bundle in self.members.here if bundle not in self._bad]
        devices = [id for bundle in here for id in self.members.here[bundle]]
        self._dismiss(list(self.ranks.values()))
        self.ranks = {}
        self._dismiss(self.spares.stop())
        self.watcher.stop()
        return len(here), devices

    # -- ends

    def _on_end(self, member: Member) -> None:
        if self.closing:
            return
        if self.spares.drop(member):
            logger.warning("an actor in reserve %s", member.ended or "is on a node that Ray has given up")
            proven = self.spares.ready(member)
            self._dismiss([member])
            if proven:
                self.bundles.back([member.bundle])
            else:
                self._bad.append(member.bundle)
        elif member.adrift:
            logger.warning("Ray has given up the node of process %d, which lives on", member.at.pid)
        else:
            self.on_lost()

    def lost(self) -> dict[int, str]:
        """See Launcher."""
        return {rank: how for rank, member in sorted(self.ranks.items()) if (how := _how(member))}

    def close(self) -> bool:
        """Let ranks end by themselves for a while, then end what is left. Does Ray answer, so that its groups can be
        removed?"""
        spares, ranks = self.spares.stop(), list(self.ranks.values())
        self.members.end(spares)
        answers = self.connection.answers()
        if not answers:
            self.members.end(ranks)
        else:
            runs = [member.run for member in ranks if member.run is not None]
            if runs:
                with contextlib.suppress(Exception):
                    self.connection.ray.wait(runs, num_returns=len(runs), timeout=EXIT_TIMEOUT)
            self.members.kill_actors([member.actor for member in ranks])
        self.watcher.stop()
        await_ends(ranks, (KILL_TIMEOUT, EXIT_TIMEOUT), Member.kill)
        for member in [*spares, *ranks]:
            member.forget()
        self.ranks = {}
        return answers


def _how(member: Member) -> str:
    """A rank's end, in words; empty as long as it lives."""
    return member.ended or ("ended after Ray had given up its node" if member.adrift and member.gone() else "")
