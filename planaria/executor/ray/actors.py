"""Actors of one engine, or of a fleet's engines: what they are made with, where they came up, and that they are gone.

An end is made certain by pid: from here where a process is on this node, else by an agent on its node, because an actor
that is stopped outlives `ray.kill` for seconds. A process that can't be shown to have ended is remembered, and whoever
gets a device on its machine ends it first.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from planaria.config.options import ParallelConfig
from planaria.env import environment
from planaria.executor.patience import FIRST, Patience
from planaria.executor.ray import environment as env
from planaria.executor.ray.actor import NodeReaper, Whereabouts, remote_class, report
from planaria.executor.ray.child import Order, RayChild
from planaria.executor.ray.cluster import HINT, Connection, bounded
from planaria.hosts.host import Child, News, Place, Slot
from planaria.node import Memories
from planaria.topology.platforms import MASKED

logger = logging.getLogger("planaria.ray")

LOOK = 1.0  # seconds between looks at nodes where one is to come up
KILL_TIMEOUT = 2.0  # seconds a killed process gets to be gone
FAR_TIMEOUT = 4.0  # seconds an agent gets to say so
COMES = 20.0  # seconds it gets to come up
ANSWERS = 20.0  # seconds for Ray itself, beside what one gets to come up
JOIN = 3.0
NSIGHT = {"t": "cuda,cudnn,cublas", "o": "'worker_process_%p'", "cuda-graph-trace": "node"}


class Actors:
    """resource: what one device is to Ray; instance: in their names; bundle_of(at): index of the bundle of the engine's
    placement group that it has, -1: none. Raises ConfigError. Any thread."""

    def __init__(
        self, connection: Connection, parallel: ParallelConfig, resource: str, instance: str,
        bundle_of: Callable[[Whereabouts], int] = lambda at: -1,
    ) -> None:  # fmt: skip
        self.connection, self.parallel, self.resource, self.instance = connection, parallel, resource, instance
        self.bundle_of = bundle_of
        self.changed = threading.Condition()
        self.children: list[RayChild] = []  # that aren't gone
        self._given = connection.inherited(parallel.ray_runtime_env)
        self._offer = env.offered(environment())
        self._asked: dict[str, frozenset[str]] = {}  # node -> variables that it has set itself
        self._reapers: dict[str, Any] = {}  # home -> NodeReaper
        self._memories: dict[tuple[str, int], Memories] = {}  # of reapers, by home and engine
        self._unconfirmed: dict[str, list[tuple[int, int]]] = {}  # home -> processes that may still be there
        self._shown: set[str] = set()

    def spawn(self, slot: Slot, entry: str, order: Callable[[], Order], limit: float, news: News) -> RayChild:
        child = RayChild(self, slot, entry, order, limit, news)
        with self.changed:
            self.children = [*(each for each in self.children if not each.gone.is_set()), child]
        child.thread.start()
        return child

    def tell_all(self) -> None:
        """Something has changed."""
        with self.changed:
            self.changed.notify_all()

    def await_starts(self, children: Iterable[Child]) -> None:
        """See Host; each has a limit of its own."""
        own = [child for child in children if isinstance(child, RayChild)]
        limit = ANSWERS + max((child.limit for child in own), default=0.0)
        patience = Patience(logger.warning, limit, FIRST)
        with self.changed:
            while late := [child for child in own if not (child.place.pid or child.ended)]:
                if patience.over:
                    break
                patience.tell(f"waiting for actors to come up: {len(late)} of {len(own)} are missing; {HINT}")
                self.changed.wait(LOOK)
        for child in late:
            child.ended = child.ended or f"did not come up: Ray has not answered for {limit:.0f} s"
            child.kill()

    def await_ends(self, children: Iterable[Child], timeout: float) -> list[Child]:
        """See Host. Their processes have ended, too, as far as that can be told."""
        own = [child for child in children if isinstance(child, RayChild)]
        with self.changed:
            self.changed.wait_for(lambda: all(child.gone.is_set() for child in own), timeout)
        return [child for child in own if not child.gone.is_set()]

    # -- making

    def bring_up(self, child: RayChild) -> None:
        """In its thread. Raises OSError: not there; and whatever Ray does."""
        try:
            self._bring_up(child)
        except Exception as e:
            if not child.killed:
                logger.warning("on node %s nothing can be started on Ray now: %s", child.slot[0], e)
                self.connection.distrusted.add([child.slot[0]])
            raise

    def _bring_up(self, child: RayChild) -> None:
        order = child.ordered = child.order()
        ray, deadline = self.connection.ray, time.monotonic() + child.limit
        ask = functools.partial(self._answer, child, order.nodes, deadline)
        given = dict(self._given)
        variables = self._missing_at_start(order.nodes[0], ask)
        if not order.engine and self.resource in MASKED:  # the mask is ours to set: see `begin`
            variables |= {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in sorted(env.COMPUTED)}
        if variables := variables | given.get("env_vars", {}):
            given["env_vars"] = variables
        if not order.engine and self.parallel.ray_workers_use_nsight:
            given["nsight"] = NSIGHT
        options = {**order.options, **({"runtime_env": given} if given else {})}
        child.actor = remote_class(ray).options(name=order.name, **options).remote(engine=order.engine)
        names = sorted({*self._offer, *env.COMPUTED})
        child.found(msgspec.msgpack.decode(ask(child.actor.where.remote(self.resource, names)), type=Whereabouts))
        self._end_older(child)
        self._send_reaper(child)
        self._find_memories(child)

    def place(self, child: RayChild) -> Place:
        at = child.at
        assert at is not None
        bundle = self.bundle_of(at)
        return Place(-1, at.home, at.node, at.address, at.pid, at.cores, at.devices, at.ray_node, bundle)

    def _answer(self, child: RayChild, nodes: Sequence[str], deadline: float, asked: Any) -> Any:
        """Raises OSError."""
        while True:
            done, _ = self.connection.ray.wait([asked], timeout=LOOK)
            if done:
                return self.connection.ray.get(asked)
            if child.killed:
                raise OSError("it was told to end")
            if time.monotonic() >= deadline:
                raise OSError(f"it did not come up on Ray within {child.limit:.0f} s")
            if deaf := self.connection.deaf(nodes):
                raise OSError(f"the raylet of node {deaf[0]} does not answer")

    def _missing_at_start(self, node: str, ask: Callable[[Any], Any]) -> dict[str, str]:
        """What processes read when they start and the node has not set itself."""
        offer = env.read_at_start(self._offer)
        if offer and node not in self._asked:
            task = self.connection.ray.remote(num_cpus=0, max_retries=0)(report)
            self._asked[node] = frozenset(ask(task.options(**on_node(node)).remote(list(offer))))
        return {name: value for name, value in offer.items() if name not in self._asked.get(node, ())}

    def begin(self, child: RayChild, message: bytes) -> tuple[Any, Any]:
        """It becomes what the message says. References of its life, and of the first thing that it says."""
        at, order, computed = child.at, child.ordered, dict[str, str]()
        assert at is not None and order is not None
        if at.devices and not order.engine:
            beside = [each.at for each in [child, *self.children] if each.at is not None and not each.gone.is_set()]
            ids = {id for other in beside if other.home == at.home for id in other.devices}
            computed = dict.fromkeys(sorted(env.COMPUTED), ",".join(map(str, sorted(ids))))
        changes = env.merge(at.own, self._offer, computed)
        if at.node not in self._shown and not child.here:
            self._shown.add(at.node)
            logger.info("environment on %s: %s", at.node, "; ".join(c.line for c in changes) or "as it is there")
        values = {change.name: change.new for change in changes} | dict(order.variables)
        return child.actor.run.remote(child.entry, message, values), child.actor.said.remote()

    # -- ending

    def _send_reaper(self, child: RayChild) -> None:
        """To a machine where there was none of us yet."""
        at = child.at
        assert at is not None
        with self.changed:
            if not child.here and at.home not in self._reapers:
                kind = self.connection.ray.remote(num_cpus=0, max_restarts=0)(NodeReaper)
                name = f"planaria-{self.instance}-reaper-{at.ray_node[:8]}"
                self._reapers[at.home] = kind.options(name=name, **on_node(at.ray_node)).remote()

    def _find_memories(self, child: RayChild) -> None:
        """That it may have of its machine's reaper. Without them it has its own. Raises OSError: it was told to end."""
        at, order = child.at, child.ordered
        assert at is not None and order is not None
        reaper = self._reapers.get(at.home)
        if child.here or order.shares is None or reaper is None:
            return
        devices, known = at.devices if order.keeps else (), self._memories.get((at.home, order.shares[0]))
        if known is not None and {*devices} <= {id for id, _ in known.keepers}:
            return
        try:
            asked = reaper.memories.remote(*order.shares, order.keeps, devices)
            told = self._answer(child, order.nodes, time.monotonic() + COMES, asked)
            self._memories[at.home, order.shares[0]] = msgspec.msgpack.decode(told, type=Memories)
        except Exception as e:  # whatever Ray raises
            if child.killed:
                raise
            logger.warning("on %s KV and weights don't outlive their processes: %s", at.node, e)

    def memories(self, home: str, engine: int = 0) -> Memories:
        """Of an engine on another machine, where its ranks have come up."""
        return self._memories.get((home, engine), Memories())

    def _end_older(self, child: RayChild) -> None:
        """What may be left on this machine of those before. Raises OSError."""
        at = child.at
        assert at is not None
        if old := self._unconfirmed.get(at.home, []):
            gone = self._ask(child.actor, old)
            self._unconfirmed[at.home] = [each for each, is_gone in zip(old, gone, strict=True) if not is_gone]
            if not all(gone):
                raise OSError(f"on {at.node} a process that had the device before can't be ended")

    def _ask(self, who: Any, processes: list[tuple[int, int]]) -> list[bool]:
        try:
            found: list[bool] = self.connection.ray.get(who.end.remote(processes), timeout=FAR_TIMEOUT)
        except Exception:  # it, or its node, or Ray has gone: whatever was ended is not known
            found = [False] * len(processes)
        return found

    def end(self, child: RayChild) -> None:
        """For certain, a stopped one too; what can't be confirmed is remembered. In a thread."""
        at, gone = child.at, True
        returned = child.ended.startswith("returned")  # it is idle: Ray ends it, and would complain if others did
        if at is not None and not (child.here or returned) and self.connection.alive:
            reaper = self._reapers.get(at.home)
            gone = reaper is not None and all(self._ask(reaper, [(at.pid, at.born)]))
            if not gone:
                self._reapers.pop(at.home, None)  # another is sent with the next one there, with memory of its own
                self._memories = {key: each for key, each in self._memories.items() if key[0] != at.home}
        if child.actor is not None and self.connection.alive:
            bounded("kill an actor", functools.partial(self.connection.ray.kill, child.actor))
        if child.here and not child.has_gone(KILL_TIMEOUT):
            child.signal()
            if not (gone := child.has_gone(KILL_TIMEOUT)):
                logger.error("process %d was killed and is still there", child.place.pid)
        if at is not None and not gone:
            self._unconfirmed.setdefault(at.home, []).append((at.pid, at.born))

    def close(self) -> None:
        """End the agents; whoever is left is killed by their owners before."""
        deadline = time.monotonic() + JOIN
        for child in self.children:
            child.thread.join(max(0.0, deadline - time.monotonic()))
        reapers, self._reapers = list(self._reapers.values()), {}
        if reapers and self.connection.alive:
            bounded("kill actors", lambda: [self.connection.ray.kill(reaper) for reaper in reapers])


def on_node(node: str) -> dict[str, Any]:
    """Options of a task or an actor that reserves nothing there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
