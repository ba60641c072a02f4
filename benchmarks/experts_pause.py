"""The part *pause* of benchmarks.experts: what streams notice of experts that move, and of load that is recorded.

A random Qwen3-MoE in bfloat16 on two tensor ranks with whole experts, 8 streams at a time. One engine takes turns:
nothing moves; every 64 steps experts are rearranged while steps wait; the same beside steps. Few tokens are in a
window, so each rearrangement finds something to move. Said of each: the time between two tokens of a stream once all
have begun, its median while nothing moves and while something does (from the decision to the last commit), and its
longest. *Recording*: two engines with the same slots take turns, one of which counts load and asks for it; neither
rearranges anything. CPU time, as others' work changes it least.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.experts_tokens import EP, TP2, checkpoint
from planaria.build import build_loop
from planaria.config.options import EngineOptions
from planaria.config.resolve import resolve
from planaria.types import SamplingParams
from planaria.wire import FromEngine, Output, Submit

SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_experts": 16, "moe_intermediate_size": 512, "head_dim": 64,
    "norm_topk_prob": True, "num_experts_per_tok": 4,
}  # fmt: skip
STREAMS, PROMPT, TOKENS = 8, 16, 200
INTERVAL, NEVER = 64, 1 << 40
ROUNDS, RECORDED = 5, 16
QUESTIONS = 500
PARAMS = SamplingParams(temperature=0, ignore_eos=True)


class Engine:
    """In this process, its ranks in others; `gaps`: seconds between two tokens of a stream, while all streams have had
    one, and whether experts were being rearranged."""

    def __init__(self, folder: str, **options: Any) -> None:
        options = {
            "dtype": "bfloat16", "device": "cpu", "max_model_len": 256, "kv_cache_memory": "64MiB", "max_num_seqs": 8,
            "distributed_executor_backend": "mp", "enable_prefix_caching": False, **EP, **TP2, **options,
        }  # fmt: skip
        self.gaps: list[tuple[float, bool]] = []
        self._last: dict[str, float] = {}
        self._number = 0
        self.loop = build_loop(resolve(EngineOptions(model=folder, **options)), self._hear)
        self.loop.start()

    def _hear(self, message: FromEngine) -> None:
        if not isinstance(message, Output):
            return
        now, state = time.monotonic(), self.loop.balancing.state
        moving = state is not None and state.rearranging
        for delta in message.deltas:
            if delta.tokens:
                if len(self._last) == STREAMS:
                    self.gaps.append((now - self._last[delta.request_id], moving))
                self._last[delta.request_id] = now
            if delta.finish is not None:
                del self._last[delta.request_id]

    def turn(self, prompts: list[list[int]]) -> list[tuple[float, bool]]:
        self.gaps = []
        for prompt in prompts:
            self._number += 1
            self.loop.handle(Submit(f"r{self._number}", prompt, PARAMS, 0, TOKENS))
        while self.loop.busy():
            self.loop.step()
        return self.gaps

    @property
    def steps(self) -> int:
        assert self.loop.core is not None
        return self.loop.core.committed

    def cpu_seconds(self) -> float:
        """Of this process and all ranks."""
        used = time.process_time()
        for member in self.loop.gang.members:
            for thread in Path(f"/proc/{member.pid}/task").iterdir():
                used += int((thread / "schedstat").read_text().split()[0]) / 1e9
        return used

    def close(self) -> None:
        self.loop.close()

    def rearranges(self, every: int, *, use_async: bool) -> None:
        state = self.loop.balancing.state
        assert state is not None
        state.config = msgspec.structs.replace(state.config, step_interval=every, use_async=use_async)


def prompts_of(draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(3, 131) for _ in range(PROMPT)] for _ in range(STREAMS)]


def paused(engine: Engine, draw: random.Random) -> dict[str, Any]:
    ways = {"nothing moves": (NEVER, False), "while steps wait": (INTERVAL, False), "beside steps": (INTERVAL, True)}
    found: dict[str, Any] = {name: {"median": [], "moving": [], "longest": [], "times": 0, "bytes": 0} for name in ways}
    for number in range(ROUNDS):
        for name, (every, use_async) in ways.items():
            engine.rearranges(every, use_async=use_async)
            before = engine.loop.balancing.stats
            gaps = engine.turn(prompts_of(draw))
            after, entry = engine.loop.balancing.stats, found[name]
            assert before is not None and after is not None
            entry["median"].append(statistics.median(gap for gap, moving in gaps if not moving))
            entry["moving"].append(statistics.median([gap for gap, moving in gaps if moving] or [0.0]))
            entry["longest"].append(max(gap for gap, _ in gaps))
            entry["times"] += after.rearrangements - before.rearrangements
            entry["bytes"] += after.bytes_moved - before.bytes_moved
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    return found


def recorded(plain: Engine, counting: Engine, draw: random.Random) -> dict[str, Any]:
    """CPU seconds of a step, of the engine's process and all ranks, round by round; and of one question for load."""
    engines = {"not recorded": plain, "recorded": counting}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(RECORDED):
        prompts = prompts_of(draw)
        for name in list(engines)[:: 1 if number % 2 else -1]:
            engine = engines[name]
            before, steps = engine.cpu_seconds(), engine.steps
            engine.turn(prompts)
            found[name].append((engine.cpu_seconds() - before) / (engine.steps - steps))
    before = counting.cpu_seconds()
    for _ in range(QUESTIONS):
        counting.loop.call("expert_load").result()
    return {**found, "question": (counting.cpu_seconds() - before) / QUESTIONS}


