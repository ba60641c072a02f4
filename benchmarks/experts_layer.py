"""The part *layer* of benchmarks.experts: one layer's experts on two cores; ours, Transformers' and vLLM's in turn.

A random Qwen3-MoE checkpoint of one layer, written by Transformers and read by all: router, choice, experts and the
sum, of the same tokens. Transformers runs each of its implementations ("eager" loops over experts, "grouped_mm" calls
torch's grouped product, "batched_mm" one product for each choice), and the best one counts. vLLM's operations run in
its own python (`--vllm-python`), which is stopped meanwhile. GB/s and GFLOP/s are ours (`rates`). Figures are the
shortest of many steps taken in turn, since other work on the machine only makes them longer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.kernels import bandwidth
from benchmarks.vllm_layer import VllmLayer
from planaria.kernels.cpu.build import host_isa

SHAPE = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "intermediate_size": 6144, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 2048,
}  # fmt: skip
TOKENS = (1, 8, 32, 128, 512)
THREADS = 2
SECONDS = 0.25  # of each way at a time
TURNS = 4
WAYS = ("eager", "grouped_mm", "batched_mm")
NAMES = ("ours", "vllm", *WAYS)
COPIES = 1  # tokens up to which "batched_mm" is tried: it copies the weights for every choice of every token
GOALS = {"transformers": 3.0, "vllm": 1.2}


Steps = Callable[[float], list[float]]  # milliseconds of each of the steps done in so many seconds


def timed(step: Callable[[], object]) -> Steps:
    def steps(seconds: float) -> list[float]:
        times: list[float] = []
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            since = time.perf_counter()
            step()
            times.append((time.perf_counter() - since) * 1e3)
        return times

    return steps


def shortest(ways: dict[str, Steps]) -> dict[str, float]:
    """Milliseconds of each, taken in turn."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(TURNS):
        for name, steps in ways.items():
            best[name] = min(best[name], *steps(SECONDS))
    return best


def write(folder: Path, dtype: torch.dtype, shape: dict[str, Any] = SHAPE) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **shape)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def ours(folder: Path, dtype: str, x: torch.Tensor, quantization: str) -> tuple[Callable[[int], torch.Tensor], Any]:
    """A step over the first rows of x, which come in as the previous stage's residual."""
    from planaria.checkpoint import resolve_checkpoint
    from planaria.kernels.cpu.ops import CpuOps
    from planaria.kernels.ops import Batch
    from planaria.layers.build import build
    from planaria.loader import WeightSource
    from planaria.models import model_config

    checkpoint, ops = resolve_checkpoint(str(folder)), CpuOps(dtype, THREADS)
    model = build(model_config(checkpoint.config), WeightSource(checkpoint), ops, quantization=quantization)
    moe: Any = model.layers[0].mlp
    norm = ops.vector(np.ones(x.shape[1], np.float32))
    batch = Batch(len(x), 1, 1, 1)
    batch.make_hidden(x.shape[1])[:, : x.shape[1]] = x.float().numpy()
    batch.positions[:] = np.arange(len(x))

    def forward(o: Any) -> Any:
        y = o.rms_norm(o.hidden(x.shape[1]), norm, 0.0)
        return o.experts(y, o.route(o.scores(y, moe.router), moe.rule, moe.slots), moe.experts, moe.slots)

    run = ops.compile(forward, batch)

    def step(count: int) -> torch.Tensor:
        batch.counts[:3] = count, 1, 0
        return torch.from_numpy(run())

    return step, ops


def theirs(folder: Path, dtype: torch.dtype, way: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=way)
    return model.model.layers[0].mlp


