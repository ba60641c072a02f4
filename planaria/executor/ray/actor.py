"""The actor that a rank lives in, or an engine of a fleet. Light until it begins: it only says where it came up.

A life is carried out by a thread of its own concurrency group, so that the actor stays reachable: setting up a compiled
graph calls other methods. Everything that goes in and out is plain data or bytes that we encoded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

LIFE_GROUP = "life"  # concurrency group of `run`
SAID_GROUP = "said"  # of `said`, which waits
GONE = 2.0  # seconds that a killed process gets to be gone
LOOK = 0.5  # seconds between looks at the raylet
REAPER_ALONE = 60.0  # seconds without a word after which a reaper whose raylet is gone ends
ENGINE_ALONE = 20.0  # the same of an engine


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """Where an actor came up. ray_node: Ray's id; group, bundle: the placement group that it reserves something of, by
    hexadecimal id ("", -1: none); born: the process's start time in the kernel's ticks, so that a pid
    used again is noticed; own: what the node's environment says of the variables that were asked about."""

    home: str
    node: str
    ray_node: str
    address: str
    pid: int
    born: int
    cores: int
    devices: tuple[int, ...]
    own: dict[str, str]
    group: str = ""
    bundle: int = -1


class RayActor:
    """A life of a class that is made with `made(rank)`, for steps that come from a compiled graph's thread, and
    `say(line)`; it hears messages and runs. Steps come by a rank's link, or from the graph, never both at a time.
    engine: one of a fleet."""

    def __init__(self, engine: bool = False) -> None:
        self.engine = engine
        self.rank: Any = None  # what `run` made
        self.life: Any = None
        self.thread = 0  # that carries out the graph's steps
        self.parent = os.getppid()  # the raylet
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._early: list[bytes] = []  # what came before there was a life to hear it
        self._lock = threading.Lock()
        if engine:
            signal.signal(signal.SIGTERM, lambda number, frame: self.leave())  # Ray's own handler ends it in mid-step

    def where(self, resource: str, names: list[str]) -> bytes:
        """Encoded Whereabouts. names: variables to report."""
        import ray
        from ray.experimental.channel import ChannelContext

        from planaria.config.machine import usable_cores
        from planaria.env import environment, host_ip
        from planaria.node import born, home, node_name

        # A graph would import torch, for more than a second, to carry tensors: there are none.
        ChannelContext.get_current()._torch_available = False
        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids().get(resource, [])
        own = environment()
        return msgspec.msgpack.encode(
            Whereabouts(
                home(), node_name(), context.get_node_id(), host_ip() or ray.util.get_node_ip_address(), os.getpid(),
                born(os.getpid()), usable_cores(), tuple(int(id) for id in ids),
                {name: own[name] for name in names if name in own}, *reserved(),
            )
        )  # fmt: skip

    def run(self, entry: str, message: bytes, environment: dict[str, str]) -> int:
        """Be what `entry` (package.module:class) makes of this message and of those that follow, until it ends; its
        exit code."""
        life = _kind(entry, environment)(self._made, self._said.put)
        with self._lock:
            for each in (message, *self._early):
                life.hear(each)
            self.life = life
        if self.engine:
            threading.Thread(target=self._look, name="planaria-raylet", daemon=True).start()
        code = int(life.run())
        if os.getppid() != self.parent or (code and not self.engine):
            os._exit(code)  # the raylet is gone, or who this rank worked for: nobody else would end this process
        return code

    def hear(self, message: bytes) -> None:
        """Maybe while `run` still imports what the first one needs."""
        with self._lock:
            if self.life is None:
                self._early.append(message)
            else:
                self.life.hear(message)

    def said(self) -> str:
        """The next thing that it says. Waits."""
        return self._said.get()

    def leave(self) -> None:
        """An engine is to end: its front end takes what is open elsewhere, and then says so."""
        if self.life is not None:
            self.life.leave()

    def _look(self) -> None:
        """While the raylet is there, it ends this process."""
        while os.getppid() == self.parent or self.life.silent < ENGINE_ALONE:
            time.sleep(LOOK)
        os._exit(1)  # its front end has gone on without it

    def end(self, processes: list[tuple[int, int]]) -> list[bool]:
        """See `end_processes`: those that had this device before, and were not seen to end."""
        return end_processes(processes)

    def _made(self, rank: Any) -> None:
        self.rank = rank

    # Nodes of a compiled graph: a plan, and what the stage before hands on -> a reply, and what goes to the next stage.

    def first_step(self, plan: bytes) -> tuple[bytes, bytes]:
        return self.step(plan, b"")

    def step(self, plan: bytes, before: bytes) -> tuple[bytes, bytes]:
        if self.thread != threading.get_ident():
            self.thread = threading.get_ident()
            if hasattr(self.rank, "take_thread"):
                self.rank.take_thread()
        edges: Any = getattr(getattr(self.rank, "mesh", None), "pp", None)
        if not hasattr(edges, "give"):  # one stage, or a rank that computes nothing
            return self._reply(plan), b""
        edges.give(before)
        reply = self._reply(plan)
        return reply, edges.take()

    def last_step(self, plan: bytes, before: bytes) -> bytes:
        return self.step(plan, before)[0]

    def only_step(self, plan: bytes) -> bytes:
        return self.step(plan, b"")[0]

    def _reply(self, plan: bytes) -> bytes:
        from planaria.executor.link.codec import answer, decode_command

        return answer(self.rank.rank, self.rank.handle(decode_command(plan)))


