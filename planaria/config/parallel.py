"""The rules of parallel options: EngineOptions + what the machine is -> ParallelConfig. Pure.

Every refusal is a ConfigError with the value, the rule and the way out, raised before any process starts. What can be
run but may surprise comes back as notes for the log.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec

from planaria.config.data_parallel import data_parallel_fields, on_nodes
from planaria.config.declared import check, picked
from planaria.config.experts import expert_fields
from planaria.config.json_option import json_option
from planaria.config.machine import Machine
from planaria.config.options import EngineOptions, ParallelConfig
from planaria.errors import ConfigError
from planaria.topology.outer import OuterLauncher
from planaria.topology.platforms import PLATFORMS

BACKENDS = ("uni", "mp", "ray", "external_launcher")

Note = tuple[int, str]  # a level of `logging`, a line

_BACKEND = "--distributed-executor-backend"
_LOCAL_RANKS, _LOCAL_RANKS_FIX = "--placement-group-local-ranks", "write each one's index on its node: 0,1,0"
_LAYERS_FIX = "write the layers of each stage: 10,20"
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def resolve_parallel(
    options: EngineOptions, machine: Machine, device: str, *, slices: bool = False
) -> tuple[ParallelConfig, list[Note]]:
    """device: a platform's name. slices: are there experts of which data-parallel ranks have slices (`may_slice`)?
    Raises ConfigError."""
    check(options)
    shares = options.enable_expert_parallel or slices
    options, machine = _replicas(*_programs(options, machine, shares), shares)
    options = on_nodes(options, shares)
    _numbers(options)
    engines = data_parallel_fields(options, shares)
    nodes = engines["engine_nodes"]
    backend = _backend(options, machine, options.nnodes if nodes is None else nodes.per_engine, shares)
    config = ParallelConfig(**{
        **picked(ParallelConfig, options),
        # whether it fits the model is looked at when the model is known (`planaria.models.deal`)
        "pp_layer_partition": _list("--pp-layer-partition", options.pp_layer_partition, _LAYERS_FIX),
        "distributed_executor_backend": backend,
        "ray_runtime_env": _runtime_env(options.ray_runtime_env),
        "placement_group_local_ranks": _list(_LOCAL_RANKS, options.placement_group_local_ranks, _LOCAL_RANKS_FIX),
        "outer": machine.outer,
        "data_parallel_index": machine.outer.replica if machine.outer is not None else 0,
        "cp_kv_cache_interleave_size": _interleave(options),
        "slices_experts": slices,
        **engines,
        **expert_fields(options),
    })  # fmt: skip
    _context(config)
    config = _with_lanes(config)
    _nodes(config)
    _ray(config, machine)
    _enough(config, machine, device)
    if config.distributed_executor_backend == "external_launcher":
        _outer(config, machine.outer)
    _refuse_synchronization(config, options)
    notes = _crowded(config, machine, device)
    if options.dcp_kv_cache_interleave_size is not None:
        line = "--dcp-kv-cache-interleave-size is the old name of --cp-kv-cache-interleave-size"
        notes.append((logging.WARNING, line))
    return _all_reduce(config, device, notes)


def _interleave(options: EngineOptions) -> int:
    """Tokens in turn on each context rank. Raises ConfigError."""
    new, old = options.cp_kv_cache_interleave_size, options.dcp_kv_cache_interleave_size
    if old is not None and new is not None and old != new:
        raise ConfigError(
            "--dcp-kv-cache-interleave-size", old, f"is the old name of --cp-kv-cache-interleave-size, which is {new}",
            "leave the old one out",
        )  # fmt: skip
    found = new or old or 1
    if options.block_size % found:
        raise ConfigError(
            "--cp-kv-cache-interleave-size", found,
            f"so many tokens in turn must divide the {options.block_size} of a block (context parallel)",
            "use a divisor of --block-size",
        )  # fmt: skip
    return found


def _context(config: ParallelConfig) -> None:
    """The rules of context parallel. Raises ConfigError."""
    size, tp = config.decode_context_parallel_size, config.tensor_parallel_size
    if tp % size:
        raise ConfigError(
            "--decode-context-parallel-size", size,
            f"context parallel deals a sequence's tokens to tensor ranks, and {size} doesn't divide "
            f"--tensor-parallel-size {tp}", f"use a divisor of {tp}",
        )  # fmt: skip


def _with_lanes(config: ParallelConfig) -> ParallelConfig:
    """Experts that are spread over data-parallel ranks make these the lanes of one engine."""
    size = config.data_parallel_size
    if not config.shares_experts or size == 1:
        return config
    local = config.data_parallel_size_local if config.data_parallel_backend == "ray" else 1
    return msgspec.structs.replace(config, lanes=size, data_parallel_size=1, data_parallel_size_local=local)


def refuse_outer_launcher(config: ParallelConfig, what: str) -> None:
    """Under an outer launcher every process runs the whole program, which `what` can't be. Raises ConfigError."""
    if config.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            _BACKEND, "external_launcher", f"runs the same batch in every process, which {what} is not",
            "use LLM(...).generate or `planaria generate`, or another back end",
        )  # fmt: skip


