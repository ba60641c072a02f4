"""Chosen cells of the fault matrix on processes; `python -m benchmarks.fault_matrix` plays all of them.

Ranks compute no model here, so that another is there at once; a token still depends on all before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import cells
from tests.faults.cells import Cell
from tests.faults.deployment import Deployment, write_model
from tests.faults.makers import make
from tests.faults.play import play
from tests.proc.servers import SOON

# In this order: a drain ends the deployment that the start-up before it has begun.
CELLS = {
    "mp-tp2": [
        "rank0/exit/start-up", "rank1/kill/drain", "engine/exception/start-up", "engine/exit/drain",
        "rank1/exception/start-up", "server/kill/start-up",
        "engine/kill/idle", "engine/stop/decode", "engine/exception/prefill", "engine/kill/recovery",
        "engine/full/recovery", "engine/slow/decode",
        "rank0/kill/idle", "rank0/stop/prefill", "rank0/exception/decode", "rank0/full/decode", "rank0/kill/recovery",
        "rank1/kill/prefill", "rank1/exit/decode", "rank1/slow/decode", "rank1/stop/recovery",
        "rank1/exception/recovery", "rank1/full/recovery",
        "server/stop/decode", "server/exception/idle", "server/kill/recovery", "server/kill/decode",
    ],
    "mp-pp2": [
        "rank1/kill/start-up", "engine/kill/drain", "rank0/stop/decode", "rank0/exception/prefill", "rank1/kill/decode",
        "rank1/exit/recovery",
    ],
    "mp-tp2-spare": ["spare/kill/idle", "spare/stop/decode", "spare/kill/recovery", "spare/exit/recovery"],
}  # fmt: skip


# Of each part and each way to harm it one; the others where long tests are asked for.
DEFAULT = {
    "mp-tp2": {
        "rank0/exit/start-up", "rank1/kill/drain", "engine/exception/start-up", "engine/exit/drain",
        "engine/kill/idle", "engine/stop/decode", "engine/full/recovery", "rank0/stop/prefill",
        "rank0/exception/decode", "rank0/kill/recovery", "rank1/slow/decode", "server/stop/decode",
        "server/kill/recovery",
    },
    "mp-pp2": {"rank0/exception/prefill", "rank1/kill/decode"},
    "mp-tp2-spare": {"spare/kill/idle", "spare/stop/decode"},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), real=False)


@pytest.fixture(scope="module")
def deployments(model: Path) -> Iterator[dict[str, Deployment]]:
    """Those that are up, by name: one at a time."""
    made: dict[str, Deployment] = {}
    yield made
    for deployment in made.values():
        deployment.close()


def at(kind: str, deployments: dict[str, Deployment], model: Path) -> Deployment:
    for other in [name for name in deployments if name != kind]:
        deployments.pop(other).close()
    if kind not in deployments:
        deployments[kind] = make(kind, model, real=False)
        deployments[kind].end_limit = max(deployments[kind].end_limit, SOON)
    return deployments[kind]


def cell_of(kind: str, cell: str) -> object:
    return pytest.param(f"{kind}/{cell}", marks=() if cell in DEFAULT[kind] else pytest.mark.long)


@pytest.mark.parametrize("name", [cell_of(kind, cell) for kind, chosen in CELLS.items() for cell in chosen])
def test_cell(name: str, deployments: dict[str, Deployment], model: Path) -> None:
    cell = Cell.of(name)
    assert not cells.senseless(cell)
    result = play(cell, at(cell.deployment, deployments, model))
    assert result.right, result


@pytest.mark.long
def test_a_cable_that_is_pulled(deployments: dict[str, Deployment], model: Path) -> None:
    for phase in ("decode", "drain"):
        result = play(Cell("mp-nodes", "link", "cut", phase), at("mp-nodes", deployments, model))
        assert result.right, result


def test_the_matrix_is_whole() -> None:
    """Every part, fault and phase that was promised is a cell that is played, or is left out for a reason."""
    for kind in ("mp-tp2", "mp-pp2", "ray"):
        every = cells.all_cells(kind) + cells.all_cells(f"{kind}-spare")
        assert len(set(map(str, every))) == len(every)
        assert {cell.fault for cell in every} == set(cells.FAULTS)
        played = [cell for cell in every if not cells.senseless(cell)]
        for who in ("server", "engine", "rank0", "rank1", "spare"):
            for fault in ("kill", "stop", "exit"):
                assert {cell.phase for cell in played if (cell.who, cell.fault) == (who, fault)} == set(cells.PHASES)
    assert all(not cells.senseless(cell) for cell in cells.all_cells("mp-nodes") if cell.fault == "cut")
