"""What it gives and costs that ranks share the tokens of a sequence's KV (docs/adr/0041-context-ranks.md), and those of
a step (docs/adr/0053-shares-of-a-step.md).

    python -m benchmarks.context [--rounds 5] [--only "first token"] [--markdown docs/performance.md]

SmolLM2 in bfloat16 on two ranks of one thread: `-tp 2`, `-tp 2 -dcp 2`, `-pcp 2`, all loaded, in turn. Ratios to the
first are of the same round. Even: CPU seconds of the rank that computes least, in those of the one that computes most;
busy: in those that passed.
Room: tokens that fit into the same memory of a rank, and bytes of a token of a model with DeepSeek-V2-Lite's latents.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine, report
from planaria import LLM, SamplingParams

OUT = Path(__file__).resolve().parent / "out"
TWO = {"tensor_parallel_size": 2, "threads": 1}
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": TWO, "tp2 dcp2": {**TWO, "decode_context_parallel_size": 2}}
SHARES: dict[str, Any] = {"prefill_context_parallel_size": 2, "threads": 1}
LAYOUTS["pcp2"] = SHARES
FIRST = "first token of 4,096, ms"
SHAPES = {
    "one stream after 128 tokens, tok/s": (1, 128, 128),
    "one stream after 3,000 tokens, tok/s": (1, 3000, 96),
    "16 at once, tok/s": (16, 128, 64),
    "first token of 1,024, ms": (1, 1024, 1),
    FIRST: (1, 4096, 1),
}
GOALS = {("tp2 dcp2", "one stream after 128 tokens, tok/s"): ">= 0.85", ("pcp2", FIRST): "<= 1.1"}
LATENTS = {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 27, "vocab_size": 102400,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


def turn(llm: LLM, rows: int, prompt: int, count: int, seed: int) -> float:
    """Tokens a second after the first of each, or milliseconds to it."""
    prompts = [[(7 * seed + 131 * row + 17 * j * j) % 40000 + 100 for j in range(prompt)] for row in range(rows)]
    times: list[float] = []
    since = time.perf_counter()
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
        on_tokens=lambda done, tokens: times.append(time.perf_counter()),
    )  # fmt: skip
    if count == 1:
        return (times[-1] - since) * 1000
    return rows * (count - 1) / (times[-1] - times[0])


def seconds(llm: LLM) -> list[float]:
    """Of the processor, that each rank has had."""
    times = [psutil.Process(member.pid).cpu_times() for member in llm._loop.gang.members]
    return [each.user + each.system for each in times]


def latent_bytes(size: int) -> int:
    """Of a token, on each of two ranks, in bfloat16."""
    from planaria.models import model_config
    from planaria.models.deal import deal
    from planaria.models.memory import rank_memory
    from planaria.topology.stripes import Context

    config = model_config(LATENTS)
    limits = {"max_model_len": 1024, "step_tokens": 1, "logit_rows": 1}
    shards = deal(config, 2, 1, context=Context(size))
    return max(rank_memory(config, s, parameter=2, element=2, kv=None, **limits).kv for s in shards) // 1024


def measure(options: argparse.Namespace) -> dict[str, Any]:
    samples: dict[str, dict[str, list[float]]] = {shape: {name: [] for name in LAYOUTS} for shape in SHAPES}
    even: dict[str, dict[str, list[float]]] = {shape: {name: [] for name in LAYOUTS} for shape in SHAPES}
    busy: dict[str, dict[str, list[float]]] = {shape: {name: [] for name in LAYOUTS} for shape in SHAPES}
    found: dict[str, Any] = {
        "cpu": machine.cpu_name(),
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "load": os.getloadavg(),
    }
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 4160,
        "kv_cache_memory": "256MiB",
        "enable_prefix_caching": False,
    }
    llms = {name: LLM(options.model, **common, **layout) for name, layout in LAYOUTS.items()}
    try:
        found["room"] = {name: llm.facts.num_blocks * llm.facts.block_size for name, llm in llms.items()}
        for number in range(options.rounds + 1):
            for shape, sizes in SHAPES.items():
                if options.only not in shape:
                    continue
                for name, llm in list(llms.items())[:: 1 if number % 2 else -1]:
                    before, since = seconds(llm), time.perf_counter()
                    value = turn(llm, *sizes, seed=number)
                    passed = time.perf_counter() - since
                    if number:  # the first is for warming up
                        samples[shape][name].append(value)
                        had = [after - of for after, of in zip(seconds(llm), before, strict=True)]
                        even[shape][name].append(min(had) / max(had))
                        busy[shape][name].append(min(had) / passed)
    finally:
        for llm in llms.values():
            llm.close()
    latents = {name: latent_bytes(size) for name, size in (("tp2", 1), ("tp2 dcp2", 2))}
    return {**found, "samples": samples, "even": even, "busy": busy, "latents": latents}


def page(found: dict[str, Any]) -> str:
    plain, shared, _ = LAYOUTS
    room, latents = found["room"], found["latents"]
    rows = [
        f"| tokens that fit into 256 MiB of a rank | {name} | {room[plain]:,} | {room[name]:,} | "
        f"{room[name] / room[plain]:.2f} | {'>= 1.3' if name == shared else ''} | | |"
        for name in LAYOUTS if name != plain
    ]  # fmt: skip
    rows.append(
        f"| bytes of a token of DeepSeek-V2-Lite's latents on a rank | {shared} | {latents[plain]:,} | "
        f"{latents[shared]:,} | {latents[shared] / latents[plain]:.2f} | 0.50 | | |"
    )
    rows += [
        line(found, shape, name) for shape in SHAPES for name in LAYOUTS if name != plain and found["even"][shape][name]
    ]
    head = (
        f"{found['when']}, {found['cpu']}, {os.cpu_count()} cores, load {found['load'][0]:.1f}; medians, and ratios of"
    )
    return "\n".join(
        [
            f"{head} the same round.",
            "",
            f"| | layout | {plain} | it | ratio | goal | even | busy |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
            *rows,
        ]
    )


def line(found: dict[str, Any], shape: str, name: str) -> str:
    """Of the table: a layout beside the first."""
    values = found["samples"][shape]
    even, busy = (statistics.median(found[what][shape][name]) for what in ("even", "busy"))
    ratios = sorted(b / a for a, b in zip(values["tp2"], values[name], strict=True))
    before, after = (f"{statistics.median(values[each]):,.1f}" for each in ("tp2", name))
    return (
        f"| {shape} | {name} | {before} | {after} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
        f"| {GOALS.get((name, shape), '')} | {even:.2f} | {busy:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default="", help="shapes with this in their names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    found = measure(options)
    OUT.mkdir(exist_ok=True)
    (OUT / "context.json").write_text(json.dumps(found, indent=1))
    text = page(found)
    print(text)
    if options.markdown:
        report.write_between(options.markdown, "context", text)


if __name__ == "__main__":
    main()
