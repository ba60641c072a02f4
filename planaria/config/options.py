"""Options as a user gives them, and the frozen configurations the parts take. A part takes only the one it needs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from planaria.config.model import ModelConfig

QUANTIZATIONS = ("auto", "none", "q8_0", "q4_1")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line and `LLM(...)` take. `planaria.config.resolve.resolve` checks and completes them."""

    model: str
    served_model_name: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"  # auto: keep a GGUF file's packed weights; none: dequantise; q8_0, q4_1: pack at load
    device: str = "auto"
    threads: int | None = None
    kernels: str = "auto"  # native: this package's CPU kernels; torch: plain torch; auto: native where they run
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # None: 512 on a CPU, 2048 on a GPU
    policy: str = "fcfs"
    block_size: int = 16
    kv_cache_memory: int | str | None = None  # bytes, or "2GiB"
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    seed: int | None = None  # of requests that bring none; None: drawn
    skip_tokenizer_init: bool = False
    null_worker: bool = False
    # parallel: see ParallelConfig; `planaria.config.parallel` has the rules
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: str | tuple[int, ...] | None = None  # "10,20"
    distributed_executor_backend: str | None = None  # None: chosen
    ray_link: str = "queue"
    ray_runtime_env: str | dict[str, Any] | None = None  # JSON, or what it says
    ray_workers_use_nsight: bool = False
    placement_group: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    secret_file: str | None = None
    max_parallel_loading_workers: int | None = None
    disable_custom_all_reduce: bool = False
    worker_cls: str = "auto"
    worker_extension_cls: str = ""
    heartbeat_timeout: float = 10.0
    batch_invariant: bool = False
    spare_workers: int = 0
    recovery_limit: int = 5
    recovery_window: float = 300.0
    step_timeout: float = 300.0


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one lane. Tokens and rows."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    depth: int = 2  # plans in flight
    micro_steps: int = 1  # turns that rows are dealt over, so that the steps in flight are of different rows
    max_logit_rows: int = 256  # positions of one step whose logits are wanted (prompt logprobs are chunked by it)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`memory`: bytes for KV, None: chosen from what the machine has."""

    block_size: int = 16
    memory: int | None = None
    enable_prefix_caching: bool = True


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16
    quantization: str
    threads: int  # of a rank
    auto_threads: bool = False  # nobody asked for a number: a rank takes its share of its node's cores
    kernels: str = "native"
    batch_invariant: bool = False  # promised: a request's numbers depend on nothing but the request


class OuterLauncher(msgspec.Struct, frozen=True, kw_only=True):
    """What an outer launcher (torchrun) says of this process in its environment."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    serves_store: bool = False  # a TCP store is there; else rank 0 serves one
    attempt: int = 0  # how often it has started everything again


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; what is in force travels in placements and `Regroup`.

    Rank order: tensor ranks fastest, then stages: rank = stage x tensor_parallel_size + tensor rank.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: tuple[int, ...] | None = None  # layers of each stage; None: evenly
    distributed_executor_backend: str = "uni"  # uni | mp | ray | external_launcher | package.module.LauncherClass
    ray_link: Literal["queue", "compiled-graph"] = "queue"  # how steps reach Ray workers
    ray_runtime_env: dict[str, Any] | None = None  # of Ray workers
    ray_workers_use_nsight: bool = False
    placement_group: str | None = None  # a Ray placement group to use, by name or hexadecimal id; None: one is made
    nnodes: int = 1  # without Ray: each runs the same command with its own node_rank
    node_rank: int = 0
    master_addr: str = "127.0.0.1"  # of the node with node_rank 0
    master_port: int = 29501
    secret_file: str | None = None  # what all nodes share, see planaria.config.secret
    max_parallel_loading_workers: int | None = None  # ranks that read weights at a time; None: all
    disable_custom_all_reduce: bool = False  # use the plain collective
    worker_cls: str = "auto"  # package.module.Class in place of planaria.worker.worker.Worker
    worker_extension_cls: str = ""  # package.module.Class mixed into the worker, for collective_rpc
    heartbeat_timeout: float = 10.0  # seconds without a sign of life after which a rank or node counts as lost
    outer: OuterLauncher | None = None  # only with external_launcher

    @property
    def world_size(self) -> int:
        """The ranks of one lane."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def over_nodes(self) -> bool:
        """Are there ranks on nodes that this package has to reach by itself?"""
        return self.nnodes > 1 and self.distributed_executor_backend == "mp"

    @property
    def local_world_size(self) -> int:
        """Ranks on each of `nnodes` nodes (Ray places its own)."""
        return self.world_size // self.nnodes


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is done about lost ranks. `recovery_limit`: times in `recovery_window` seconds that the ranks may come up
    again without a token since the last time; 0: the first loss ends the engine. `step_timeout`: seconds after which a
    step is overdue at the latest."""

    spare_workers: int = 0
    recovery_limit: int = 5
    recovery_window: float = 300.0
    step_timeout: float = 300.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided before a process starts. `checkpoint` is a planaria.checkpoint.Checkpoint as plain values."""

    model: ModelConfig
    checkpoint: dict[str, Any]
    served_model_name: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    device: DeviceConfig
    parallel: ParallelConfig
    faults: FaultConfig = FaultConfig()
    null_worker: bool = False
