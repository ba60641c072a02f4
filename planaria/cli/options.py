"""The options every command that runs an engine shares, declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from planaria.config.options import EngineOptions

_ENGINE: dict[str, tuple[Any, Any, list[str], str]] = {
    # field: (type, default, flags, help)
    "dtype": (str, "auto", ["--dtype"], "auto, float32 or bfloat16."),
    "quantization": (
        str, "auto", ["--quantization"],
        "auto keeps a GGUF file's packed weights; none unpacks them; q8_0 or q4_1 packs at load.",
    ),
    "device": (str, "auto", ["--device"], "auto, cpu or cuda."),
    "threads": (int | None, None, ["--threads"], "CPU threads; default: the cores this process may use."),
    "kernels": (str, "auto", ["--kernels"], "CPU kernels: native (this package's), torch (plain), or auto."),
    "max_model_len": (int | None, None, ["--max-model-len"], "Longest request in tokens, prompt and output."),
    "max_num_seqs": (int, 256, ["--max-num-seqs"], "Most requests running at a time."),
    "max_num_batched_tokens": (int, 2048, ["--max-num-batched-tokens"], "Most tokens in one step."),
    "policy": (str, "fcfs", ["--scheduling-policy"], "fcfs or priority."),
    "block_size": (int, 16, ["--block-size"], "Tokens in a KV block: a multiple of 16."),
    "kv_cache_memory": (str | None, None, ["--kv-cache-memory"], "Memory for keys and values, e.g. 2GiB."),
    "enable_prefix_caching": (
        bool, True, ["--enable-prefix-caching/--no-enable-prefix-caching"], "Reuse what requests have in common.",
    ),
    "async_scheduling": (
        bool | None, None, ["--async-scheduling/--no-async-scheduling"], "Plan a step while one runs.",
    ),
    "seed": (int | None, None, ["--seed"], "Of requests that bring none; default: drawn."),
    "null_worker": (bool, False, ["--null-worker"], "Compute nothing: measures the engine alone."),
    "distributed_executor_backend": (
        str | None, None, ["--distributed-executor-backend"],
        "How ranks are started: uni (in the engine) or mp (processes).",
    ),
    "tensor_parallel_size": (int, 1, ["--tensor-parallel-size", "-tp"], "Ranks that share each layer."),
    "pipeline_parallel_size": (int, 1, ["--pipeline-parallel-size", "-pp"], "Stages that share the layers."),
}  # fmt: skip


def engine_command(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the engine's options to a command. `function` takes `model` and `engine: dict`, a keyword each."""
    own = inspect.signature(function, eval_str=True)
    extra = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default,
            annotation=Annotated[kind, typer.Option(*flags, help=text, rich_help_panel="Engine")],
        )
        for name, (kind, default, flags, text) in _ENGINE.items()
    ]  # fmt: skip

    @functools.wraps(function)
    def command(**values: Any) -> None:
        engine = {name: values.pop(name) for name in _ENGINE}
        function(**values, engine=engine)

    mine = [p for p in own.parameters.values() if p.name != "engine"]
    command.__signature__ = own.replace(parameters=[*mine, *extra])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*mine, *extra]}
    return command


def engine_options(model: str, engine: dict[str, Any], **more: Any) -> EngineOptions:
    return EngineOptions(model=model, **engine, **more)
