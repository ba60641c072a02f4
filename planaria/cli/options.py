"""The options every command that runs an engine shares, declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from planaria.config.options import EngineOptions

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
    "max_num_batched_tokens": (int, ["--max-num-batched-tokens"], "Most tokens in one step."),
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
    "distributed_executor_backend": (
        str | None, ["--distributed-executor-backend"],
        "How ranks are started: uni (in the engine) or mp (processes).",
    ),
    "tensor_parallel_size": (int, ["--tensor-parallel-size", "-tp"], "Ranks that share each layer."),
    "pipeline_parallel_size": (int, ["--pipeline-parallel-size", "-pp"], "Stages that share the layers."),
}  # fmt: skip

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineOptions)}


def engine_command(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the engine's options to a command. `function` takes `model` and `engine: dict`, a keyword each."""
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
        function(**values, engine=engine)

    mine = [p for p in own.parameters.values() if p.name != "engine"]
    command.__signature__ = own.replace(parameters=[*mine, *extra])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*mine, *extra]}
    return command


def engine_options(model: str, engine: dict[str, Any], **more: Any) -> EngineOptions:
    return EngineOptions(model=model, **engine, **more)
