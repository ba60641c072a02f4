"""Options about experts: every refusal with its value and its way out. No process is started."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from planaria.config.all2all import BACKENDS, DEFAULT, LIBRARIES, ExpertShapes, way_of
from planaria.config.data_parallel import may_slice
from planaria.config.experts import eplb_config, resolve_experts
from planaria.config.machine import Machine
from planaria.config.options import EngineOptions, EPLBConfig, ParallelConfig
from planaria.config.parallel import ranks_here, resolve_parallel
from planaria.env import SpmdDataParallel
from planaria.errors import ConfigError
from planaria.topology import Layout
from planaria.topology.outer import OuterLauncher

SMALL = ExpertShapes(num_experts=8, top_k=2, hidden_size=4096)
LAPTOP = Machine(cores=64, ray_installed=True)
TP2, DP2, DP8 = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"data_parallel_size": 8}
EP, EPLB = {"enable_expert_parallel": True}, {"enable_eplb": True}
DP_RAY = {"data_parallel_backend": "ray"}
DEEPEP_LL, DEEPEP_HT = "deepep_low_latency", "deepep_high_throughput"
EVERY_LIBRARY = LIBRARIES


def resolved(
    shapes: ExpertShapes | None = SMALL, device: str = "cpu", libraries: tuple[str, ...] | None = (),
    slices: bool = False, **given: Any,
) -> tuple[ParallelConfig, list[str]]:  # fmt: skip
    options = EngineOptions(model="m", **given)
    config, _ = resolve_parallel(options, LAPTOP, "cpu", slices=slices)
    config, notes = resolve_experts(config, options, device, shapes, libraries)
    return config, [line for level, line in notes if level == logging.WARNING]


@pytest.mark.row("P6")
def test_data_parallel_ranks_have_slices_of_experts() -> None:
    config, _ = resolved(slices=True, **DP2, **TP2, pipeline_parallel_size=2)
    assert (config.lanes, config.data_parallel_size, config.world_size) == (2, 1, 8)
    assert config.slices(config.layout) == 2 and config.shares_experts and config.use_sequence_parallel_moe
    assert config.expert_parallel_size == 1, "none is whole"
    assert resolved(slices=True, **DP2, enable_dbo=True)[0].num_micro_batches == 2
    for backend in ("pplx", DEEPEP_LL):
        with pytest.raises(ConfigError, match=f"--all2all-backend {backend}: .* each of 2 has a slice of every one"):
            resolved(slices=True, **DP2, all2all_backend=backend, libraries=EVERY_LIBRARY, device="cuda")
    assert not resolved(slices=True, **DP2, all2all_backend="naive")[1]
    dense = resolved(None, **DP2)[0]
    assert (dense.lanes, dense.data_parallel_size, dense.slices(dense.layout)) == (1, 2, 1)


def test_when_there_would_be_slices() -> None:
    for given, wanted in (
        (DP2, True), ({}, False), ({**DP2, **EP}, False), ({**DP2, "data_parallel_rank": 1}, True),
        ({**DP2, "data_parallel_hybrid_lb": True}, True), ({**DP2, "prefill_engines": 1, "decode_engines": 1}, False),
        ({**DP2, "headless": True, "data_parallel_start_rank": 1, "data_parallel_size_local": 1}, True),
    ):  # fmt: skip
        assert may_slice(EngineOptions(model="m", **given)) == wanted, given
    assert may_slice(EngineOptions(model="m"), programs=True)


def test_the_defaults_change_nothing() -> None:
    config, notes = resolved(shapes=None)
    assert not notes and resolved()[0] == config
    assert (config.expert_parallel_size, config.num_micro_batches, config.all2all_backend) == (
        1, 1, "allgather_reducescatter",
    )  # fmt: skip


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    # what, options, the value as it is named, the way out
    ("placement", {"expert_placement_strategy": "random"}, "--expert-placement-strategy random", "linear, round_robin"),
    ("exchange", {"all2all_backend": "mpi"}, "--all2all-backend mpi: is unknown", ", ".join(BACKENDS)),
    ("DeepEP and fill", {**EP, **DP8, **DP_RAY, "ray_dp_pack_strategy": "fill", "all2all_backend": DEEPEP_LL},
     "--ray-dp-pack-strategy fill", "by eights on a node; use --ray-dp-pack-strategy strict"),
    ("micro-batches", {"ubatch_size": -1}, "--ubatch-size -1", "at least 0"),
    ("many micro-batches", {"ubatch_size": 17}, "--ubatch-size 17: must be at most 16", "a thread and a group"),
    ("decode threshold", {"dbo_decode_token_threshold": -1}, "--dbo-decode-token-threshold -1", "at least 0"),
    ("prefill threshold", {"dbo_prefill_token_threshold": -1}, "--dbo-prefill-token-threshold -1", "at least 0"),
    ("dense", {**EP, **TP2, "shapes": None}, "--enable-expert-parallel True: the model has no experts", "leave it out"),
    ("too many ranks", {**EP, **TP2, **DP8}, "-tp 2 x -dp 8 are 16 ranks, and 8 experts leave some without any",
     "at most 8 ranks"),
    ("too many with replicas", {**EP, **EPLB, **TP2, **DP8, "eplb_config": {"num_redundant_experts": 4}},
     "8 experts and 4 redundant ones", "at most 12 ranks"),
    ("balancing slices", {**EPLB, **TP2}, "--enable-eplb True: moves whole experts", "add --enable-expert-parallel"),
    ("balancing one", {**EP, **EPLB}, "--enable-eplb True: there is one rank", "--tensor-parallel-size"),
    ("balancing and the same bits", {**EP, **EPLB, **TP2, "batch_invariant": True},
     "--enable-eplb True: moves experts to other ranks with their load", "leave one of the two out"),
    ("replicas of nothing", {**EP, **TP2, "eplb_config": '{"num_redundant_experts": 2}'},
     "num_redundant_experts 2: nothing decides which experts", "add --enable-eplb"),
    ("more replicas than room", {**EP, **EPLB, **TP2, "eplb_config": {"num_redundant_experts": 9}},
     "num_redundant_experts 9: with 8 each of 2 ranks has all 8 experts", "give at most 8"),
    ("hiding nothing", {**TP2, "enable_dbo": True}, "--enable-dbo True: there is no exchange of tokens", "leave it"),
    ("hiding nothing, dense", {"ubatch_size": 2, "shapes": None}, "--ubatch-size 2", "the model is dense; leave it"),
    ("JSON", {"eplb_config": "{"}, "--eplb-config '{': can't be read", "window_size"),
    ("no object", {"eplb_config": "[1]"}, "--eplb-config '[1]'", "num_redundant_experts"),
    ("unknown field", {"eplb_config": '{"windows": 3}'}, "unknown field `windows`", "fields: window_size"),
    ("type", {"eplb_config": {"window_size": "long"}}, "Expected `int`, got `str` - at `$.window_size`", "fields"),
    ("window", {"eplb_config": {"window_size": 0}}, "--eplb-config window_size 0", "at least 1"),
    ("interval", {"eplb_config": {"step_interval": 0}}, "--eplb-config step_interval 0", "at least 1"),
    ("replicas", {"eplb_config": {"num_redundant_experts": -1}}, "num_redundant_experts -1", "at least 0"),
    ("logging", {"eplb_config": {"log_balancedness": True, "log_balancedness_interval": 0}},
     "--eplb-config log_balancedness_interval 0", "at least 1"),
    ("policy", {"eplb_config": {"policy": "swap"}}, "--eplb-config policy swap: is unknown", "choose one of default"),
    ("asynchronous", {"eplb_config": {"policy": "swap", "use_async": True}}, "--eplb-config use_async true",
     "the policy is swap; leave policy out"),
    ("pplx on a CPU", {**EP, **DP2, "all2all_backend": "pplx"}, "--all2all-backend pplx: is for CUDA devices",
     "use --all2all-backend allgather_reducescatter"),
    ("pplx missing", {**EP, **DP2, "all2all_backend": "pplx", "device": "cuda"},
     "needs the package pplx_kernels, which isn't installed", "install pplx-kernels, or use"),
    ("pplx on a CPU, with one lane", {**EP, **TP2, "all2all_backend": "pplx"}, "--all2all-backend pplx: is for CUDA",
     "use --all2all-backend allgather_reducescatter"),
    ("pplx missing, with one lane", {**EP, "all2all_backend": "pplx", "device": "cuda"}, "needs the package pplx",
     "install pplx-kernels, or use"),
    ("DeepEP missing", {**EP, **DP2, "all2all_backend": DEEPEP_LL, "device": "cuda", "libraries": ("flashinfer",)},
     "needs the package deep_ep", "install DeepEP"),
    ("FlashInfer missing", {**EP, **DP2, "all2all_backend": "flashinfer_all2allv", "device": "cuda"},
     "needs the package flashinfer,", "install flashinfer-python"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
@pytest.mark.row("P7")
def test_refused(case: tuple[str, dict[str, Any], str, str]) -> None:
    _, given, value, way_out = case
    given = dict(given)
    device = given.pop("device", "cpu")
    with pytest.raises(ConfigError) as e:
        resolved(device=device, **given)
    assert value in str(e.value) and way_out in str(e.value) and "\n" not in str(e.value)


def shaped(**fields: Any) -> ExpertShapes:
    return msgspec.structs.replace(SMALL, **fields)


@pytest.mark.parametrize(
    ("backend", "given", "shapes", "why"),
    [
        ("pplx", DP2, shaped(num_experts=9), "9 on 2 ranks are uneven"),
        ("flashinfer_all2allv", {**DP8, "tensor_parallel_size": 2}, shaped(num_experts=60), "60 on 16 ranks"),
        ("deepep_low_latency", {**DP2, **EPLB, "eplb_config": {"num_redundant_experts": 1}}, SMALL, "9 on 2 ranks"),
        ("deepep_high_throughput", DP2, shaped(dtype="float32"), "--dtype is float32"),
        ("pplx", DP2, shaped(hidden_size=68), "a multiple of 16 bytes, and hidden size 68"),
        ("deepep_low_latency", DP2, shaped(num_experts=64, top_k=10), "at most 9 experts, and the model to 10"),
        ("deepep_low_latency", DP2, shaped(hidden_size=1024), "2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192"),
        ("deepep_high_throughput", {"data_parallel_size": 6}, shaped(num_experts=12), "of 8, and there are 6"),
    ],
)
def test_shapes_a_library_has_no_kernels_for(
    backend: str, given: dict[str, Any], shapes: ExpertShapes, why: str
) -> None:
    """Also where nobody knows yet what the ranks' node has (Ray)."""
    for libraries in (EVERY_LIBRARY, None):
        with pytest.raises(ConfigError, match="--all2all-backend") as e:
            resolved(shapes, "cuda", libraries, **EP, **given, all2all_backend=backend)
        assert why in str(e.value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.row("P9")
def test_each_exchange_is_taken_where_it_can_run(backend: str) -> None:
    config, notes = resolved(SMALL, "cuda", EVERY_LIBRARY, **EP, **DP2, all2all_backend=backend)
    assert config.all2all_backend == backend and not notes
    assert resolved(SMALL, "cpu", None, **EP, **DP2, all2all_backend=backend)[0] == config  # Ray: the ranks will say


def test_what_changes_nothing_is_said() -> None:
    for given, line in (
        ({**EP, **TP2, "all2all_backend": "naive"}, "--all2all-backend naive changes nothing: tokens are exchanged"),
        ({**EP, **TP2, "enable_dbo": True}, "--enable-dbo changes nothing: tokens are exchanged between several"),
        ({**EP, **TP2, "ubatch_size": 3}, "--ubatch-size 3 changes nothing: tokens are exchanged between several"),
        ({"eplb_config": {"window_size": 10}}, "--eplb-config changes nothing without --enable-eplb"),
        ({"expert_placement_strategy": "round_robin"}, "round_robin changes nothing without --enable-expert-parallel"),
    ):
        assert len(resolved(**given)[1]) == 1 and line in resolved(**given)[1][0]


@pytest.mark.row("P8")
def test_round_robin_with_replicas_is_linear() -> None:
    given = {**EP, **EPLB, **TP2, "expert_placement_strategy": "round_robin"}
    assert resolved(**given) == (resolved(**given)[0], []) and resolved(**given)[0].enable_eplb
    assert resolved(**given)[0].expert_placement_strategy == "round_robin"
    config, notes = resolved(**given, eplb_config={"num_redundant_experts": 2})
    assert config.expert_placement_strategy == "linear"
    assert notes == ["--expert-placement-strategy linear is used: 2 redundant experts are asked for, and round robin "
                     "knows none"]  # fmt: skip


@pytest.mark.row("P23")
def test_what_is_derived() -> None:
    both, _ = resolved(**EP, **TP2, **DP2)
    assert both.expert_parallel_size == 4 and both.use_sequence_parallel_moe
    assert resolved(**TP2, **DP2)[0].expert_parallel_size == 1
    for given in (EP | TP2, EP | DP2, TP2 | DP2):
        assert not resolved(**given)[0].use_sequence_parallel_moe
    taken = {b: resolved(SMALL, "cpu", None, **EP, **TP2, **DP2, all2all_backend=b)[0] for b in BACKENDS}
    assert [b for b in BACKENDS if not taken[b].use_sequence_parallel_moe] == ["pplx", "flashinfer_all2allv"]


@pytest.mark.row("P12")
def test_when_a_step_is_split() -> None:
    """Strictly above the threshold of its kind."""
    dbo, _ = resolved(**EP, **DP2, enable_dbo=True, ubatch_size=4)
    assert dbo.num_micro_batches == 2
    assert not dbo.splits(32, prefill=False) and dbo.splits(33, prefill=False)
    assert not dbo.splits(512, prefill=True) and dbo.splits(513, prefill=True)
    four, _ = resolved(**EP, **DP2, ubatch_size=4, dbo_decode_token_threshold=0)
    assert four.num_micro_batches == 4 and four.splits(1, prefill=False) and not four.splits(0, prefill=False)
    for size in (0, 1):
        whole, _ = resolved(**EP, **DP2, ubatch_size=size)
        assert whole.num_micro_batches == 1 and not whole.splits(10**6, prefill=True)


def test_a_balancing_configuration_as_text_or_as_what_it_says() -> None:
    said = {"window_size": 5, "num_redundant_experts": 3, "use_async": True}
    assert eplb_config(said) == eplb_config(msgspec.json.encode(said).decode()) == EPLBConfig(**said)  # type: ignore[arg-type]
    assert eplb_config(None) == EPLBConfig() == eplb_config({})
    assert not eplb_config('{"log_balancedness_interval": 0}').log_balancedness  # nobody logs: it isn't looked at


def test_the_way_of_a_layout_in_force() -> None:
    """Ranks may be lost, and what is left may be more or fewer than a library takes."""
    for name, slots, ranks, used in (
        ("pplx", 8, 4, "pplx"), ("pplx", 8, 3, DEFAULT), (DEEPEP_HT, 96, 4, DEEPEP_HT), (DEEPEP_HT, 96, 3, DEFAULT),
        (DEEPEP_HT, 96, 16, DEEPEP_HT), (DEEPEP_LL, 96, 3, DEEPEP_LL), ("naive", 8, 3, "naive"),
    ):  # fmt: skip
        assert way_of(name, slots, ranks) == used


def test_data_parallel_ranks_that_share_experts_are_lanes_of_one_engine() -> None:
    config = resolved(**EP, **DP2, **TP2)[0]
    assert (config.lanes, config.data_parallel_size, list(config.replicas)) == (2, 1, [0])
    assert config.layout == Layout(tp=2, dp=2) and config.world_size == 4 == config.expert_parallel_size
    assert config.distributed_executor_backend == "mp" and config.use_sequence_parallel_moe
    dense = resolved(shapes=None, **DP2)[0]
    assert (dense.lanes, dense.data_parallel_size, dense.layout) == (1, 2, Layout())
    assert resolved(**DP2)[0].lanes == 1, "experts that are sliced are not shared over engines"


ONE_ENGINE: list[tuple[dict[str, Any], str]] = [
    ({"data_parallel_rank": 0}, "-external-lb True: pods share the model's .* add --data-parallel-address, or"),
    ({"data_parallel_start_rank": 0, "data_parallel_size_local": 1}, "--data-parallel-hybrid-lb True: pods share"),
    ({"distributed_executor_backend": "uni"}, "use mp or ray"),
    ({"nnodes": 3}, r"world size 2 \(-tp 1 x -pp 1 x -dp 2\) can't be split evenly over the nodes; choose -tp, -pp"),
    ({"nnodes": 2, "data_parallel_size_local": 2}, "-local 2: .* dealt evenly to 2 nodes; leave it out, or give 1"),
    ({"nnodes": 2, "data_parallel_size_local": 0}, "-local 0: .* are lanes of one engine"),
    ({**DP_RAY, "placement_group": "a,b,c"}, "--placement-group a,b,c: is 3 groups, and there are 2 lanes"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "named"), ONE_ENGINE, ids=[named for _, named in ONE_ENGINE])
def test_what_is_about_several_engines_is_refused_for_one(given: dict[str, Any], named: str) -> None:
    for how in (EP, {"slices": True}):
        with pytest.raises(ConfigError, match=named):
            resolved(**how, **DP2, **given)


@pytest.mark.parametrize(
    "given", [{"nnodes": 2}, {"nnodes": 2, "data_parallel_size_local": 1},
              {"data_parallel_address": "10.0.0.1", "data_parallel_size_local": 1}],
)  # fmt: skip
def test_lanes_on_several_nodes_are_one_engine_on_all_of_them(given: dict[str, Any]) -> None:
    """Also in vLLM's words, at the head and on the other node."""
    config, _ = resolved(**EP, **DP2, **given)
    assert (config.lanes, config.nnodes, config.engine_nodes, config.over_nodes) == (2, 2, None, True)
    assert (config.node_rank, config.local_world_size, len(config.replicas)) == (0, 1, 1)
    if "data_parallel_address" in given:
        other, _ = resolved(**EP, **DP2, **given, headless=True, data_parallel_start_rank=1)
        assert other == msgspec.structs.replace(config, node_rank=1)


def test_lanes_on_ray_are_one_engine_with_a_place_for_each() -> None:
    config, _ = resolved(**EP, **DP2, **TP2, **DP_RAY, data_parallel_size_local=1)
    assert (config.lanes, config.data_parallel_backend, config.data_parallel_size_local) == (2, "ray", 1)
    assert config.distributed_executor_backend == "ray" and ranks_here(config) == 2
    given, _ = resolved(**EP, **DP2, **DP_RAY, placement_group="a,b")
    assert given.placement_groups == ("a", "b")
    assert resolved(**EP, **DP2, distributed_executor_backend="ray", placement_group="a")[0].lanes == 2


def test_lanes_of_processes_that_an_outer_launcher_starts() -> None:
    """torchrun starts the ranks of one engine, which lanes are; environment variables of other processes don't."""
    outer = OuterLauncher(rank=1, world_size=2)
    options = EngineOptions(model="m", **EP, **DP2, distributed_executor_backend="external_launcher")
    assert resolve_parallel(options, Machine(cores=2, outer=outer), "cpu")[0].layout == Layout(dp=2)
    own = SpmdDataParallel(size=2, rank=1, rank_local=1)
    alone = Machine(cores=2, data_parallel=own)
    tp2, ray = {"tensor_parallel_size": 2}, {"distributed_executor_backend": "ray"}
    for given, why in (
        ({**EP, **tp2}, "2 ranks was asked for.*-dp 2"), ({**EP, **ray}, "backend ray was"), ({}, "of a dense"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"\$PLANARIA_DP_SIZE 2: .*{why}"):
            resolve_parallel(EngineOptions(model="m", **given), alone, "cpu")


@pytest.mark.row("P22")
def test_lanes_that_are_programs_with_prompts_of_their_own() -> None:
    own = SpmdDataParallel(size=2, rank=1, rank_local=0, master_ip="10.0.0.1", master_port=4321)
    config = resolve_parallel(EngineOptions(model="m", **EP), Machine(cores=2, data_parallel=own), "cpu")[0]
    assert (config.layout, config.distributed_executor_backend) == (Layout(dp=2), "external_launcher")
    outer = OuterLauncher(rank=1, world_size=2, master_addr="10.0.0.1", master_port=4321, own_prompts=True)
    assert config.outer == outer
    said = resolve_parallel(EngineOptions(model="m", **EP, **DP2), Machine(cores=2, data_parallel=own), "cpu")[0]
    assert said.outer is None and said.lanes == 2, "the option is asked first"
