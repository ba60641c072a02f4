"""The rules of parallel options: EngineOptions + what the machine is -> ParallelConfig. Pure.

Every refusal is a ConfigError with the value, the rule and the way out, raised before any process starts. What can be
run but may surprise comes back as notes for the log.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal

import msgspec

from planaria.config.machine import Machine
from planaria.config.options import EngineOptions, OuterLauncher, ParallelConfig
from planaria.env import SpmdDataParallel
from planaria.errors import ConfigError

BACKENDS = ("uni", "mp", "ray", "external_launcher")
RAY_LINKS = ("queue", "compiled-graph")
LEAST_HEARTBEAT = 2.0  # seconds; ranks show a sign of life every second

Note = tuple[int, str]  # a level of `logging`, a line

_BACKEND = "--distributed-executor-backend"
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def resolve_parallel(options: EngineOptions, machine: Machine, device: str) -> tuple[ParallelConfig, list[Note]]:
    """device: "cpu" or "cuda". Raises ConfigError."""
    _numbers(options)
    config = ParallelConfig(
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        pp_layer_partition=_partition(options.pp_layer_partition),
        distributed_executor_backend=_backend(options, machine, device),
        ray_link=_ray_link(options.ray_link),
        ray_runtime_env=_runtime_env(options.ray_runtime_env),
        ray_workers_use_nsight=options.ray_workers_use_nsight,
        placement_group=options.placement_group,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        secret_file=options.secret_file,
        max_parallel_loading_workers=options.max_parallel_loading_workers,
        disable_custom_all_reduce=options.disable_custom_all_reduce,
        worker_cls=_class_path("--worker-cls", options.worker_cls, "auto"),
        worker_extension_cls=_class_path("--worker-extension-cls", options.worker_extension_cls, ""),
        heartbeat_timeout=options.heartbeat_timeout,
        outer=machine.outer,
    )
    _nodes(config)
    _ray(config, machine)
    _enough(config, machine, device)
    if config.distributed_executor_backend == "external_launcher":
        _outer(config, machine.outer)
    _spmd(machine.data_parallel)
    return _all_reduce(config, device, _crowded(config, machine, device))


def refuse_outer_launcher(config: ParallelConfig, what: str) -> None:
    """Under an outer launcher every process runs the whole program, which `what` can't be. Raises ConfigError."""
    if config.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            _BACKEND, "external_launcher", f"runs the same batch in every process, which {what} is not",
            "use LLM(...).generate or `planaria generate`, or another back end",
        )  # fmt: skip


def ranks_here(config: ParallelConfig) -> int:
    """Ranks that share this node's cores, as far as is known before Ray has placed them."""
    return config.outer.local_world_size if config.outer is not None else config.local_world_size


def steps_in_flight(config: ParallelConfig, ahead: bool | None, device: str) -> int:
    """How many plans may be on their way: one for each stage, two to plan a step while one runs.

    ahead: --async-scheduling; None: yes, except where the rank would compute with the very cores that plan.
    """
    if ahead is None:
        ahead = device != "cpu" or config.distributed_executor_backend not in ("uni", "external_launcher")
    return max(config.pipeline_parallel_size, 2 if ahead else 1)


def _numbers(options: EngineOptions) -> None:
    for option, value in (
        ("--tensor-parallel-size", options.tensor_parallel_size),
        ("--pipeline-parallel-size", options.pipeline_parallel_size),
        ("--nnodes", options.nnodes),
        ("--max-parallel-loading-workers", options.max_parallel_loading_workers),
    ):
        if value is not None and value < 1:
            raise ConfigError(option, value, "must be at least 1")
    if not 0 <= options.node_rank < options.nnodes:
        rule = f"must be 0 to {options.nnodes - 1} with --nnodes {options.nnodes}"
        raise ConfigError("--node-rank", options.node_rank, rule, "count nodes from 0")
    if not 1 <= options.master_port <= 65535:
        raise ConfigError("--master-port", options.master_port, "is not a port number", "give 1 to 65535")
    if not options.master_addr:
        raise ConfigError("--master-addr", "''", "is empty", "give the address of the node with --node-rank 0")
    if not options.heartbeat_timeout >= LEAST_HEARTBEAT:
        raise ConfigError(
            "--heartbeat-timeout", options.heartbeat_timeout,
            f"must be at least {LEAST_HEARTBEAT:g} seconds: ranks show a sign of life every second",
        )  # fmt: skip


