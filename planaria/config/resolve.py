"""EngineOptions -> EngineConfig: every rule is checked here, before a process starts, naming value and way out."""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec

from planaria.checkpoint import Checkpoint, resolve_checkpoint
from planaria.checkpoint.foreign import model_of
from planaria.checkpoint.generation import generation_config, sampling_defaults
from planaria.checkpoint.resolve import Hub, shape_of, template_of, with_tokenizer
from planaria.checkpoint.shared import SharedWeights, tensors_for
from planaria.config.data_parallel import may_slice
from planaria.config.declared import check, picked
from planaria.config.experts import expert_map, expert_shapes, resolve_experts
from planaria.config.json_option import json_option
from planaria.config.kinds import of_two_kinds
from planaria.config.machine import (
    Machine,
    check_module,
    look,
    own_folder,
    present_platform,
    served,
    torch_installed,
    usable_cores,
    usable_platform,
)
from planaria.config.options import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EngineOptions,
    FaultConfig,
    LoRAConfig,
    ParallelConfig,
    PoolingConfig,
    SchedulerConfig,
    TierConfig,
)
from planaria.config.parallel import ranks_here, resolve_parallel, steps_in_flight, uses_ray
from planaria.config.pooling import resolve_pooling
from planaria.config.secret import deployment_secret
from planaria.config.sizes import AUTO, parse_bytes, parse_tokens
from planaria.config.speculative import draft_source, speculative_config
from planaria.config.system import no_kernels, no_processes
from planaria.config.transfer import transfer_config
from planaria.config.vllm_words import variables
from planaria.env import environment
from planaria.errors import ConfigError
from planaria.models.config import ModelConfig
from planaria.models.deal import deal
from planaria.models.fields import MOST
from planaria.node import available_memory
from planaria.topology.platforms import CPU, PLATFORMS

logger = logging.getLogger("planaria.config")

TIER_SIZE = "10GiB"
GIB = 1 << 30
LOGIT_ROWS = 256  # beyond one per row: positions of prompt logprobs in one step


NO_TORCH = "PyTorch is not installed here"
WITH_TORCH, WITH_CUDA = (f'pip install "planaria[{extra}]"' for extra in ("torch", "cuda"))


def _device_name(asked: str, used: bool) -> str:
    """used: by ranks of this node."""
    if asked == CPU.name:
        return asked
    there, found = present_platform(), usable_platform()
    lacking = there is not CPU and not torch_installed()
    if asked == "auto":
        if lacking and used:
            logger.warning("the %ss here are not used, for %s: %s (--device cpu says that it is meant)",
                           there.title, NO_TORCH, WITH_CUDA)  # fmt: skip
        return found.name
    rule = f"no {served(asked).title} is visible to torch"
    if asked != found.name and used:
        if lacking and asked == there.name:
            raise ConfigError("--device", asked, NO_TORCH, f"{WITH_CUDA}, or use --device cpu")
        raise ConfigError("--device", asked, rule, f"use --device {found.name}")
    return asked


def check_torch(device: DeviceConfig, parallel: ParallelConfig, machine: Machine) -> None:
    """Raise ConfigError where ranks of this node would need torch, and it isn't there."""
    if machine.torch_installed or uses_ray(parallel, machine) or not parallel.data_parallel_size_local:
        return
    if device.kernels == "torch":
        why = no_kernels()
        rule = f"{NO_TORCH}, and {why}" if why else NO_TORCH
        raise ConfigError("--kernels", "torch", rule, WITH_TORCH if why else f"{WITH_TORCH}, or leave it out")
    if parallel.nodes_per_engine > 1:
        rule = f"ranks of an engine over several nodes meet by PyTorch's gloo, and {NO_TORCH}"
        raise ConfigError("--nnodes", parallel.nnodes, rule, f"{WITH_TORCH} on each node")
    if parallel.world_size > 1 and parallel.disable_custom_all_reduce:
        rule = f"ranks then send over PyTorch's gloo, and {NO_TORCH}"
        raise ConfigError("--disable-custom-all-reduce", True, rule, f"{WITH_TORCH}, or leave it out")


