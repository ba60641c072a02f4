"""A step in which a lane has nothing to do: its ranks run the whole pass on no rows, and what follows is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.models import model_config
from tests.model.checkpoints import DictSource, config_of, write_checkpoint
from tests.model.driver import Driver

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64},
    "deepseek_v2": {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1,
        "topk_method": "group_limited_greedy",
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": None, "eos_token_id": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_tokens(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, family, **FAMILIES[family])
    for kind in (TorchOps, CpuOps):
        ops: Any = kind("cpu") if kind is TorchOps else kind("float32", 1)
        model = build(model_config(config_of(folder)), DictSource.open(folder), ops, quantization="none")
        found = []
        for idle in (False, True):
            driver = Driver(model, ops, block_size=16)
            first = driver.step({0: [3, 5, 7]})[0].clone()
            if idle:
                driver.batch.counts[:] = 0
                assert driver.run().shape == (0, 131)
            found.append(torch.cat([first, driver.step({0: [9]})[0]]))
        assert torch.equal(*found)
        ops.close()
