"""Two Ray nodes with addresses of their own, in two network namespaces: a pipeline across them, over both links."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.proc.servers import needs_smollm2, planaria
from tests.proc.test_nodes import two_networks  # noqa: F401  a fixture
from tests.ray.clusters import KEPT, cluster_environment, ray_node

pytestmark = needs_smollm2

ADDRESS = "10.93.0.1:6379"
ARGS = [
    "generate", "smollm2", "--dtype", "float32", "--quantization", "none", "--kv-cache-memory", "64MiB",
    "--max-model-len", "512", "--prompt", "The capital of France is", "--prompt", "1 2 3 4 5 6", "--max-tokens", "12",
    "--ignore-eos", "--json",
]  # fmt: skip

# Waits until both nodes are up.
BOTH = """
import time
import ray
while True:
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
        break
    except ConnectionError:
        time.sleep(0.2)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.1)
"""


def tokens(stdout: str) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in stdout.splitlines()]


@pytest.fixture
def two_nodes(two_networks: list[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:  # noqa: F811
    """How to run a command on the first node, and the environment that finds the cluster."""
    KEPT.close()
    env = os.environ | cluster_environment()
    here, there = two_networks
    folders = [tempfile.mkdtemp(prefix="pr") for _ in range(2)]  # short: sockets' paths have a limit
    try:
        with (
            ray_node(here, env, "--head", "--node-ip-address", "10.93.0.1", "--port", "6379", "--temp-dir", folders[0],
                     "--include-dashboard", "false"),
            ray_node(there, env, "--address", ADDRESS, "--node-ip-address", "10.93.0.2", "--temp-dir", folders[1]),
        ):  # fmt: skip
            subprocess.run(
                [*here, sys.executable, "-c", BOTH], env=env | {"RAY_ADDRESS": ADDRESS}, timeout=240, check=True
            )
            yield here, env | {"RAY_ADDRESS": ADDRESS}
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
def test_a_pipeline_across_two_networks(two_nodes: tuple[tuple[str, ...], dict[str, str]]) -> None:
    """By the queue; through a graph: test_fleet_networks.py."""
    expected = tokens(planaria(*ARGS).stdout)
    prefix, env = two_nodes
    run = subprocess.run(
        [*prefix, sys.executable, "-m", "planaria", *ARGS, "-pp", "2", "--distributed-executor-backend", "ray"],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert tokens(run.stdout) == expected
    first = json.loads(run.stdout.splitlines()[0])
    assert first["executor"] == "ray" and first["link"] == "shm+tcp"


@pytest.mark.long
def test_a_rank_elsewhere_is_stopped_then_its_node_is_lost(two_nodes: tuple[tuple[str, ...], dict[str, str]]) -> None:
    """Only its node can end a rank that is stopped; then there is nowhere else to go."""
    prefix, env = two_nodes
    run = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.ray.far_program"], capture_output=True, text=True, env=env, timeout=240,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "far": "10.93.0.2", "stopped": True, "replaced": True, "there": "10.93.0.2", "node": True, "layout": "tp=1",
        "left": [],
    }, run.stderr  # fmt: skip
