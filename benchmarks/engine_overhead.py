"""What the engine itself costs a step: everything but the model's device work.

    python -m benchmarks.engine_overhead [--markdown docs/performance.md]

Rows running at once in columns; milliseconds a step, median (p90) over the steps.
- plan, nothing changed: `EngineCore.plan` in steps that name no row: must be flat
- plan, every row gets a block: `EngineCore.plan` when all rows need one in the same step (1 step in 16; rows spread out
  have 1/16 of it in every step)
- commit: `EngineCore.commit`, one token and delta of every row
- engine step: one `EngineLoop.turn` with a null worker: plan, link to the worker's thread and back, commit, deltas;
  rows spread out, so that each step has its share of changes
- LLM step: the same under `LLM.generate`, with the text of every request made as well
- runner: `Runner.step` with a forward pass and a choice that cost nothing: assembling the batch, taking the tokens in
- sampler, greedy: the choice over ready logits
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from planaria import LLM, SamplingParams
from planaria.build import build_loop
from planaria.config.options import EngineConfig, EngineOptions
from planaria.config.resolve import resolve
from planaria.core.engine import EngineCore
from planaria.kernels.ops import Batch
from planaria.protocol import Fresh, LanePlan, Row
from planaria.types import Request
from planaria.wire import FromEngine, Submit
from planaria.worker.null import NullWorker
from planaria.worker.runner import Runner
from planaria.worker.sampler import Sampler

OUT = Path(__file__).resolve().parent / "out" / "engine_overhead.json"
PROMPT = 16
WARM = 40  # steps before timing: every row is in by then
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)

Samples = list[float]  # milliseconds


def config_for(model: str, rows: int) -> EngineConfig:
    return resolve(
        EngineOptions(
            model=model, null_worker=True, max_num_seqs=rows, max_num_batched_tokens=max(8192, rows),
            skip_tokenizer_init=True, threads=1,
        )
    )  # fmt: skip


def prompts(rows: int, spread: bool) -> list[list[int]]:
    """Different ones; with `spread` of different lengths, so that rows need their blocks in different steps."""
    source = random.Random(rows)
    return [[source.randrange(100, 30_000) for _ in range(PROMPT + (i % 16 if spread else 0))] for i in range(rows)]


def core_parts(config: EngineConfig, rows: int, steps: int) -> dict[str, Samples]:
    """The deciding part alone, depth 1."""
    blocks = rows * (-(-(PROMPT + WARM + steps) // config.cache.block_size) + 2)
    core = EngineCore(config.scheduler, config.cache, blocks)
    worker = NullWorker()
    for i, prompt in enumerate(prompts(rows, spread=False)):
        core.admit(Request(f"r{i}", prompt, GREEDY, 0, max_tokens=WARM + steps + 8))
    found: dict[str, Samples] = {"plan, nothing changed": [], "plan, every row gets a block": [], "commit": []}
    for step in range(WARM + steps):
        since = time.perf_counter()
        plan = core.plan(since)
        planned = time.perf_counter()
        assert plan is not None
        result = _result(plan.epoch, plan.step, worker, plan.lanes[0], plan.freed_rows[0])
        began = time.perf_counter()
        core.commit(result)
        ended = time.perf_counter()
        if step >= WARM:
            changed = len(plan.lanes[0])
            assert changed in (0, rows), f"{changed} of {rows} rows changed; the prompts aren't in step"
            kind = "plan, every row gets a block" if changed else "plan, nothing changed"
            found[kind].append(1e3 * (planned - since))
            found["commit"].append(1e3 * (ended - began))
    return found


def _result(epoch: int, step: int, worker: NullWorker, plan: LanePlan, freed: tuple[int, ...]) -> Any:
    from planaria.protocol import StepResult

    return StepResult(epoch, step, (worker.step(step, plan, freed),))


def loop_step(config: EngineConfig, rows: int, steps: int) -> Samples:
    """`EngineLoop.turn` as `LLM` and the engine process call it."""
    deltas = 0

    def hear(message: FromEngine) -> None:
        nonlocal deltas
        deltas += len(getattr(message, "deltas", ()))

    loop = build_loop(config, hear)
    facts = loop.start()
    try:
        for i, prompt in enumerate(prompts(rows, spread=True)):
            loop.handle(Submit(f"r{i}", prompt, GREEDY, 0, min(WARM + steps + 64, facts.max_model_len - 2 * PROMPT)))
        for _ in range(WARM):
            loop.step()
        deltas = 0
        found = []
        for _ in range(steps):
            since = time.perf_counter()
            loop.step()
            found.append(1e3 * (time.perf_counter() - since))
        if deltas != rows * steps:
            raise RuntimeError(f"{deltas} deltas in {steps} steps of {rows} rows")
        return found
    finally:
        loop.close()


def llm_step(model: str, rows: int, steps: int) -> Samples:
    """Time between two steps of `LLM.generate`, text included."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=WARM + steps)
    options: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": max(8192, rows), "threads": 1}
    stamps: list[float] = []
    with LLM(model, null_worker=True, **options) as llm:
        llm.generate(prompts(rows, spread=True), params, on_tokens=lambda done, new: stamps.append(time.perf_counter()))
    return [1e3 * (b - a) for a, b in zip(stamps[WARM : WARM + steps - 1], stamps[WARM + 1 :], strict=False)]


