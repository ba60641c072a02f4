"""Options as a user gives them, and the frozen configurations the parts take. A part takes only the one it needs."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from planaria.config.all2all import DEFAULT, EXCHANGES
from planaria.config.declared import UNHASHED, option
from planaria.config.engine_nodes import EngineNodes
from planaria.models.config import ModelConfig
from planaria.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from planaria.topology.cluster import LaneGroup
from planaria.topology.experts import STRATEGIES as EXPERT_STRATEGIES
from planaria.topology.layout import Layout
from planaria.topology.outer import OuterLauncher
from planaria.topology.packing import STRATEGIES as PACK_STRATEGIES
from planaria.topology.platforms import PLATFORMS, Platform
from planaria.topology.stripes import Context

DTYPES = ("auto", "float32", "bfloat16")
TINY = 5e-324  # the least number above 0
QUANTIZATIONS = ("auto", "none", "q8_0", "q4_1")


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of ranks, engines and nodes. `ParallelConfig` has the same, completed."""

    tensor_parallel_size: Annotated[int, option("Ranks that share each layer.", "-tp", least=1, hashed=False)] = 1
    pipeline_parallel_size: Annotated[int, option("Stages that share the layers.", "-pp", least=1, hashed=False)] = 1
    decode_context_parallel_size: Annotated[
        int,
        option(
            "Tensor ranks that share the tokens of a sequence's KV, instead of having heads of all; divides -tp.",
            "-dcp",
            least=1,
            hashed=True,
        ),
    ] = 1
    prefill_context_parallel_size: Annotated[
        int,
        option(
            "Groups of -tp ranks that each compute a share of a step's tokens and have a share of its KV.",
            "-pcp",
            least=1,
            hashed=False,
        ),
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        int | None,
        option("Tokens in turn on each context rank: divides --block-size; default: 1.", least=1, hashed=True),
    ] = None
    dcp_kv_cache_interleave_size: Annotated[
        int | None, option("Old name of --cp-kv-cache-interleave-size.", least=1, hashed=False)
    ] = None
    pp_layer_partition: Annotated[
        str | tuple[int, ...] | None, option("Layers of each stage, e.g. 10,20; default: evenly.", hashed=True)
    ] = None
    distributed_executor_backend: Annotated[
        str | None,
        option(
            "How ranks are started: uni (in the engine), mp (processes), ray, external_launcher (torchrun), or "
            "package.module.LauncherClass; default: chosen.",
            hashed=False,
            metavar="uni|mp|ray|external_launcher|CLASS",
        ),
    ] = None
    data_parallel_size: Annotated[
        int,
        option(
            "Engines, each with a copy of the model; with --enable-expert-parallel lanes of one engine that share "
            "experts.",
            "-dp",
            least=1,
            hashed=False,
        ),
    ] = 1
    prefill_engines: Annotated[
        int,
        option(
            "Engines that compute prompts and hand them over with their KV, so that no stream waits for another's; "
            "with --decode-engines.",
            least=0,
            hashed=False,
        ),
    ] = 0
    decode_engines: Annotated[
        int, option("Engines that go on from there; with --prefill-engines.", least=0, hashed=False)
    ] = 0
    data_parallel_size_local: Annotated[
        int | None,
        option(
            "Those of one node; default: all; with --nnodes dealt evenly; with external balancing or the strategy span "
            "1.",
            "-dpl",
            hashed=False,
        ),
    ] = None
    data_parallel_rank: Annotated[
        int | None,
        option("This server has one engine, of this number; an outside balancer picks servers.", "-dpn", hashed=False),
    ] = None
    data_parallel_start_rank: Annotated[
        int | None,
        option(
            "This server has --data-parallel-size-local engines from this number on; an outside balancer picks "
            "servers. With --headless: this node has.",
            "-dpr",
            hashed=False,
        ),
    ] = None
    data_parallel_backend: Annotated[
        str,
        option(
            "Who starts engines: mp (processes here) or ray (actors, placed).",
            "-dpb",
            choices=("mp", "ray"),
            hashed=False,
        ),
    ] = "mp"
    data_parallel_external_lb: Annotated[
        bool, option("One server per engine (with --data-parallel-rank).", hashed=False)
    ] = False
    data_parallel_hybrid_lb: Annotated[
        bool, option("One server per node (with --data-parallel-start-rank).", hashed=False)
    ] = False
    data_parallel_address: Annotated[
        str | None,
        option(
            "Address of the node with the first engine: on Ray it comes first, else it is the --master-addr.",
            "-dpa",
            hashed=False,
        ),
    ] = None
    disable_nccl_for_dp_synchronization: Annotated[
        bool | None,
        option("Refused: no engines here meet in collectives to tell each other of steps.", hashed=False),
    ] = None
    ray_dp_pack_strategy: Annotated[
        str | None,
        option(
            "How engines on Ray share nodes: strict (the local size on each), fill (as many as fit), span (an engine "
            "over several nodes); default: strict.",
            choices=PACK_STRATEGIES,
            hashed=False,
        ),
    ] = None
    api_server_count: Annotated[
        int, option("Server processes in front of the engines.", "-asc", least=1, hashed=False)
    ] = 1
    # experts: `planaria.config.experts` has the rules
    enable_expert_parallel: Annotated[
        bool, option("Deal whole experts to ranks; else each expert is sliced by tensor rank.", hashed=True)
    ] = False
    expert_placement_strategy: Annotated[
        str,
        option(
            "Which rank has which experts: linear ([0,1] [2,3]) or round_robin ([0,2] [1,3]).",
            choices=EXPERT_STRATEGIES,
            hashed=True,
        ),
    ] = "linear"
    enable_eplb: Annotated[bool, option("Move and repeat experts so that ranks have equal load.", hashed=True)] = False
    eplb_config: Annotated[
        str | dict[str, Any] | None,
        option(
            "As JSON: window_size, step_interval, num_redundant_experts, log_balancedness, log_balancedness_interval, "
            """use_async, policy, e.g. '{"num_redundant_experts": 8}'.""",
            hashed=True,
            metavar="JSON",
        ),
    ] = None
    all2all_backend: Annotated[
        str | None,
        option(
            f"How tokens reach experts of other ranks: {', '.join(EXCHANGES)}; default: {DEFAULT}.",
            choices=tuple(EXCHANGES),
            hashed=True,
        ),
    ] = None
    enable_dbo: Annotated[
        bool, option("Compute large steps as two micro-batches: one computes while one exchanges.", hashed=True)
    ] = False
    ubatch_size: Annotated[
        int,
        option("Micro-batches of a large step; 0 or 1: not split. --enable-dbo: two.", least=0, hashed=True),
    ] = 0
    dbo_decode_token_threshold: Annotated[
        int, option("A step without prompts is split above so many tokens.", least=0, hashed=True)
    ] = 32
    dbo_prefill_token_threshold: Annotated[
        int, option("A step with prompts is split above so many tokens.", least=0, hashed=True)
    ] = 512
    ray_link: Annotated[
        str,
        option("How steps reach Ray workers: queue or compiled-graph.", choices=("queue", "compiled-graph"),
               hashed=False),
    ] = "queue"  # fmt: skip
    ray_runtime_env: Annotated[
        str | dict[str, Any] | None,
        option("Runtime environment of Ray workers, as JSON.", hashed=False, metavar="JSON"),
    ] = None
    ray_workers_use_nsight: Annotated[bool, option("Profile Ray workers with nsight.", hashed=False)] = False
    placement_group: Annotated[
        str | None, option("Ray placement groups to use, one for each engine or lane.", hashed=False)
    ] = None  # by name or hexadecimal id; None: made
    placement_group_local_ranks: Annotated[
        str | tuple[int, ...] | None,
        option("The index of each of these on its node, e.g. 0,1,0; default: in their order.", hashed=False),
    ] = None
    nnodes: Annotated[
        int, option("Nodes, without Ray: run the same command on each with its --node-rank.", least=1, hashed=False)
    ] = 1
    node_rank: Annotated[int, option("This node's number, 0 to --nnodes - 1.", hashed=False)] = 0
    master_addr: Annotated[str, option("Address of the node with --node-rank 0.", hashed=False)] = "127.0.0.1"
    master_port: Annotated[
        int,
        option("Port it listens on for the other nodes.", least=1, most=65535, rule="is not a port number",
               fix="give 1 to 65535", hashed=False),
    ] = 29501  # fmt: skip
    secret_file: Annotated[
        str | None,
        option("File with the secret that all nodes share. Also $PLANARIA_SECRET_FILE.", hashed=False, metavar="FILE"),
    ] = None
    max_parallel_loading_workers: Annotated[
        int | None, option("Ranks that read weights at a time; default: all.", least=1, hashed=False)
    ] = None
    # these three are compared by name, see `planaria.config.digest.compared`
    disable_custom_all_reduce: Annotated[bool, option("Use the plain collective (gloo, NCCL).", hashed=False)] = False
    worker_cls: Annotated[
        str, option("package.module.Class in place of the worker; auto: Planaria's.", hashed=False, metavar="CLASS")
    ] = "auto"
    worker_extension_cls: Annotated[
        str,
        option(
            "package.module.Class whose methods join the worker's, for collective_rpc.", hashed=False, metavar="CLASS"
        ),
    ] = ""
    sd_worker_cls: Annotated[
        str,
        option(
            "package.module.Class that drafts tokens on a rank, with --speculative-config; auto: by its method.",
            hashed=False,
            metavar="CLASS",
        ),
    ] = "auto"
    link_chunk_bytes: Annotated[
        int | None,
        option(
            "Bytes of a piece of a message between an engine and its ranks; default: 64 KiB in shared memory, 256 KiB "
            "over TCP.",
            least=4096,
            most=1 << 24,
            rule="must be from 4096 to 16777216",
            hashed=False,
        ),
    ] = None
    heartbeat_timeout: Annotated[
        float,
        option(
            "Seconds without a sign of life after which a rank or node counts as lost.",
            least=2.0,
            rule="must be at least 2 seconds: ranks show a sign of life every second",
            hashed=False,
            metavar="SECONDS",
        ),
    ] = 10.0


