"""Clusters that tests share: one of a single node, as Planaria starts it. Ended with the module that asked for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.clusters import ended

NEED_RAY = [
    "test_ray.py", "test_cluster.py", "test_networks.py", "test_losses.py", "test_without_ray.py", "test_fleet.py",
    "test_fleet_networks.py", "test_fleet_state.py", "test_lanes.py", "test_lane_actors.py",
    "test_devices.py",
]  # fmt: skip
collect_ignore = [] if importlib.util.find_spec("ray") else NEED_RAY


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    """Ray as `connect` starts it, held open so that engines of the module reuse it."""
    from planaria.executor.ray.cluster import connect

    connection = connect("local", 4)
    try:
        yield connection.ray
    finally:
        with ended():
            connection.close()


@pytest.fixture(scope="session")
def weightless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration of a model of two layers, for ranks that compute nothing: nobody needs torch for it."""
    from tests.faults.deployment import write_model

    return str(write_model(tmp_path_factory.mktemp("weightless"), real=False))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, float32, four heads on two KV heads."""
    from tests.model.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("small"), "llama")
