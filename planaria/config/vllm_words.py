"""vLLM's words (options of its command line and of `LLM`, its environment) and what they are here. A page of tables,
and the two rules that read it: `ours` for Python, `planaria.cli.words` for a command line."""

from __future__ import annotations

from typing import Any, NamedTuple

from planaria.errors import ConfigError

# Options under another name, and values that are.
RENAMED = {
    "scheduling_policy": "policy", "kv_cache_memory_bytes": "kv_cache_memory", "allowed_origins": "cors_origins",
    "allowed_methods": "cors_methods", "allowed_headers": "cors_headers", "allow_credentials": "cors_credentials",
    "task": "runner", "override_pooler_config": "pooler_config",
}  # fmt: skip
VALUES: dict[str, dict[Any, Any]] = {
    "runner": dict.fromkeys(("embed", "embedding", "classify", "score", "reward", "encode"), "pooling"),
    "dtype": {"half": "bfloat16", "float16": "bfloat16", "float": "float32"},
    "quantization": dict.fromkeys(
        ("gguf", "gptq", "gptq_marlin", "awq", "awq_marlin", "compressed-tensors", "bitsandbytes", "fp8", "mxfp4"),
        "auto",
    ),
    "model_impl": {"vllm": "planaria"},
    "tool_call_parser": {"llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "deepseek_v31": "deepseek_v3"},
}  # fmt: skip
# In both tables `!` marks a switch, which takes no value.
# No answer depends on these: they have no effect. By why.
WITHOUT_EFFECT = {
    "what is compiled or recorded for GPUs is this package's own": """enforce_eager! max_seq_len_to_capture
        compilation_config cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size optimization_level
        performance_mode
        disable_cascade_attn! attention_backend attention_config enable_flashinfer_autotune! kernel_config moe_backend
        mamba_backend cudagraph_metrics! enable_layerwise_nvtx_tracing! use_tqdm_on_load! pt_load_map_location
        safetensors_load_strategy""",
    "no code comes with a model": "trust_remote_code! code_revision hf_config_path",
    "memory is this package's own": """swap_space cpu_offload_gb cpu_offload_params num_gpu_blocks_override
        preemption_mode prefix_caching_hash_algo num_lookahead_slots mamba_block_size mamba_cache_mode
        mamba_cache_dtype mamba_ssm_cache_dtype disable_hybrid_kv_cache_manager! kv_sharing_fast_prefill!
        use_v2_block_manager! offload_backend""",
    "prompts always come in chunks": """enable_chunked_prefill! max_num_partial_prefills max_long_partial_prefills
        long_prefill_token_threshold scheduler_delay_factor num_scheduler_steps multi_step_stream_outputs!
        stream_interval disable_async_output_proc! use_async_output_proc! scheduler_reserve_full_isl!""",
    "the log is this package's own": """disable_log_stats! disable_log_requests! enable_log_requests!
        disable_uvicorn_access_log! disable_access_log_for_endpoints uvicorn_log_level max_log_len log_error_stack!
        enable_log_outputs! enable_log_deltas! enable_logging_iteration_details! aggregate_engine_logging!
        log_config_file show_hidden_metrics_for_version kv_cache_metrics! kv_cache_metrics_sample enable_mfu_metrics!
        collect_detailed_traces""",
    "it is always so": """enable_prompt_tokens_details! enable_request_id_headers! enable_tokenizer_info_endpoint!
        disable_frontend_multiprocessing! language_model_only! tokenizer_pool_size
        tokenizer_pool_type tokenizer_pool_extra_config fail_on_environ_validation! distributed_timeout_seconds
        exclude_tools_when_tool_choice_none! enable_reasoning!
        enable_sleep_mode!
        h11_max_incomplete_event_size h11_max_header_count""",
    "what it counts is in /metrics": "enable_server_load_tracking!",
    "the page /docs needs the internet, /openapi.json doesn't": "enable_offline_docs!",
    "there are texts only": """limit_mm_per_prompt mm_processor_kwargs media_io_kwargs mm_processor_cache_gb
        mm_processor_cache_type mm_shm_cache_max_object_size_mb disable_mm_preprocessor_cache! mm_encoder_tp_mode
        mm_encoder_attn_backend skip_mm_profiling! interleave_mm_strings! allowed_local_media_path
        allowed_media_domains video_pruning_rate disable_chunked_mm_input! enable_multimodal_encoder_data_parallel!""",
    "adapters are kept and cut as the weights are": "lora_dtype fully_sharded_loras!",
    "it is read from the environment": "hf_token",
}
INSTEAD = {"num_gpu_blocks_override": "kv_cache_memory", "hf_token": "$HF_TOKEN", "uvicorn_log_level": "--log-level"}
# Not there yet. By what they are for.
ABSENT = {
    "adapters of other kinds": """lora_extra_vocab_size enable_lora_bias! default_mm_loras enable_prompt_adapter!
        prompt_adapters""",
    "speculative decoding by this option": """speculative_model num_speculative_tokens
        ngram_prompt_lookup_max ngram_prompt_lookup_min""",
    "parsers of the user's own, and servers of tools": "tool_parser_plugin tool_server reasoning_parser_plugin",
    "other ways to follow grammars, and defaults for them": """structured_outputs_config guided_decoding_backend
        guided_decoding_disable_fallback!
        guided_decoding_disable_any_whitespace! guided_decoding_disable_additional_properties!""",
    "plugins": "io_processor_plugin",
    "prompts of embeddings, images or sounds": "enable_prompt_embeds! enable_mm_embeds! mm_encoder_only!",
    "KV on the move": """kv_events_config ec_transfer_config kv_offloading_backend
        weight_transfer_config""",
    "KV in fewer bits": "kv_cache_dtype calculate_kv_scales!",
    "other weights, code or classes": """load_format model_loader_extra_config ignore_patterns config_format
        tokenizer_mode logits_processors logits_processor_pattern scheduler_cls additional_config middleware
        enable_return_routed_experts!""",
    "another configuration than the model's": """rope_scaling rope_theta override_generation_config
        override_attention_dtype disable_sliding_window! logprobs_mode max_logprobs""",
    "traces and profiles by this option": "profiler_config",
    "this of the server": """uds root_path ssl_cert_reqs ssl_ciphers enable_ssl_refresh! default_chat_template_kwargs
        chat_template_content_format response_role return_tokens_as_token_ids! enable_force_include_usage!
        disable_fastapi_docs! tokens_only! grpc! fingerprint_mode fingerprint_value""",
}
# Values of these that ask for nothing; of others: None, and of a switch False.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tokenizer_mode": ("auto", "hf"), "load_format": ("auto", "safetensors", "gguf"), "kv_cache_dtype": ("auto",),
    "override_generation_config": ({}, "{}"),
    "logits_processors": ([],),
    "config_format": ("auto", "hf"), "chat_template_content_format": ("auto", "string"), "ssl_cert_reqs": (0, "0"),
    "response_role": ("assistant",), "guided_decoding_backend": ("auto", "guidance"),
    "middleware": ([],), "kv_offloading_backend": ("native",),
    "logprobs_mode": ("raw_logprobs",), "max_logprobs": (*range(21), *map(str, range(21))),
    "fingerprint_mode": ("full", "hash"), "tool_parser_plugin": ("",), "reasoning_parser_plugin": ("",),
    "additional_config": ({}, "{}"), "structured_outputs_config": ({}, "{}"),
}  # fmt: skip


