"""What tests ask of the machine around a cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.proc.servers import wait_until


def ray_processes() -> set[int]:
    """Below this process."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """What is ended inside is gone at the end: every process below this one that was there, and its shared memory."""
    before = ray_processes()
    yield
    wait_until("Ray's processes are gone", lambda: not before & ray_processes())
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("plasma")]
    assert not left, left


def live_actors(ray: Any) -> list[str]:
    """Names of actors that have not ended; a graph's own has none."""
    from ray._private.state import actors

    return [a["Name"] for a in actors().values() if a["State"] not in ("DEAD",)]


def live_groups() -> list[str]:
    """Placement groups that have not been removed."""
    from ray.util import placement_group_table

    return [id for id, group in placement_group_table().items() if group["state"] != "REMOVED"]


def cluster_environment() -> dict[str, str]:
    """Of clusters that tests start: a token of their own, workers that are not niced."""
    return {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip


@contextlib.contextmanager
def several_nodes(*slots: int) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` on this machine only, with a token of its own; so many slots on each node."""
    own = cluster_environment()
    os.environ |= own
    from ray._private import ray_constants, utils
    from ray._private.authentication_test_utils import reset_auth_token_state
    from ray.cluster_utils import Cluster

    from planaria.executor.ray.cluster import loopback

    reset_auth_token_state()
    with loopback(ray_constants):
        cluster = Cluster()
        try:
            for count in slots:
                cluster.add_node(num_cpus=1, resources={"planaria_slot": count}, include_dashboard=False)
            yield cluster
        finally:
            with ended():
                cluster.shutdown()
            address_file = Path(utils.get_ray_address_file(None))  # by which others would find it
            address_file.unlink(missing_ok=True)
            for name in own:
                del os.environ[name]
            reset_auth_token_state()