def _partition(given: str | tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Whether it fits the model is looked at when the model is known (`planaria.layers.deal`)."""
    if given is None or isinstance(given, tuple):
        return given
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ConfigError(
            "--pp-layer-partition", repr(given), "is not a list of numbers", "write the layers of each stage: 10,20"
        ) from None


def _ray_link(given: str) -> Literal["queue", "compiled-graph"]:
    if given == "queue" or given == "compiled-graph":
        return given  # type: ignore[return-value]
    raise ConfigError("--ray-link", given, "is unknown", f"choose one of {', '.join(RAY_LINKS)}")


def _runtime_env(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        fix = """write '{"env_vars": {"NAME": "value"}}'"""
        raise ConfigError("--ray-runtime-env", repr(given), f"is not a JSON object: {e}", fix) from None


def _class_path(option: str, given: str, default: str) -> str:
    if given != default and _PATH.fullmatch(given) is None:
        raise ConfigError(option, repr(given), "is not the path of a class", "write package.module.Class")
    return given


def _backend(options: EngineOptions, machine: Machine, device: str) -> str:
    """The executor back end as asked, else the first rule that matches."""
    world = options.tensor_parallel_size * options.pipeline_parallel_size
    asked = options.distributed_executor_backend
    if asked is not None:
        if asked not in BACKENDS and _PATH.fullmatch(asked) is None:
            ways = f"{', '.join(BACKENDS)}, or package.module.LauncherClass"
            raise ConfigError(_BACKEND, asked, "is unknown", f"choose one of {ways}")
        if asked == "uni" and world > 1:
            rule = f"runs one rank, and -tp {options.tensor_parallel_size} -pp {options.pipeline_parallel_size} "
            raise ConfigError(_BACKEND, "uni", rule + f"are {world}", "use mp or ray")
        return asked
    if options.nnodes > 1:
        return "mp"
    if options.placement_group is not None or machine.in_placement_group:
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
    if config.world_size % config.nnodes:
        raise ConfigError(
            "--nnodes", config.nnodes,
            f"world size {config.world_size} (-tp {config.tensor_parallel_size} x -pp {config.pipeline_parallel_size}) "
            "can't be split evenly over the nodes",
            f"choose -tp and -pp so that their product is a multiple of {config.nnodes}",
        )  # fmt: skip


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
    elif not machine.ray_installed:
        raise ConfigError(_BACKEND, backend, "needs the package ray", "pip install 'planaria[ray]'")


def _enough(config: ParallelConfig, machine: Machine, device: str) -> None:
    """One accelerator a rank, where ranks are started here."""
    ranks = ranks_here(config)
    if device == "cpu" or ranks <= machine.accelerators or uses_ray(config, machine) or machine.launcher is not None:
        return
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    raise ConfigError(
        "--tensor-parallel-size", tp,
        f"-tp {tp} -pp {pp} need {ranks} accelerators on this node, and it has {machine.accelerators}",
        f"use {_BACKEND} ray to place ranks over a cluster, or {_BACKEND} mp with --nnodes on several nodes",
    )  # fmt: skip


def _outer(config: ParallelConfig, outer: OuterLauncher | None) -> None:
    tp, pp, world = config.tensor_parallel_size, config.pipeline_parallel_size, config.world_size
    start = f"start it with torchrun --nproc-per-node {config.local_world_size} -m planaria ..."
    if outer is None:
        raise ConfigError(_BACKEND, "external_launcher", "RANK is not set in the environment", start)
    if outer.world_size != world:
        raise ConfigError(
            _BACKEND, "external_launcher", f"WORLD_SIZE is {outer.world_size}, and -tp {tp} -pp {pp} are {world} ranks",
            start,
        )  # fmt: skip
    if outer.rank >= world:
        rule = f"RANK is {outer.rank} of {world} ranks, counted from 0"
        raise ConfigError(_BACKEND, "external_launcher", rule, start)


def _spmd(replica: SpmdDataParallel | None) -> None:
    """Replicas that the user's own processes are. Only experts spread over replicas have to meet; no model here has."""
    if replica is None:
        return
    for name, rank in (("RANK", replica.rank), ("RANK_LOCAL", replica.rank_local)):
        if rank >= replica.size:
            raise ConfigError(
                f"$PLANARIA_DP_{name}", rank, f"must be below PLANARIA_DP_SIZE ({replica.size})", "count from 0"
            )
    if replica.size > 1:
        raise ConfigError(
            "$PLANARIA_DP_SIZE", replica.size, "the model is dense: its replicas have nothing to tell each other",
            "unset it and give each process its share of the prompts",
        )  # fmt: skip


def _crowded(config: ParallelConfig, machine: Machine, device: str) -> list[Note]:
    ranks = ranks_here(config)
    if device != "cpu" or uses_ray(config, machine) or ranks <= machine.cores:
        return []
    line = f"{ranks} ranks share {machine.cores} cores: they take turns, so every step takes longer"
    return [(logging.WARNING, line)]


def _all_reduce(config: ParallelConfig, device: str, notes: list[Note]) -> tuple[ParallelConfig, list[Note]]:
    """The fast collective is for CPUs, inside a node."""
    if device != "cpu":
        why = f"there is no fast collective for {device}"
    elif config.local_world_size % config.tensor_parallel_size:
        why = "tensor groups span nodes"
    else:
        return config, notes
    if config.disable_custom_all_reduce:
        return config, notes
    line = f"{why}: the plain collective is used (--disable-custom-all-reduce)"
    return msgspec.structs.replace(config, disable_custom_all_reduce=True), [*notes, (logging.DEBUG, line)]
