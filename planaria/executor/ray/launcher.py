"""Ranks as Ray actors. Translates a placement; decides nothing.

`start` makes the actors, light, and asks where they came up; `run` completes them: each becomes its rank, and the
reference of that run is watched. A rank's end is made certain by pid: from here where it is on this node, else by a
task on its node, because an actor that is stopped outlives `ray.kill` for seconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings, environment
from planaria.errors import CapacityError, PlanariaError
from planaria.executor.boot import Place, RankBoot
from planaria.executor.launcher.fixed import Fixed
from planaria.executor.ray import environment as env
from planaria.executor.ray.actor import Whereabouts, end_process, remote_class, report
from planaria.executor.ray.cluster import Connection, bounded, connect
from planaria.executor.ray.groups import Group, obtain
from planaria.executor.ray.names import actor_name
from planaria.executor.ray.waiting import Waiting
from planaria.executor.ray.watch import Watcher
from planaria.node import home
from planaria.topology import Layout

logger = logging.getLogger("planaria.ray")

EXIT_TIMEOUT = 5.0  # seconds ranks get to end by themselves
KILL_TIMEOUT = 2.0
NSIGHT = {"t": "cuda,cudnn,cublas", "o": "'worker_process_%p'", "cuda-graph-trace": "node"}


class RayLauncher(Fixed):
    """entry: `package.module:class` of a rank's life (planaria.worker.main). device: "cpu" or an accelerator's name."""

    name = "ray"
    link, uses_ray, replaces = "queue", True, True

    def __init__(
        self, parallel: ParallelConfig, device: str, entry: str, settings: RaySettings | None = None, epoch: int = 0
    ) -> None:
        self.parallel, self.device, self.entry, self.epoch = parallel, device, entry, epoch
        self.settings = settings or RaySettings()
        self.layout = Layout(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        self.instance = secrets.token_hex(3)
        self.on_exit: Callable[[], None] = lambda: None
        self.connection: Connection | None = None
        self.group: Group | None = None
        self.actors: list[Any] = []
        self.found: list[Whereabouts] = []
        self.runs: dict[int, Any] = {}
        self.address = "127.0.0.1"  # of this node, for those elsewhere
        self._pids: dict[int, int] = {}  # rank -> pidfd, of those on this node
        self._watcher: Watcher | None = None
        self.before_leaving: list[Callable[[], None]] = []  # what needs Ray to end; called when the ranks have
        self._ended: dict[int, str] = {}
        self._closing = False
        self._offer: dict[str, str] = {}

    # -- starting

    def start(self) -> list[Place]:
        """Raises ConfigError for a rule that is broken, CapacityError when the cluster stays too small."""
        self.connection = connect(self.settings.address, self.layout.size)
        self.address = self.connection.address
        resource = self.connection.resource(self.device)
        self.group = obtain(
            self.connection, self.parallel.placement_group, self.layout, resource, self.settings,
            f"planaria-{self.instance}",
        )  # fmt: skip
        for group in self.group.placement.spanning():
            logger.warning(
                "tensor ranks %s are on several nodes: each layer's sums cross the network",
                ", ".join(str(slot.rank) for slot in group),
            )
        self._offer = env.offered(environment())
        self.actors = self._make_actors(resource, range(self.layout.size))
        self.found = self._where(resource, self.actors)
        self._hold_local(range(self.layout.size))
        return self._places()

    def _places(self) -> list[Place]:
        return [
            Place(rank, at.home, at.node, at.address, at.pid, at.cores, at.devices)
            for rank, at in enumerate(self.found)
        ]

    def _make_actors(self, resource: str, ranks: Sequence[int]) -> list[Any]:
        assert self.connection is not None and self.group is not None
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self.connection.ray
        kind = remote_class(ray)
        fraction = self.settings.fraction
        wants: dict[str, Any] = (
            {"num_gpus": fraction} if resource == "GPU" else {"num_cpus": fraction} if resource == "CPU"
            else {"resources": {resource: fraction}}
        )  # fmt: skip
        runtime_env = self._runtime_env(resource)
        if runtime_env:
            wants["runtime_env"] = runtime_env
        return [
            kind.options(
                name=actor_name(self.instance, self.layout, rank, self.epoch),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group.handle, placement_group_bundle_index=self.group.bundles[rank],
                    placement_group_capture_child_tasks=False,
                ),
                **wants,
            ).remote()
            for rank in ranks
        ]  # fmt: skip

    def _runtime_env(self, resource: str) -> dict[str, Any]:
        """The user's, and over it what must be there before the process starts."""
        given = dict(self.parallel.ray_runtime_env or {})
        variables = self._missing_at_start()
        if resource in ("GPU", "NPU", "HPU", "TPU"):  # the mask is ours to set: see `run`
            variables |= {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in sorted(env.COMPUTED)}
        variables |= given.get("env_vars", {})
        if variables:
            given["env_vars"] = variables
        if self.parallel.ray_workers_use_nsight:
            given["nsight"] = NSIGHT
        return given

    def _missing_at_start(self) -> dict[str, str]:
        """What workers would read at their start and no node of this placement has set itself."""
        assert self.connection is not None and self.group is not None
        offer = env.read_at_start(self._offer)
        if not offer:
            return {}
        ray = self.connection.ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ask = ray.remote(num_cpus=0, max_retries=0)(report)
        asked = [
            ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(list(offer))
            for node in self.group.placement.nodes
        ]
        taken = {name for own in self._get(asked, "the nodes' environment") for name in own}
        return {name: value for name, value in offer.items() if name not in taken}

    def _where(self, resource: str, actors: Sequence[Any]) -> list[Whereabouts]:
        names = sorted({*self._offer, *env.COMPUTED})
        answers = self._get([actor.where.remote(resource, names) for actor in actors], "ranks to come up")
        return [msgspec.msgpack.decode(answer, type=Whereabouts) for answer in answers]

    def _get(self, asked: list[Any], what: str) -> list[Any]:
        """All answers; says what it waits for. Raises PlanariaError."""
        assert self.connection is not None
        ray = self.connection.ray
        waiting, began, left = Waiting(what, self.settings.wait), time.monotonic(), asked
        try:
            while left:
                _, left = ray.wait(left, num_returns=len(left), timeout=1.0)
                elapsed = time.monotonic() - began
                if left and waiting.over(elapsed):
                    raise CapacityError(f"{what}: {len(left)} did not answer on Ray within {elapsed:.0f} s")
                for line in waiting.lines(elapsed, f"{len(left)} of {len(asked)} are missing"):
                    logger.warning("%s", line)
            return list(ray.get(asked))
        except ray.exceptions.RayError as e:
            lines = [line for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
            raise PlanariaError(f"a worker can't be started on Ray: {lines[-1].strip()}") from e

    def _hold_local(self, ranks: Sequence[int]) -> None:
        """Descriptors of the processes on this node: no other process is killed by mistake, and an end can be seen."""
        for rank in ranks:
            at = self.found[rank]
            if at.home == home():
                with contextlib.suppress(ProcessLookupError):
                    self._pids[rank] = os.pidfd_open(at.pid)

    def run(self, boots: Sequence[RankBoot]) -> None:
        assert self.connection is not None
        masks: dict[str, list[int]] = {}
        for at in self.found:
            masks.setdefault(at.home, []).extend(at.devices)
        shown = set()
        for boot in boots:
            if boot.rank in self.runs:
                self.actors[boot.rank].boot.remote(boot.encode())
                continue
            at = self.found[boot.rank]
            computed = {}
            if at.devices:
                mask = ",".join(map(str, sorted(set(masks[at.home]))))
                computed = dict.fromkeys(sorted(env.COMPUTED), mask)
            changes = env.merge(at.own, self._offer, computed)
            if at.node not in shown and at.home != home():
                shown.add(at.node)
                logger.info("environment on %s: %s", at.node, "; ".join(c.line for c in changes) or "as it is there")
            values = {change.name: change.new for change in changes}
            self.runs[boot.rank] = self.actors[boot.rank].run.remote(self.entry, boot.encode(), values)
        self._watcher = Watcher(self.connection.ray, self.runs, self._on_end)

    def replace(self, ranks: Sequence[int]) -> list[Place]:
        """End these for certain; other actors take their bundles. Where steps come by a compiled graph all are
        replaced: survivors sit inside its loop. Raises CapacityError when Ray gives none in time."""
        if self.parallel.ray_link == "compiled-graph":
            ranks = range(self.layout.size)
        connection = self.connection
        if connection is None or not connection.alive:
            raise CapacityError("Ray is gone: nothing can replace a rank")
        if self._watcher is not None:
            self._watcher.stop()
        self._end_now(ranks)
        self._leave()
        self.epoch += 1
        resource = connection.resource(self.device)
        actors = self._make_actors(resource, ranks)
        for rank, actor, at in zip(ranks, actors, self._where(resource, actors), strict=True):
            self.actors[rank], self.found[rank] = actor, at
        self._hold_local(ranks)
        return self._places()

    def _end_now(self, ranks: Sequence[int]) -> None:
        """Kill them, wait until they are gone where that can be seen, and forget them."""
        assert self.connection is not None
        local = {rank: self._pids[rank] for rank in ranks if rank in self._pids}
        for pidfd in local.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._end_elsewhere(ranks)
        for rank in ranks:
            bounded("kill an actor", functools.partial(self.connection.ray.kill, self.actors[rank]))
            self.runs.pop(rank, None)
            self._ended.pop(rank, None)
        for rank, pidfd in local.items():
            select.select([pidfd], [], [], KILL_TIMEOUT)
            os.close(pidfd)
            del self._pids[rank]

    # -- ends

    def _on_end(self, rank: int, how: str) -> None:
        self._ended[rank] = how
        if not self._closing:
            self.on_exit()

    def lost(self) -> dict[int, str]:
        """Ranks that have ended though nobody asked, and how."""
        return {} if self._closing else dict(sorted(self._ended.items()))

    def closing(self) -> None:
        self._closing = True

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""
        self._closing = True
        for pidfd in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._end_elsewhere(range(len(self.found)))
        self.close()

    def _end_elsewhere(self, ranks: Sequence[int]) -> None:
        """Kill those that are on other nodes by pid, through a task on each."""
        far = [self.found[rank] for rank in ranks if rank not in self._pids and self.found[rank].home != home()]
        if self.connection is None or not self.connection.alive or not far:
            return
        ray = self.connection.ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with contextlib.suppress(Exception):  # Ray or the node may be gone; then so is what can be done from here
            end = ray.remote(num_cpus=0, max_retries=0)(end_process)
            asked = [
                end.options(scheduling_strategy=NodeAffinitySchedulingStrategy(at.ray_node, soft=False)).remote(
                    at.pid, at.born
                )
                for at in far
            ]
            ray.wait(asked, num_returns=len(asked), timeout=KILL_TIMEOUT)

    def close(self) -> None:
        """Let ranks end by themselves for a while, then end what is left; no actor, no placement group made here and no
        process of theirs remains. Idempotent."""
        self._closing = True
        connection, self.connection = self.connection, None
        if connection is None:
            return
        ray = connection.ray
        if connection.alive:
            if self.runs:
                with contextlib.suppress(Exception):
                    ray.wait(list(self.runs.values()), num_returns=len(self.runs), timeout=EXIT_TIMEOUT)
            for actor in self.actors:
                bounded("kill an actor", functools.partial(ray.kill, actor))
        if self._watcher is not None:
            self._watcher.stop()
        self._await_local_ends()
        self._leave()
        if self.group is not None and connection.alive:
            bounded("remove the placement group", self.group.remove)
        self.actors, self.runs = [], {}
        connection.close()

    def _leave(self) -> None:
        for end in self.before_leaving:
            end()
        self.before_leaving.clear()

    def _await_local_ends(self) -> None:
        """`ray.kill` only asks. Processes of this node are gone when this returns."""
        left = dict(self._pids)
        for limit in (KILL_TIMEOUT, KILL_TIMEOUT):
            poller = select.poll()
            for pidfd in left.values():
                poller.register(pidfd, select.POLLIN)
            deadline = time.monotonic() + limit
            while left and (remaining := deadline - time.monotonic()) > 0:
                ended = {fd for fd, _ in poller.poll(remaining * 1000)}
                for fd in ended:
                    poller.unregister(fd)
                left = {rank: fd for rank, fd in left.items() if fd not in ended}
            for pidfd in left.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in self._pids.values():
            os.close(pidfd)
        self._pids = {}
