"""The part *tokens* of benchmarks.experts: the same tokens as Transformers, whatever way the experts are spread.

For each architecture a small random checkpoint, written by Transformers, in float32; 20 prompts at once, greedy; each
way in turn. A way that this version refuses is named with its reason.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from planaria import LLM, SamplingParams
from planaria.errors import ConfigError

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": None, "num_experts_per_tok": 3,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mixtral", {"num_local_experts": 8}),
    "Qwen2-MoE": ("qwen2_moe", {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 32, "norm_topk_prob": True}),
    "OLMoE": ("olmoe", {"num_experts": 8, "pad_token_id": None}),
    "DeepSeek-V2": (
        "deepseek_v2",
        {"num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 2,
         "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
         "routed_scaling_factor": 1.5},
    ),
}  # fmt: skip
EP = {"enable_expert_parallel": True}
TP2, DP2 = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "TP 2": TP2,
    "EP, TP 2": {**TP2, **EP},
    "EP, TP 2, round robin": {**TP2, **EP, "expert_placement_strategy": "round_robin"},
    "EP, TP 2, PP 2": {**TP2, **EP, "pipeline_parallel_size": 2},
    "EP, DP 2": {**DP2, **EP},
    "EP, DP 2, naive": {**DP2, **EP, "all2all_backend": "naive"},
    "EP, DP 2, TP 2": {**DP2, **TP2, **EP},
}
PROMPTS, TOKENS = 20, 16


def checkpoint(folder: Path, family: str, given: dict[str, Any]) -> Any:
    """Written, and Transformers' model of it. Weights are drawn wide, so that the experts matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **given})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1, 0.2)
            else:
                parameter.normal_(std=0.3 if name.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def tokens_part() -> tuple[dict[str, Any], list[report.Table]]:
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 131) for _ in range(draw.randrange(1, 60))] for _ in range(PROMPTS)]
    result: dict[str, dict[str, str]] = {}
    for name, (family, given) in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as place:
            model = checkpoint(Path(place), family, given)
            with torch.inference_mode():
                how = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
                wanted = [model.generate(torch.tensor([p]), **how)[0, len(p) :] for p in prompts]
            result[name] = {}
            for way, options in WAYS.items():
                result[name][way] = run(place, options, prompts, [w.tolist() for w in wanted])
                print(name, way, result[name][way], flush=True)
    rows = [[way, *(result[name][way] for name in result)] for way in WAYS]
    title = f"Of {PROMPTS} prompts, those whose {TOKENS} greedy tokens are Transformers' (float32)"
    return result, [report.Table(title, ["", *result], rows)]


def run(model: str, options: dict[str, Any], prompts: list[list[int]], wanted: list[list[int]]) -> str:
    common: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 128, "kv_cache_memory": "32MiB",
        "skip_tokenizer_init": True,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    try:
        with LLM(model, **common, **options) as llm:
            found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    except ConfigError as e:
        return f"refused: {e}"
    same = sum(f == w for f, w in zip(found, wanted, strict=True))
    return str(same)