def pause_part() -> tuple[dict[str, Any], list[report.Table]]:
    draw = random.Random(0)
    config = {"window_size": 32, "step_interval": INTERVAL, "num_redundant_experts": 2}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        checkpoint(Path(folder), "qwen3_moe", SHAPE)
        with contextlib.closing(Engine(folder, enable_eplb=True, eplb_config=config)) as engine:
            pauses = paused(engine, draw)
        plain = running.enter_context(contextlib.closing(Engine(folder)))
        counting = running.enter_context(contextlib.closing(Engine(folder, enable_eplb=True)))  # and the same slots
        cost = recorded(plain, counting, draw)
    return {"pauses": pauses, "recording": cost}, tables(pauses, cost)


def tables(pauses: dict[str, Any], cost: dict[str, Any]) -> list[report.Table]:
    rows = []
    for name, entry in pauses.items():
        longest = entry["longest"]
        moving = f"{1000 * statistics.median(entry['moving']):.1f}" if entry["times"] else "-"
        rows.append([
            name, str(entry["times"]), f"{entry['bytes'] / 2**20:.0f}",
            f"{1000 * statistics.median(entry['median']):.1f}", moving,
            f"{1000 * statistics.median(longest):.1f}", f"{1000 * max(longest):.1f}",
        ])  # fmt: skip
    one, other = cost["not recorded"], cost["recorded"]
    ratios = [after / before - 1 for before, after in zip(one, other, strict=True)]
    return [
        report.Table(
            f"Time between two tokens of a stream, {STREAMS} streams, {ROUNDS} rounds by turns (ms)",
            ["experts", "rearranged", "MiB moved", "median", "while moving", "longest (median of rounds)", "longest"],
            rows,
        ),
        report.Table(
            f"Recording load, {RECORDED} rounds by turns: CPU time of a step, of all processes (ms)",
            ["not recorded, least", "recorded, least", "median of the rounds' differences", "one question for load"],
            [[
                f"{1000 * min(one):.2f}", f"{1000 * min(other):.2f}", f"{100 * statistics.median(ratios):+.1f} %",
                f"{1000 * cost['question']:.2f}",
            ]],
        ),
    ]  # fmt: skip
