"""Ranks as actors on a Ray cluster of three nodes of this machine, one slot each: two are used, one is free."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.faults.deployment import ROOT, Deployment
from tests.faults.harm import SLOW_FACTOR, SLOW_SECONDS
from tests.faults.orders import FOLDER, Orders
from tests.proc.servers import Server
from tests.ray.clusters import several_nodes

NODES = 3


class RayDeployment(Deployment):
    """`--distributed-executor-backend ray -pp 2`. The raylet that is harmed is rank 1's, never the engine's."""

    def __init__(self, name: str, model: Path, *, real: bool = True) -> None:
        super().__init__(name, model, real=real)
        self.outside["raylet"] = self.harm_raylet
        self._cluster: Any = None
        self._stack = contextlib.ExitStack()
        self._stopped: list[int] = []

    def options(self) -> list[str]:
        spares = ["--spare-workers", "1"] if self.name == "ray-spare" else []
        return ["-pp", "2", "--distributed-executor-backend", "ray", *spares]

    def command(self) -> Server:
        if self._cluster is None:
            self._stack.enter_context(environment({FOLDER: str(self.folder), "PYTHONPATH": str(ROOT)}))
            self._cluster = self._stack.enter_context(several_nodes(*[1] * NODES))
            os.environ["RAY_ADDRESS"] = self._cluster.address
            self._stack.callback(os.environ.pop, "RAY_ADDRESS", None)
        return super().command()

    def raylets(self) -> dict[int, Any]:
        """Living ones that aren't the head's, and their nodes."""
        nodes = [node for node in self._cluster.list_all_nodes() if node is not self._cluster.head_node]
        found = {}
        for node in nodes:
            for info in node.all_processes.get("raylet", []):
                if info.process.poll() is None:
                    found[info.process.pid] = node
        return found

    def raylet(self) -> int:
        """Of rank 1's node: the one other than the engine's that has an actor."""
        for pid in self.raylets():
            for child in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    line = " ".join(child.cmdline())
                    if "RayActor" in line or line.startswith("planaria: worker"):
                        return pid
        raise LookupError("no raylet but the engine's has an actor")

    def harm_raylet(self, fault: str) -> None:
        if fault == "calm":
            self._calm()
            return
        pid = self.raylet()
        match fault:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "exit":
                os.kill(pid, signal.SIGTERM)
            case "stop":
                self._stopped.append(pid)
                os.kill(pid, signal.SIGSTOP)
            case "slow":
                threading.Thread(target=_slow, args=(pid,), daemon=True).start()

    def _calm(self) -> None:
        """Three nodes again."""
        while self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)
        alive = set(map(id, self.raylets().values()))
        for node in self._cluster.list_all_nodes():
            if node is not self._cluster.head_node and id(node) not in alive:
                self._cluster.remove_node(node, allow_graceful=False)
                self._cluster.add_node(num_cpus=1, resources={"planaria_slot": 1}, include_dashboard=False)

    def end(self) -> None:
        """The cluster's processes know orders by the folder that there was when it began."""
        known = self.folder
        super().end()
        if self._cluster is not None:
            shutil.rmtree(self.folder)
            known.mkdir(exist_ok=True)
            self.folder, self.orders = known, Orders(known)

    def close(self) -> None:
        super().close()
        self._stack.close()


def _slow(pid: int) -> None:
    """Let it run for one millisecond in a hundred."""
    end = time.monotonic() + SLOW_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.001 * (SLOW_FACTOR - 1))
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.001)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
