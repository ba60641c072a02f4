"""Words of vLLM's `LLM(...)` and of its environment, and what they are here. A page of tables; no rule beside them."""

from __future__ import annotations

from typing import Any

from planaria.errors import ConfigError

# Arguments under another name, and values that are.
RENAMED = {"scheduling_policy": "policy", "kv_cache_memory_bytes": "kv_cache_memory"}
DTYPES = {"half": "bfloat16", "float16": "bfloat16", "float": "float32"}
# No answer depends on these: they have no effect. With what is to be used instead, where there is something.
WITHOUT_EFFECT = {
    "gpu_memory_utilization": "kv_cache_memory", "num_gpu_blocks_override": "kv_cache_memory",
    "download_dir": "$HF_HOME", "hf_token": "$HF_TOKEN", **dict.fromkeys((
        "trust_remote_code", "swap_space", "cpu_offload_gb", "enforce_eager", "max_seq_len_to_capture",
        "compilation_config", "cuda_graph_sizes", "disable_log_stats", "disable_log_requests",
        "disable_async_output_proc", "enable_chunked_prefill", "max_num_partial_prefills", "use_v2_block_manager",
        "limit_mm_per_prompt", "mm_processor_kwargs", "disable_mm_preprocessor_cache", "allowed_local_media_path",
        "guided_decoding_backend", "structured_outputs_config", "attention_backend", "tokenizer_pool_size",
    ), ""),
}  # fmt: skip
# Of these only the values that ask for nothing are taken.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tokenizer": (None,), "tokenizer_mode": ("auto", "hf"), "tokenizer_revision": (None,), "revision": (None,),
    "code_revision": (None,), "load_format": ("auto",), "kv_cache_dtype": ("auto",), "task": ("auto", "generate"),
    "runner": ("auto", "generate"), "convert": ("auto", "none"), "model_impl": ("auto",), "enable_lora": (False, None),
    "speculative_config": (None,), "hf_overrides": (None, {}), "override_generation_config": (None, {}),
    "logits_processors": (None, []), "enable_sleep_mode": (False,), "disable_sliding_window": (False,),
    "decode_context_parallel_size": (1,), "prefill_context_parallel_size": (1,), "config_format": ("auto",),
}  # fmt: skip

# Variables -> what does it here.
VARIABLES = {
    "VLLM_API_KEY": "PLANARIA_API_KEY", "VLLM_HOST_IP": "PLANARIA_HOST_IP", "VLLM_CACHE_ROOT": "PLANARIA_CACHE",
    "VLLM_LOGGING_LEVEL": "PLANARIA_LOG_LEVEL", "VLLM_DP_SIZE": "PLANARIA_DP_SIZE", "VLLM_DP_RANK": "PLANARIA_DP_RANK",
    "VLLM_DP_RANK_LOCAL": "PLANARIA_DP_RANK_LOCAL", "VLLM_RAY_PER_WORKER_GPUS": "PLANARIA_RAY_FRACTION",
    "VLLM_RAY_BUNDLE_INDICES": "PLANARIA_RAY_BUNDLES", "VLLM_RAY_DP_PACK_STRATEGY": "--ray-dp-pack-strategy",
    "VLLM_USE_RAY_COMPILED_DAG": "--ray-link compiled-graph", "VLLM_ALL2ALL_BACKEND": "--all2all-backend",
    "VLLM_BATCH_INVARIANT": "--batch-invariant", "VLLM_PP_LAYER_PARTITION": "--pp-layer-partition",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory", "VLLM_CPU_OMP_THREADS_BIND": "--threads",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "--step-timeout",
}  # fmt: skip


def ours(model: str, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """`given` arguments of `LLM` without those that are vLLM's alone, and a line about what has no effect ("": nothing
    to say). None is an argument's default. Raises ConfigError for what would change answers and isn't there."""
    options: dict[str, Any] = {}
    notes: list[str] = []
    for word, value in given.items():
        name = RENAMED.get(word, word)
        if name in WITHOUT_EFFECT:
            instead = WITHOUT_EFFECT[name]
            notes.append(f"{name} (use {instead})" if instead else name)
        elif name in NEUTRAL:
            if value not in NEUTRAL[name] and not (name == "tokenizer" and value == model):
                raise ConfigError(name, value, "is not supported", "leave it out")
        elif value is not None:
            options[name] = value
    line = f"arguments without effect here: {', '.join(notes)}" if notes else ""
    dtype = str(options.get("dtype", "")).removeprefix("torch.")
    if dtype in DTYPES:
        options["dtype"] = DTYPES[dtype]
        line += "; " * bool(line) + f"dtype {dtype} is {DTYPES[dtype]} here"
    return options, line


def variables(environment: dict[str, str]) -> str:
    """A line about vLLM's variables that something else does here; "" where none is set."""
    found = [f"{name} (here: {VARIABLES[name]})" for name in sorted(VARIABLES.keys() & environment.keys())]
    return f"variables of vLLM are not read: {', '.join(found)}" if found else ""
