"""An engine whose ranks exchange tokens by the libraries for GPUs, with stand-ins for these: from the option to the
tokens, and again after a rank was replaced. What such an engine lacks is a package and a device."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from planaria.config.all2all import EXCHANGES
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, texts

NAMES = [name for name, way in EXCHANGES.items() if way.library]
ASKED = texts(131, [(5, 6), (12, 5), (1, 6), (7, 4)])
SHAPE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "hidden_size": 2048, "num_hidden_layers": 1,
}  # fmt: skip
TORCH: dict[str, Any] = {"dtype": "bfloat16", "kernels": "torch", "max_num_batched_tokens": 16, "max_num_seqs": 4}
LANES: dict[str, Any] = {
    **TORCH, "data_parallel_size": 2, "enable_expert_parallel": True, "disable_custom_all_reduce": True,
    "worker_cls": "tests.proc.libraries.LibraryWorker",
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepEP has kernels for some sizes alone."""
    return write_checkpoint(tmp_path_factory.mktemp("wide"), "qwen2_moe", **SHAPE)


@pytest.mark.parametrize("name", NAMES[:1] + [pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:]])
@pytest.mark.row("P9")
def test_an_engine_exchanges_by_a_library(wide: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.config.experts.check_library", lambda *asked: None)  # there is neither here
    with Engine(str(wide), distributed_executor_backend="uni", **TORCH) as one:
        expected = one.run(ASKED)
    with Engine(str(wide), all2all_backend=name, **LANES) as engine:
        assert engine.run(ASKED) == expected
        for calls in engine.loop.call("calls").result(300):
            exchanged = [what for what in calls if what != "nvshmem_init"]
            assert exchanged and exchanged == ["dispatch", "combine"] * (len(exchanged) // 2)
        assert engine.run(ASKED, 6, lambda: engine.kill(1, signal.SIGKILL)) == expected
        assert engine.recoveries[-1].ranks == [1]