class EngineOptions(ParallelOptions, frozen=True, kw_only=True):
    """What the command line and `LLM(...)` take. `planaria.config.resolve.resolve` checks and completes them."""

    model: str
    served_model_name: Annotated[
        str | None, option("Name clients use; default: MODEL as typed.", typed=False, hashed=False)
    ] = None
    dtype: Annotated[str, option("auto, float32 or bfloat16.", choices=DTYPES, hashed=True)] = "auto"
    quantization: Annotated[
        str,
        option(
            "auto keeps weights packed that are so in the file; none unpacks them; q8_0 or q4_1 packs at load.",
            choices=QUANTIZATIONS,
            hashed=True,
        ),
    ] = "auto"
    device: Annotated[str, option("auto, cpu, cuda or rocm.", choices=("auto", *PLATFORMS), hashed=True)] = "auto"
    threads: Annotated[
        int | None, option("CPU threads; default: the cores this process may use.", least=1, hashed=False)
    ] = None
    kernels: Annotated[
        str,
        option(
            "CPU kernels: native (this package's), torch (plain; of planaria[torch]), or auto.",
            choices=("auto", "native", "torch"),
            hashed=True,
        ),
    ] = "auto"
    model_impl: Annotated[
        str,
        option(
            "Whose code runs the model: planaria (its families), transformers (other decoders), or auto.",
            choices=("auto", "planaria", "transformers"),
            hashed=False,
        ),
    ] = "auto"
    tokenizer: Annotated[
        str | None,
        option(
            "A folder, .gguf file or hub id whose tokenizer to use; default: the model's.",
            hashed=False,
            metavar="MODEL",
        ),
    ] = None
    tokenizer_revision: Annotated[str | None, option("Of --tokenizer, where that is a hub id.", hashed=False)] = None
    revision: Annotated[str | None, option("Branch, tag or commit of MODEL, where that is a hub id.", hashed=False)] = (
        None
    )
    download_dir: Annotated[
        str | None,
        option("Folder for what comes from the hub; default: the hub's own cache.", hashed=False, metavar="FOLDER"),
    ] = None
    chat_template: Annotated[
        str | None,
        option(
            "A file with a chat template, or the template itself; default: the model's.", hashed=False, metavar="FILE"
        ),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool | None,
        option("Let models choose among tools; default: where the format of their calls is known.", hashed=False),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        option(
            f"How the model writes calls of tools: {', '.join(TOOL_CALL_PARSERS)}; default: chosen from its chat "
            "template.",
            choices=TOOL_CALL_PARSERS,
            hashed=False,
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        option(
            f"How the model writes its reasoning, which is then told apart: {', '.join(REASONING_PARSERS)}; default: "
            "it is content.",
            choices=REASONING_PARSERS,
            hashed=False,
        ),
    ] = None
    max_model_len: Annotated[
        int | str | None,
        option(
            "Longest request in tokens, prompt and output, e.g. 4096 or 4k (4,000; 4K is 4,096); auto: as long as KV "
            "memory allows.",
            least=2,
            hashed=True,
            metavar="TOKENS",
        ),
    ] = None
    max_num_seqs: Annotated[int, option("Most requests running at a time.", least=1, hashed=True)] = 256
    max_num_batched_tokens: Annotated[
        int | None, option("Most tokens in one step; default: 512 on a CPU, 2048 on a GPU.", hashed=True)
    ] = None
    policy: Annotated[
        str, option("fcfs or priority.", "--scheduling-policy", choices=("fcfs", "priority"), hashed=True)
    ] = "fcfs"
    block_size: Annotated[int, option("Tokens in a KV block: a multiple of 16.", hashed=True)] = 16
    kv_cache_memory: Annotated[
        int | str | None, option("Memory for keys and values of each rank, e.g. 2GiB.", hashed=True, metavar="SIZE")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        option("Share of a GPU's memory that may be used; default: 0.92.", least=TINY, most=1.0, hashed=False),
    ] = None
    enable_prefix_caching: Annotated[bool, option("Reuse what requests have in common.", hashed=True)] = True
    kv_checksums: Annotated[
        bool, option("Check KV that a rank takes over from a dead one by checksums of its full blocks.", hashed=True)
    ] = True
    kv_tier: Annotated[
        str | None,
        option(
            "Folder for KV blocks that are wanted again, also after a restart, and the most it may have, e.g. "
            "/var/kv,20GiB; default: 10GiB.",
            hashed=False,
            metavar="FOLDER[,SIZE]",
        ),
    ] = None
    kv_offloading_size: Annotated[
        float | None,
        option(
            "Memory of the node, in GiB, for KV blocks that the cache has no room for: of an engine, all its ranks "
            "together.",
            least=TINY,
            hashed=False,
            metavar="GIB",
        ),
    ] = None
    kv_transfer_config: Annotated[
        str | dict[str, Any] | None,
        option(
            "Exchange KV blocks with other servers, behind somebody else's router: as JSON, with vLLM's names; "
            "connectors: tcp, NixlConnector, directory, LMCacheConnectorV1.",
            hashed=False,
            metavar="JSON",
        ),
    ] = None
    async_scheduling: Annotated[bool | None, option("Plan a step while one runs.", hashed=True)] = None
    speculative_config: Annotated[
        str | dict[str, Any] | None,
        option(
            "Draft tokens, and check several in a step: as JSON, with vLLM's names, e.g. "
            """'{"method": "ngram", "num_speculative_tokens": 8}'; methods: ngram, suffix, draft_model, eagle.""",
            hashed=True,
            metavar="JSON",
        ),
    ] = None
    enable_lora: Annotated[bool, option("Serve adapters (LoRA) over the model.", hashed=True)] = False
    max_loras: Annotated[
        int, option("Adapters that requests may use at the same time; others wait.", least=1, most=4096, hashed=True)
    ] = 1
    max_lora_rank: Annotated[int, option("Largest rank of an adapter.", least=1, most=512, hashed=True)] = 16
    max_cpu_loras: Annotated[
        int | None,
        option("Adapters that may be loaded; default: 64, or --max-loras if that is more.", least=1, hashed=False),
    ] = None
    seed: Annotated[int | None, option("Of requests that bring none; default: drawn.", hashed=False)] = None
    generation_config: Annotated[
        str,
        option(
            "Where requests that say nothing get temperature, top_p, top_k, ... from: auto (the model's "
            "generation_config.json), vllm (from nowhere), or a folder that has another.",
            hashed=False,
            metavar="auto|vllm|FOLDER",
        ),
    ] = "auto"
    runner: Annotated[
        str,
        option(
            "What the model is for: generate, pooling (vectors and scores alone), or auto: what it is made for; one "
            "that generates also embeds.",
            choices=("auto", "generate", "pooling"),
            hashed=True,
        ),
    ] = "auto"
    convert: Annotated[
        str,
        option(
            "With --runner pooling, what is made of the model: embed or classify; auto: what it has.",
            choices=("auto", "none", "embed", "classify"),
            hashed=True,
        ),
    ] = "auto"
    pooler_config: Annotated[
        str | dict[str, Any] | None,
        option(
            "How vectors are made, as JSON with vLLM's names: pooling_type (LAST, MEAN, CLS), normalize, dimensions, "
            "activation; default: what the model's folder says.",
            hashed=True,
            metavar="JSON",
        ),
    ] = None
    hf_overrides: Annotated[
        str | dict[str, Any] | None,
        option("""Fields in place of config.json's, as JSON, e.g. '{"is_matryoshka": true}'.""", hashed=True,
               metavar="JSON"),
    ] = None  # fmt: skip
    skip_tokenizer_init: Annotated[bool, option("Token ids in and out, no text.", typed=False, hashed=False)] = False
    null_worker: Annotated[bool, option("Compute nothing: measures the engine alone.", hashed=True)] = False
    batch_invariant: Annotated[
        bool,
        option(
            "Promise that a request's tokens depend on nothing but the request, to the last bit, also after a fault.",
            hashed=True,
        ),
    ] = False
    spare_workers: Annotated[
        int, option("Processes that are loaded and wait to replace a lost rank.", least=0, hashed=False)
    ] = 0
    recovery_limit: Annotated[
        int,
        option(
            "Times that lost ranks are replaced with no token in between before giving up; 0: never.",
            least=0,
            hashed=False,
        ),
    ] = 5
    recovery_window: Annotated[
        float,
        option(
            "Seconds in which they are counted.",
            least=TINY,
            rule="must be more than 0",
            hashed=False,
            metavar="SECONDS",
        ),
    ] = 300.0
    step_timeout: Annotated[
        float,
        option("Seconds after which a step is overdue at the latest.", least=TINY, rule="must be more than 0",
               hashed=False, metavar="SECONDS"),
    ] = 300.0  # fmt: skip
    data_parallel_rpc_port: Annotated[
        int | None,
        option(
            "Port nodes meet at, with --data-parallel-address: the --master-port.",
            "-dpp",
            least=1,
            most=65535,
            rule="is not a port number",
            fix="give 1 to 65535",
            hashed=False,
        ),
    ] = None
    headless: Annotated[
        bool,
        option(
            "No server on this node: its engines (--data-parallel-size-local from --data-parallel-start-rank on) are "
            "the server's at --data-parallel-address.",
            hashed=False,
        ),
    ] = False


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one lane. Tokens and rows."""

    max_num_seqs: int
    max_num_batched_tokens: int
    auto_batched_tokens: bool = False  # nobody asked for a number: with few threads steps are shorter
    max_model_len: int
    auto_model_len: bool = False  # less, where KV memory is for less
    policy: str = "fcfs"
    depth: int = 2  # plans in flight
    micro_steps: int = 1  # turns that rows are dealt over, so that the steps in flight are of different rows
    max_drafts: int = 0  # of a row in one step: tokens that its worker may guess ahead, and check in the same step
    max_logit_rows: int = 256  # positions of one step whose logits are wanted (prompt logprobs are chunked by it)


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A folder for KV blocks, of every node that has ranks. size: bytes of all that is in it."""

    folder: str
    size: int


class TransferConfig(msgspec.Struct, frozen=True):
    """Of KV blocks between servers. serves: others fetch here what was computed for them; asks: it fetches from others.
    host, port: where others reach the first rank of the first engine, each other rank at a port more; peers: whom it
    may ask, `HOST:PORT`, besides those that have the deployment's secret; buffer: bytes of each rank for blocks that
    others are to fetch; lease: seconds that they are held; folder: of the connector directory; backends: of NIXL, by
    which bytes go; remote_url: of LMCache's store. No port: between engines of one server, whose ranks say where they
    are."""

    connector: str
    serves: bool
    asks: bool
    engine_id: str
    host: str = ""
    port: int = 0
    peers: tuple[str, ...] = ()
    buffer: int = 0
    lease: float = 0.0
    folder: TierConfig | None = None
    backends: tuple[str, ...] = ()
    remote_url: str = ""

    @property
    def by_store(self) -> bool:
        """Blocks go through a store that servers share, and not from one to another."""
        return self.folder is not None or bool(self.remote_url)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`memory`: bytes for KV, None: chosen from what the machine has. `kv_offloading`: bytes for blocks of all ranks of
    an engine beside it. block_size: tokens of a block, on all context ranks together."""

    block_size: int = 16
    memory: int | None = None
    enable_prefix_caching: bool = True
    kv_checksums: bool = True
    kv_tier: TierConfig | None = None
    kv_offloading: Annotated[int, UNHASHED] = 0
    transfer: Annotated[TransferConfig | None, UNHASHED] = None

    @property
    def keeps_blocks(self) -> bool:
        """Are there stores of blocks outside of the cache?"""
        return self.kv_tier is not None or bool(self.kv_offloading or (self.transfer and self.transfer.remote_url))


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    device: str  # a platform's name
    dtype: str  # float32 | bfloat16
    quantization: str
    threads: int  # of a rank
    # nobody asked for a number: a rank takes its share of its node's cores
    auto_threads: Annotated[bool, UNHASHED] = False
    sharers: Annotated[int, UNHASHED] = 1  # engines that the node's cores and memory are dealt over
    # accelerators of the node that are this engine's; none named: all
    devices: Annotated[tuple[int, ...], UNHASHED] = ()
    kernels: str = "native"
    gpu_memory_utilization: Annotated[float, UNHASHED] = 0.92
    batch_invariant: bool = False  # promised: a request's numbers depend on nothing but the request

    @property
    def platform(self) -> Platform:
        return PLATFORMS[self.device]


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Balancing of expert load by moving and repeating experts. Steps are the engine's."""

    window_size: int = 1000  # steps of load that are kept
    step_interval: int = 3000  # steps between rearrangements
    num_redundant_experts: int = 0  # slots of a layer beyond one for each expert
    log_balancedness: bool = False
    log_balancedness_interval: int = 1  # steps
    use_async: bool = False  # weights move between steps, not while steps wait
    policy: str = "default"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rank that draws tokens guesses ahead. Of `num_speculative_tokens` a row gets as many as pay. Names are
    vLLM's; `suffix_*` are of the method suffix, `prompt_lookup_*` of ngram."""

    method: str = ""  # ngram, suffix, draft_model or eagle; left out: draft_model where there is a `model`, else ngram
    model: str = ""  # of draft_model and eagle: what MODEL is to `serve`
    num_speculative_tokens: int = 0  # at most, of a row in one step; 0: by the method
    prompt_lookup_max: int = 0  # tokens that are looked for, the longest first; 0: 5, or what the least is
    prompt_lookup_min: int = 0  # 0: 2, or what the most is
    suffix_decoding_max_tree_depth: int = 24  # tokens that are looked for at most
    suffix_decoding_max_cached_requests: int = 10_000  # outputs that are remembered
    suffix_decoding_max_spec_factor: float = 2.0  # drafts for each token that was found again
    suffix_decoding_min_token_prob: float = 0.1  # of a draft, by how often it came
    draft_tensor_parallel_size: int = 1  # ranks that share the layers of the model that drafts: 1, or all tensor ranks


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters: max_loras in use at the same time, each of a rank up to max_lora_rank. max_cpu_loras: that a front end
    has, in use or not."""

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: Annotated[int, UNHASHED] = 64


class DraftSource(msgspec.Struct, frozen=True, kw_only=True):
    """The model that drafts, as EngineConfig has the one that is served."""

    model: ModelConfig
    checkpoint: Annotated[dict[str, Any], UNHASHED]
    quantization: str


class ParallelConfig(ParallelOptions, frozen=True, kw_only=True):
    """What was asked for; what is in force travels in placements and `Regroup`.

    Rank order: tensor ranks fastest, then stages, then lanes; see planaria.topology.layout.

    Data parallel: `data_parallel_size` replicas (engines) of `world_size` ranks each. Without external or hybrid
    balancing one server balances them all; external: this server has one, number `data_parallel_rank`; hybrid: it has
    `data_parallel_size_local`, from `data_parallel_start_rank` on. An engine's own configuration has size 1 and
    `data_parallel_index`, its number in the fleet. With several engines `nnodes` are the fleet's, and `engine_nodes`
    says which of them an engine has; an engine's own configuration has its own nodes.
    """

    cp_kv_cache_interleave_size: int = 1
    pp_layer_partition: tuple[int, ...] | None = None
    distributed_executor_backend: str = "uni"
    ray_runtime_env: dict[str, Any] | None = None
    placement_group_local_ranks: tuple[int, ...] | None = None
    lane_groups: Annotated[tuple[LaneGroup, ...], UNHASHED] = ()  # placement groups of lanes that have one each
    outer: Annotated[OuterLauncher | None, UNHASHED] = None  # only with external_launcher
    data_parallel_size_local: int | None = 1  # engines on this node; None: as many as fit there (Ray)
    data_parallel_rank: int = 0
    data_parallel_start_rank: int = 0
    data_parallel_index: Annotated[int, UNHASHED] = 0
    data_parallel_rank_local: Annotated[int, UNHASHED] = 0  # which of its node's engines it is
    engine_nodes: Annotated[EngineNodes | None, UNHASHED] = None  # of several engines on nodes without Ray
    ray_dp_pack_strategy: str = "strict"  # see planaria.topology.packing
    lanes: Annotated[int, UNHASHED] = 1  # of an engine: its data-parallel ranks, which share the model's experts
    slices_experts: bool = False  # these have a slice of each expert, where there is no expert parallel
    api_process_rank: Annotated[int, UNHASHED] = 0  # which of these server processes this is; -1: it is an engine's
    eplb_config: EPLBConfig = EPLBConfig()  # type: ignore[assignment]
    all2all_backend: str = DEFAULT

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share the experts of a layer."""
        ranks = self.tensor_parallel_size * self.prefill_context_parallel_size * self.data_parallel_size * self.lanes
        return ranks if self.enable_expert_parallel else 1

    def expert_slots(self, num_experts: int) -> int:
        """Of a layer, redundant ones included."""
        return num_experts + (self.eplb_config.num_redundant_experts if self.enable_eplb else 0)

    @property
    def shares_experts(self) -> bool:
        """Are data-parallel ranks lanes of one engine, also where there is one? Experts are dealt to their ranks, whole
        or in slices."""
        return self.enable_expert_parallel or self.slices_experts

    def slices(self, layout: Layout) -> int:
        """Of each expert, besides those of the tensor ranks of a lane: what these have is cut into so many."""
        return layout.dp * layout.pcp if self.slices_experts else 1

    @property
    def use_sequence_parallel_moe(self) -> bool:
        """Are tokens dealt to tensor ranks before experts, so that none is exchanged twice? pplx does it by itself."""
        lanes = self.data_parallel_size * self.lanes * self.prefill_context_parallel_size
        spread = self.shares_experts and self.tensor_parallel_size > 1 and lanes > 1
        return spread and EXCHANGES[self.all2all_backend].deals

    @property
    def num_micro_batches(self) -> int:
        """Parts a large step is computed in; 1: as a whole."""
        return 2 if self.enable_dbo else max(1, self.ubatch_size)

    def splits(self, num_tokens: int, *, prefill: bool) -> bool:
        """Is a step of so many tokens, with any prompt's among them, computed in micro-batches?"""
        above = self.dbo_prefill_token_threshold if prefill else self.dbo_decode_token_threshold
        return self.num_micro_batches > 1 and num_tokens > above

    @property
    def splits_prefill(self) -> bool:
        """Are there engines of two kinds, which read each other's KV?"""
        return self.prefill_engines > 0

    @property
    def world_size(self) -> int:
        """The ranks of one engine."""
        return self.layout.size

    @property
    def layout(self) -> Layout:
        """That was asked for."""
        return Layout(
            tp=self.tensor_parallel_size, pcp=self.prefill_context_parallel_size, pp=self.pipeline_parallel_size,
            dp=self.lanes,
        )  # fmt: skip

    def context(self, layout: Layout, pcp_rank: int = 0) -> Context:
        """Which ranks of a layout in force share a sequence's tokens: where tensor ranks are gone, so many that their
        number divides the one asked for."""
        dcp = math.gcd(self.decode_context_parallel_size, layout.tp)
        return Context(dcp, layout.pcp, self.cp_kv_cache_interleave_size, pcp_rank)

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


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answers with, and how its vectors are made.

    tasks: of generate, embed, classify, score. kind: one of types.POOLINGS; width: numbers of a whole vector;
    normalize: to length 1. sizes: that a vector may be cut to, (): any; None: it may not be; dimensions: of requests
    that say nothing. labels: of one that classifies; activation: what makes probabilities of their scores: softmax,
    sigmoid or "", nothing.
    """

    tasks: tuple[str, ...] = ("generate",)
    kind: str = "last"
    width: int = 0
    normalize: bool = True
    sizes: tuple[int, ...] | None = None
    dimensions: int | None = None
    labels: tuple[str, ...] = ()
    activation: str = ""

    def dimensions_problem(self, dimensions: int) -> str:
        """Why a vector can't be cut to so many numbers, or ""."""
        if self.sizes is None:
            return "the model wasn't trained for shorter vectors (config.json: is_matryoshka, matryoshka_dimensions)"
        if self.sizes and dimensions not in self.sizes:
            return f"the model was trained for {', '.join(map(str, self.sizes))}"
        return "" if 1 <= dimensions <= self.width else f"must be from 1 to {self.width}"


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
    speculative: SpeculativeConfig | None = None
    draft: DraftSource | None = None
    pooling: PoolingConfig = PoolingConfig()
    lora: LoRAConfig | None = None  # None: there are no adapters
    weights_number: int = 0  # how often weights were changed

    @property
    def lends_memory(self) -> bool:
        """Do the server's engines read each other's KV in memory of the node?"""
        return self.parallel.splits_prefill and self.cache.transfer is None

    def tokens_here(self, layout: Layout) -> int:
        """Of a block, on each rank of a layout in force."""
        return self.cache.block_size // self.parallel.context(layout).size

    def with_layout(self, layout: Layout) -> EngineConfig:
        """The same engine, asked for in another layout. A partition of layers stays where it has as many stages."""
        parallel, stages = self.parallel, layout.pp
        partition = parallel.pp_layer_partition
        return msgspec.structs.replace(
            self,
            parallel=msgspec.structs.replace(
                parallel, tensor_parallel_size=layout.tp, pipeline_parallel_size=stages, lanes=layout.dp,
                prefill_context_parallel_size=layout.pcp,
                pp_layer_partition=partition if partition is not None and len(partition) == stages else None,
            ),
            scheduler=msgspec.structs.replace(
                self.scheduler, micro_steps=stages, depth=max(stages, self.scheduler.depth)
            ),
        )  # fmt: skip
