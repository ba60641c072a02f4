"""Actors that get ready to be ranks: spares that were asked for, and whoever the layout is short of.

A thread makes them, since Ray takes seconds to start one, and may hang: the engine only looks at who is there. Each is
given a spare's boot, loads what any rank may need, and waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

from planaria.errors import PlanariaError
from planaria.executor.boot import RankBoot
from planaria.executor.ray.bundles import BundlePool, HeldBundle
from planaria.executor.ray.members import Member, Members, Missing
from planaria.executor.ray.names import spare_name
from planaria.node import process_state
from planaria.topology import Infeasible, Layout

logger = logging.getLogger("planaria.ray")

LOOK = 2.0  # seconds between looks for a place
START_LIMIT = 60.0  # seconds for a spare to come up
JOIN = 3.0


class Spares:
    """on_begin(member) is called when one has begun, so that its end is seen; whoever sees it calls `drop`."""

    def __init__(self, members: Members, bundles: BundlePool, on_begin: Callable[[Member], None]) -> None:
        self.members, self.bundles, self.on_begin = members, bundles, on_begin
        self._there: list[Member] = []
        self._wanted = 0
        self._boot: RankBoot | None = None
        self._layout, self._held = Layout(), dict[int, Member]()
        self._made = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def want(self, count: int, boot: RankBoot, layout: Layout, held: Mapping[int, Member]) -> None:
        """See that there are so many. layout: that there should be; held: its ranks that there are. Returns at once."""
        with self._lock:
            self._wanted, self._boot, self._layout, self._held = count, boot, layout, dict(held)
            if self._thread is None and count and not self._over:
                self._thread = threading.Thread(target=self._keep_spares, name="planaria-ray-spares", daemon=True)
                self._thread.start()
        self._wake.set()

    def there(self) -> list[Member]:
        """Those that have begun; the ready ones first."""
        with self._lock:
            return sorted(self._there, key=lambda member: not self.ready(member))

    def ready(self, member: Member) -> bool:
        ray = self.members.connection.ray
        if member.ready is not None and ray.wait([member.ready], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):  # it has ended instead
                ray.get(member.ready)
                member.ready = None
        return member.ready is None

    def add(self, member: Member) -> None:
        """It came up as a rank, and isn't needed as that now."""
        with self._lock:
            self._there.append(member)

    def drop(self, member: Member) -> bool:
        """It has become a rank, or has ended. False if it wasn't here."""
        with self._lock:
            found = member in self._there
            if found:
                self._there.remove(member)
        return found

    def stop(self) -> list[Member]:
        """No more. Those that are there, for the caller to end."""
        self._over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(JOIN)
        with self._lock:
            there, self._there = self._there, []
        return there

    def _keep_spares(self) -> None:
        said = ""
        while not self._over:
            self._wake.clear()
            for member in self.there():
                if member.here and process_state(member.at.pid) in ("T", "t"):
                    logger.warning("a rank in reserve, process %d, is stopped: killed", member.at.pid)
                    member.kill()  # whoever sees its end calls `drop`, and the engine wants another
            with self._lock:
                short = self._wanted - len(self._there)
            if short <= 0:
                self._wake.wait()
                continue
            try:
                self._make()
                said = ""
                continue
            except Infeasible as e:
                why = f"there is no room for it: {e.why}"
            except (PlanariaError, TimeoutError) as e:
                why = str(e)
            except Exception as e:  # whatever Ray raises where it is going
                why = f"{type(e).__name__}: {e}"
            if why != said:
                logger.warning("a rank in reserve can't be started on Ray now: %s", why.splitlines()[0])
                said = why
            self._wake.wait(LOOK)

    def _make(self) -> None:
        """One more. Raises Infeasible, Missing, TimeoutError."""
        with self._lock:
            boot, layout, held = self._boot, self._layout, dict(self._held)
            for member in self._there:  # each for a rank that is missing, or in reserve
                free = next((rank for rank in range(layout.size) if rank not in held), len(held))
                held[free] = member
        assert boot is not None
        try:
            bundle = self._bundle(layout, {rank: member.bundle for rank, member in held.items() if rank < layout.size})
        except Infeasible:  # not for all that are missing: anywhere, then
            bundle = self.bundles.find(Layout(), {})[0]
        self._made += 1
        try:
            (member,) = self.members.make([bundle], [spare_name(self.members.instance, self._made)], START_LIMIT)
        except Exception as e:
            if isinstance(e, Missing):
                self.bundles.distrust([bundle.node])
            self.bundles.back([bundle])
            raise
        self.members.begin(member, boot, held.values())
        with self._lock:
            self._there.append(member)
        self.on_begin(member)

    def _bundle(self, layout: Layout, held: dict[int, HeldBundle]) -> HeldBundle:
        """For the first rank that is missing, where it should be; else anywhere."""
        missing = next((rank for rank in range(layout.size) if rank not in held), None)
        if missing is None:
            return self.bundles.find(Layout(), {})[0]
        return self.bundles.find(layout, held, only=missing)[missing]