class VllmWord(NamedTuple):
    """An option of vLLM that is none here. why: it has no effect; absent: what isn't there."""

    switch: bool
    why: str = ""
    absent: str = ""


def _words() -> dict[str, VllmWord]:
    found = {}
    for table, field in ((WITHOUT_EFFECT, "why"), (ABSENT, "absent")):
        for said, names in table.items():
            for name in names.split():
                found[name.rstrip("!")] = VllmWord(name.endswith("!"), **{field: said})
    return found


WORDS = _words()

# Variables -> what does it here.
VARIABLES = {
    "VLLM_API_KEY": "PLANARIA_API_KEY", "VLLM_HOST_IP": "PLANARIA_HOST_IP", "VLLM_CACHE_ROOT": "PLANARIA_CACHE",
    "VLLM_LOGGING_LEVEL": "PLANARIA_LOG_LEVEL", "VLLM_DP_SIZE": "PLANARIA_DP_SIZE", "VLLM_DP_RANK": "PLANARIA_DP_RANK",
    "VLLM_DP_RANK_LOCAL": "PLANARIA_DP_RANK_LOCAL",
    "VLLM_DP_MASTER_IP": "PLANARIA_DP_MASTER_IP", "VLLM_DP_MASTER_PORT": "PLANARIA_DP_MASTER_PORT",
    "VLLM_RAY_PER_WORKER_GPUS": "PLANARIA_RAY_FRACTION",
    "VLLM_RAY_BUNDLE_INDICES": "PLANARIA_RAY_BUNDLES", "VLLM_RAY_DP_PACK_STRATEGY": "--ray-dp-pack-strategy",
    "VLLM_USE_RAY_COMPILED_DAG": "--ray-link compiled-graph", "VLLM_ALL2ALL_BACKEND": "--all2all-backend",
    "VLLM_BATCH_INVARIANT": "--batch-invariant", "VLLM_PP_LAYER_PARTITION": "--pp-layer-partition",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory", "VLLM_CPU_OMP_THREADS_BIND": "--threads",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "--step-timeout",
}  # fmt: skip


def without_effect(name: str, value: Any, option: str) -> str:
    """What is said of a word that has none, with what does it instead. option: as it was typed. Raises ConfigError for
    one that would have an effect and isn't there yet."""
    word = WORDS[name]
    if word.why:
        return f"{option} (use {INSTEAD[name]})" if name in INSTEAD else option
    if value is None or value in NEUTRAL.get(name, (False,) if word.switch else ()):
        return ""
    raise ConfigError(option, value, f"{word.absent}: not there yet", "leave it out")


def value_of(name: str, value: Any) -> tuple[Any, str]:
    """A value of an option as it is called here, and what is said of that."""
    plain = str(value).removeprefix("torch.")
    here = VALUES.get(name, {}).get(plain)
    return (value, "") if here is None else (here, f"{name} {plain} is {here} here")


def said(notes: list[str], values: list[str]) -> str:
    """A line about what has no effect, and about values; "": nothing to say."""
    return "; ".join([*([f"without effect here: {', '.join(notes)}"] if notes else []), *values])


def ours(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """`given` arguments of `LLM` without those that are vLLM's alone, and a line about what has no effect. None is an
    argument's default. Raises ConfigError for what would change answers and isn't there."""
    options: dict[str, Any] = {}
    notes, values = [], []
    for word, value in given.items():
        name = RENAMED.get(word, word)
        if name in WORDS:
            notes.append(without_effect(name, value, name))
        elif value is not None:
            options[name], line = value_of(name, value)
            values.append(line)
    return options, said([note for note in notes if note], [line for line in values if line])


def variables(environment: dict[str, str]) -> str:
    """A line about vLLM's variables that something else does here; "" where none is set."""
    found = [f"{name} (here: {VARIABLES[name]})" for name in sorted(VARIABLES.keys() & environment.keys())]
    return f"variables of vLLM are not read: {', '.join(found)}" if found else ""
