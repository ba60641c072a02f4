"""Engines of several ranks on one device, but that the device is the CPU: what they share goes by way of main memory,
as tensors. The tokens are those of one rank, also after one is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, texts
from tests.model.staged import StagedRank

OPTIONS: dict[str, Any] = {"kernels": "torch", "threads": 1, "kv_cache_memory": "2MiB"}
ASKED = texts(100, [(40, 12), (20, 12), (9, 12)])
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
EP = {"enable_expert_parallel": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("staged"), "qwen2_moe", **QWEN)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with Engine(str(model), **OPTIONS) as engine:
        return engine.run(ASKED)


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [({"tensor_parallel_size": 2, **EP}, {}), (EP, {"lanes": 2})], ids=["tensor ranks", "lanes"],
)  # fmt: skip
def test_experts_of_two_ranks(
    model: Path, expected: list[list[int]], layout: dict[str, Any], parallel: dict[str, Any]
) -> None:
    own = f"{StagedRank.__module__}.StagedRank"
    with Engine(str(model), parallel=parallel, worker_cls=own, **layout, **OPTIONS) as engine:
        assert len(engine.pids) == 2 and engine.run(ASKED) == expected
        assert engine.run(ASKED, 4, lambda: engine.kill(1, signal.SIGKILL)) == expected
        assert len(engine.recoveries) == 1


SHARES = {"prefill_context_parallel_size": 2}
FEW = [(prompt, 2) for prompt, _ in ASKED[1:]]  # a step for both


@pytest.mark.row("P1")
@pytest.mark.parametrize(
    ("rank", "layout", "dies"),
    [
        ("InterpretedRank", {**SHARES, **EP}, False),
        pytest.param("InterpretedRank", {**SHARES, "tensor_parallel_size": 2}, True, marks=pytest.mark.long),
        pytest.param("StagedRank", {**SHARES, "pipeline_parallel_size": 2}, True, marks=pytest.mark.long),
    ],
)
def test_shares_of_a_step(
    model: Path, expected: list[list[int]], rank: str, layout: dict[str, Any], dies: bool
) -> None:  # fmt: skip
    """Prefill context ranks, with the kernels for GPUs."""
    if rank == "InterpretedRank":
        pytest.importorskip("triton", reason="Triton is not installed: there is none for this platform")
    wanted = [tokens[:2] for tokens in expected[1:]]
    with Engine(str(model), worker_cls=f"{StagedRank.__module__}.{rank}", **layout, **OPTIONS) as engine:
        assert engine.run(FEW) == wanted
        if dies:
            assert engine.run(FEW, 1, lambda: engine.kill(1, signal.SIGKILL)) == wanted
            assert len(engine.recoveries) == 1
