"""The part *models* of benchmarks.experts: whole engines on one random Qwen3-MoE checkpoint, written by Transformers.

Ours, vLLM's CPU build and Transformers, each a process of its own with 2 threads, in bfloat16, loaded once; in each
round every engine does the same scenario in turn while the others are stopped. Prompts are random token ids, new in
each round; greedy, exactly the wanted number of tokens. Figures are medians of rounds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import environments, report
from benchmarks.drivers import Driver, Spec, running

SHAPE = {
    "hidden_size": 1024, "moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 1024,
}  # fmt: skip
THREADS = 2
ROUNDS = 3
KV_BYTES = 256 << 20
SCENARIOS = {  # prompts, tokens of each, tokens out of each; what is counted
    "prefill, 2 x 256": (2, 256, 1),
    "decode, 1 stream": (1, 16, 24),
    "decode, 16 streams": (16, 16, 16),
}


def specs(folder: str, vllm_python: Path | None, caches: Path) -> list[Spec]:
    common = {
        "threads": THREADS, "max_model_len": 1024, "max_num_seqs": 32, "kv_bytes": KV_BYTES,
        "options": {"skip_tokenizer_init": True},
    }  # fmt: skip
    ours = {**common, "kernels": "auto"}
    offline = {"HF_HUB_OFFLINE": "1"}
    found = [
        Spec("planaria", Path(sys.executable), "planaria_driver.py", folder, "bf16", 0, ours),
        Spec("transformers", Path(sys.executable), "transformers_driver.py", folder, "bf16", 0, common, offline),
    ]
    if vllm_python is None:
        print("vLLM: left out, no --vllm-python")
        return found
    variables, warnings = environments.vllm_variables(vllm_python)
    for warning in warnings:
        print(f"vLLM: {warning}")
    variables |= {"VLLM_CACHE_ROOT": str(caches), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return [*found, Spec("vllm", vllm_python, "vllm_driver.py", folder, "bf16", 0, common, variables)]


def tokens_a_second(driver: Driver, seed: int, shape: tuple[int, int, int]) -> float:
    """Of a prefill the prompts' tokens until the first of each is there; of a decode those after the first ones."""
    prompts, tokens_in, tokens_out = shape
    with driver.awake():
        events = driver.run(seed, [[tokens_in, tokens_out]] * prompts)["events"]
    if tokens_out == 1:
        return prompts * tokens_in / float(events[-1][0])
    started = next(i for i in range(len(events)) if sum(n for _, n in events[: i + 1]) >= prompts)
    return float(sum(n for _, n in events[started + 1 :]) / (events[-1][0] - events[started][0]))


def models_part(vllm_python: Path | None = None) -> tuple[dict[str, Any], list[report.Table]]:
    import torch

    from benchmarks.experts_layer import write

    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place) / "model"
        write(folder, torch.bfloat16, SHAPE)
        drivers = {}
        for spec in specs(str(folder), vllm_python, Path(place) / "caches"):
            drivers[spec.name] = stack.enter_context(running(spec, Path(place)))
        rates: dict[str, dict[str, list[float]]] = {scenario: {name: [] for name in drivers} for scenario in SCENARIOS}
        for turn in range(ROUNDS + 1):  # the first one warms up
            for scenario, shape in SCENARIOS.items():
                for name, driver in drivers.items():
                    rate = tokens_a_second(driver, turn, shape)
                    if turn:
                        rates[scenario][name].append(rate)
    rows = []
    peers = [name for name in drivers if name != "planaria"]
    for scenario, found in rates.items():
        middle = {name: statistics.median(samples) for name, samples in found.items()}
        shown = [f"{middle[n]:.0f} ({min(found[n]):.0f}-{max(found[n]):.0f})" for n in drivers]
        rows.append([scenario, *shown, *(f"{middle['planaria'] / middle[peer]:.2f}" for peer in peers)])
    title = f"A random Qwen3-MoE of 6 layers, bfloat16, {THREADS} threads: tokens a second, median of {ROUNDS} (range)"
    heads = ["", *drivers, *(f"ours / {peer}" for peer in peers)]
    return dict(rates), [report.Table(title, heads, rows)]
