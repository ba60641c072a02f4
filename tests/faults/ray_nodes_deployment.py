"""Ranks as actors on two Ray nodes, each with a network of its own: server and rank 0 on one, rank 1 on the other."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.deployment import Deployment
from tests.proc.networks import Networks, two_networks
from tests.proc.servers import Server, wait_until
from tests.ray.clusters import cluster_environment, ray_node
from tests.ray.test_networks import ADDRESS

ALIVE = (
    "import ray; ray.init(log_to_driver=False, logging_level='ERROR'); "
    "print(sum(node['Alive'] for node in ray.nodes()))"
)


class RayNodesDeployment(Deployment):
    """`--distributed-executor-backend ray -pp 2`. The cable between the nodes can be pulled; Ray doesn't survive that
    on the other node, so all is started again for each cell."""

    end_limit = 15.0
    limit = 150.0  # a rank that never came to an epoch's link is given a minute
    lasting = False
    names = ("engine", "rank0")  # a layout of one rank may go on

    def __init__(self, name: str, model: Path, *, real: bool = True) -> None:
        super().__init__(name, model, real=real)
        self.outside["link"] = self.harm_link
        self.own = cluster_environment()
        self._stack = contextlib.ExitStack()
        self._networks: Networks | None = None

    def harm_link(self, fault: str) -> None:
        assert self._networks is not None
        if fault == "cut":
            self._networks.cut()
        else:
            self._networks.mend()

    def options(self) -> list[str]:
        return ["-pp", "2", "--distributed-executor-backend", "ray"]

    def environment(self) -> dict[str, str]:
        return super().environment() | self.own

    def command(self) -> Server:
        self._networks = networks = self._stack.enter_context(two_networks())
        self.space = networks.spaces[0]
        here, there = networks.prefixes
        folders = [tempfile.mkdtemp(prefix="pr") for _ in range(2)]  # short: sockets' paths have a limit
        for folder in folders:
            self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        env = self.environment()
        head = ["--head", "--port", "6379", "--include-dashboard", "false", "--node-ip-address", "10.93.0.1"]
        other = ["--address", ADDRESS, "--node-ip-address", "10.93.0.2"]
        self._stack.enter_context(ray_node(here, env, *head, "--temp-dir", folders[0]))
        self._stack.enter_context(ray_node(there, env, *other, "--temp-dir", folders[1]))
        env = env | {"RAY_ADDRESS": ADDRESS}

        def both() -> bool:
            asked = subprocess.run(
                [*here, sys.executable, "-c", ALIVE], capture_output=True, text=True, env=env, check=False
            )
            return asked.stdout.strip() == "2"

        wait_until("both nodes are up", both, limit=90)
        return Server(*self.arguments(), module="tests.faults.serve", env=env, prefix=here)

    def end(self) -> None:
        super().end()
        self._stack.close()
        self._networks = None

    def close(self) -> None:
        self.end()
        super().close()