def device_config(options: EngineOptions, device: str, checkpoint_dtype: str, packed: bool, ranks: int) -> DeviceConfig:
    on_host, dtype = PLATFORMS[device].on_host, options.dtype
    if dtype == "auto":
        dtype = "float32" if checkpoint_dtype == "float32" and not packed else "bfloat16"
    quantization = options.quantization
    if quantization == "auto":
        quantization = "keep" if packed and dtype == "bfloat16" else "none"
    if options.kernels == "native" and not on_host:
        raise ConfigError("--kernels", "native", f"are for the CPU, and the device is {device}", "use --kernels torch")
    why = no_kernels()
    if options.kernels == "native" and why:
        raise ConfigError("--kernels", "native", why, "use --kernels torch, or leave it out")
    kernels = "torch" if why or not on_host or options.kernels == "torch" else "native"
    if options.batch_invariant and kernels == "torch":
        what = f"--kernels {kernels}" if on_host else f"--device {device}"
        raise ConfigError(
            "--batch-invariant", True, f"only this package's CPU kernels sum in an order of their own, not {what}",
            "use --device cpu --kernels native",
        )  # fmt: skip
    return DeviceConfig(
        device=device, dtype=dtype, quantization=quantization,
        threads=options.threads or max(1, usable_cores() // ranks), auto_threads=options.threads is None,
        batch_invariant=options.batch_invariant,
        gpu_memory_utilization=options.gpu_memory_utilization or 0.92,
        kernels=kernels,
    )  # fmt: skip


def _faults(options: EngineOptions, parallel: ParallelConfig) -> FaultConfig:
    backend = parallel.distributed_executor_backend
    if options.spare_workers and backend in ("uni", "external_launcher"):
        raise ConfigError(
            "--spare-workers", options.spare_workers,
            f"spares are for ranks of mp and ray, and these are started by {backend}",
            "use --distributed-executor-backend mp, or leave it out: a lost rank is replaced all the same",
        )  # fmt: skip
    return FaultConfig(**picked(FaultConfig, options))


def _check_store(flag: str, value: object, options: EngineOptions, device: str) -> None:
    """Raise ConfigError where there can be no store of KV blocks outside of the cache."""
    why = None
    if not options.enable_prefix_caching:
        why = "is found by the prefix cache, which --no-enable-prefix-caching turns off"
    elif not PLATFORMS[device].on_host or options.null_worker:
        why = "is for KV in the memory of a CPU"
    elif options.distributed_executor_backend == "external_launcher":
        why = "is for ranks that Planaria starts"
    if why is not None:
        raise ConfigError(flag, value, why, "leave it out")


def _offloading(options: EngineOptions, device: str) -> int:
    """Bytes. Raises ConfigError."""
    size, flag = options.kv_offloading_size, "--kv-offloading-size"
    if size is None:
        return 0
    _check_store(flag, size, options, device)
    there = available_memory()
    if size * GIB > there and options.distributed_executor_backend != "ray":  # whose workers may be elsewhere
        raise ConfigError(flag, size, f"GiB are more than the {there / GIB:.1f} that are free here", "give less")
    return int(size * GIB)


def _tier(options: EngineOptions, device: str) -> TierConfig | None:
    """Raises ConfigError."""
    if options.kv_tier is None:
        return None
    _check_store("--kv-tier", options.kv_tier, options, device)
    folder, _, size = options.kv_tier.partition(",")
    if not folder:
        raise ConfigError("--kv-tier", options.kv_tier, "names no folder", "write DIR or DIR,SIZE")
    tier = TierConfig(folder=os.path.abspath(folder), size=parse_bytes(size or TIER_SIZE, "--kv-tier"))
    if options.distributed_executor_backend != "ray":  # whose workers may be elsewhere
        own_folder("--kv-tier", tier.folder)
    return tier


def lora_config(options: EngineOptions) -> LoRAConfig | None:
    """Raises ConfigError."""
    if not options.enable_lora:
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            if (value := getattr(options, name)) != getattr(EngineOptions(model=""), name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, value, "is of adapters, and there are none", "give --enable-lora too")
        return None
    most = options.max_cpu_loras or max(64, options.max_loras)
    if most < options.max_loras:
        raise ConfigError("--max-cpu-loras", most, f"is less than --max-loras ({options.max_loras})", "raise it")
    return LoRAConfig(max_loras=options.max_loras, max_lora_rank=options.max_lora_rank, max_cpu_loras=most)


def _cache(options: EngineOptions, parallel: ParallelConfig, device: str, memory: int | None) -> CacheConfig:
    """memory: bytes, None: what there is. Raises ConfigError."""
    if options.kv_transfer_config is not None:
        _check_store("--kv-transfer-config", options.kv_transfer_config, options, device)
    transfer = transfer_config(options, parallel)
    own = {
        "memory": memory, "transfer": transfer, "kv_offloading": _offloading(options, device),
        "kv_tier": _tier(options, device) or (transfer and transfer.folder),
        "block_size": options.block_size * parallel.context(parallel.layout).size,
    }  # fmt: skip
    return CacheConfig(**{**picked(CacheConfig, options), **own})


def step_tokens(options: EngineOptions, device: str) -> int:
    """Of a step at most."""
    return options.max_num_batched_tokens or max(PLATFORMS[device].step_tokens, options.max_num_seqs)


def _model(
    options: EngineOptions, checkpoint: Checkpoint, parallel: ParallelConfig
) -> tuple[Checkpoint, ModelConfig, PoolingConfig]:  # fmt: skip
    """The model as it is used. Raises ConfigError, ModelError."""
    model = model_of(checkpoint, options.model_impl)
    splits = parallel.num_micro_batches > 1 or parallel.shares_experts
    return checkpoint, *resolve_pooling(options, checkpoint, model, splits=splits)


def _checkpoint(options: EngineOptions) -> Checkpoint:
    """The model's. Raises ConfigError, ModelError."""
    found = resolve_checkpoint(options.model, Hub(options.revision, options.download_dir))
    if overrides := json_option("--hf-overrides", options.hf_overrides or {}, dict[str, Any]):
        return msgspec.structs.replace(found, config={**found.config, **overrides})
    return found


def has_slices(options: EngineOptions, checkpoint: Checkpoint | None = None) -> bool:
    """Have data-parallel ranks a slice of each expert? Where that depends on the model its configuration is read,
    unless it is given. Raises ConfigError, ModelError."""
    if checkpoint is None:
        if not (options.model and may_slice(options)):
            return False
        checkpoint = shape_of(options.model, Hub(options.revision, options.download_dir))
    model = model_of(checkpoint, options.model_impl)
    return model.moe is not None and model.foreign is None


def of_foreign(options: EngineOptions, model: ModelConfig, parallel: ParallelConfig) -> EngineOptions:
    """Where Transformers' code runs the model: with torch's kernels. Raises ConfigError for what it can't have."""
    if model.foreign is None:
        return options
    context, shares = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    refused = {
        "--kernels": options.kernels if options.kernels == "native" else None,
        "--quantization": options.quantization if options.quantization not in ("auto", "none") else None,
        "--enable-lora": options.enable_lora or None,
        "--batch-invariant": options.batch_invariant or None,
        "--enable-expert-parallel": parallel.enable_expert_parallel or None,
        "--decode-context-parallel-size": context if context > 1 else None,
        "--prefill-context-parallel-size": shares if shares > 1 else None,
    }
    for flag, value in refused.items():
        if value is not None:
            rule = f"{model.architecture} is run by Transformers' code, which has nothing of this"
            raise ConfigError(flag, value, rule, "leave it out")
    return msgspec.structs.replace(options, kernels="torch")


def check_sizes(options: EngineOptions) -> None:
    """What is wrong whatever the model is. Raises ConfigError."""
    check(options)
    if options.block_size < 16 or options.block_size % 16 or options.block_size > 256:
        raise ConfigError("--block-size", options.block_size, "must be a multiple of 16 up to 256")
    most = options.max_num_batched_tokens
    if most is not None and most < options.max_num_seqs:
        raise ConfigError(
            "--max-num-batched-tokens", most,
            f"must be at least --max-num-seqs ({options.max_num_seqs}): each running request may add a token to a step",
            "raise it, or lower --max-num-seqs",
        )  # fmt: skip


def longest_text(options: EngineOptions, model: ModelConfig, longest: int) -> int:
    """Tokens of a request. longest: where that isn't said. Raises ConfigError."""
    asked = parse_tokens(options.max_model_len, "--max-model-len") or longest
    if asked > model.max_position:
        rule = f"the model's positions end at {model.max_position}"
        raise ConfigError("--max-model-len", asked, rule, f"use at most {model.max_position}")
    return asked


def resolve(options: EngineOptions) -> EngineConfig:
    """Raises ConfigError for a refused option, ModelError for a model that can't be served."""
    check_sizes(options)
    speculative = speculative_config(options.speculative_config)
    device_name = _device_name(options.device, options.data_parallel_size_local != 0)
    options = of_two_kinds(options, device_name)
    if line := variables(environment()):
        logger.warning(line)
    if options.gpu_memory_utilization is not None and PLATFORMS[device_name].on_host:
        logger.warning("--gpu-memory-utilization has no effect without a GPU: --kv-cache-memory says what KV takes")
    machine = look(options.distributed_executor_backend)
    checkpoint = _checkpoint(options) if may_slice(options, programs=machine.data_parallel is not None) else None
    slices = checkpoint is not None and has_slices(options, checkpoint)
    parallel, notes = resolve_parallel(options, machine, device_name, slices=slices)
    backend = parallel.distributed_executor_backend
    if backend != "uni" and (why := no_processes()):
        raise ConfigError("--distributed-executor-backend", backend, why, "use uni, which is one rank in this process")
    if not uses_ray(parallel, machine):  # on Ray, workers may have what isn't here
        if parallel.worker_cls != "auto":
            check_module("--worker-cls", parallel.worker_cls)
        if parallel.worker_extension_cls:
            check_module("--worker-extension-cls", parallel.worker_extension_cls)
        if parallel.sd_worker_cls != "auto":
            check_module("--sd-worker-cls", parallel.sd_worker_cls)
    if parallel.over_nodes:
        deployment_secret(parallel)
    given = options.kv_cache_memory
    memory = None if given is None else parse_bytes(given, "--kv-cache-memory")

    checkpoint = checkpoint or _checkpoint(options)
    hub = Hub(options.revision, options.download_dir)
    if options.tokenizer is not None:
        checkpoint = with_tokenizer(checkpoint, options.tokenizer, hub._replace(revision=options.tokenizer_revision))
    if options.chat_template is not None:
        checkpoint = msgspec.structs.replace(checkpoint, chat_template=template_of(options.chat_template))
    generation = generation_config(options.generation_config, checkpoint.generation_config)
    checkpoint = msgspec.structs.replace(checkpoint, generation_config=generation)
    sampling_defaults(generation)
    checkpoint, model, pooling = _model(options, checkpoint, parallel)
    options = of_foreign(options, model, parallel)
    if speculative is not None and not model.has_logits:
        rule = f"{model.architecture} draws no tokens as it is used here"
        raise ConfigError("--speculative-config", speculative.method, rule, "leave it out")
    longest = (
        model.max_position if model.has_logits else min(model.max_position, checkpoint.sentence.get("max_length", MOST))
    )
    max_model_len = longest_text(options, model, longest)
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    experts = expert_map(model, parallel, parallel.expert_parallel_size)
    deal(model, tp, pp, parallel.pp_layer_partition, experts, slices=parallel.slices(parallel.layout))
    device = device_config(
        options, device_name, model.dtype, packed=checkpoint.packed, ranks=ranks_here(parallel)
    )  # fmt: skip
    check_torch(device, parallel, machine)
    libraries = None if uses_ray(parallel, machine) else machine.libraries
    parallel, more = resolve_experts(parallel, options, device_name, expert_shapes(model, device.dtype), libraries)
    for level, line in notes + more:
        logger.log(level, line)
    return EngineConfig(
        model=model,
        checkpoint=msgspec.to_builtins(checkpoint),
        served_model_name=options.served_model_name or options.model,
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=step_tokens(options, device_name),
            auto_batched_tokens=options.max_num_batched_tokens is None and device.platform.on_host,
            max_model_len=max_model_len,
            auto_model_len=str(options.max_model_len) in AUTO,
            policy=options.policy,
            depth=steps_in_flight(parallel, options.async_scheduling, device_name),
            micro_steps=parallel.pipeline_parallel_size,
            max_drafts=speculative.num_speculative_tokens if speculative is not None else 0,
            max_logit_rows=options.max_num_seqs
            + (LOGIT_ROWS if model.has_logits else step_tokens(options, device_name)),
        ),
        cache=_cache(options, parallel, device_name, memory),
        device=device,
        parallel=parallel,
        faults=_faults(options, parallel),
        null_worker=options.null_worker,
        speculative=speculative,
        draft=draft_source(speculative, checkpoint, model, parallel, hub, device.dtype),
        pooling=pooling,
        lora=lora_config(options),
    )


