"""`pytest tests/sim --seed N` replays one seed and prints its history."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this seed of tests/sim and print its history")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--seed", None) is not None:
        items[:] = [item for item in items if item.name == "test_a_seed_is_replayed"]


@pytest.fixture
def one_seed(request: pytest.FixtureRequest) -> int | None:
    seed = request.config.getoption("--seed", None)
    assert seed is None or isinstance(seed, int)
    return seed
