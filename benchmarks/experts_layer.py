"""The part *layer* of benchmarks.experts: one layer's experts on two cores, ours and Transformers' in turn.

A random Qwen3-MoE checkpoint of one layer, written by Transformers and read by both: router, choice, experts and the
sum, of the same tokens. Transformers runs each of its implementations ("eager" loops over experts, "grouped_mm" calls
torch's grouped product, "batched_mm" one product for each choice), and the best one counts. Figures are the shortest of
several steps taken in turn, since other work on the machine only makes them longer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report

SHAPE = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "intermediate_size": 6144, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 2048,
}  # fmt: skip
TOKENS = (1, 8, 32, 128, 512)
THREADS = 2
SECONDS = 1.0  # of each way with each number of tokens, at least
FEWEST = 5  # steps, at least
WAYS = ("eager", "grouped_mm", "batched_mm")
COPIES = 8  # tokens up to which "batched_mm" is tried: it copies the weights for every choice of every token
GOAL = 3.0


def shortest(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each, taken in turn."""
    for step in steps.values():
        step()
    best, spent, turns = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, 0.0), 0
    while turns < FEWEST or min(spent.values()) < SECONDS:
        turns += 1
        for name, step in steps.items():
            if turns > FEWEST and spent[name] >= SECONDS:
                continue
            since = time.perf_counter()
            step()
            took = time.perf_counter() - since
            best[name], spent[name] = min(best[name], took * 1e3), spent[name] + took
    return best


def write(folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SHAPE)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def ours(folder: Path, dtype: str, x: torch.Tensor, quantization: str) -> tuple[Callable[[int], torch.Tensor], Any]:
    """A step over the first rows of x, which come in as the previous stage's residual."""
    from planaria.checkpoint import resolve_checkpoint
    from planaria.kernels.cpu import CpuOps
    from planaria.kernels.ops import Batch
    from planaria.loader import open_weights
    from planaria.models import build, model_config

    checkpoint, ops = resolve_checkpoint(str(folder)), CpuOps(dtype, THREADS)
    model = build(model_config(checkpoint.config), open_weights(checkpoint), ops, quantization=quantization)
    moe: Any = model.layers[0].mlp
    norm = ops.vector(torch.ones(x.shape[1]))
    batch = Batch(len(x), 1, 1, 1)
    batch.make_hidden(x.shape[1])[:, : x.shape[1]] = x.float().numpy()
    batch.positions[:] = np.arange(len(x))

    def forward(o: Any) -> Any:
        y = o.rms_norm(o.hidden(x.shape[1]), norm, 0.0)
        return o.experts(y, o.route(o.scores(y, moe.router), moe.rule, moe.slots), moe.experts, moe.slots)

    run = ops.compile(forward, batch)

    def step(count: int) -> torch.Tensor:
        batch.counts[:3] = count, 1, 0
        return run()

    return step, ops


def theirs(folder: Path, dtype: torch.dtype, way: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=way)
    return model.model.layers[0].mlp


def row(step: Callable[[int], torch.Tensor], blocks: dict[str, Any], x: torch.Tensor) -> dict[str, float]:
    """Milliseconds of each way with these tokens; how many times ours the best of theirs takes; how far ours is off."""
    with torch.inference_mode():
        wanted, found = blocks["eager"](x[None])[0].float(), step(len(x)).clone()
        # the median: where two experts score nearly alike in bfloat16 a few tokens choose another one
        gap = float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())
        ways: dict[str, Callable[[], object]] = {"ours": lambda: step(len(x))}
        for way, block in blocks.items():
            if way != "batched_mm" or len(x) <= COPIES:
                ways[way] = partial(block, x[None])
        best = shortest(ways)
    return {**best, "ratio": min(best[way] for way in best if way != "ours") / best["ours"], "gap": gap}


def layer_part() -> tuple[dict[str, Any], list[report.Table]]:
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = {}
    tables = []
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write(folder, dtype)
            x = torch.nn.functional.rms_norm(torch.randn(max(TOKENS), SHAPE["hidden_size"]), (SHAPE["hidden_size"],))
            x = x.to(dtype)
            step, ops = ours(folder, name, x, "none")
            blocks = {way: theirs(folder, dtype, way) for way in WAYS}
            rows = []
            for count in TOKENS:
                found = result[f"{name} {count}"] = row(step, blocks, x[:count])
                times = [f"{found[way]:.2f}" if way in found else "-" for way in ("ours", *WAYS)]
                rows.append([str(count), *times, f"{found['ratio']:.2f}", f"{found['gap']:.1e}"])
            ops.close()
        title = f"One layer's experts, {name}, {THREADS} threads: ms a step (shortest); goal {GOAL:g} x Transformers"
        tables.append(report.Table(title, ["tokens", "ours", *WAYS, "best of theirs / ours", "median gap"], rows))
    return result, tables
