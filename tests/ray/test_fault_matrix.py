"""Chosen cells of the fault matrix on Ray: three nodes of this machine, a rank on each of two."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.faults.cells import Cell
from tests.faults.deployment import Deployment, write_model
from tests.faults.makers import make
from tests.faults.play import play
from tests.proc.servers import SOON
from tests.tiers import representatives

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

CELLS = [
    "engine/kill/decode",
    "rank0/stop/prefill",
    "rank1/kill/decode",
    "rank1/kill/recovery",
    "raylet/kill/decode",
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = make("ray", write_model(tmp_path_factory.mktemp("model"), real=False), real=False)
    made.end_limit = max(made.end_limit, SOON)
    yield made
    made.close()


# The others by test_ray.py and test_losses.py, too.
@pytest.mark.parametrize(
    "name", representatives(CELLS, "engine/kill/decode", "rank0/stop/prefill", "rank1/kill/recovery")
)
def test_cell(name: str, deployment: Deployment) -> None:
    result = play(Cell.of(f"ray/{name}"), deployment)
    assert result.right, result
