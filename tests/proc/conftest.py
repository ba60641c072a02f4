"""A small model, and one with experts and the tokens of one rank, for modules that compare layouts with it. A module
with a `MODEL` of its own gets that."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, for ranks that are to compute one, whichever: see `servers.TINY`."""
    from tests.model.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("small"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.model.checkpoints import write_checkpoint
    from tests.proc.experts import MODEL

    shape = getattr(request.module, "MODEL", MODEL)
    return write_checkpoint(tmp_path_factory.mktemp("experts"), "qwen2_moe", **shape)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """To `ASKED`."""
    from tests.model.engines import Engine
    from tests.proc.experts import ASKED

    with Engine(str(folder), distributed_executor_backend="uni") as one:
        return one.run(ASKED)
