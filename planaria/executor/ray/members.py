"""Actors that are ranks, or get ready to be: making them, finding out where they came up, beginning, ending.

An end is made certain by pid: from here where a process is on this node, else by an agent on its node, because an actor
that is stopped outlives `ray.kill` for seconds. A process that can't be shown to have ended is remembered, and whoever
gets a device on its machine ends it first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings, environment
from planaria.errors import CapacityError
from planaria.executor.boot import RankBoot
from planaria.executor.ray import environment as env
from planaria.executor.ray.actor import NodeReaper, Whereabouts, remote_class, report
from planaria.executor.ray.bundles import HeldBundle
from planaria.executor.ray.cluster import Connection, bounded
from planaria.executor.ray.waiting import Waiting
from planaria.hosts.host import Place
from planaria.node import home, readable

logger = logging.getLogger("planaria.ray")

KILL_TIMEOUT = 2.0  # seconds a killed process gets to be gone
FAR_TIMEOUT = 4.0  # seconds an agent gets to say so
NSIGHT = {"t": "cuda,cudnn,cublas", "o": "'worker_process_%p'", "cuda-graph-trace": "node"}


class Missing(CapacityError):
    """Some actors did not come up. members: those that did; bundles: of the others."""

    def __init__(self, why: str, members: list[Member], bundles: list[HeldBundle]) -> None:
        super().__init__(why)
        self.members, self.bundles = members, bundles


class Member:
    """An actor in its bundle. run: reference of its life, None before that began; ready: of a spare, what ends when it
    is prepared."""

    def __init__(self, bundle: HeldBundle, actor: Any, at: Whereabouts) -> None:
        self.bundle, self.actor, self.at = bundle, actor, at
        self.run: Any = None
        self.ready: Any = None
        self.ended = ""  # how, if it ended unasked
        self.adrift = False  # Ray has given it up, with its node, and it lives on
        self.pidfd = -1
        if self.here:
            with contextlib.suppress(ProcessLookupError):
                self.pidfd = os.pidfd_open(at.pid)

    @property
    def here(self) -> bool:
        """On the driver's machine, whichever raylet it belongs to."""
        return self.at.home == home()

    def place(self, rank: int, groups: Collection[str]) -> Place:
        """groups: the engine's placement groups, by id, but for those of devices that were added."""
        at = self.at
        bundle = at.bundle if at.group in groups else -1
        return Place(rank, at.home, at.node, at.address, at.pid, at.cores, at.devices, at.ray_node, bundle)

    def gone(self, timeout: float = 0.0) -> bool:
        """Has its process ended, as far as that can be seen from here?"""
        if not self.here or self.pidfd < 0:
            return self.here
        return readable(self.pidfd, timeout)

    def forget(self) -> None:
        """It has been dealt with."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def kill(self) -> None:
        """From here; without effect where that can't be done."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class Members:
    """Makes and ends them. Any thread."""

    def __init__(
        self, connection: Connection, parallel: ParallelConfig, settings: RaySettings, resource: str, entry: str,
        instance: str,
    ) -> None:  # fmt: skip
        self.connection, self.parallel, self.settings, self.resource = connection, parallel, settings, resource
        self.entry, self.instance = entry, instance
        self.offer = env.offered(environment())
        self._asked: dict[str, frozenset[str]] = {}  # node -> variables that it has set itself
        self._reapers: dict[str, Any] = {}  # home -> NodeReaper
        self._unconfirmed: dict[str, list[tuple[int, int]]] = {}  # home -> processes that may still be there
        self._shown: set[str] = set()
        self.here: dict[HeldBundle, tuple[int, ...]] = {}  # of bundles on the driver's machine, their accelerators

    # -- making

    def make(self, bundles: Sequence[HeldBundle], names: Sequence[str], limit: float) -> list[Member]:
        """One actor in each bundle. Raises Missing."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self.connection.ray
        kind = remote_class(ray)
        options = self._options([bundle.node for bundle in bundles], limit)
        actors = [
            kind.options(
                name=name,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundle.group.handle, placement_group_bundle_index=bundle.number,
                    placement_group_capture_child_tasks=False,
                ),
                **options,
            ).remote()
            for bundle, name in zip(bundles, names, strict=True)
        ]  # fmt: skip
        asked = sorted({*self.offer, *env.COMPUTED})
        answers = self._all([actor.where.remote(self.resource, asked) for actor in actors], "ranks to come up", limit)
        members = [
            None if isinstance(answer, str) else Member(bundle, actor, msgspec.msgpack.decode(answer, type=Whereabouts))
            for bundle, actor, answer in zip(bundles, actors, answers, strict=True)
        ]
        why = next((answer for answer in answers if isinstance(answer, str)), "")
        for i, member in enumerate(members):
            if member is not None and not self._has_device(member):
                self.end([member])
                members[i], why = None, f"on {member.at.node} a process that had the device before can't be ended"
        made = [member for member in members if member is not None]
        if len(made) < len(bundles):
            lost = [i for i, member in enumerate(members) if member is None]
            self.kill_actors([actors[i] for i in lost])
            raise Missing(why, made, [bundles[i] for i in lost])
        self.here |= {member.bundle: member.at.devices for member in made if member.here}
        self._send_reapers(made)
        return made

    def _options(self, nodes: Collection[str], limit: float) -> dict[str, Any]:
        fraction, resource = self.settings.fraction, self.resource
        wants: dict[str, Any] = (
            {"num_gpus": fraction} if resource == "GPU" else {"num_cpus": fraction} if resource == "CPU"
            else {"resources": {resource: fraction}}
        )  # fmt: skip
        runtime_env = self._runtime_env(nodes, limit)
        if runtime_env:
            wants["runtime_env"] = runtime_env
        return wants

    def _runtime_env(self, nodes: Collection[str], limit: float) -> dict[str, Any]:
        """The user's, and over it what must be there before the process starts."""
        given = self.connection.inherited(self.parallel.ray_runtime_env)
        variables = self._missing_at_start(nodes, limit)
        if self.resource in ("GPU", "NPU", "HPU", "TPU"):  # the mask is ours to set: see `begin`
            variables |= {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in sorted(env.COMPUTED)}
        variables |= given.get("env_vars", {})
        if variables:
            given["env_vars"] = variables
        if self.parallel.ray_workers_use_nsight:
            given["nsight"] = NSIGHT
        return given

    def _missing_at_start(self, nodes: Collection[str], limit: float) -> dict[str, str]:
        """What workers would read at their start and none of these nodes has set itself."""
        offer = env.read_at_start(self.offer)
        new = [node for node in dict.fromkeys(nodes) if node not in self._asked] if offer else []
        if new:
            ray = self.connection.ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            ask = ray.remote(num_cpus=0, max_retries=0)(report)
            asked = [
                ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(list(offer))
                for node in new
            ]
            for node, own in zip(new, self._all(asked, "the nodes' environment", limit), strict=True):
                if isinstance(own, dict):
                    self._asked[node] = frozenset(own)
        taken = {name for node in nodes for name in self._asked.get(node, ())}
        return {name: value for name, value in offer.items() if name not in taken}

    def _all(self, asked: list[Any], what: str, limit: float) -> list[Any]:
        """Answers; for each that didn't come in time, or whose actor died, text that says so."""
        ray = self.connection.ray
        waiting, began, left = Waiting(what, limit), time.monotonic(), asked
        while left:
            _, left = ray.wait(left, num_returns=len(left), timeout=min(1.0, limit))
            elapsed = time.monotonic() - began
            if left and waiting.over(elapsed):
                break
            for line in waiting.lines(elapsed, f"{len(left)} of {len(asked)} are missing"):
                logger.warning("%s", line)
        late = f"{what}: {len(left)} did not answer on Ray within {time.monotonic() - began:.0f} s"
        answers: list[Any] = []
        for each in asked:
            try:
                answers.append(late if each in left else ray.get(each))
            except ray.exceptions.RayError as e:
                lines = [line for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
                answers.append(f"a worker can't be started on Ray: {lines[-1].strip()}")
        return answers

    # -- beginning

    def begin(self, member: Member, boot: RankBoot, others: Iterable[Member]) -> None:
        """Be the rank that the boot says, or go on as it. others: that share its machine's devices."""
        if member.run is not None:
            member.actor.boot.remote(boot.encode())
            return
        at, computed = member.at, dict[str, str]()
        if at.devices:
            ids = {id for other in (member, *others) if other.at.home == at.home for id in other.at.devices}
            computed = dict.fromkeys(sorted(env.COMPUTED), ",".join(map(str, sorted(ids))))
        changes = env.merge(at.own, self.offer, computed)
        if at.node not in self._shown and not member.here:
            self._shown.add(at.node)
            logger.info("environment on %s: %s", at.node, "; ".join(c.line for c in changes) or "as it is there")
        values = {change.name: change.new for change in changes}
        member.run = member.actor.run.remote(self.entry, boot.encode(), values)
        member.ready = member.actor.ready.remote()

    # -- ending

    def _send_reapers(self, members: Sequence[Member]) -> None:
        """To machines where there are members and no agent yet."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for member in members:
            at = member.at
            if not member.here and at.home not in self._reapers:
                kind = self.connection.ray.remote(num_cpus=0, max_restarts=0)(NodeReaper)
                strategy = NodeAffinitySchedulingStrategy(at.ray_node, soft=False)
                name = f"planaria-{self.instance}-reaper-{at.ray_node[:8]}"
                self._reapers[at.home] = kind.options(name=name, scheduling_strategy=strategy).remote()

    def _has_device(self, member: Member) -> bool:
        """End what may be left on this machine of earlier members."""
        old = self._unconfirmed.get(member.at.home)
        if not old:
            return True
        gone = self._ask(member.actor, old)
        self._unconfirmed[member.at.home] = [each for each, is_gone in zip(old, gone, strict=True) if not is_gone]
        return all(gone)

    def _ask(self, who: Any, processes: list[tuple[int, int]]) -> list[bool]:
        try:
            found: list[bool] = self.connection.ray.get(who.end.remote(processes), timeout=FAR_TIMEOUT)
        except Exception:  # it, or its node, or Ray has gone: whatever was ended is not known
            found = [False] * len(processes)
        return found

    def end(self, members: Collection[Member]) -> None:
        """For certain, stopped ones too; what can't be confirmed is remembered."""
        for member in members:
            member.kill()
        far: dict[str, list[tuple[int, int]]] = {}
        for member in members:
            if not member.here:
                far.setdefault(member.at.home, []).append((member.at.pid, member.at.born))
        for at, processes in far.items():
            agent = self._reapers.get(at)
            gone = self._ask(agent, processes) if agent is not None else [False] * len(processes)
            if not all(gone):
                self._reapers.pop(at, None)  # another is sent with the next member there
                left = [each for each, is_gone in zip(processes, gone, strict=True) if not is_gone]
                self._unconfirmed.setdefault(at, []).extend(left)
        self.kill_actors([member.actor for member in members])
        deadline = time.monotonic() + KILL_TIMEOUT
        for member in members:
            if member.here and not member.gone(max(0.0, deadline - time.monotonic())):
                logger.error("process %d was killed and is still there", member.at.pid)
                self._unconfirmed.setdefault(member.at.home, []).append((member.at.pid, member.at.born))

    def kill_actors(self, actors: Collection[Any]) -> None:
        """Only asks for it."""
        ray = self.connection.ray

        def kill() -> None:
            for actor in actors:
                ray.kill(actor)

        if actors and self.connection.alive:
            bounded("kill actors", kill)

    def close(self) -> None:
        """End the agents."""
        self.kill_actors(list(self._reapers.values()))
        self._reapers = {}


def await_ends(members: Collection[Member], limits: Sequence[float], kill: Callable[[Member], None]) -> None:
    """Until the processes on this machine are gone; those that aren't after a limit are killed."""
    left = [member for member in members if member.here]
    for limit in limits:
        deadline = time.monotonic() + limit
        left = [member for member in left if not member.gone(max(0.0, deadline - time.monotonic()))]
        for member in left:
            kill(member)
