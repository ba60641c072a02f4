"""Clusters that test files share, see KEPT: one of a single node, as Planaria starts it, and one of three."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.clusters import KEPT, started_here, three_nodes

NEED_RAY = [
    "test_ray.py", "test_cluster.py", "test_networks.py", "test_losses.py", "test_without_ray.py", "test_fleet.py",
    "test_fleet_networks.py", "test_fleet_state.py", "test_lanes.py", "test_lane_actors.py",
    "test_devices.py",
]  # fmt: skip
collect_ignore = [] if importlib.util.find_spec("ray") else NEED_RAY


@pytest.fixture(scope="session", autouse=True)
def kept() -> Iterator[None]:
    yield
    KEPT.close()


@pytest.fixture(scope="module")
def local_ray() -> Any:
    """Ray as `connect` starts it, held open so that engines reuse it."""
    return KEPT.have("started here", started_here)


@pytest.fixture(scope="module")
def three() -> Any:
    """Three nodes with two slots each. Who takes one away gives it back."""
    return KEPT.have("three nodes", three_nodes)


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
