"""Two Ray nodes with addresses of their own, in two network namespaces: a pipeline across them, over both links."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proc.servers import needs_smollm2, planaria, wait_until
from tests.proc.test_nodes import two_networks  # noqa: F401  a fixture
from tests.ray.clusters import cluster_environment

pytestmark = needs_smollm2

ADDRESS = "10.93.0.1:6379"
ARGS = [
    "generate", "smollm2", "--dtype", "float32", "--quantization", "none", "--kv-cache-memory", "64MiB",
    "--max-model-len", "512", "--prompt", "The capital of France is", "--prompt", "1 2 3 4 5 6", "--max-tokens", "12",
    "--ignore-eos", "--json",
]  # fmt: skip


def tokens(stdout: str) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in stdout.splitlines()]


@contextlib.contextmanager
def ray_node(prefix: tuple[str, ...], env: dict[str, str], *args: str) -> Iterator[None]:
    """`ray start ARGS --block` in a namespace; at the end nothing of it is left there."""
    command = [*prefix, str(Path(sys.executable).parent / "ray"), "start", *args, "--block", "--num-cpus", "1"]
    command += ["--resources", '{"planaria_slot": 1}', "--object-store-memory", str(100 << 20)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            for pid in pids_in(prefix[-1]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(10)


def pids_in(space: str) -> list[int]:
    """Processes of one of the test's own namespaces."""
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


@pytest.fixture
def two_nodes(two_networks: list[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:  # noqa: F811
    """How to run a command on the first node, and the environment that finds the cluster."""
    env = os.environ | cluster_environment()
    here, there = two_networks
    folders = [tempfile.mkdtemp(prefix="pr") for _ in range(2)]  # short: sockets' paths have a limit
    try:
        with (
            ray_node(here, env, "--head", "--node-ip-address", "10.93.0.1", "--port", "6379", "--temp-dir", folders[0],
                     "--include-dashboard", "false"),
            ray_node(there, env, "--address", ADDRESS, "--node-ip-address", "10.93.0.2", "--temp-dir", folders[1]),
        ):  # fmt: skip
            def both() -> bool:
                asked = subprocess.run(
                    [*here, sys.executable, "-c", "import ray; ray.init(log_to_driver=False, logging_level='ERROR'); "
                     "print(sum(node['Alive'] for node in ray.nodes()))"],
                    capture_output=True, text=True, env=env | {"RAY_ADDRESS": ADDRESS}, check=False,
                )  # fmt: skip
                return asked.stdout.strip() == "2"

            wait_until("both nodes are up", both, limit=90)
            yield here, env | {"RAY_ADDRESS": ADDRESS}
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_pipeline_across_two_networks(two_nodes: tuple[tuple[str, ...], dict[str, str]]) -> None:
    expected = tokens(planaria(*ARGS).stdout)
    prefix, env = two_nodes
    for link in ("queue", "compiled-graph"):
        run = subprocess.run(
            [*prefix, sys.executable, "-m", "planaria", *ARGS, "-pp", "2", "--distributed-executor-backend", "ray",
             "--ray-link", link],
            capture_output=True, text=True, env=env, timeout=150, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert tokens(run.stdout) == expected, link
        first = json.loads(run.stdout.splitlines()[0])
        assert first["executor"] == "ray" and first["link"] == {"queue": "shm+tcp"}.get(link, "ray-graph+shm+tcp")
