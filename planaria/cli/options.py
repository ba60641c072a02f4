"""The options every command that runs an engine shares, declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from planaria.config.options import EngineOptions
from planaria.errors import ConfigError

_ENGINE: dict[str, tuple[Any, list[str], str]] = {
    # field: (type, flags, help); defaults are those of EngineOptions
    "dtype": (str, ["--dtype"], "auto, float32 or bfloat16."),
    "quantization": (
        str, ["--quantization"],
        "auto keeps a GGUF file's packed weights; none unpacks them; q8_0 or q4_1 packs at load.",
    ),
    "device": (str, ["--device"], "auto, cpu or cuda."),
    "threads": (int | None, ["--threads"], "CPU threads; default: the cores this process may use."),
    "kernels": (str, ["--kernels"], "CPU kernels: native (this package's), torch (plain), or auto."),
    "max_model_len": (int | None, ["--max-model-len"], "Longest request in tokens, prompt and output."),
    "max_num_seqs": (int, ["--max-num-seqs"], "Most requests running at a time."),
    "max_num_batched_tokens": (
        int | None, ["--max-num-batched-tokens"], "Most tokens in one step; default: 512 on a CPU, 2048 on a GPU.",
    ),
    "policy": (str, ["--scheduling-policy"], "fcfs or priority."),
    "block_size": (int, ["--block-size"], "Tokens in a KV block: a multiple of 16."),
    "kv_cache_memory": (str | None, ["--kv-cache-memory"], "Memory for keys and values, e.g. 2GiB."),
    "enable_prefix_caching": (
        bool, ["--enable-prefix-caching/--no-enable-prefix-caching"], "Reuse what requests have in common.",
    ),
    "async_scheduling": (
        bool | None, ["--async-scheduling/--no-async-scheduling"], "Plan a step while one runs.",
    ),
    "seed": (int | None, ["--seed"], "Of requests that bring none; default: drawn."),
    "null_worker": (bool, ["--null-worker"], "Compute nothing: measures the engine alone."),
    "tensor_parallel_size": (int, ["--tensor-parallel-size", "-tp"], "Ranks that share each layer."),
    "pipeline_parallel_size": (int, ["--pipeline-parallel-size", "-pp"], "Stages that share the layers."),
    "pp_layer_partition": (str | None, ["--pp-layer-partition"], "Layers of each stage, e.g. 10,20; default: evenly."),
    "distributed_executor_backend": (
        str | None, ["--distributed-executor-backend"],
        "How ranks are started: uni (in the engine), mp (processes), ray, external_launcher (torchrun), or "
        "package.module.LauncherClass; default: chosen.",
    ),
    "data_parallel_size": (
        int, ["--data-parallel-size", "-dp"],
        "Engines, each with a copy of the model; with --enable-expert-parallel lanes of one engine that share experts.",
    ),
    "data_parallel_size_local": (
        int | None, ["--data-parallel-size-local", "-dpl"],
        "Those of one node; default: all; with --nnodes dealt evenly; with external balancing or the strategy span 1.",
    ),
    "data_parallel_rank": (
        int | None, ["--data-parallel-rank", "-dpn"],
        "This server has one engine, of this number; an outside balancer picks servers.",
    ),
    "data_parallel_start_rank": (
        int | None, ["--data-parallel-start-rank", "-dpr"],
        "This server has --data-parallel-size-local engines from this number on; an outside balancer picks servers. "
        "With --headless: this node has.",
    ),
    "data_parallel_backend": (
        str, ["--data-parallel-backend", "-dpb"], "Who starts engines: mp (processes here) or ray (actors, placed).",
    ),
    "data_parallel_external_lb": (
        bool, ["--data-parallel-external-lb"], "One server per engine (with --data-parallel-rank).",
    ),
    "data_parallel_hybrid_lb": (
        bool, ["--data-parallel-hybrid-lb"], "One server per node (with --data-parallel-start-rank).",
    ),
    "data_parallel_address": (
        str | None, ["--data-parallel-address", "-dpa"],
        "Address of the node with the first engine: on Ray it comes first, else it is the --master-addr.",
    ),
    "data_parallel_rpc_port": (
        int | None, ["--data-parallel-rpc-port", "-dpp"], "Port nodes meet at there: the --master-port.",
    ),
    "headless": (
        bool, ["--headless"],
        "No server on this node: its engines (--data-parallel-size-local from --data-parallel-start-rank on) are the "
        "server's at --data-parallel-address.",
    ),
    "disable_nccl_for_dp_synchronization": (
        bool | None,
        ["--disable-nccl-for-dp-synchronization/--no-disable-nccl-for-dp-synchronization"],
        "Engines that meet in collectives use gloo; default: where steps are planned ahead.",
    ),
    "ray_dp_pack_strategy": (
        str | None, ["--ray-dp-pack-strategy"],
        "How engines on Ray share nodes: strict (the local size on each), fill (as many as fit), span (an engine over "
        "several nodes); default: strict.",
    ),
    "api_server_count": (int, ["--api-server-count", "-asc"], "Server processes in front of the engines."),
    "enable_expert_parallel": (
        bool, ["--enable-expert-parallel"], "Deal whole experts to ranks; else each expert is sliced by tensor rank.",
    ),
    "expert_placement_strategy": (
        str, ["--expert-placement-strategy"],
        "Which rank has which experts: linear ([0,1] [2,3]) or round_robin ([0,2] [1,3]).",
    ),
    "enable_eplb": (bool, ["--enable-eplb"], "Move and repeat experts so that ranks have equal load."),
    "eplb_config": (
        str | None, ["--eplb-config"],
        """As JSON: window_size, step_interval, num_redundant_experts, log_balancedness, log_balancedness_interval, """
        """use_async, policy, e.g. '{"num_redundant_experts": 8}'.""",
    ),
    "all2all_backend": (
        str | None, ["--all2all-backend"],
        "How tokens reach experts of other ranks: naive, allgather_reducescatter, pplx, deepep_high_throughput, "
        "deepep_low_latency or flashinfer_all2allv; default: allgather_reducescatter.",
    ),
    "enable_dbo": (
        bool, ["--enable-dbo"], "Compute large steps as two micro-batches: one computes while one exchanges.",
    ),
    "ubatch_size": (int, ["--ubatch-size"], "Micro-batches of a large step; 0 or 1: not split. --enable-dbo: two."),
    "dbo_decode_token_threshold": (
        int, ["--dbo-decode-token-threshold"], "A step without prompts is split above so many tokens.",
    ),
    "dbo_prefill_token_threshold": (
        int, ["--dbo-prefill-token-threshold"], "A step with prompts is split above so many tokens.",
    ),
    "ray_link": (str, ["--ray-link"], "How steps reach Ray workers: queue or compiled-graph."),
    "ray_runtime_env": (str | None, ["--ray-runtime-env"], "Runtime environment of Ray workers, as JSON."),
    "ray_workers_use_nsight": (bool, ["--ray-workers-use-nsight"], "Profile Ray workers with nsight."),
    "placement_group": (str | None, ["--placement-group"], "Ray placement groups to use, one for each engine or lane."),
    "nnodes": (int, ["--nnodes"], "Nodes, without Ray: run the same command on each with its --node-rank."),
    "node_rank": (int, ["--node-rank"], "This node's number, 0 to --nnodes - 1."),
    "master_addr": (str, ["--master-addr"], "Address of the node with --node-rank 0."),
    "master_port": (int, ["--master-port"], "Port it listens on for the other nodes."),
    "secret_file": (
        str | None, ["--secret-file"], "File with the secret that all nodes share. Also $PLANARIA_SECRET_FILE.",
    ),
    "max_parallel_loading_workers": (
        int | None, ["--max-parallel-loading-workers"], "Ranks that read weights at a time; default: all.",
    ),
    "disable_custom_all_reduce": (bool, ["--disable-custom-all-reduce"], "Use the plain collective (gloo, NCCL)."),
    "worker_cls": (str, ["--worker-cls"], "package.module.Class in place of the worker; auto: Planaria's."),
    "worker_extension_cls": (str, ["--worker-extension-cls"], "package.module.Class whose methods join the worker's."),
    "batch_invariant": (
        bool, ["--batch-invariant"],
        "Promise that a request's tokens depend on nothing but the request, to the last bit, also after a fault.",
    ),
    "spare_workers": (int, ["--spare-workers"], "Processes that are loaded and wait to replace a lost rank."),
    "recovery_limit": (
        int, ["--recovery-limit"],
        "Times that lost ranks are replaced with no token in between before giving up; 0: never.",
    ),
    "recovery_window": (float, ["--recovery-window"], "Seconds in which they are counted."),
    "step_timeout": (float, ["--step-timeout"], "Seconds after which a step is overdue at the latest."),
    "heartbeat_timeout": (
        float, ["--heartbeat-timeout"], "Seconds without a sign of life after which a rank counts as lost.",
    ),
}  # fmt: skip

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineOptions)}


def engine_command(function: Callable[..., None], *, agents: bool = True) -> Callable[..., None]:
    """Adds the engine's options to a command. `function` takes `model` and `engine: dict`, a keyword each. agents: on
    nodes but the first it runs their ranks."""
    own = inspect.signature(function, eval_str=True)
    extra = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name],
            annotation=Annotated[kind, typer.Option(*flags, help=text)],
        )
        for name, (kind, flags, text) in _ENGINE.items()
    ]  # fmt: skip

    @functools.wraps(function)
    def command(**values: Any) -> None:
        engine = {name: values.pop(name) for name in _ENGINE}
        if agents and (engine["headless"] or (engine["nnodes"] > 1 and engine["node_rank"] > 0)):
            _be_agent(values["model"], engine, values.get("log_level"))
        function(**values, engine=engine)

    mine = [p for p in own.parameters.values() if p.name != "engine"]
    command.__signature__ = own.replace(parameters=[*mine, *extra])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*mine, *extra]}
    return command


def _be_agent(model: str, engine: dict[str, Any], log_level: str | None) -> None:
    """On every node but the first, a command runs this node's ranks for the first one's. Returns where processes of an
    outer launcher are ranks themselves."""
    from planaria.config.resolve import resolve
    from planaria.logs import setup_logging

    if log_level is not None:
        setup_logging(log_level)
    if not model:
        raise ConfigError("--model", "", "is needed on every node but the first")
    config = resolve(engine_options(model, engine))
    if config.parallel.over_nodes:
        from planaria.build import run_agent

        raise typer.Exit(run_agent(config))


def engine_options(model: str, engine: dict[str, Any], **more: Any) -> EngineOptions:
    return EngineOptions(model=model, **engine, **more)
