"""What a seed of one engine stands for: nodes and their devices, a layout and others that are asked for, requests with
their times, and which faults there may be. Drawn at once, so that it doesn't depend on how the run goes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from planaria.config.options import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EPLBConfig,
    FaultConfig,
    LoRAConfig,
    ParallelConfig,
    SchedulerConfig,
    TierConfig,
)
from planaria.executor.loras import STEP_BYTES
from planaria.models.config import ModelConfig, MoEConfig, RopeConfig
from planaria.protocol import LoraModule
from planaria.types import SamplingParams
from planaria.wire import Cancel, LoadLora, Report, ResizeEngine, Shutdown, Submit, ToEngine, UnloadLora
from tests.reference_worker import hash_tokens, hash_vector
from tests.sim.lanes import Pause

VOCAB = 40
BLOCK_BYTES = 1000
LAYOUTS = [  # tensor ranks, stages, lanes
    (1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 3, 1), (3, 1, 1),
    (1, 4, 1), (1, 1, 2), (1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2), (1, 1, 4),
]  # fmt: skip

KILLS = ("kill", "kill several", "spare dies")
PAUSES = ("stop", "short stop", "cut", "hang", "slow", "slow for long")
ERRORS = ("exception", "out of memory")
MESSAGES = ("reply lost", "command lost", "reply twice", "late ghost", "delay")
LAUNCHES = ("launch dies", "launch fails", "launch is slow")
CLOCKS = ("engine away", "all asleep")
DEVICES = ("device leaves", "node leaves", "node will leave", "device is bad")
NO_DEVICE = ("no device",)

MOST = 4  # ranks along an axis
MOST_RANKS = 6  # where some share a step
MODEL = ModelConfig(
    architecture="Hash", hidden_size=1, intermediate_size=32 * MOST, num_layers=MOST, num_heads=MOST,
    num_kv_heads=MOST, head_dim=1, vocab_size=16 * MOST, max_position=1024, norm_eps=0.0, rope=RopeConfig(),
)  # fmt: skip


@dataclass
class Asked:
    """A request, and what is true of it: `tokens` are what it gets in full, or a `vector` in their place; `poison` the
    position that can't be computed without killing (or failing) its rank."""

    submit: Submit
    tokens: list[int]
    poison: int | None = None
    vector: bytes | None = None


@dataclass
class Scenario:
    seed: int
    config: EngineConfig
    messages: list[tuple[float, ToEngine | Pause]]
    asked: dict[str, Asked]
    nodes: list[int]  # devices of each
    kinds: list[str]  # of faults
    chance: float  # of a fault, at each occasion
    budget: int  # of faults
    poison_raises: bool = False
    poison_rank: int | None = None  # that is hit by it; None: all
    garbage: bool = True  # what a KV block holds before it is computed: something, or nothing
    quiet_peers: bool = False  # ranks that wait for one that is dead say nothing
    tight: bool = False  # with fewer ranks a block takes more memory of each
    poisons: dict[int, int] = field(default_factory=dict)  # by a request's seed
    liked: tuple[int, ...] = (1,)  # how often each expert is chosen


def draw(seed: int, *, keyed: bool = True) -> Scenario:
    chance = random.Random(seed * 2 + 1)
    config = draw_config(chance)
    asked, messages = draw_requests(chance, config, keyed)
    groups = [KILLS, PAUSES, ERRORS, MESSAGES, LAUNCHES, CLOCKS, DEVICES]
    kinds = [kind for group in chance.sample(groups, chance.choice([1, 2, 3, 7])) for kind in group]
    if not any(kind in KILLS for kind in kinds) and any(kind in LAUNCHES for kind in kinds):
        kinds.append("kill")  # else nothing is ever launched again
    if chance.random() < 0.03:
        kinds += NO_DEVICE
    if chance.random() < 0.08:
        kinds = []
    config, liked = draw_experts(chance, config)
    config = with_context(seed, config)
    config = with_drafts(seed, config)
    with_grammars(seed, asked, keyed=keyed)
    config = with_loras(seed, config, asked, messages, keyed=keyed)
    scenario = Scenario(
        seed, config, messages, asked, _nodes(chance, config), kinds,
        chance=chance.choice([0.005, 0.02, 0.05, 0.2]), budget=chance.choice([1, 2, 3, 5, 8]),
        poison_raises=chance.random() < 0.3, garbage=chance.random() < 0.7, quiet_peers=chance.random() < 0.3,
        poison_rank=chance.choice([None, chance.randrange(config.parallel.world_size)]), tight=chance.random() < 0.3,
        liked=liked,
    )  # fmt: skip
    if chance.random() < 0.15:
        scenario.poisons = draw_poisons(chance, asked)
    return with_vectors(with_tier(with_layouts(scenario)))