def _kind(entry: str, environment: dict[str, str]) -> Any:
    """The class at package.module:class. The environment is complete before anything large is imported."""
    os.environ.update(environment)
    with contextlib.suppress(OSError):  # Ray's workers are niced as batch work; ranks and engines serve
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    module, _, kind = entry.partition(":")
    return getattr(importlib.import_module(module), kind)


def reserved() -> tuple[str, int]:
    """What this actor reserves, by Ray's names of it: the id of a placement group, and a bundle's index there."""
    from ray._private.worker import global_worker

    with contextlib.suppress(Exception):  # Ray's own, and for a look at what was planned only
        for name in global_worker.core_worker.resource_ids():
            if found := re.fullmatch(r"bundle_group_(\d+)_([0-9a-f]+)", name):
                return found[2], int(found[1])
    return "", -1


def report(names: list[str]) -> dict[str, str]:
    """Carried out on a node: which of these variables its processes start with."""
    with open("/proc/self/environ", "rb") as f:  # not os.environ, to which Ray adds
        found = dict(item.split("=", 1) for item in os.fsdecode(f.read()).split("\0") if "=" in item)
    return {name: found[name] for name in names if name in found}


def end_processes(processes: list[tuple[int, int]]) -> list[bool]:
    """End processes of this node, each a pid and when it was born, from outside. For each: is it gone for certain?"""
    from planaria.node import born, readable

    ending: dict[int, int] = {}
    for pid, started in processes:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if born(pid) == started:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                ending[pid] = pidfd
            else:  # another process has the number
                os.close(pidfd)
    deadline = time.monotonic() + GONE
    gone = []
    for pid, _ in processes:
        left = max(0.0, deadline - time.monotonic())
        gone.append(pid not in ending or readable(ending[pid], left))
    for pidfd in ending.values():
        os.close(pidfd)
    return gone


class NodeReaper:
    """On a node that isn't the driver's, outside of the ranks: ends them by pid, also when they are stopped, also when
    the raylet is gone; then it stays for a while only. It owns what memory outlives them there (docs/adr/0050)."""

    def __init__(self) -> None:
        self._heard, self._parent = time.monotonic(), os.getppid()
        self._kv: dict[int, Any] = {}  # by engine
        self._weights: Any = None  # of all
        self._owned: dict[int, Any] = {}  # keepers of memory, by device
        threading.Thread(target=self._look, name="planaria-reaper", daemon=True).start()

    def end(self, processes: list[tuple[int, int]]) -> list[bool]:
        """See `end_processes`; of none: a sign of life."""
        self._heard = time.monotonic()
        return end_processes(processes)

    def memories(self, engine: int, ranks: int, keeps: str, devices: Sequence[int]) -> bytes:
        """Encoded Memories: for KV of that engine, which has so many ranks, and for weights; the same each time. keeps:
        by which calls these devices have it, which have keepers from then on; empty: it is the node's."""
        from planaria.hosts.device_keeper import OwnedKeepers
        from planaria.hosts.device_memory import Keepers
        from planaria.hosts.memory import KVMemory
        from planaria.hosts.weights import WeightsMemory
        from planaria.node import Memories

        for device in devices if keeps else ():
            if device not in self._owned:
                self._owned[device] = OwnedKeepers(keeps, [device])
        keepers = Keepers([each for owned in self._owned.values() for each in owned.keeping]) if keeps else None
        if engine not in self._kv:
            self._kv[engine] = KVMemory.make(ranks)
        self._weights = self._weights or WeightsMemory.make()
        for each in (self._weights, *self._kv.values()):
            if each is not None:
                each.keepers = keepers
        return msgspec.msgpack.encode(Memories.of(self._kv[engine], self._weights))

    def _look(self) -> None:
        while os.getppid() == self._parent or time.monotonic() - self._heard < REAPER_ALONE:
            time.sleep(1.0)
        os._exit(0)


def remote_class(ray: Any) -> Any:
    """RayActor for Ray: what waits in groups of their own, nodes of the graph with two outputs."""
    ray.method(concurrency_group=LIFE_GROUP)(RayActor.run)  # marks the function
    ray.method(concurrency_group=SAID_GROUP)(RayActor.said)
    for method in (RayActor.first_step, RayActor.step):
        ray.method(num_returns=2)(method)
    groups = {LIFE_GROUP: 1, SAID_GROUP: 1}
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=groups)(RayActor)
