"""The rules of expert options: who has which experts, how tokens reach them, how load is balanced. Pure.

`expert_fields` looks at what needs no model, `resolve_experts` at the rest, when the model is known.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from planaria.config.all2all import DEFAULT, EXCHANGES, ExpertShapes, check_library, check_shapes
from planaria.config.json_option import json_option
from planaria.config.options import EngineOptions, EPLBConfig, ParallelConfig
from planaria.errors import ConfigError
from planaria.models.config import ModelConfig
from planaria.topology.experts import ExpertMap

Note = tuple[int, str]  # a level of `logging`, a line

POLICIES = ("default",)

_EP, _EPLB, _EPLB_CONFIG, _DBO = "--enable-expert-parallel", "--enable-eplb", "--eplb-config", "--enable-dbo"
_PLACEMENT, _ALL2ALL, _UBATCH = "--expert-placement-strategy", "--all2all-backend", "--ubatch-size"
MOST_MICRO_BATCHES = 16


def expert_fields(options: EngineOptions) -> dict[str, Any]:
    """Fields of ParallelConfig. Raises ConfigError."""
    backend = options.all2all_backend
    if backend is not None and EXCHANGES[backend].by_eights and options.ray_dp_pack_strategy == "fill":
        raise ConfigError(
            "--ray-dp-pack-strategy", "fill",
            f"puts any number of ranks on a node, and those of {_ALL2ALL} {backend} must sit by eights on a node",
            f"use --ray-dp-pack-strategy strict, or {_ALL2ALL} {DEFAULT}",
        )  # fmt: skip
    if options.ubatch_size > MOST_MICRO_BATCHES:
        rule = f"must be at most {MOST_MICRO_BATCHES}: each has a thread and a group of ranks of its own"
        raise ConfigError(_UBATCH, options.ubatch_size, rule)
    return {"eplb_config": eplb_config(options.eplb_config), "all2all_backend": backend or DEFAULT}


def eplb_config(given: str | dict[str, Any] | None) -> EPLBConfig:
    """From JSON, or what it says. Raises ConfigError for a field that is unknown, of another type, or out of range."""
    if given is None:
        return EPLBConfig()
    config: EPLBConfig = json_option(_EPLB_CONFIG, given, EPLBConfig, """write '{"num_redundant_experts": 8}'""")
    least = {"window_size": 1, "step_interval": 1, "num_redundant_experts": 0}
    if config.log_balancedness:
        least["log_balancedness_interval"] = 1
    for name, value in least.items():
        if getattr(config, name) < value:
            raise ConfigError(f"{_EPLB_CONFIG} {name}", getattr(config, name), f"must be at least {value}")
    if config.use_async and config.policy != "default":
        rule = f"moves weights between steps as the policy default orders them, and the policy is {config.policy}"
        raise ConfigError(f"{_EPLB_CONFIG} use_async", "true", rule, "leave policy out, or use_async")
    if config.policy not in POLICIES:
        raise ConfigError(f"{_EPLB_CONFIG} policy", config.policy, "is unknown", f"choose one of {', '.join(POLICIES)}")
    return config


def expert_shapes(model: ModelConfig, dtype: str) -> ExpertShapes | None:
    """Of a model with experts; None: it is dense. dtype: that hidden values are computed in."""
    moe = model.moe
    if moe is None:
        return None
    return ExpertShapes(num_experts=moe.num_experts, top_k=moe.top_k, hidden_size=model.hidden_size, dtype=dtype)


def resolve_experts(
    config: ParallelConfig,
    options: EngineOptions,
    device: str,
    shapes: ExpertShapes | None,
    libraries: tuple[str, ...] | None = (),
) -> tuple[ParallelConfig, list[Note]]:
    """For a model with experts of these shapes, or a dense one (None). libraries: modules that can be imported where
    ranks run; None: who knows. Raises ConfigError."""
    _needs(config, shapes)
    if config.enable_eplb and options.batch_invariant:
        rule = "moves experts to other ranks with their load, and a token's sum is taken rank by rank"
        why = "--batch-invariant promises that it depends on nothing but the request"
        raise ConfigError(_EPLB, True, f"{rule}: {why}", "leave one of the two out")
    notes: list[Note] = []
    apart = config.data_parallel_size * config.lanes * config.prefill_context_parallel_size > 1
    exchanged = config.shares_experts and apart
    if options.all2all_backend is not None and not exchanged:
        why = "tokens are exchanged with --data-parallel-size above 1, by a model with experts"
        notes.append((logging.WARNING, f"{_ALL2ALL} {options.all2all_backend} changes nothing: {why}"))
    if config.num_micro_batches > 1 and config.shares_experts and not exchanged:
        option = _DBO if config.enable_dbo else f"{_UBATCH} {config.ubatch_size}"
        why = "tokens are exchanged between several data-parallel ranks, and there is one"
        notes.append((logging.WARNING, f"{option} changes nothing: {why}"))
    if options.eplb_config is not None and not config.enable_eplb:
        notes.append((logging.WARNING, f"{_EPLB_CONFIG} changes nothing without {_EPLB}"))
    redundant = config.eplb_config.num_redundant_experts
    if config.expert_placement_strategy == "round_robin":
        if not config.enable_expert_parallel:
            notes.append((logging.WARNING, f"{_PLACEMENT} round_robin changes nothing without {_EP}"))
        elif redundant:
            why = f"{redundant} redundant experts are asked for, and round robin knows none"
            config = msgspec.structs.replace(config, expert_placement_strategy="linear")
            notes.append((logging.WARNING, f"{_PLACEMENT} linear is used: {why}"))
    if shapes is not None and config.data_parallel_size > 1:  # engines; lanes are no longer counted there
        notes.append((logging.INFO, f"each of {config.data_parallel_size} engines of two kinds has all experts"))
    if config.slices_experts:
        ranks = config.layout.expert_ranks
        line = f"each of {ranks} ranks has a slice of every expert; {_EP} deals them whole"
        notes.append((logging.INFO, line))
        if EXCHANGES[config.all2all_backend].library:
            rule = f"brings tokens to the ranks that have their experts, and each of {ranks} has a slice of every one"
            raise ConfigError(_ALL2ALL, config.all2all_backend, rule, f"add {_EP}, or use {DEFAULT}")
    if config.enable_expert_parallel:  # there may be more lanes later
        check_library(config.all2all_backend, device, libraries)
    if shapes is not None and exchanged:
        check_shapes(config.all2all_backend, shapes, config.expert_parallel_size, redundant)
    return config, notes


def _needs(config: ParallelConfig, shapes: ExpertShapes | None) -> None:
    """What an option takes for granted."""
    ranks, redundant = config.expert_parallel_size, config.eplb_config.num_redundant_experts
    if config.enable_expert_parallel:
        if shapes is None:
            raise ConfigError(_EP, True, "the model has no experts: it is dense", "leave it out")
        if ranks > shapes.num_experts + redundant:
            degrees = f"-tp {config.tensor_parallel_size} x -dp {ranks // config.tensor_parallel_size}"
            slots = f"{shapes.num_experts} experts" + (f" and {redundant} redundant ones" if redundant else "")
            rule = f"{degrees} are {ranks} ranks, and {slots} leave some without any"
            raise ConfigError(_EP, True, rule, f"use at most {shapes.num_experts + redundant} ranks")
    if config.enable_eplb:
        if not config.enable_expert_parallel:
            raise ConfigError(_EPLB, True, "moves whole experts, and they are sliced by tensor rank", f"add {_EP}")
        if ranks == 1:
            fix = "leave it out, or give --tensor-parallel-size or --data-parallel-size"
            raise ConfigError(_EPLB, True, "there is one rank, which has all experts", fix)
        if shapes is not None and redundant > shapes.num_experts * (ranks - 1):
            most = shapes.num_experts * (ranks - 1)
            rule = f"with {most} each of {ranks} ranks has all {shapes.num_experts} experts"
            raise ConfigError(f"{_EPLB_CONFIG} num_redundant_experts", redundant, rule, f"give at most {most}")
    elif redundant:
        option, rule = f"{_EPLB_CONFIG} num_redundant_experts", "nothing decides which experts to repeat"
        raise ConfigError(option, redundant, f"{rule} without {_EPLB}", f"add {_EPLB}, or leave it out")
    if config.num_micro_batches > 1 and not config.shares_experts:
        option, value = (_DBO, True) if config.enable_dbo else (_UBATCH, config.ubatch_size)
        why = "the model is dense" if shapes is None else f"there is no {_EP}, and no --data-parallel-size above 1"
        raise ConfigError(option, value, f"there is no exchange of tokens to hide: {why}", "leave it out")


def expert_map(config: ModelConfig, parallel: ParallelConfig, ranks: int) -> ExpertMap | None:
    """Where whole experts are over the `ranks` of an expert group, at the start; None: they are sliced by columns."""
    if config.moe is None or not parallel.enable_expert_parallel:
        return None
    experts = config.moe.num_experts
    redundant = parallel.expert_slots(experts) - experts
    return ExpertMap.placed(parallel.expert_placement_strategy, experts, ranks, redundant)