def refuse_api_servers(config: ParallelConfig, what: str) -> None:
    """ConfigError for several server processes where none is started."""
    if config.api_server_count > 1:
        raise ConfigError(
            "--api-server-count", config.api_server_count, f"{what} is no server", "leave it out, or use planaria serve"
        )


def refuse_several_engines(config: ParallelConfig, what: str) -> None:
    """Several engines are processes behind a server, which `what` has not. Raises ConfigError."""
    refuse_api_servers(config, what)
    if config.data_parallel_size > 1:
        raise ConfigError(
            "--data-parallel-size", config.data_parallel_size, f"is for several engines, and {what} is one",
            "use `planaria serve` or `planaria batch`, or give each of several processes its share of the prompts",
        )  # fmt: skip


def ranks_here(config: ParallelConfig) -> int:
    """Ranks that share this node's cores, as far as is known before Ray has placed them."""
    if config.outer is not None:
        return config.outer.local_world_size
    if config.lanes > 1 and config.data_parallel_backend == "ray":  # so many of the lanes
        return config.world_size // config.lanes * (config.data_parallel_size_local or config.lanes)
    return config.local_world_size * (config.data_parallel_size_local or 1)


def steps_in_flight(config: ParallelConfig, ahead: bool | None, device: str) -> int:
    """How many plans may be on their way: one for each stage, two to plan a step while one runs.

    ahead: --async-scheduling; None: yes, except where the rank would compute with the very cores that plan.
    """
    if ahead is None:
        ahead = not PLATFORMS[device].on_host or config.distributed_executor_backend not in ("uni", "external_launcher")
    return max(config.pipeline_parallel_size, 2 if ahead else 1)


def _numbers(options: EngineOptions) -> None:
    if not 0 <= options.node_rank < options.nnodes:
        rule = f"must be 0 to {options.nnodes - 1} with --nnodes {options.nnodes}"
        raise ConfigError("--node-rank", options.node_rank, rule, "count nodes from 0")
    if not options.master_addr:
        raise ConfigError("--master-addr", "''", "is empty", "give the address of the node with --node-rank 0")
    _class_path("--worker-cls", options.worker_cls, "auto")
    _class_path("--worker-extension-cls", options.worker_extension_cls, "")
    _class_path("--sd-worker-cls", options.sd_worker_cls, "auto")


def _list(option: str, given: str | tuple[int, ...] | None, fix: str) -> tuple[int, ...] | None:
    if given is None or isinstance(given, tuple):
        return given
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ConfigError(option, repr(given), "is not a list of numbers", fix) from None