def other_weights(config: EngineConfig, path: str) -> dict[str, Any]:
    """The engine's checkpoint, with the tensors of another one of the same model. Raises ConfigError, ModelError."""
    found = resolve_checkpoint(path)
    present = msgspec.convert(config.checkpoint, Checkpoint)
    model = model_of(found, "transformers" if config.model.foreign is not None else "planaria")
    differ = [name for name in model.__struct_fields__ if getattr(model, name) != getattr(config.model, name)]
    if differ:
        told = ", ".join(f"{name} {getattr(model, name)}, not {getattr(config.model, name)}" for name in differ[:3])
        raise ConfigError("weights", path, f"are of another model: {told:.300}", "give those of the same architecture")
    if found.format != present.format:
        raise ConfigError("weights", path, f"are {found.format}, the engine's are {present.format}", "convert them")
    return dict(msgspec.to_builtins(
        msgspec.structs.replace(present, path=found.path, files=found.files, tensors=found.tensors, updated=True)
    ))  # fmt: skip


def other_tensors(config: EngineConfig, weights: SharedWeights) -> dict[str, Any]:
    """The engine's checkpoint, with tensors that are in memory of this node. Raises ConfigError, ModelError."""
    present, fix = msgspec.convert(config.checkpoint, Checkpoint), "write them to a folder that all see, and give that"
    place = weights.handle.partition("@")[0]
    if config.parallel.nnodes > 1:
        raise ConfigError("tensors", place, f"can't be seen from {config.parallel.nnodes} nodes", fix)
    if config.model.foreign is not None:
        raise ConfigError("tensors", place, "can't be read by Transformers' code, which runs this model", fix)
    if present.format != "safetensors":
        fix = "start the engine from a folder of safetensors"
        raise ConfigError("tensors", place, f"can't take the place of a {present.format} file's", fix)
    tied = config.model.tie_word_embeddings or not config.model.has_logits
    tensors = tensors_for(present, weights, ("lm_head.weight",) if tied else ())
    return dict(msgspec.to_builtins(
        msgspec.structs.replace(present, path=place, files=(weights.handle,), tensors=tensors, updated=True)
    ))  # fmt: skip
