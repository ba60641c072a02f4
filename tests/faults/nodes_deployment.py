"""Two nodes without Ray, each with a network of its own: the server and rank 0 on one, rank 1 on the other."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from tests.faults.deployment import Deployment
from tests.proc.networks import Networks, two_networks
from tests.proc.servers import Server

SECRET = b"a secret of at least thirty-two bytes, for tests"


class NodesDeployment(Deployment):
    """`--nnodes 2 -pp 2`. The cable between them can be pulled: the other node's ranks must end, its agent waits for
    the first node to come back, so both are started again for each cell."""

    lasting = False
    names: tuple[str, ...] = ("engine", "rank0")  # a layout of one rank may go on
    end_limit = 15.0  # ranks that can't be reached end when their node has heard nothing for the heartbeat's limit

    def __init__(self, name: str, model: Path, *, real: bool = True) -> None:
        super().__init__(name, model, real=real)
        self._stack = contextlib.ExitStack()
        self.networks = self.connect()
        self.space = self.networks.spaces[0]
        self.outside["link"] = self.harm_link
        self._agent: subprocess.Popen[bytes] | None = None
        self.is_cut = False

    def connect(self) -> Networks:
        """Raises as `ip`."""
        return self._stack.enter_context(two_networks())

    def harm_link(self, fault: str) -> None:
        if fault == "cut":
            self.networks.cut()
            self.is_cut = True
        else:
            self.networks.mend()

    def whole(self) -> str:
        """The cable is in again, and the node has joined again."""
        if self.is_cut:
            self.networks.mend()
            self.is_cut = False
        return super().whole()

    def options(self) -> list[str]:
        secret = str(self.folder / "secret")
        return ["-pp", "2", "--nnodes", "2", "--master-addr", "10.93.0.1", "--secret-file", secret]

    def command(self) -> Server:
        self.networks.mend()
        (self.folder / "secret").write_bytes(SECRET)
        (self.folder / "secret").chmod(0o600)
        here, there = self.networks.prefixes
        self._agent = subprocess.Popen(
            [*there, sys.executable, "-m", "planaria", "serve", *self.arguments(), "--node-rank", "1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.environment(),
        )  # fmt: skip
        return Server(*self.arguments(), module="tests.faults.serve", env=self.environment(), prefix=here)

    def left(self, limit: float | None = None) -> dict[int, str]:
        """An agent that was cut off waits for another driver, and has no ranks."""
        found = super().left(limit)
        if self._agent is not None and self._agent.poll() is None and not found:
            found = {child.pid: "rank" for child in psutil.Process(self._agent.pid).children()}
        return found

    def end(self) -> None:
        self.networks.mend()
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait(10)
            self._agent = None
        super().end()

    def close(self) -> None:
        super().close()
        self._stack.close()