def _runtime_env(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not isinstance(given, str):
        return given
    env: dict[str, Any] = json_option(
        "--ray-runtime-env", given, dict[str, Any], """write '{"env_vars": {"NAME": "value"}}'"""
    )
    return env


def _class_path(option: str, given: str, default: str) -> None:
    if given != default and _PATH.fullmatch(given) is None:
        raise ConfigError(option, repr(given), "is not the path of a class", "write package.module.Class")


def _backend(options: EngineOptions, machine: Machine, nodes: int, shares: bool) -> str:
    """The executor back end as asked, else the first rule that matches. nodes: of an engine. shares: are data-parallel
    ranks its lanes?"""
    prefill = options.prefill_context_parallel_size
    world = options.tensor_parallel_size * options.pipeline_parallel_size * prefill
    if shares:
        world *= options.data_parallel_size
    asked = options.distributed_executor_backend
    on_ray = options.data_parallel_backend == "ray"
    if asked is not None:
        if asked not in BACKENDS and _PATH.fullmatch(asked) is None:
            ways = f"{', '.join(BACKENDS)}, or package.module.LauncherClass"
            raise ConfigError(_BACKEND, asked, "is unknown", f"choose one of {ways}")
        if asked == "uni" and world > 1:
            lanes = f" -dp {options.data_parallel_size}" if shares else ""
            lanes = f" -pcp {prefill}" * (prefill > 1) + lanes
            rule = f"runs one rank, and -tp {options.tensor_parallel_size} -pp {options.pipeline_parallel_size}{lanes} "
            raise ConfigError(_BACKEND, "uni", rule + f"are {world}", "use mp or ray")
        if on_ray and asked != "ray":
            raise ConfigError(
                "--data-parallel-backend", "ray", f"places engines with their ranks, and the executor is {asked}",
                f"leave {_BACKEND} out",
            )  # fmt: skip
        return asked
    if nodes > 1:
        return "mp"
    if options.nnodes == 1 and (on_ray or options.placement_group is not None or machine.in_placement_group):
        return "ray"
    return "uni" if world == 1 else "mp"


def uses_ray(config: ParallelConfig, machine: Machine) -> bool:
    if machine.launcher is not None:
        return machine.launcher.uses_ray
    return config.distributed_executor_backend == "ray"


def _nodes(config: ParallelConfig) -> None:
    if config.nnodes == 1:
        return
    backend = config.distributed_executor_backend
    if backend not in ("mp", "uni", "external_launcher"):
        raise ConfigError(
            "--nnodes", config.nnodes, f"is for mp and external_launcher, and the executor is {backend}",
            "leave --nnodes out (Ray knows its nodes), or use --distributed-executor-backend mp",
        )  # fmt: skip
    nodes = config.nodes_per_engine
    if config.world_size % nodes:
        over = f"the {nodes} nodes of an engine" if config.engine_nodes is not None else "the nodes"
        raise ConfigError(
            "--nnodes", config.nnodes,
            f"world size {config.world_size} ({_degrees(config, ' x ')}) can't be split evenly over {over}",
            f"choose {'-tp, -pp and -dp' if config.lanes > 1 else '-tp and -pp'} so that their product is a multiple "
            f"of {nodes}",
        )  # fmt: skip


def _degrees(config: ParallelConfig, between: str = " ") -> str:
    """Those of one engine, as they are typed."""
    prefill = config.prefill_context_parallel_size
    shares = [f"-pcp {prefill}"] if prefill > 1 else []
    degrees = [f"-tp {config.tensor_parallel_size}", *shares, f"-pp {config.pipeline_parallel_size}"]
    return between.join(degrees + ([f"-dp {config.lanes}"] if config.lanes > 1 else []))


def _ray(config: ParallelConfig, machine: Machine) -> None:
    """What only Ray workers can have, and what they need."""
    backend = config.distributed_executor_backend
    if not uses_ray(config, machine):
        for option, value, given in (
            ("--ray-workers-use-nsight", True, config.ray_workers_use_nsight),
            ("--ray-link", config.ray_link, config.ray_link != "queue"),
            ("--ray-runtime-env", config.ray_runtime_env, config.ray_runtime_env is not None),
            ("--placement-group", config.placement_group, config.placement_group is not None),
        ):
            if given:
                raise ConfigError(
                    option, value, f"is for workers on Ray, and the executor is {backend}", f"add {_BACKEND} ray"
                )
    elif config.placement_group is not None:
        _groups(config)
    ranks = config.placement_group_local_ranks
    if ranks is not None and len(ranks) != len(config.placement_groups):
        rule = f"is {len(ranks)} local ranks, and there are {len(config.placement_groups)} placement groups of yours"
        raise ConfigError(_LOCAL_RANKS, ",".join(map(str, ranks)), rule, "give one for each --placement-group")
    if uses_ray(config, machine) and not machine.ray_installed:
        raise ConfigError(_BACKEND, backend, "needs the package ray", "pip install 'planaria[ray]'")


def _groups(config: ParallelConfig) -> None:
    """The user's placement groups: one for each engine."""
    option, given, names = "--placement-group", config.placement_group, config.placement_groups
    engines, what = len(config.replicas), "engine"
    if config.data_parallel_backend == "ray" and config.lanes > 1:
        engines, what = config.lanes, "lane"
    if not all(names) or not names:
        raise ConfigError(option, repr(given), "has an empty name in it", "write names or ids with commas between them")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(option, given, f"names {twice} twice", f"give each {what} a group of its own")
    if len(names) != engines:
        fix = f"give {engines}, separated by commas, or leave it out: a group is made for each {what}"
        raise ConfigError(option, given, f"is {len(names)} groups, and there are {engines} {what}s", fix)
    if engines > 1 and config.data_parallel_backend != "ray":
        raise ConfigError(
            option, given, "is for engines that Ray starts, and these are processes of this node",
            "add --data-parallel-backend ray",
        )  # fmt: skip


def _enough(config: ParallelConfig, machine: Machine, device: str) -> None:
    """One accelerator a rank, where ranks are started here."""
    ranks = ranks_here(config)
    on_host = PLATFORMS[device].on_host
    if on_host or ranks <= machine.accelerators or uses_ray(config, machine) or machine.launcher is not None:
        return
    dp = config.data_parallel_size_local or 1
    degrees = _degrees(config) + (f" with {dp} engines" if dp > 1 else "")
    raise ConfigError(
        "--tensor-parallel-size", config.tensor_parallel_size,
        f"{degrees} need {ranks} accelerators on this node, and it has {machine.accelerators}",
        f"use {_BACKEND} ray to place ranks over a cluster, or {_BACKEND} mp with --nnodes on several nodes",
    )  # fmt: skip


def _outer(config: ParallelConfig, outer: OuterLauncher | None) -> None:
    world = config.world_size
    start = f"start it with torchrun --nproc-per-node {config.local_world_size} -m planaria ..."
    if outer is None:
        raise ConfigError(_BACKEND, "external_launcher", "RANK is not set in the environment", start)
    if outer.world_size != world:
        raise ConfigError(
            _BACKEND, "external_launcher",
            f"WORLD_SIZE is {outer.world_size}, and {_degrees(config)} are {world} ranks", start,
        )  # fmt: skip
    if outer.rank >= world:
        rule = f"RANK is {outer.rank} of {world} ranks, counted from 0"
        raise ConfigError(_BACKEND, "external_launcher", rule, start)


def _programs(options: EngineOptions, machine: Machine, shares: bool) -> tuple[EngineOptions, Machine]:
    """Where data-parallel ranks are programs of the user's, and nothing was said of data parallel: ranks of one engine
    whose experts they share. Raises ConfigError."""
    replica = machine.data_parallel
    if replica is None or options.data_parallel_size > 1:
        return options, machine
    for name, rank in (("RANK", replica.rank), ("RANK_LOCAL", replica.rank_local)):
        if rank >= replica.size:
            raise ConfigError(
                f"$PLANARIA_DP_{name}", rank, f"must be below PLANARIA_DP_SIZE ({replica.size})", "count from 0"
            )
    if replica.size == 1:
        return options, machine
    if not shares:
        raise ConfigError(
            "$PLANARIA_DP_SIZE", replica.size, "replicas of a dense model have nothing to tell each other",
            "unset it and give each process its share of the prompts",
        )  # fmt: skip
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    if ranks > 1 or options.distributed_executor_backend not in (None, "external_launcher"):
        what = f"{ranks} ranks" if ranks > 1 else f"{_BACKEND} {options.distributed_executor_backend}"
        raise ConfigError(
            "$PLANARIA_DP_SIZE", replica.size, f"each of these processes is one rank itself, and {what} was asked for",
            f"unset it and start all ranks at once: torchrun ... {_BACKEND} external_launcher -dp {replica.size}",
        )  # fmt: skip
    options = msgspec.structs.replace(
        options, data_parallel_size=replica.size, distributed_executor_backend="external_launcher"
    )
    return options, msgspec.structs.replace(machine, outer=replica.programs(), data_parallel=None)


def _replicas(options: EngineOptions, machine: Machine, shares: bool) -> tuple[EngineOptions, Machine]:
    """Where an outer launcher starts the ranks of several engines that share no experts: as one of these, which is this
    process's. Raises ConfigError."""
    size, outer = options.data_parallel_size, machine.outer
    if options.distributed_executor_backend != "external_launcher" or size == 1 or shares or outer is None:
        return options, machine
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size * options.prefill_context_parallel_size
    if outer.world_size != ranks * size or outer.rank >= outer.world_size:
        raise ConfigError(
            _BACKEND, "external_launcher",
            f"RANK is {outer.rank} and WORLD_SIZE {outer.world_size}, and -dp {size} engines of {ranks} ranks are "
            f"{ranks * size}", f"start it with torchrun --nproc-per-node {ranks * size} -m planaria ...",
        )  # fmt: skip
    machine = msgspec.structs.replace(machine, outer=outer.divided(size))
    return msgspec.structs.replace(options, data_parallel_size=1), machine


def _refuse_synchronization(config: ParallelConfig, options: EngineOptions) -> None:
    """Nobody meets in collectives to tell each other of steps, so there is nothing to choose. Raises ConfigError."""
    asked = options.disable_nccl_for_dp_synchronization
    if asked is None:
        return
    why = "there is one engine"
    if config.lanes > 1:
        why = "lanes are told of each step by their one engine"
    elif config.data_parallel_size > 1:
        why = "engines that share no experts never meet"
    raise ConfigError("--disable-nccl-for-dp-synchronization", asked, f"has nothing to act on: {why}", "leave it out")


def _crowded(config: ParallelConfig, machine: Machine, device: str) -> list[Note]:
    ranks = ranks_here(config)
    if not PLATFORMS[device].on_host or uses_ray(config, machine) or ranks <= machine.cores:
        return []
    line = f"{ranks} ranks share {machine.cores} cores: they take turns, so every step takes longer"
    return [(logging.WARNING, line)]


def _all_reduce(config: ParallelConfig, device: str, notes: list[Note]) -> tuple[ParallelConfig, list[Note]]:
    """The fast collective is inside a node; on devices each group finds out."""
    apart = PLATFORMS[device].on_host and config.local_world_size % config.tensor_parallel_size
    if not apart or config.disable_custom_all_reduce:
        return config, notes
    line = "tensor groups span nodes: the plain collective is used (--disable-custom-all-reduce)"
    return msgspec.structs.replace(config, disable_custom_all_reduce=True), [*notes, (logging.DEBUG, line)]
