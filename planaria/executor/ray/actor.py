"""The actor that a rank lives in. Light until `run`: it only says where it came up.

`run` is carried out by a thread of its own concurrency group, so that the actor stays reachable: setting up a compiled
graph calls other methods. Everything that goes in and out is plain data or bytes that we encoded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any

import msgspec

RANK_GROUP = "rank"  # concurrency group of `run`


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """Where an actor came up. ray_node: Ray's id; born: the process's start time in the kernel's ticks, so that a pid
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


class RankActor:
    """One rank. Steps come by its link, or from a compiled graph's thread; never both at a time."""

    def __init__(self) -> None:
        self.rank: Any = None  # what `run` made
        self.life: Any = None
        self.thread = 0  # that carries out the graph's steps

    def where(self, resource: str, names: list[str]) -> bytes:
        """Encoded Whereabouts. names: variables to report."""
        import ray

        from planaria.config.machine import usable_cores
        from planaria.env import environment, host_ip
        from planaria.node import home, node_name

        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids().get(resource, [])
        own = environment()
        return msgspec.msgpack.encode(
            Whereabouts(
                home(), node_name(), context.get_node_id(), host_ip() or ray.util.get_node_ip_address(), os.getpid(),
                born(os.getpid()), usable_cores(), tuple(int(id) for id in ids),
                {name: own[name] for name in names if name in own},
            )
        )  # fmt: skip

    def run(self, entry: str, boot: bytes, environment: dict[str, str]) -> int:
        """Be the rank until it ends: `entry` (package.module:class) is made with what hears of the worker, and gets
        this boot and those of later epochs. The environment is complete before anything large is imported."""
        os.environ.update(environment)
        with contextlib.suppress(OSError):  # Ray's workers are niced as batch work; a rank serves
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        from planaria.executor.boot import RankBoot
        from planaria.logs import setup_logging

        decoded = RankBoot.decode(boot)
        setup_logging(decoded.log_level)
        module, _, kind = entry.partition(":")
        self.life = getattr(importlib.import_module(module), kind)(self._made)
        self.life.boot(decoded)
        code: int = self.life.run()
        return code

    def boot(self, boot: bytes) -> None:
        """Another epoch begins."""
        from planaria.executor.boot import RankBoot

        self.life.boot(RankBoot.decode(boot))

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


def report(names: list[str]) -> dict[str, str]:
    """Carried out on a node: which of these variables its processes start with."""
    with open("/proc/self/environ", "rb") as f:  # not os.environ, to which Ray adds
        found = dict(item.split("=", 1) for item in os.fsdecode(f.read()).split("\0") if "=" in item)
    return {name: found[name] for name in names if name in found}


def born(pid: int) -> int:
    """When a process of this node started, in the kernel's ticks; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def end_process(pid: int, started: int) -> bool:
    """Carried out on the node of a process that must end, outside of it. False if it was gone already."""
    import signal

    if born(pid) != started or not started:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def remote_class(ray: Any) -> Any:
    """RankActor for Ray: `run` in a group of its own, nodes of the graph with two outputs."""
    ray.method(concurrency_group=RANK_GROUP)(RankActor.run)  # marks the function
    for method in (RankActor.first_step, RankActor.step):
        ray.method(num_returns=2)(method)
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={RANK_GROUP: 1})(RankActor)
