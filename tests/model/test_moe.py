"""Families with experts against Transformers, and what the operations promise: ties, groups, rows of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planaria import LLM, SamplingParams
from planaria.checkpoint import resolve_checkpoint
from planaria.checkpoint.fused import unfused
from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.reference import TorchOps
from planaria.layers.build import build
from planaria.loader import WeightSource
from planaria.models import model_config
from tests.model.checkpoints import TINY, DictSource, config_of, load_reference, write_checkpoint
from tests.model.driver import Driver
from tests.model.test_models import one_torch_thread  # noqa: F401

TOLERANCE = 1e-4  # of log-probabilities
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 8, "sliding_window": 7}),
    "qwen2-moe": ("qwen2_moe", {**EIGHT, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    "qwen2-moe-some-dense": (
        "qwen2_moe",
        {**EIGHT, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "norm_topk_prob": True,
         "num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": ("qwen3_moe", {**EIGHT, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "qwen3_moe", {**EIGHT, "moe_intermediate_size": 32, "mlp_only_layers": [0], "sliding_window": 9,
                      "use_sliding_window": True},
    ),
    "olmoe": ("olmoe", {**EIGHT, "pad_token_id": None}),
    "olmoe-mha": ("olmoe", {**EIGHT, "num_key_value_heads": 4, "norm_topk_prob": True, "pad_token_id": None}),
}  # fmt: skip

FEW_EXPERTS = {
    "n_routed_experts": 8, "moe_intermediate_size": 32, "num_key_value_heads": 4, "q_lora_rank": None,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            family, overrides = CASES[name]
            folder = write_checkpoint(tmp_path_factory.mktemp(name), family, **overrides)
            made[name] = folder, load_reference(folder)
        return made[name]

    return get


def make_model(folder: Path, ops: Any, quantization: str = "keep") -> Any:
    return build(model_config(config_of(folder)), DictSource.open(folder), ops, quantization=quantization)


def distance(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits.log_softmax(-1) - reference.log_softmax(-1)).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, checkpoint: Any, make_ops: Any) -> None:
    folder, reference = checkpoint(name)
    ops = make_ops()
    model = make_model(folder, ops)
    draw = random.Random(name)
    prompts = [[draw.randrange(131) for _ in range(length)] for length in (1, 5, 18, 41)]
    with torch.no_grad():
        wanted = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    assert min(float(w.std()) for w in wanted) > 0.5  # else a wrong model could pass
    alone = Driver(model, ops, block_size=16)
    together = Driver(model, ops, block_size=16, seed=1)
    found = together.step(dict(enumerate(prompts)))
    for i, want in enumerate(wanted):
        assert distance(alone.whole(i, prompts[i], chunk=7), want) < TOLERANCE
        assert distance(found[i], want) < TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe"])
def test_greedy_tokens_equal_those_of_transformers(name: str, checkpoint: Any) -> None:
    """20 prompts at once through the engine. What Transformers would say next is looked up with our tokens given, which
    is the same if it always says them."""
    folder, reference = checkpoint(name)
    draw = random.Random(name)
    prompts = [[draw.randrange(3, 131) for _ in range(draw.randrange(1, 40))] for _ in range(20)]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kv_cache_memory": "32MiB"}
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        said = list(result.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + said])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == said and len(said) == 12


def test_tokens_are_counted_by_expert(checkpoint: Any, make_ops: Any) -> None:
    """Of each layer with experts, and of each step since the count was asked for."""
    folder, _ = checkpoint("qwen3-moe-some-dense")
    ops = make_ops()
    model = make_model(folder, ops)
    load = model.count_experts()
    driver = Driver(model, ops, block_size=16)
    assert load.shape == (1, 8)
    driver.step({0: [5, 7, 9]})
    assert load.sum() == 3 * 3
    driver.step({0: [11], 1: [3, 4]})
    assert load.sum() == 3 * 6 and load.max() <= 6


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_packed_at_load(kind: str, checkpoint: Any) -> None:
    """Experts are packed like any matrix, the router is not; both back ends agree on what is left."""
    folder, reference = checkpoint("qwen2-moe-some-dense")
    prompt = [(5 + 11 * i * i) % 131 for i in range(30)]
    with torch.no_grad():
        exact = reference(torch.tensor([prompt])).logits[0]
    found = []
    for ops in (TorchOps("cpu"), CpuOps("float32", 2)):
        model = make_model(folder, ops, kind)
        found.append(Driver(model, ops, block_size=16).whole(0, prompt))
        ops.close()
    assert distance(found[0], found[1]) < 5e-3  # rows are rounded to 15 bits before packed weights
    assert distance(found[1], exact) > 5e-3


@pytest.mark.parametrize("name", ["qwen2-moe", "olmoe"])
def test_a_text_has_the_same_bits_alone_and_in_company(name: str, checkpoint: Any) -> None:
    """Natively: whatever shares the step, and however the text is cut into chunks."""
    folder, _ = checkpoint(name)
    ops = CpuOps("bfloat16", 2)
    model = make_model(folder, ops)
    draw = random.Random(name)
    prompts = [[draw.randrange(131) for _ in range(length)] for length in (1, 5, 18, 150)]
    together = Driver(model, ops, block_size=16).step(dict(enumerate(prompts)))
    alone = Driver(model, ops, block_size=16, seed=1)
    for i, prompt in enumerate(prompts):
        assert torch.equal(alone.whole(i, prompt, chunk=7), together[i])
    ops.close()


@pytest.mark.parametrize(
    "name", ["mixtral-window", "qwen2-moe-some-dense", "qwen3-moe", "olmoe", "deepseek_v2", "deepseek_v3"]
)
def test_experts_stored_as_one_tensor_are_read_one_by_one(name: str, tmp_path: Path) -> None:
    """Transformers writes both layouts; ours of either has the same names and the same values, and no bytes twice."""
    family, overrides = CASES.get(name, (name, FEW_EXPERTS))
    config = AutoConfig.for_model(family, **{**TINY, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sources = []
    for original in (True, False):
        model.save_pretrained(tmp_path / str(original), save_original_format=original)
        sources.append(WeightSource(resolve_checkpoint(str(tmp_path / str(original)))))
    each, fused = sources
    assert any(".experts.7." in name for name in each.names()) and sorted(each.names()) == sorted(fused.names())
    assert each.checkpoint.weight_bytes == fused.checkpoint.weight_bytes
    for tensor in each.names():
        assert np.array_equal(each.get(tensor), fused.get(tensor)), tensor


def test_a_tensor_of_experts_that_cannot_be_divided_is_named(tmp_path: Path) -> None:
    wrong = TensorInfo("model.layers.0.mlp.experts.gate_up_proj", "f32", (4, 7, 8), 0, 0, 896)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj has shape \[4, 7, 8\].*each expert"):
        unfused("a folder", {"model_type": "olmoe"}, [wrong])
