"""Options as a user gives them, and the frozen configurations the parts take. A part takes only the one it needs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from planaria.config.engine_nodes import EngineNodes
from planaria.config.model import ModelConfig
from planaria.topology.cluster import LaneGroup
from planaria.topology.layout import Layout

QUANTIZATIONS = ("auto", "none", "q8_0", "q4_1")
SEQUENCE_PARALLEL = ("naive", "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")


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
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None  # None: all of them, or 1, see ParallelConfig
    data_parallel_rank: int | None = None  # given: external balancing
    data_parallel_start_rank: int | None = None  # given: hybrid balancing
    data_parallel_backend: str = "mp"
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    data_parallel_address: str | None = None  # None: not said, see `planaria.config.data_parallel`
    data_parallel_rpc_port: int | None = None
    headless: bool = False
    disable_nccl_for_dp_synchronization: bool | None = None
    ray_dp_pack_strategy: str | None = None  # None: strict
    api_server_count: int = 1
    # experts: `planaria.config.experts` has the rules
    enable_expert_parallel: bool = False
    expert_placement_strategy: str = "linear"
    enable_eplb: bool = False
    eplb_config: str | dict[str, Any] | None = None  # JSON, or what it says: fields of EPLBConfig
    all2all_backend: str | None = None  # None: allgather_reducescatter
    enable_dbo: bool = False
    ubatch_size: int = 0
    dbo_decode_token_threshold: int = 32
    dbo_prefill_token_threshold: int = 512
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
    auto_batched_tokens: bool = False  # nobody asked for a number: with few threads steps are shorter
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
    sharers: int = 1  # engines that the node's cores and memory are dealt over
    devices: tuple[int, ...] = ()  # accelerators of the node that are this engine's; none named: all
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


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Balancing of expert load by moving and repeating experts. Steps are the engine's."""

    window_size: int = 1000  # steps of load that are kept
    step_interval: int = 3000  # steps between rearrangements
    num_redundant_experts: int = 0  # slots of a layer beyond one for each expert
    log_balancedness: bool = False
    log_balancedness_interval: int = 1  # steps
    use_async: bool = False  # weights move between steps, not while steps wait
    policy: str = "default"


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; what is in force travels in placements and `Regroup`.

    Rank order: tensor ranks fastest, then stages, then lanes; see planaria.topology.layout.

    Data parallel: `data_parallel_size` replicas (engines) of `world_size` ranks each. Without external or hybrid
    balancing one server balances them all; external: this server has one, number `data_parallel_rank`; hybrid: it has
    `data_parallel_size_local`, from `data_parallel_start_rank` on. An engine's own configuration has size 1 and
    `data_parallel_index`, its number in the fleet. With several engines `nnodes` are the fleet's, and `engine_nodes`
    says which of them an engine has; an engine's own configuration has its own nodes.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: tuple[int, ...] | None = None  # layers of each stage; None: evenly
    distributed_executor_backend: str = "uni"  # uni | mp | ray | external_launcher | package.module.LauncherClass
    ray_link: Literal["queue", "compiled-graph"] = "queue"  # how steps reach Ray workers
    ray_runtime_env: dict[str, Any] | None = None  # of Ray workers
    ray_workers_use_nsight: bool = False
    placement_group: str | None = None  # a Ray placement group to use, by name or hexadecimal id; None: one is made
    lane_groups: tuple[LaneGroup, ...] = ()  # instead, of an engine whose lanes have one each
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
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = 1  # engines on this node; None: as many as fit there (Ray)
    data_parallel_rank: int = 0
    data_parallel_start_rank: int = 0
    data_parallel_index: int = 0
    data_parallel_backend: Literal["mp", "ray"] = "mp"  # who starts the engines
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    data_parallel_address: str | None = None  # of the node that comes first, on Ray; None: its head
    engine_nodes: EngineNodes | None = None  # of several engines on nodes without Ray
    disable_nccl_for_dp_synchronization: bool = False  # of replicas that meet in collectives; dense ones don't
    ray_dp_pack_strategy: Literal["strict", "fill", "span"] = "strict"  # see planaria.topology.packing
    api_server_count: int = 1
    lanes: int = 1  # of an engine: its data-parallel ranks, which share the model's experts
    api_process_rank: int = 0  # which of these server processes this one is; -1: it is an engine's
    is_moe_model: bool = False  # found from the model
    enable_expert_parallel: bool = False  # whole experts are dealt to ranks; else each expert is sliced by tensor rank
    expert_placement_strategy: Literal["linear", "round_robin"] = "linear"
    enable_eplb: bool = False
    eplb_config: EPLBConfig = EPLBConfig()
    all2all_backend: str = "allgather_reducescatter"
    enable_dbo: bool = False
    ubatch_size: int = 0
    dbo_decode_token_threshold: int = 32  # a step of so many tokens is not split yet
    dbo_prefill_token_threshold: int = 512  # one with any prompt's tokens

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share the experts of a layer."""
        ranks = self.tensor_parallel_size * self.data_parallel_size * self.lanes
        return ranks if self.enable_expert_parallel else 1

    @property
    def use_sequence_parallel_moe(self) -> bool:
        """Are tokens dealt to tensor ranks before experts, so that none is exchanged twice? pplx does it by itself."""
        lanes = self.data_parallel_size * self.lanes
        spread = self.enable_expert_parallel and self.tensor_parallel_size > 1 and lanes > 1
        return spread and self.all2all_backend in SEQUENCE_PARALLEL

    @property
    def num_micro_batches(self) -> int:
        """Parts a large step is computed in; 1: as a whole."""
        return 2 if self.enable_dbo else max(1, self.ubatch_size)

    def splits(self, num_tokens: int, *, prefill: bool) -> bool:
        """Is a step of so many tokens, with any prompt's among them, computed in micro-batches?"""
        above = self.dbo_prefill_token_threshold if prefill else self.dbo_decode_token_threshold
        return self.num_micro_batches > 1 and num_tokens > above

    @property
    def world_size(self) -> int:
        """The ranks of one engine."""
        return self.layout.size

    @property
    def layout(self) -> Layout:
        """That was asked for."""
        return Layout(tp=self.tensor_parallel_size, pp=self.pipeline_parallel_size, dp=self.lanes)

    @property
    def world_size_across_dp(self) -> int:
        return self.world_size * self.data_parallel_size

    @property
    def replicas(self) -> range:
        """Numbers of the engines behind this server."""
        if self.data_parallel_external_lb:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        if self.data_parallel_hybrid_lb:
            first = self.data_parallel_start_rank
            return range(first, first + (self.data_parallel_size_local or 1))
        return range(self.data_parallel_size)

    @property
    def placement_groups(self) -> tuple[str, ...]:
        """The user's, by name or id: one for each engine, or none."""
        return tuple(name.strip() for name in self.placement_group.split(",")) if self.placement_group else ()

    @property
    def over_nodes(self) -> bool:
        """Are there ranks on nodes that this package has to reach by itself?"""
        return self.nnodes > 1 and self.distributed_executor_backend in ("uni", "mp")

    @property
    def nodes_per_engine(self) -> int:
        return self.engine_nodes.per_engine if self.engine_nodes is not None else self.nnodes

    @property
    def local_world_size(self) -> int:
        """An engine's ranks on each of its nodes (Ray places its own)."""
        return self.world_size // self.nodes_per_engine


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

    def with_layout(self, layout: Layout) -> EngineConfig:
        """The same engine, asked for in another layout. A partition of layers stays where it has as many stages."""
        parallel, stages = self.parallel, layout.pp
        partition = parallel.pp_layer_partition
        return msgspec.structs.replace(
            self,
            parallel=msgspec.structs.replace(
                parallel, tensor_parallel_size=layout.tp, pipeline_parallel_size=stages, lanes=layout.dp,
                pp_layer_partition=partition if partition is not None and len(partition) == stages else None,
            ),
            scheduler=msgspec.structs.replace(
                self.scheduler, micro_steps=stages, depth=max(stages, self.scheduler.depth)
            ),
        )  # fmt: skip