def with_layouts(scenario: Scenario) -> Scenario:
    """Some have one node, and another layout is asked for while requests run."""
    if scenario.seed % 16 != 10 or scenario.config.model.moe is not None:
        return scenario
    chance, scenario.nodes = random.Random(f"layouts of {scenario.seed}"), [sum(scenario.nodes)]
    began = [when for when, message in scenario.messages if isinstance(message, Submit)]
    for i, when in enumerate(chance.sample(began, min(len(began), 3))):
        tp, pp, _ = chance.choice(LAYOUTS)
        scenario.messages.append((when + chance.uniform(0.05, 0.5), ResizeEngine(f"again{i}", tp, pp)))
    scenario.messages.sort(key=lambda each: each[0])
    return scenario


def with_vectors(scenario: Scenario) -> Scenario:
    """In some, most requests end with a vector."""
    if scenario.seed % 7 != 3:
        return scenario
    chance = random.Random(f"vectors of {scenario.seed}")
    for i, (when, message) in enumerate(scenario.messages):
        if not isinstance(message, Submit) or scenario.asked[message.id].poison is not None or chance.random() < 0.3:
            continue
        asked, pooling = scenario.asked[message.id], chance.choice(["last", "mean"])
        params = SamplingParams(max_tokens=1, pooling=pooling)
        asked.submit = msgspec.structs.replace(message, params=params, max_tokens=1, output=[])
        asked.tokens, asked.vector = [], hash_vector(message.prompt, pooling, message.adapter)
        scenario.messages[i] = when, asked.submit
    return scenario


