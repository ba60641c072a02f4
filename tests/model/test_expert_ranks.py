"""Experts on several ranks: sliced by columns or whole, with either placement, against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from planaria.config.experts import expert_map
from planaria.config.options import ParallelConfig
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.models import model_config
from planaria.models.config import ModelConfig
from planaria.models.deal import deal
from planaria.topology.experts import ExpertMap
from tests.model.checkpoints import DictSource, config_of, write_checkpoint
from tests.model.driver import Driver
from tests.model.ranks import Ranks
from tests.model.test_parallel import alone, assert_same, config_for, requests, start, together

QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
OLMOE = {"num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": None, "eos_token_id": 2}
EP = {"enable_expert_parallel": True}
ROUND_ROBIN = {**EP, "expert_placement_strategy": "round_robin"}
KINDS: list[tuple[str, str, dict[str, Any], dict[str, Any], tuple[int, int]]] = [
    ("sliced", "qwen2_moe", QWEN, {}, (2, 1)),
    ("whole", "qwen2_moe", QWEN, EP, (2, 1)),
    ("round-robin-stages", "qwen2_moe", QWEN, ROUND_ROBIN, (2, 2)),
    ("whole-wide-norm", "olmoe", OLMOE, EP, (3, 1)),  # two KV heads on three ranks: two have the same keys
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        for family, overrides in (("qwen2_moe", QWEN), ("olmoe", OLMOE))
    }


@pytest.mark.parametrize(("family", "given", "layout"), [case[1:2] + case[3:] for case in KINDS],
                         ids=[case[0] for case in KINDS])  # fmt: skip
def test_ranks_agree_with_one(
    folders: dict[str, Path], family: str, given: dict[str, Any], layout: tuple[int, int]
) -> None:
    config = config_for(str(folders[family]))
    parallel = msgspec.structs.replace(config.parallel, **given)
    with Ranks(msgspec.structs.replace(config, parallel=parallel), *layout) as ranks:
        start(ranks)
        found = together(ranks, config, requests(131), 1)
    assert_same(found, alone(config, requests(131)))


class Counting(DictSource):
    """Counts bytes by tensor."""

    def __init__(self, tensors: Any) -> None:
        super().__init__(tensors)
        self.read: dict[str, int] = {}

    def get(self, name: str, **how: Any) -> Any:
        values = super().get(name, **how)
        self.read[name] = self.read.get(name, 0) + values.nbytes
        return values


def parallel_with(given: dict[str, Any]) -> ParallelConfig:
    return msgspec.structs.replace(ParallelConfig(), **given)


@pytest.mark.parametrize("given", [{}, EP, ROUND_ROBIN], ids=["sliced", "linear", "round-robin"])
@pytest.mark.row("P6")
def test_a_rank_reads_its_own_experts_only(folders: dict[str, Path], given: dict[str, Any]) -> None:
    """Every expert's bytes are read by the ranks together once, and each rank reads half of them."""
    folder = folders["qwen2_moe"]
    config: ModelConfig = model_config(config_of(folder))
    read, tensors = [], DictSource.open(folder).tensors
    for shard in deal(config, 2, 1, None, expert_map(config, parallel_with(given), 2)):
        source = Counting(tensors)
        build(config, source, TorchOps("cpu"), quantization="none", shard=shard)
        read.append({name: size for name, size in source.read.items() if ".experts." in name})
    whole = {name: t.size * 4 for name, t in tensors.items() if ".experts." in name}
    assert {name: sum(part.get(name, 0) for part in read) for name in whole} == whole
    assert sum(read[0].values()) == sum(read[1].values()) == sum(whole.values()) // 2
    if given:
        held = [{name.split(".experts.")[1].split(".")[0] for name in part} for part in read]
        assert held == ([{"0", "2", "4"}, {"1", "3", "5"}] if "expert_placement_strategy" in given else [
            {"0", "1", "2"}, {"3", "4", "5"}
        ])  # fmt: skip


def test_replicas_share_an_experts_tokens(folders: dict[str, Path]) -> None:
    """Slots that hold an expert again change not a bit: the token's position says which computes it."""
    folder = folders["olmoe"]
    config = model_config(config_of(folder))
    tokens = [(3 + 7 * i * i) % 131 for i in range(29)]
    found = []
    for experts in (None, ExpertMap(5, 1, (4, 0, 1, 2, 3, 0, 4, 0))):
        (shard,) = deal(config, 1, 1, None, experts)
        ops = CpuOps("float32", 1)
        model = build(config, DictSource.open(folder), ops, quantization="none", shard=shard)
        found.append(Driver(model, ops, block_size=16).whole(0, tokens))
        ops.close()
    assert torch.equal(found[0], found[1])
