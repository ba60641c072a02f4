"""The part *tokens* of benchmarks.experts: the same tokens as Transformers, whatever way the experts are spread.

For each architecture a small random checkpoint, written by Transformers, in float32; 20 prompts at once, greedy; each
way in turn. A way that this version refuses is named with its reason. Some ways have something happen when half of all
tokens have come, or all the time: experts move one by one, a rank is killed, a lane leaves or comes. That it did happen
is looked for afterwards: a way in which it didn't is named so.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from planaria import LLM, SamplingParams
from planaria.errors import ConfigError
from planaria.executor.layout_change import ARRIVAL_LOOK
from planaria.wire import ResizeEngine

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
OFTEN = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2}
SPLIT = {"enable_dbo": True, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 1}


@dataclass(frozen=True)
class Way:
    """before: done to the engine when it is there; halfway: when half of all tokens have come; shown: afterwards, has
    what the way is about happened?"""

    options: dict[str, Any]
    before: Callable[[LLM], None] | None = None
    halfway: Callable[[LLM], None] | None = None
    shown: Callable[[LLM], bool] = lambda llm: True


def one_by_one(llm: LLM) -> None:
    """Each expert that moves is a step of its own, so that requests run between them."""
    state = llm._loop.balancing.state
    assert state is not None
    state.step_bytes = 1


def have_moved(llm: LLM) -> bool:
    return llm.stats.experts is not None and llm.stats.experts.bytes_moved > 0


def kill_a_rank(llm: LLM) -> None:
    os.kill(llm.facts.ranks[-1], signal.SIGKILL)


def lanes(count: int) -> Callable[[LLM], None]:
    """Ranks that are to come are waited for here, so that the change falls among the requests."""

    def harm(llm: LLM) -> None:
        loop = llm._loop
        loop.handle(ResizeEngine(f"to {count}", 1, 1, count))
        while (arrival := loop.layout_change.arrival) is not None and not loop.gang.came(arrival.layout):
            time.sleep(ARRIVAL_LOOK)

    return harm


def formed_again(llm: LLM) -> bool:
    return llm.stats.epoch > 0 and llm.stats.replayed_tokens > 0


def balanced(axis: dict[str, Any], **config: bool) -> Way:
    return Way({**axis, **EP, "enable_eplb": True, "eplb_config": {**OFTEN, **config}}, one_by_one, shown=have_moved)


WAYS = {
    "1 rank": Way({}),
    "TP 2": Way(TP2),
    "EP, TP 2": Way({**TP2, **EP}),
    "EP, TP 2, round robin": Way({**TP2, **EP, "expert_placement_strategy": "round_robin"}),
    "EP, TP 2, PP 2": Way({**TP2, **EP, "pipeline_parallel_size": 2}),
    "EP, DP 2": Way({**DP2, **EP}),
    "EP, DP 2, naive": Way({**DP2, **EP, "all2all_backend": "naive"}),
    "EP, DP 2, TP 2": Way({**DP2, **TP2, **EP}),
    "EP, TP 2, while experts move": balanced(TP2),
    "EP, DP 2, while experts move, asynchronous": balanced(DP2, use_async=True),
    "EP, DP 2, DBO": Way({**DP2, **EP, **SPLIT}),
    "EP, DP 2, a rank killed": Way({**DP2, **EP}, halfway=kill_a_rank, shown=formed_again),
    "EP, DP 2 to 1": Way({**DP2, **EP}, halfway=lanes(1), shown=formed_again),
    "EP, DP 1 to 2": Way({**EP, "distributed_executor_backend": "mp"}, halfway=lanes(2), shown=formed_again),
}
PROMPTS, TOKENS = 20, 16


def checkpoint(folder: Path, family: str, given: dict[str, Any]) -> Any:
    """Written, and Transformers' model of it. Weights are drawn wide, so that the experts matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **given})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
            for way, how_it_runs in WAYS.items():
                result[name][way] = run(place, how_it_runs, prompts, [w.tolist() for w in wanted])
                print(name, way, result[name][way], flush=True)
    rows = [[way, *(result[name][way] for name in result)] for way in WAYS]
    title = f"Of {PROMPTS} prompts, those whose {TOKENS} greedy tokens are Transformers' (float32)"
    return result, [report.Table(title, ["", *result], rows)]


def run(model: str, way: Way, prompts: list[list[int]], wanted: list[list[int]]) -> str:
    common: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 128, "kv_cache_memory": "32MiB",
        "skip_tokenizer_init": True,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    left = [len(prompts) * TOKENS // 2]

    def on_tokens(done: int, tokens: int) -> None:
        before, left[0] = left[0], left[0] - tokens
        if way.halfway is not None and before > 0 >= left[0]:
            way.halfway(llm)

    try:
        with LLM(model, **common, **way.options) as llm:
            if way.before is not None:
                way.before(llm)
            found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, on_tokens=on_tokens)]
            shown = way.shown(llm)
    except ConfigError as e:
        return f"refused: {e}"
    same = sum(f == w for f, w in zip(found, wanted, strict=True))
    return str(same) if shown else f"{same}, but it did not happen"