def with_context(seed: int, config: EngineConfig) -> EngineConfig:
    """Some have ranks that share the tokens of a sequence, and of a step. Those have fewer, larger blocks, and more
    experts."""
    chance, parallel = random.Random(f"context of {seed}"), config.parallel
    tp = parallel.tensor_parallel_size
    size = chance.choice([size for size in range(1, tp + 1) if tp % size == 0])
    interleave, shares = chance.choice([1, 1, 2]), chance.choice([1, 1, 1, 1, 2, 2, 3])
    if parallel.world_size * shares > MOST_RANKS:
        shares = 1
    parallel = msgspec.structs.replace(
        parallel, decode_context_parallel_size=size, prefill_context_parallel_size=shares,
        cp_kv_cache_interleave_size=interleave,
    )  # fmt: skip
    cache, model, turn = config.cache, config.model, size * shares * interleave
    if size * shares > 1 and cache.block_size % turn:
        assert cache.memory is not None
        tokens = -(-cache.block_size // turn) * turn
        needed = -(-config.scheduler.max_model_len // tokens) * BLOCK_BYTES
        memory = max(needed, cache.memory * cache.block_size // tokens // BLOCK_BYTES * BLOCK_BYTES)
        cache = msgspec.structs.replace(cache, block_size=tokens, memory=memory)
    if model.moe is not None and shares > 1:
        moe = msgspec.structs.replace(model.moe, num_experts=model.moe.num_experts + MOST * (shares - 1))
        model = msgspec.structs.replace(model, moe=moe)
    return msgspec.structs.replace(config, parallel=parallel, cache=cache, model=model)


def with_tier(scenario: Scenario) -> Scenario:
    """Some keep KV blocks on disk; then there are requests with a salt, and some whose blocks are to persist."""
    chance, config = random.Random(f"tier of {scenario.seed}"), scenario.config
    if not config.cache.enable_prefix_caching or chance.random() < 0.25:
        return scenario
    cache = msgspec.structs.replace(config.cache, kv_tier=TierConfig(folder="simulated", size=1 << 20))
    scenario.config = msgspec.structs.replace(config, cache=cache)
    salted = chance.random() < 0.3
    for i, (when, message) in enumerate(scenario.messages):
        if isinstance(message, Submit):
            salt, persist = chance.choice(["", "x"]) if salted else "", chance.random() < 0.6
            submit = msgspec.structs.replace(message, cache_salt=salt, persist=persist)
            scenario.messages[i] = when, submit
            scenario.asked[message.id].submit = submit
    return scenario


def draw_poisons(chance: random.Random, asked: dict[str, Asked]) -> dict[int, int]:
    """Make one or two requests poisonous; their positions, by seed."""
    poisons = {}
    for request in chance.sample(list(asked.values()), min(len(asked), chance.choice([1, 1, 2]))):
        last = len(request.submit.prompt) + len(request.tokens) - 2
        if last >= 0:
            request.poison = poisons[request.submit.seed] = chance.randint(0, last)
    return poisons


def draw_config(chance: random.Random) -> EngineConfig:
    tp, pp, lanes = chance.choice(LAYOUTS)
    depth = chance.choice([1, 2]) if pp == 1 else chance.choice([1, pp, pp + 1])
    block_size = chance.choice([1, 2, 4, 8])
    seqs = chance.randint(1, 6)
    max_model_len = 48
    needed = -(-max_model_len // block_size)
    return EngineConfig(
        model=MODEL, checkpoint={}, served_model_name="hash",
        scheduler=SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=chance.randint(max(seqs, 4), 64), max_model_len=max_model_len,
            policy=chance.choice(["fcfs", "fcfs", "priority"]), depth=depth, max_logit_rows=seqs + 8,
            micro_steps=1 if depth < pp else chance.choice([1, pp]),
        ),
        cache=CacheConfig(
            block_size=block_size, memory=chance.randint(needed, 4 * needed) * BLOCK_BYTES,
            enable_prefix_caching=chance.random() < 0.6,
        ),
        device=DeviceConfig(device="cpu", dtype="float32", quantization="none", threads=1),
        parallel=ParallelConfig(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, lanes=lanes, distributed_executor_backend="mp",
            max_parallel_loading_workers=chance.choice([None, None, 1]),
        ),
        faults=FaultConfig(
            spare_workers=chance.choice([0, 0, 1, 2]), recovery_limit=chance.choice([1, 3, 5, 5, 5, 10]),
            recovery_window=chance.choice([60.0, 300.0]), step_timeout=chance.choice([15.0, 40.0]),
        ),
    )  # fmt: skip


def with_drafts(seed: int, config: EngineConfig) -> EngineConfig:
    """Rows of every other scenario go on by several tokens."""
    drafts = random.Random(f"drafts of {seed}").choice([0, 0, 1, 4])
    return msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, max_drafts=drafts))


def with_grammars(seed: int, asked: dict[str, Asked], *, keyed: bool) -> None:
    """Some requests of every third scenario have a grammar: other tokens, as many as before."""
    chance = random.Random(f"grammars of {seed}")
    if chance.random() < 2 / 3:
        return
    for request in asked.values():
        submit = request.submit
        if not submit.params.stop_token_ids and chance.random() < 0.7:
            grammar = submit.params.grammar = str(chance.randrange(1, 4))
            request.tokens[:] = hash_tokens(
                submit.prompt, submit.seed, len(request.tokens), VOCAB, grammar, keyed=keyed
            )
            submit.output[:] = request.tokens[: len(submit.output)]


def with_loras(
    seed: int, config: EngineConfig, asked: dict[str, Asked], messages: list[tuple[float, ToEngine | Pause]], *,
    keyed: bool,
) -> EngineConfig:  # fmt: skip
    """Requests of every other scenario have adapters: other tokens, as many as before. Each is loaded in parts, maybe
    after requests for it have come, unloaded after the last of them has, and some come again."""
    chance = random.Random(f"adapters of {seed}")
    if chance.random() < 0.5:
        return config
    last: dict[str, float] = {}  # when the last request for it comes
    for i, (when, message) in enumerate(messages):
        if not isinstance(message, Submit) or message.params.stop_token_ids or chance.random() < 0.2:
            continue
        adapter, request = str(chance.randrange(1, 5)), asked[message.id]
        last[adapter] = when
        request.tokens[:] = hash_tokens(
            message.prompt, message.seed, len(request.tokens), VOCAB, message.params.grammar, keyed=keyed,
            adapter=adapter,
        )  # fmt: skip
        message.output[:] = request.tokens[: len(message.output)]
        request.submit = msgspec.structs.replace(message, adapter=adapter)
        messages[i] = when, request.submit
    for adapter, when in last.items():
        first, parts = chance.uniform(0, 5), chance.randint(1, 3)
        module = LoraModule(adapter, 1, 1.0, "f32", b"", bytes(STEP_BYTES)) if chance.random() < 0.3 else None
        modules = () if module is None else (module,)

        def load(at: float) -> None:
            messages.extend((at, LoadLora(adapter, part, parts, modules)) for part in range(parts))  # noqa: B023

        load(first)
        while chance.random() < 0.6:
            first = max(first, when) + chance.uniform(0, 0.5)
            messages.append((first, UnloadLora(adapter)))
            if chance.random() < 0.5:
                first += chance.uniform(0, 0.5)
                load(first)
    messages.sort(key=lambda item: item[0])
    lora = LoRAConfig(max_loras=chance.randint(1, 3), max_cpu_loras=chance.randint(1, 3))
    return msgspec.structs.replace(config, lora=lora)


def draw_experts(chance: random.Random, config: EngineConfig) -> tuple[EngineConfig, tuple[int, ...]]:
    """Whole experts on the ranks, balanced in most cases; how often each is chosen. A step of a rearrangement may move
    as many bytes as a few of them have, or one."""
    layout = config.parallel.layout
    if layout.tp * layout.dp == 1 or chance.random() < 0.2:
        return config, (1,)
    num, size = chance.randint(MOST, MOST + 3), chance.choice([1 << 14, 1 << 19, 1 << 20])
    moe = MoEConfig(num_experts=num, top_k=1, intermediate_size=size)
    balanced = chance.random() < 0.8
    eplb = EPLBConfig(
        num_redundant_experts=chance.choice([0, 1, 2, 4]) if balanced else 0, window_size=chance.choice([1, 5, 20]),
        step_interval=chance.choice([1, 3, 10, 20]), use_async=chance.random() < 0.5,
        log_balancedness=chance.random() < 0.2,
    )  # fmt: skip
    parallel = msgspec.structs.replace(
        config.parallel, enable_expert_parallel=True, enable_eplb=balanced, eplb_config=eplb,
        expert_placement_strategy=chance.choice(["linear", "round_robin"]),
    )  # fmt: skip
    model = msgspec.structs.replace(config.model, moe=moe)
    liked = tuple(chance.choice([0, 1, 1, 4, 20]) for _ in range(chance.randint(3, 8)))
    return msgspec.structs.replace(config, model=model, parallel=parallel), liked


def _nodes(chance: random.Random, config: EngineConfig) -> list[int]:
    """At least as many devices as ranks and spares."""
    devices = config.parallel.world_size + config.faults.spare_workers + chance.choice([0, 0, 0, 1, 2])
    ends = sorted(chance.sample(range(1, devices), min(devices - 1, chance.choice([0, 1, 1, 2]))))
    return [end - start for start, end in pairwise([0, *ends, devices])]


def _layouts(chance: random.Random, spread: float) -> list[tuple[float, ToEngine]]:
    """Layouts that are asked for; some can't be."""
    messages: list[tuple[float, ToEngine]] = []
    for i in range(chance.choice([1, 1, 2, 4])):
        tp, pp, lanes = chance.choice([*LAYOUTS, (0, 1, 1), (1, 1, 0), (MOST + 1, 1, 1), (1, MOST + 1, 1)])
        messages.append((chance.uniform(0, spread + 1), ResizeEngine(f"l{i}", tp, pp, lanes)))
    return messages


def draw_requests(
    chance: random.Random, config: EngineConfig, keyed: bool
) -> tuple[dict[str, Asked], list[tuple[float, ToEngine | Pause]]]:
    spread = chance.choice([0.0, 0.5, 4.0])
    shared = [chance.randrange(3) for _ in range(20)]
    asked: dict[str, Asked] = {}
    messages: list[tuple[float, ToEngine | Pause]] = []
    for i in range(chance.randint(1, 8)):
        own = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 6))]
        prompt = shared[: chance.choice([0, 4, 12, 20])] + own
        seed, max_tokens = 1000 * i + chance.randrange(1000), chance.choice([1, 4, 10, 20])
        tokens = hash_tokens(prompt, seed, max_tokens, VOCAB, keyed=keyed)
        stops: tuple[int, ...] = ()
        if chance.random() < 0.3:
            stops = (chance.choice(tokens),)
            tokens = tokens[: tokens.index(stops[0]) + 1]
        had = chance.randrange(len(tokens)) if keyed and chance.random() < 0.15 else 0  # admitted again
        id, when = f"r{i}", chance.uniform(0, spread)
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops)
        submit = Submit(id, prompt, params, seed, max_tokens, priority=chance.randrange(3), output=tokens[:had])
        asked[id] = Asked(submit, tokens)
        messages.append((when, submit))
        if chance.random() < 0.12:
            messages.append((when + chance.choice([0.0, chance.uniform(0, 1), chance.uniform(0, 20)]), Cancel(id)))
    for _ in range(chance.choice([0, 0, 0, 2])):
        messages.append((chance.uniform(0, spread + 1), Report()))
    if chance.random() < 0.25:
        messages += _layouts(chance, spread)
    if chance.random() < 0.04:
        messages.append((chance.uniform(0, spread + 3), Shutdown()))
    if chance.random() < 0.3:  # of lanes that there are then, if there are several
        for _ in range(chance.choice([1, 3])):
            messages.append((chance.uniform(0, spread + 1), Pause(chance.randrange(MOST), chance.uniform(0, 2))))
    messages.sort(key=lambda item: item[0])
    return asked, messages