class _NoChoice:
    """A sampler's shape; every row draws the same token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def enter(self, row: int, fresh: Fresh) -> None:
        self.tokens.append(1000)

    def leave(self, row: int) -> None:
        pass

    def sample(self, logits: Any, rows: list[int]) -> tuple[list[int], dict[int, Any], dict[int, str]]:
        return self.tokens, {}, {}


def worker_parts(config: EngineConfig, rows: int, steps: int) -> dict[str, Samples]:
    """The runner around a forward pass that is ready, and the sampler on its logits."""
    scheduler, size = config.scheduler, config.cache.block_size
    vocab = config.model.vocab_size
    columns = -(-(PROMPT + steps + 2) // size) + 1
    logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)

    def runner(sampler: Any) -> Callable[[], None]:
        batch = Batch(scheduler.max_num_batched_tokens, rows, columns, scheduler.max_logit_rows)
        made = Runner(batch, lambda: logits, sampler, scheduler, size)
        blocks = [tuple(range(i * columns, (i + 1) * columns)) for i in range(rows)]
        enter = tuple(
            Row(i, 0, PROMPT, blocks[i], True, Fresh(array("i", prompt), PROMPT, GREEDY, 0))
            for i, prompt in enumerate(prompts(rows, spread=False))
        )
        made.step(1, enter, ())
        number = iter(range(2, steps + 8))
        return lambda: void(made.step(next(number), (), ()))

    assembly = timed(runner(_NoChoice()), steps)
    sampler = Sampler(rows, vocab)
    for i, prompt in enumerate(prompts(rows, spread=False)):
        sampler.enter(i, Fresh(array("i", prompt), PROMPT, GREEDY, 0))
    order = list(range(rows))
    return {"runner": assembly, "sampler, greedy": timed(lambda: void(sampler.sample(logits, order)), steps // 4)}


def void(_: object) -> None:
    return None


def timed(call: Callable[[], None], repeat: int) -> Samples:
    found = []
    for _ in range(repeat):
        since = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - since))
    return found


def summary(samples: Samples) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered), "p90": ordered[int(0.9 * (len(ordered) - 1))], "steps": len(ordered),
    }  # fmt: skip


def measure(model: str, sizes: list[int], steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """{part: {rows: {"median", "p90", "steps"}}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for rows in sizes:
        config = config_for(model, rows)
        parts = core_parts(config, rows, steps)
        parts["engine step"] = loop_step(config, rows, steps)
        parts["LLM step"] = llm_step(model, rows, steps)
        parts |= worker_parts(config, rows, steps)
        for name, samples in parts.items():
            found.setdefault(name, {})[str(rows)] = summary(samples)
        sys.stderr.write(f"{rows} rows done\n")
    return found


def table(found: dict[str, dict[str, dict[str, float]]], sizes: list[int]) -> report.Table:
    """Rows: the parts, and what a step costs in all."""
    rows = []
    for name, by_size in found.items():
        cells = [by_size[str(n)] for n in sizes]
        rows.append([name, *(f"{c['median']:.3f} ({c['p90']:.3f})" for c in cells)])
    total = [found["engine step"][str(n)]["median"] + found["runner"][str(n)]["median"] for n in sizes]
    rows.append(["engine step + runner", *(f"{t:.3f}" for t in total)])
    head = ["ms a step, median (p90)", *(f"{n} rows" if n > 1 else "1 row" for n in sizes)]
    return report.Table("Engine overhead", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="only its configuration is read")
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--markdown", type=Path, help="also write the table into this file between its markers")
    options = parser.parse_args()
    sizes = [int(n) for n in options.sizes.split(",")]
    found = measure(options.model, sizes, options.steps)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))
    made = table(found, sizes)
    print(report.as_text([made], []))
    if options.markdown:
        report.write_between(options.markdown, "engine_overhead", report.as_markdown([made], []))


if __name__ == "__main__":
    main()