def row(
    step: Callable[[int], torch.Tensor], blocks: dict[str, Any], vllm: VllmLayer | None, x: torch.Tensor, folder: Path
) -> dict[str, float]:
    """Milliseconds of each way with these tokens, and how far ours and vLLM's results are from Transformers'."""
    ways: dict[str, Steps] = {"ours": timed(lambda: step(len(x)))}
    found: dict[str, float] = {}
    with torch.inference_mode():
        wanted = blocks["eager"](x[None])[0].float()
        found["gap"] = gap(step(len(x)), wanted)
        if vllm is not None:
            vllm.ask("result", tokens=len(x), out=str(folder / "result.pt"))
            found["vllm gap"] = gap(torch.load(folder / "result.pt"), wanted)
            ways["vllm"] = partial(vllm.steps, len(x))
        for way, block in blocks.items():
            if way != "batched_mm" or len(x) <= COPIES:
                ways[way] = timed(partial(block, x[None]))
        found |= shortest(ways)
        found |= rates(x, blocks["eager"], found["ours"])
    found["transformers"] = min(found[way] for way in WAYS if way in found)
    return found


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The median over tokens: where two experts score nearly alike in bfloat16 a few tokens choose another one."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def rates(x: torch.Tensor, block: Any, took: float) -> dict[str, float]:
    """What these milliseconds come to: weights of the experts that the tokens choose, read once; multiplications and
    additions of their products."""
    k, hidden, inter = SHAPE["num_experts_per_tok"], SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]
    chosen = torch.nn.functional.linear(x, block.gate.weight).topk(k, dim=-1).indices
    one = 3 * hidden * inter
    return {
        "GB/s": len(chosen.unique()) * one * x.element_size() / took / 1e6,
        "GFLOP/s": len(x) * k * 2 * one / took / 1e6,
    }


def cells(found: dict[str, float]) -> list[str]:
    times = [f"{found[way]:.2f}" if way in found else "-" for way in NAMES]
    ratios = [f"{found[peer] / found['ours']:.2f}" if peer in found else "-" for peer in GOALS]
    gaps = [f"{found[name]:.1e}" if name in found else "-" for name in ("gap", "vllm gap")]
    return [*times, *ratios, f"{found['GB/s']:.0f}", f"{found['GFLOP/s']:.0f}", *gaps]


def together(rows: dict[int, dict[str, float]]) -> list[list[str]]:
    """The same tokens through steps of each size, as in a mixed load; and the geometric mean of the rows' ratios."""
    measured = [name for name in ("ours", *GOALS) if all(name in found for found in rows.values())]
    whole = {name: sum(found[name] / tokens for tokens, found in rows.items()) for name in measured}
    ratio = [f"{whole[p] / whole['ours']:.2f}" if p in whole else "-" for p in GOALS]
    mean = [f"{geometric_mean(f[p] / f['ours'] for f in rows.values()):.2f}" if p in whole else "-" for p in GOALS]
    blank = ["" for _ in NAMES]
    return [["as many tokens of each", *blank, *ratio, *[""] * 4], ["geometric mean", *blank, *mean, *[""] * 4]]


def layer_part(vllm_python: Path | None = None) -> tuple[dict[str, Any], list[report.Table]]:
    torch.set_num_threads(THREADS)
    if vllm_python is None:
        print("vLLM: left out, no --vllm-python")
    result: dict[str, Any] = {}
    tables = []
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            folder = Path(place)
            write(folder, dtype)
            x = torch.nn.functional.rms_norm(torch.randn(max(TOKENS), SHAPE["hidden_size"]), (SHAPE["hidden_size"],))
            x = x.to(dtype)
            vllm = None
            if vllm_python is not None:
                torch.save(x, folder / "x.pt")
                vllm = stack.enter_context(closing(VllmLayer(
                    vllm_python, THREADS, folder / "log", folder=place, dtype=name, k=SHAPE["num_experts_per_tok"],
                    x=str(folder / "x.pt"),
                )))  # fmt: skip
            step, ops = ours(folder, name, x, "none")
            stack.callback(ops.close)
            blocks = {way: theirs(folder, dtype, way) for way in WAYS}
            rows = {count: row(step, blocks, vllm, x[:count], folder) for count in TOKENS}
            result |= {f"{name} {count}": found for count, found in rows.items()}
        goals = ", ".join(f"{goal:g} x {peer}" for peer, goal in GOALS.items())
        reading = bandwidth(THREADS, TURNS)
        tables.append(report.Table(
            f"One layer's experts, {name}, {THREADS} threads, {host_isa()}, {reading:.0f} GB/s: ms a step (shortest); "
            f"goals: {goals}",
            ["tokens", *NAMES, *(f"{peer} / ours" for peer in GOALS), "GB/s", "GFLOP/s", "median gap", "vllm's"],
            [*([str(count), *cells(found)] for count, found in rows.items()), *together(rows)],
        ))  # fmt: skip
    return result, tables
