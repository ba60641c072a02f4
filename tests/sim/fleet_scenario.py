"""What a seed of a fleet stands for: how many engines on how many nodes, requests with their times, changes of the
fleet's size, and which faults there may be.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from planaria.config.options import CacheConfig, EngineConfig, FaultConfig, ParallelConfig, SchedulerConfig
from planaria.wire import Cancel, Submit
from tests.sim.scenario import BLOCK_BYTES, Asked, draw_config, draw_poisons, draw_requests, with_drafts, with_grammars

KILLS = ("kill", "node leaves", "crash", "exit", "load dies")
PAUSES = ("stop", "short stop", "hang", "slow", "load is slow")
RANKS = ("ranks lost", "told to end")
MESSAGES = ("said twice", "said too late", "said for nothing", "delay")
CLOCKS = ("server away", "all asleep")
ENDS = ("gives up", "start fails")


class Size(msgspec.Struct, frozen=True):
    """Somebody asks for so many engines."""

    id: str
    engines: int
    drain_timeout: float
    prefill: int = 1  # of them, where there are two kinds


class Shape(msgspec.Struct, frozen=True):
    """Somebody asks for another layout of all engines."""

    tp: int
    pp: int


@dataclass
class FleetScenario:
    seed: int
    config: EngineConfig
    messages: list[tuple[float, Submit | Cancel | Size | Shape]]
    asked: dict[str, Asked]
    nodes: int  # that the engines are dealt over
    kinds: list[str]
    chance: float
    budget: int
    poison_raises: bool
    garbage: bool = True
    poisons: dict[int, int] = field(default_factory=dict)


def draw_fleet(seed: int, *, keyed: bool = True) -> FleetScenario:
    chance = random.Random(seed * 2 + 1)
    config = with_drafts(seed, _config(chance))
    asked, drawn = draw_requests(chance, config, keyed)
    messages: list[tuple[float, Submit | Cancel | Size | Shape]] = [
        (when, message) for when, message in drawn if isinstance(message, Submit | Cancel)
    ]
    with_grammars(seed, asked, keyed=keyed)
    spread = max(when for when, _ in messages)
    for i in range(chance.choice([0, 0, 1, 1, 2, 3])):
        size = Size(f"s{i}", chance.choice([0, 1, 1, 2, 2, 3, 4]), chance.choice([0.0, 0.0, 0.05, 5.0]))
        messages.append((chance.uniform(0, spread + 1), size))
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        messages.append((chance.uniform(0, spread + 1), Shape(chance.choice([1, 2, 9]), chance.choice([1, 2]))))
    messages.sort(key=lambda item: item[0])
    groups = [KILLS, PAUSES, RANKS, MESSAGES, CLOCKS]
    kinds = [kind for group in chance.sample(groups, chance.choice([1, 2, 3, 5])) for kind in group]
    if chance.random() < 0.2:
        kinds += ENDS
    if chance.random() < 0.08:
        kinds = []
    scenario = FleetScenario(
        seed, config, messages, asked, chance.choice([1, 2, 2, 3]), kinds,
        chance=chance.choice([0.01, 0.03, 0.1, 0.3]), budget=chance.choice([1, 2, 3, 5, 8]),
        poison_raises=chance.random() < 0.3,
    )  # fmt: skip
    if chance.random() < 0.15:
        scenario.poisons = draw_poisons(chance, asked)
    return with_kinds(scenario)


def with_kinds(scenario: FleetScenario) -> FleetScenario:
    """Some have engines of two kinds; of a chance of their own, so that the others are as they were."""
    chance, config = random.Random(f"kinds of {scenario.seed}"), scenario.config
    if chance.random() < 0.4:
        size = max(2, config.parallel.data_parallel_size)
        prefill = chance.randint(1, size - 1)
        parallel = msgspec.structs.replace(
            config.parallel, data_parallel_size=size, prefill_engines=prefill, decode_engines=size - prefill
        )
        needed = -(-config.scheduler.max_model_len // config.cache.block_size)
        memory = chance.choice([config.cache.memory, needed * BLOCK_BYTES, (needed + 2) * BLOCK_BYTES])
        cache = msgspec.structs.replace(config.cache, enable_prefix_caching=True, memory=memory)
        scenario.config = msgspec.structs.replace(config, parallel=parallel, cache=cache)
        scenario.messages = [
            (when, msgspec.structs.replace(said, prefill=chance.randint(1, 2)) if isinstance(said, Size) else said)
            for when, said in scenario.messages
        ]
    return scenario


def _config(chance: random.Random) -> EngineConfig:
    config = draw_config(chance)
    seqs, size = chance.randint(1, 4), config.cache.block_size
    needed = -(-config.scheduler.max_model_len // size)
    return msgspec.structs.replace(
        config,
        scheduler=SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=chance.randint(max(seqs, 4), 64),
            max_model_len=config.scheduler.max_model_len, depth=chance.choice([1, 2]), max_logit_rows=seqs + 8,
        ),
        cache=CacheConfig(
            block_size=size, memory=chance.randint(needed, 4 * needed) * BLOCK_BYTES,
            enable_prefix_caching=chance.random() < 0.6,
        ),
        parallel=ParallelConfig(distributed_executor_backend="mp", data_parallel_size=chance.choice([1, 2, 2, 2, 3])),
        faults=FaultConfig(
            recovery_limit=chance.choice([1, 3, 5, 5, 10]), recovery_window=chance.choice([60.0, 300.0]),
            step_timeout=chance.choice([15.0, 100.0]),
        ),
    )  # fmt: skip
