"""What of a configuration shapes the computation, as hashes: ranks that differ must not meet in a collective.

A field counts unless it is named in NOT_HASHED. Degrees are there, because they change with epochs: the layout in
force is given to `compute_hash` instead.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

import msgspec

from planaria.config.options import EngineConfig

NOT_HASHED = frozenset({
    # degrees, ranks, and where things are
    "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size", "parallel.lanes", "parallel.outer",
    "parallel.nnodes", "parallel.node_rank", "parallel.master_addr", "parallel.master_port",
    "parallel.secret_file",
    # how ranks are started, reached and watched
    "parallel.distributed_executor_backend", "parallel.ray_link", "parallel.ray_runtime_env",
    "parallel.ray_workers_use_nsight", "parallel.placement_group", "parallel.lane_groups",
    "parallel.max_parallel_loading_workers", "parallel.data_parallel_size", "parallel.data_parallel_size_local",
    "parallel.data_parallel_rank",
    "parallel.data_parallel_start_rank", "parallel.data_parallel_index", "parallel.data_parallel_backend",
    "parallel.data_parallel_external_lb", "parallel.data_parallel_hybrid_lb", "parallel.data_parallel_address",
    "parallel.engine_nodes", "parallel.ray_dp_pack_strategy", "parallel.api_server_count", "parallel.api_process_rank",
    "parallel.heartbeat_timeout", "faults.spare_workers", "faults.recovery_limit", "faults.recovery_window",
    "faults.step_timeout",
    # compared by name, see `compared`
    "parallel.disable_custom_all_reduce", "parallel.worker_cls", "parallel.worker_extension_cls",
    # a node's own: paths, cores; and what only front ends use
    "checkpoint.name", "checkpoint.path", "checkpoint.files", "checkpoint.tokenizer_dir", "checkpoint.chat_template",
    "device.threads", "device.auto_threads", "device.sharers", "device.devices", "served_model_name",
})  # fmt: skip

LIBRARIES = ("planaria", "torch", "numpy", "numba", "msgspec")


def hash_fields(config: EngineConfig) -> dict[str, str]:
    """A digest of every field that shapes the computation, by its dotted name."""
    return {name: _digest(value) for name, value in _leaves(config) if name not in NOT_HASHED}


def compute_hash(config: EngineConfig, layout: str = "") -> str:
    """One digest of them all, joined with the layout in force. Equal configurations give equal hashes anywhere."""
    return _digest([layout, *sorted(hash_fields(config).items())])


def compared(config: EngineConfig) -> dict[str, str]:
    """What else must be the same on every rank, in words: the all-reduce, worker classes, library versions."""
    parallel = config.parallel
    return {
        "all-reduce": "plain" if parallel.disable_custom_all_reduce else "fast",
        "worker class": parallel.worker_cls,
        "worker extension class": parallel.worker_extension_cls or "none",
        "python": ".".join(python_version().split(".")[:2]),
        **{name: _version(name) for name in LIBRARIES},
    }


def _leaves(config: EngineConfig) -> Iterator[tuple[str, Any]]:
    """Fields of the parts of a configuration as part.field; what isn't made of fields as it is."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            yield from ((f"{name}.{field}", getattr(value, field)) for field in value.__struct_fields__)
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", part) for key, part in value.items())
        else:
            yield name, value


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


@functools.cache  # a rank says it again in every epoch, and reads no file for that
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
