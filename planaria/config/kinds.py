"""The rules of engines of two kinds, for prompts and for what follows them, behind one server. Pure."""

from __future__ import annotations

import msgspec

from planaria.config.options import EngineOptions
from planaria.errors import ConfigError
from planaria.topology.platforms import PLATFORMS

PREFILL, DECODE = "--prefill-engines", "--decode-engines"


def of_two_kinds(options: EngineOptions, device: str) -> EngineOptions:
    """As so many engines in all. device: a platform's name. Raises ConfigError."""
    prefill, decode = options.prefill_engines, options.decode_engines
    if not prefill and not decode:
        return options
    if not prefill or not decode:
        given, other = (PREFILL, DECODE) if prefill else (DECODE, PREFILL)
        raise ConfigError(given, prefill or decode, f"needs engines of the other kind ({other})", f"add {other} 1")

    def refuse(why: str, fix: str) -> ConfigError:
        return ConfigError(PREFILL, prefill, why, fix)

    if options.data_parallel_size != 1:
        size = options.data_parallel_size
        raise refuse(f"says how many engines there are, and --data-parallel-size {size} does, too", "give one of them")
    if options.enable_expert_parallel:
        raise refuse("is for engines with a copy of the model each, not for lanes that share experts", "use -dp")
    backend = options.distributed_executor_backend
    if backend not in (None, "uni", "mp", "ray"):
        raise refuse(f"is for ranks that Planaria starts, not for {backend}", "use uni, mp or ray")
    outside = (
        options.data_parallel_external_lb, options.data_parallel_hybrid_lb, options.data_parallel_rank is not None,
        options.data_parallel_start_rank is not None,
    )  # fmt: skip
    if any(outside):
        raise refuse("is for engines of one server, not behind an outside balancer", "leave the balancer's options out")
    if not options.enable_prefix_caching:
        raise refuse("finds KV by its prefix, which --no-enable-prefix-caching turns off", "leave that out")
    if not PLATFORMS[device].on_host or options.null_worker:
        raise refuse("is for KV in the memory of a CPU", "use -dp")
    return msgspec.structs.replace(options, data_parallel_size=prefill + decode)
