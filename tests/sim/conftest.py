"""`pytest tests/sim --seed N` replays one seed and prints its history."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this seed of tests/sim and print its history")


@pytest.fixture
def one_seed(request: pytest.FixtureRequest) -> int | None:
    seed = request.config.getoption("--seed", None)
    assert seed is None or isinstance(seed, int)
    return seed
