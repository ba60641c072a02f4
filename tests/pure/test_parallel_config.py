"""Parallel options: what is chosen, and every refusal with its value and its way out. No process is started."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec
import pytest
import typer

from planaria.checkpoint import Checkpoint
from planaria.cli.app import app
from planaria.config.data_parallel import as_api_process, engine_config
from planaria.config.digest import NOT_HASHED, compared, compute_hash, hash_fields
from planaria.config.engine_nodes import EngineNodes
from planaria.config.machine import LauncherFacts, Machine, check_module, launcher_facts
from planaria.config.options import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EngineOptions,
    FaultConfig,
    ParallelConfig,
    SchedulerConfig,
)
from planaria.config.parallel import (
    ranks_here,
    refuse_outer_launcher,
    refuse_several_engines,
    resolve_parallel,
    steps_in_flight,
)
from planaria.config.resolve import check_torch
from planaria.env import SpmdDataParallel, outer_launcher, spmd_data_parallel
from planaria.errors import ConfigError
from planaria.models.deal import deal
from planaria.topology.outer import OuterLauncher
from tests.pure.test_deal import model

MODEL = model(heads=6, kv_heads=2, head_dim=16, hidden=96, mlp=256, vocab=512, layers=4)
LAPTOP = Machine(cores=2, ray_installed=True)
BOX = Machine(cores=64, accelerators=4, ray_installed=True)
RANK_1 = OuterLauncher(rank=1, world_size=2, local_rank=1, local_world_size=2)


def replica(size: int, rank: int = 0, rank_local: int = 0) -> Machine:
    said = SpmdDataParallel(size=size, rank=rank, rank_local=rank_local)
    return msgspec.structs.replace(LAPTOP, data_parallel=said)


def resolved(machine: Machine = LAPTOP, device: str = "cpu", **options: Any) -> ParallelConfig:
    return resolve_parallel(EngineOptions(model="m", **options), machine, device)[0]


def notes(machine: Machine, **options: Any) -> list[tuple[int, str]]:
    return resolve_parallel(EngineOptions(model="m", **options), machine, "cpu")[1]


TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
RAY, MP, EXTERNAL = ({"distributed_executor_backend": name} for name in ("ray", "mp", "external_launcher"))
EP2 = {"data_parallel_size": 2, "enable_expert_parallel": True}
PODS = {"enable_expert_parallel": True, "data_parallel_address": "10.0.0.2"}
DP4, DP_RAY = {"data_parallel_size": 4}, {"data_parallel_backend": "ray"}


@pytest.mark.parametrize(
    ("machine", "device", "options", "backend"),
    [
        (LAPTOP, "cpu", {}, "uni"),
        (LAPTOP, "cpu", TP2, "mp"),
        (LAPTOP, "cpu", {"pipeline_parallel_size": 2}, "mp"),
        (LAPTOP, "cpu", {"tensor_parallel_size": 3}, "mp"),  # ranks may outnumber cores
        (BOX, "cuda", TP4, "mp"),
        (BOX, "cuda", {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "nnodes": 2}, "mp"),
        (LAPTOP, "cpu", {**TP2, "placement_group": "mine"}, "ray"),
        (msgspec.structs.replace(LAPTOP, in_placement_group=True), "cpu", {}, "ray"),
        (msgspec.structs.replace(LAPTOP, in_placement_group=True), "cpu", {**TP2, "nnodes": 2}, "mp"),  # the first rule
        (BOX, "cuda", {"tensor_parallel_size": 8, **RAY}, "ray"),
        (LAPTOP, "cpu", MP, "mp"),  # one rank, as asked
    ],
)
@pytest.mark.row("P16")
def test_the_back_end_is_chosen(machine: Machine, device: str, options: dict[str, Any], backend: str) -> None:
    assert resolved(machine, device, **options).distributed_executor_backend == backend


REFUSED: list[tuple[str, Machine, str, dict[str, Any], str, str]] = [
    # what, machine, device, options, the value as it is named, the way out
    ("no tensor ranks", LAPTOP, "cpu", {"tensor_parallel_size": 0}, "--tensor-parallel-size 0", "at least 1"),
    ("no stages", LAPTOP, "cpu", {"pipeline_parallel_size": -1}, "--pipeline-parallel-size -1", "at least 1"),
    ("no loaders", LAPTOP, "cpu", {"max_parallel_loading_workers": 0}, "--max-parallel-loading-workers 0", "at least"),
    ("context ranks", LAPTOP, "cpu", {"tensor_parallel_size": 3, "decode_context_parallel_size": 2},
     "context-parallel-size 2: context parallel", "--tensor-parallel-size 3; use a divisor of 3"),
    ("tokens in turn", LAPTOP, "cpu", {**TP2, "cp_kv_cache_interleave_size": 3}, "interleave-size 3",
     "a divisor of --block-size"),
    ("more in turn than a block", LAPTOP, "cpu", {**TP2, "cp_kv_cache_interleave_size": 32}, "interleave-size 32",
     "must divide the 16 of a block (context parallel)"),
    ("two numbers in turn", LAPTOP, "cpu", {"cp_kv_cache_interleave_size": 2, "dcp_kv_cache_interleave_size": 4},
     "--dcp-kv-cache-interleave-size 4", "leave the old one out"),
    ("one rank for shares", LAPTOP, "cpu",
     {"prefill_context_parallel_size": 2, "distributed_executor_backend": "uni"}, "-pcp 2 are 2", "use mp or ray"),
    ("no nodes", LAPTOP, "cpu", {"nnodes": 0}, "--nnodes 0", "at least 1"),
    ("node rank too high", LAPTOP, "cpu", {**TP2, "nnodes": 2, "node_rank": 2}, "--node-rank 2", "count nodes from 0"),
    ("node rank below 0", LAPTOP, "cpu", {"node_rank": -1}, "--node-rank -1", "count nodes from 0"),
    ("port", LAPTOP, "cpu", {"master_port": 0}, "--master-port 0", "1 to 65535"),
    ("address", LAPTOP, "cpu", {"master_addr": ""}, "--master-addr ''", "--node-rank 0"),
    ("heartbeat", LAPTOP, "cpu", {"heartbeat_timeout": 0.5}, "--heartbeat-timeout 0.5", "at least 2 seconds"),
    ("a tiny chunk", LAPTOP, "cpu", {"link_chunk_bytes": 10}, "--link-chunk-bytes 10", "4096 to 16777216"),
    ("heartbeat is nan", LAPTOP, "cpu", {"heartbeat_timeout": float("nan")}, "--heartbeat-timeout nan", "at least 2"),
    ("uneven nodes", LAPTOP, "cpu", {"tensor_parallel_size": 3, "nnodes": 2}, "--nnodes 2", "a multiple of 2"),
    ("nodes on Ray", LAPTOP, "cpu", {**TP2, **RAY, "nnodes": 2}, "--nnodes 2", "Ray knows its nodes"),
    ("unknown word", LAPTOP, "cpu", {"distributed_executor_backend": "mpi"}, "mpi: is unknown",
     "uni, mp, ray, external_launcher, or package.module.LauncherClass"),
    ("two ranks in one", LAPTOP, "cpu", {**TP2, "distributed_executor_backend": "uni"}, "uni: runs one rank", "use mp"),
    ("too few accelerators", BOX, "cuda", {"tensor_parallel_size": 8}, "need 8 accelerators on this node, and it has 4",
     "ray to place ranks over a cluster, or --distributed-executor-backend mp with --nnodes"),
    ("too few, mp asked", BOX, "cuda", {"tensor_parallel_size": 8, **MP}, "and it has 4", "--nnodes"),
    ("too few on each node", BOX, "cuda", {"tensor_parallel_size": 16, "nnodes": 2}, "need 8 accelerators", "--nnodes"),
    ("ray missing", Machine(), "cpu", RAY, "ray: needs the package ray", "pip install 'planaria[ray]'"),
    ("nsight off Ray", LAPTOP, "cpu", {"ray_workers_use_nsight": True}, "the executor is uni", "backend ray"),
    ("graph off Ray", LAPTOP, "cpu", {**TP2, "ray_link": "compiled-graph"}, "the executor is mp", "backend ray"),
    ("environment off Ray", LAPTOP, "cpu", {"ray_runtime_env": "{}"}, "--ray-runtime-env {}", "backend ray"),
    ("group off Ray", LAPTOP, "cpu", {**MP, "placement_group": "mine"}, "--placement-group mine", "backend ray"),
    ("too few groups", LAPTOP, "cpu", {**DP4, **DP_RAY, "placement_group": "a,b"}, "is 2 groups, and there are 4",
     "give 4, separated by commas"),
    ("too few local ranks", LAPTOP, "cpu",
     {**DP4, **DP_RAY, "placement_group": "a,b,c,d", "placement_group_local_ranks": "0,1"},
     "is 2 local ranks, and there are 4 placement groups", "give one for each"),
    ("local ranks alone", LAPTOP, "cpu", {**RAY, "placement_group_local_ranks": "0"}, "there are 0 placement groups",
     "give one for each"),
    ("bad local ranks", LAPTOP, "cpu", {**RAY, "placement_group_local_ranks": "0;1"}, "is not a list of numbers",
     "0,1,0"),
    ("a group twice", LAPTOP, "cpu", {**DP4, **DP_RAY, "placement_group": "a,b,a,c"}, "names a twice", "of its own"),
    ("a nameless group", LAPTOP, "cpu", {**DP4, **DP_RAY, "placement_group": "a,,b,c"}, "an empty name", "commas"),
    ("groups for processes", LAPTOP, "cpu", {**DP4, **RAY, "placement_group": "a,b,c,d"}, "processes of this node",
     "add --data-parallel-backend ray"),
    ("environment", LAPTOP, "cpu", {**RAY, "ray_runtime_env": "[1]"}, "--ray-runtime-env '[1]'", "env_vars"),
    ("ray link", LAPTOP, "cpu", {**RAY, "ray_link": "dag"}, "--ray-link dag", "queue, compiled-graph"),
    ("partition", LAPTOP, "cpu", {"pp_layer_partition": "10;20"}, "--pp-layer-partition '10;20'", "10,20"),
    ("worker", LAPTOP, "cpu", {"worker_cls": "Mine"}, "--worker-cls 'Mine'", "package.module.Class"),
    ("extension", LAPTOP, "cpu", {"worker_extension_cls": "a b.C"}, "--worker-extension-cls", "package.module.Class"),
    ("no RANK", LAPTOP, "cpu", {**TP2, **EXTERNAL}, "RANK is not set", "torchrun --nproc-per-node 2 -m planaria"),
    ("WORLD_SIZE", msgspec.structs.replace(LAPTOP, outer=RANK_1), "cpu", EXTERNAL,
     "WORLD_SIZE is 2, and -tp 1 -pp 1 are 1 ranks", "--nproc-per-node 1"),
    ("RANK too high", msgspec.structs.replace(LAPTOP, outer=OuterLauncher(rank=2, world_size=2)), "cpu",
     {**TP2, **EXTERNAL}, "RANK is 2 of 2", "torchrun"),
    ("no engines", LAPTOP, "cpu", {"data_parallel_size": 0}, "--data-parallel-size 0", "at least 1"),
    ("no servers", LAPTOP, "cpu", {"api_server_count": 0}, "--api-server-count 0", "at least 1"),
    ("local above all", LAPTOP, "cpu", {**DP4, "data_parallel_size_local": 5}, "size-local 5", "0 to --data-parallel"),
    ("engine's rank", LAPTOP, "cpu", {**DP4, "data_parallel_rank": 4}, "--data-parallel-rank 4", "0 to 3"),
    ("engine's rank below 0", LAPTOP, "cpu", {**DP4, "data_parallel_rank": -1}, "--data-parallel-rank -1", "0 to 3"),
    ("first engine", LAPTOP, "cpu", {**DP4, "data_parallel_start_rank": 4}, "--data-parallel-start-rank 4", "0 to 3"),
    ("engines' port", LAPTOP, "cpu", {"data_parallel_rpc_port": 0}, "--data-parallel-rpc-port 0", "1 to 65535"),
    ("engines' address", LAPTOP, "cpu", {"data_parallel_address": ""}, "--data-parallel-address ''", "first engine"),
    ("engines' backend", LAPTOP, "cpu", {"data_parallel_backend": "k8s"}, "--data-parallel-backend k8s", "mp, ray"),
    ("engines on Ray, ranks not", LAPTOP, "cpu", {**DP4, **DP_RAY, **MP}, "the executor is mp", "leave --distributed"),
    ("engines over nodes on Ray", LAPTOP, "cpu", {**DP4, **DP_RAY, "nnodes": 2}, "--nnodes 2", "Ray knows its nodes"),
    ("a server on each node", LAPTOP, "cpu", {**DP4, "nnodes": 2, "data_parallel_rank": 1}, "--nnodes 2", "leave --nn"),
    ("engines and nodes uneven", LAPTOP, "cpu", {**DP4, "nnodes": 3}, "--nnodes 3: 4 engines", "multiple of the other"),
    ("engines of a node uneven", LAPTOP, "cpu", {**DP4, "nnodes": 2, "data_parallel_size_local": 3}, "size-local 3",
     "a divisor"),
    ("groups of nodes uneven", LAPTOP, "cpu", {**DP4, "nnodes": 3, "data_parallel_size_local": 2},
     "--nnodes 3: 4 engines, 2 on a node, make 2 groups", "a multiple of 2"),
    ("ranks of an engine uneven", LAPTOP, "cpu", {**DP4, **TP2, "nnodes": 12}, "the 3 nodes of an engine",
     "a multiple of 3"),
    ("nobody has engines", LAPTOP, "cpu", {**DP4, "data_parallel_size_local": 0}, "nobody would start 4 of 4", "--nn"),
    ("address of one node", LAPTOP, "cpu", {**DP4, "data_parallel_address": "10.0.0.2"}, "--data-parallel-address 10.0",
     "or give --data-parallel-size-local"),
    ("port of one node", LAPTOP, "cpu", {**DP4, "data_parallel_rpc_port": 99}, "-rpc-port 99", "leave it out"),
    ("address of one engine", LAPTOP, "cpu", {"data_parallel_address": "10.0.0.2"}, "there is one engine", "leave it"),
    ("address behind a balancer", LAPTOP, "cpu", {**DP4, "data_parallel_rank": 1, "data_parallel_address": "10.0.0.2"},
     "don't meet", "leave it out"),
    ("port on Ray", LAPTOP, "cpu", {**DP4, **DP_RAY, "data_parallel_rpc_port": 99}, "where they come up", "leave it"),
    ("two meeting places", LAPTOP, "cpu", {**DP4, "nnodes": 2, "data_parallel_address": "10.0.0.2",
     "master_addr": "10.0.0.1"}, "--master-addr 10.0.0.1", "one of them"),
    ("headless alone", LAPTOP, "cpu", {"headless": True}, "--headless True: is for a node", "--data-parallel-address"),
    ("headless, how many", LAPTOP, "cpu", {**DP4, "headless": True}, "how many engines", "--data-parallel-size-local"),
    ("headless, none", LAPTOP, "cpu", {**DP4, "headless": True, "data_parallel_size_local": 0}, "how many", "local"),
    ("headless, where", LAPTOP, "cpu", {**DP4, "headless": True, "data_parallel_size_local": 2}, "where the server is",
     "add --data-parallel-address"),
    ("headless, which", LAPTOP, "cpu", {**DP4, "headless": True, "data_parallel_size_local": 2,
     "data_parallel_address": "10.0.0.2"}, "which engines", "add --data-parallel-start-rank"),
    ("headless, between", LAPTOP, "cpu", {**DP4, "headless": True, "data_parallel_size_local": 2,
     "data_parallel_start_rank": 1, "data_parallel_address": "10.0.0.2"}, "-start-rank 1", "multiple of 2"),
    ("engines of torchrun", msgspec.structs.replace(LAPTOP, outer=RANK_1), "cpu", {**DP4, **EXTERNAL},
     "RANK is 1 and WORLD_SIZE 2, and -dp 4 engines of 1 ranks are 4", "torchrun --nproc-per-node 4"),
    ("both balancings", LAPTOP, "cpu", {**DP4, "data_parallel_rank": 1, "data_parallel_hybrid_lb": True},
     "--data-parallel-hybrid-lb", "one kind"),
    ("external, one engine", LAPTOP, "cpu", {"data_parallel_rank": 0}, "--data-parallel-external-lb", "leave it out"),
    ("hybrid, one engine", LAPTOP, "cpu", {"data_parallel_hybrid_lb": True}, "there is one engine", "leave it out"),
    ("external, which", LAPTOP, "cpu", {**DP4, "data_parallel_external_lb": True}, "isn't said", "rank 0 to 3"),
    ("external on Ray", LAPTOP, "cpu", {**DP4, **DP_RAY, "data_parallel_rank": 1}, "Ray places them", "backend mp"),
    ("external, several", LAPTOP, "cpu", {**DP4, "data_parallel_rank": 1, "data_parallel_size_local": 2},
     "size-local 2", "leave it out"),
    ("pods, where", LAPTOP, "cpu", {**DP4, "enable_expert_parallel": True, "data_parallel_rank": 1},
     "--data-parallel-external-lb True: pods share the model's", "add --data-parallel-address"),
    ("pods, between", LAPTOP, "cpu", {**DP4, **PODS, "data_parallel_start_rank": 1, "data_parallel_size_local": 2},
     "-start-rank 1", "multiple of 2"),
    ("pods, uneven", LAPTOP, "cpu", {**DP4, **PODS, "data_parallel_start_rank": 0, "data_parallel_size_local": 3},
     "-size-local 3", "divisor"),
    ("pods on Ray", LAPTOP, "cpu", {**DP4, **DP_RAY, **PODS, "data_parallel_rank": 1}, "Ray places them", "backend mp"),
    ("pods and nodes", LAPTOP, "cpu", {**DP4, **PODS, "data_parallel_rank": 1, "nnodes": 2}, "--nnodes 2", "leave"),
    ("hybrid, too many", LAPTOP, "cpu", {**DP4, "data_parallel_start_rank": 2, "data_parallel_size_local": 3},
     "size-local 3", "give 1 to 2"),
    ("hybrid, none", LAPTOP, "cpu", {**DP4, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 0},
     "size-local 0", "give 1 to 4"),
    ("nobody's engines", LAPTOP, "cpu", {**DP4, "data_parallel_size_local": 1}, "start 3 of 4", "backend ray"),
    ("strategy", LAPTOP, "cpu", {**DP4, **DP_RAY, "ray_dp_pack_strategy": "loose"}, "loose", "strict, fill, span"),
    ("strategy off Ray", LAPTOP, "cpu", {**DP4, "ray_dp_pack_strategy": "fill"}, "fill", "--data-parallel-backend ray"),
    ("span with a local size", LAPTOP, "cpu",
     {**DP4, **DP_RAY, "ray_dp_pack_strategy": "span", "data_parallel_size_local": 2}, "size-local 2", "leave it out"),
    ("strict with none", LAPTOP, "cpu", {**DP4, **DP_RAY, "data_parallel_size_local": 0}, "size-local 0", "fill"),
    ("too few for engines", BOX, "cuda", {**DP4, **TP2}, "with 4 engines need 8 accelerators", "ray"),
    ("synchronisation of one", LAPTOP, "cpu", {"disable_nccl_for_dp_synchronization": True}, "one engine", "leave it"),
    ("synchronisation of several", LAPTOP, "cpu", {**DP4, "disable_nccl_for_dp_synchronization": False}, "never meet",
     "leave it"),
    ("replica's rank", replica(2, rank=2), "cpu", {}, "$PLANARIA_DP_RANK 2", "count from 0"),
    ("replica's local rank", replica(2, rank_local=2), "cpu", {}, "$PLANARIA_DP_RANK_LOCAL 2", "count from 0"),
    ("dense replicas", replica(2), "cpu", {}, "$PLANARIA_DP_SIZE 2: replicas of a dense model", "unset it"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
@pytest.mark.row("P13")
def test_refused(case: tuple[str, Machine, str, dict[str, Any], str, str]) -> None:
    _, machine, device, options, value, way_out = case
    with pytest.raises(ConfigError) as e:
        resolved(machine, device, **options)
    assert value in str(e.value) and way_out in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("tp", "pp", "partition", "value"),
    [
        (1, 5, None, "--pipeline-parallel-size 5"),
        (1, 2, (3, 2), "--pp-layer-partition 3,2"),
        (1, 2, (4,), "--pp-layer-partition 4"),
        (1, 2, (4, 0), "--pp-layer-partition 4,0"),
        (99, 1, None, "--tensor-parallel-size 99"),
    ],
)
@pytest.mark.row("P1")
def test_a_layout_that_cannot_be_dealt_is_refused(
    tp: int, pp: int, partition: tuple[int, ...] | None, value: str
) -> None:
    """`resolve` calls `deal` for this."""
    with pytest.raises(ConfigError, match=value):
        deal(MODEL, tp, pp, partition)


@pytest.mark.row("P2", "P4", "P5")
def test_engines_of_a_server() -> None:
    """Local unset is all of them, or 1; a rank or a start rank says who balances."""
    assert (resolved().data_parallel_size_local, list(resolved().replicas)) == (1, [0])
    all_here = resolved(**DP4, **TP2)
    assert (all_here.data_parallel_size_local, list(all_here.replicas)) == (4, [0, 1, 2, 3])
    assert (all_here.world_size, all_here.world_size_across_dp, ranks_here(all_here)) == (2, 8, 8)
    external = resolved(**DP4, data_parallel_rank=2)
    assert external.data_parallel_external_lb and not external.data_parallel_hybrid_lb
    assert (external.data_parallel_size_local, list(external.replicas)) == (1, [2])
    hybrid = resolved(**DP4, data_parallel_start_rank=1, data_parallel_size_local=2)
    assert hybrid.data_parallel_hybrid_lb and list(hybrid.replicas) == [1, 2]
    on_ray = resolved(**DP4, **DP_RAY)
    assert (on_ray.distributed_executor_backend, on_ray.ray_dp_pack_strategy) == ("ray", "strict")
    assert on_ray.data_parallel_size_local is None and list(on_ray.replicas) == [0, 1, 2, 3]
    assert resolved(**DP4, **DP_RAY, ray_dp_pack_strategy="span").data_parallel_size_local == 1
    assert resolved(**DP4, **DP_RAY, ray_dp_pack_strategy="fill", data_parallel_size_local=0).replicas == range(4)
    assert ranks_here(resolved(**DP4, **DP_RAY, ray_dp_pack_strategy="fill", data_parallel_size_local=0)) == 1


def test_engines_over_nodes() -> None:
    """Nodes of an engine: nnodes // (DP // DP_local)."""

    def at(node: int = 0, **options: Any) -> ParallelConfig:
        return resolved(node_rank=node, **options)

    one_each = at(**DP4, nnodes=2)
    assert one_each.engine_nodes == EngineNodes(0, 2, 2, 1) and one_each.data_parallel_size_local == 2
    assert (one_each.distributed_executor_backend, one_each.over_nodes) == ("uni", True)
    assert (one_each.local_world_size, ranks_here(one_each), list(one_each.replicas)) == (1, 2, [0, 1, 2, 3])
    spread = at(**DP4, **TP4, nnodes=4, data_parallel_size_local=2)
    assert spread.engine_nodes == EngineNodes(0, 4, 2, 2) and spread.distributed_executor_backend == "mp"
    assert (spread.local_world_size, ranks_here(spread)) == (2, 4)
    assert [list(spread.engine_nodes.of(engine)) for engine in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [spread.engine_nodes.seat(engine) for engine in range(4)] == [0, 1, 0, 1]
    own = engine_config(msgspec.structs.replace(CONFIG, parallel=spread), 3, 4)
    assert (own.parallel.nnodes, own.parallel.node_rank, own.parallel.master_port) == (2, 0, 0), "any port"
    assert (own.parallel.data_parallel_index, own.device.sharers, own.parallel.over_nodes) == (3, 2, True)
    assert engine_config(msgspec.structs.replace(CONFIG, parallel=spread), 2, 3).device.sharers == 1
    alone = engine_config(msgspec.structs.replace(CONFIG, parallel=one_each), 1, 4, accelerators=[5, 6])
    assert (alone.parallel.nnodes, alone.parallel.over_nodes, alone.device.devices) == (1, False, (6,))


@pytest.mark.row("P21")
def test_processes_of_a_server() -> None:
    """Each knows which one it is; an engine's is none of them."""
    config = msgspec.structs.replace(CONFIG, parallel=resolved(**DP4, api_server_count=2))
    assert [as_api_process(config.parallel, rank).api_process_rank for rank in (0, 1)] == [0, 1]
    assert engine_config(config, 3, 4).parallel.api_process_rank == -1 and config.parallel.api_process_rank == 0
    for rank in (-2, 2):
        with pytest.raises(ConfigError, match=rf"api_process_rank {rank}: must be -1 .* to 1 with --api-server"):
            as_api_process(config.parallel, rank)


@pytest.mark.row("P2")
def test_a_node_with_the_server_only() -> None:
    """The same command everywhere, or the number that the other nodes have."""
    front, other = (resolved(**DP4, nnodes=3, node_rank=rank, data_parallel_size_local=0) for rank in (0, 1))
    assert front.engine_nodes == other.engine_nodes == EngineNodes(1, 3, 2, 1)
    assert (front.data_parallel_size_local, other.data_parallel_size_local) == (0, 2)
    named = resolved(**DP4, nnodes=3, node_rank=1, data_parallel_size_local=2)
    assert named == other
    assert resolved(**DP4, **TP2, nnodes=9, data_parallel_size_local=0).engine_nodes == EngineNodes(1, 9, 1, 2)


@pytest.mark.row("P3")
def test_engines_over_nodes_in_other_words() -> None:
    """As vLLM's users say it: an address and a port for where nodes meet, nodes without a server headless."""
    met = {"data_parallel_address": "10.0.0.2", "data_parallel_rpc_port": 4321}
    ours = {"nnodes": 2, "master_addr": "10.0.0.2", "master_port": 4321}
    two = {**DP4, "data_parallel_size_local": 2}
    assert resolved(**two, **met) == resolved(**two, **ours)
    assert resolved(**two, **met, headless=True, data_parallel_start_rank=2) == resolved(**two, **ours, node_rank=1)
    none, all = {**DP4, "data_parallel_size_local": 0}, {**DP4, "data_parallel_size_local": 4}
    assert resolved(**none, **met) == resolved(**none, **ours)
    assert resolved(**all, **met, headless=True, data_parallel_start_rank=0) == resolved(**none, **ours, node_rank=1)
    ours["nnodes"] = 3
    assert resolved(**none, **met, nnodes=3) == resolved(**none, **ours)
    headless = resolved(**two, **met, nnodes=3, headless=True, data_parallel_start_rank=2)
    assert headless == resolved(**none, **ours, node_rank=2)
    assert resolved(**two, data_parallel_address="10.0.0.2").master_port == 29550
    assert resolved(**DP4, **DP_RAY, data_parallel_address="10.0.0.2").data_parallel_address == "10.0.0.2"


@pytest.mark.row("P5")
def test_pods_of_one_engine() -> None:
    """Experts spread over data-parallel ranks, a command for each rank or for each node's: nodes of one engine."""
    met = {"enable_expert_parallel": True, "data_parallel_address": "10.0.0.2"}
    ours = {"enable_expert_parallel": True, "master_addr": "10.0.0.2", "master_port": 29550}
    for rank in range(4):
        external = resolved(**DP4, **met, data_parallel_rank=rank)
        assert external == resolved(**DP4, **ours, nnodes=4, node_rank=rank)
    assert (external.lanes, external.over_nodes, external.local_world_size) == (4, True, 1)
    two = {**DP4, "data_parallel_size_local": 2}
    hybrid = resolved(**two, **met, data_parallel_start_rank=2, data_parallel_rpc_port=4321)
    assert hybrid == resolved(**two, **{**ours, "master_port": 4321}, nnodes=2, node_rank=1)
    assert resolved(**DP4, **met, data_parallel_hybrid_lb=True) == resolved(**DP4, **ours), "all of them here"


@pytest.mark.row("P11")
def test_the_choice_of_the_all_reduce_is_not_batch_invariance_s() -> None:
    """Shared memory adds in rank order: the plain collective would cost time and change no bit."""
    for invariant in (False, True):
        config = resolved(**MP, **TP2, batch_invariant=invariant)
        assert not config.disable_custom_all_reduce


@pytest.mark.row("P22")
def test_the_environments_replicas_are_read_only_without_the_option() -> None:
    assert resolved(replica(2), **DP4).data_parallel_size == 4


NATIVE = DeviceConfig(device="cpu", dtype="float32", quantization="none", threads=1)
PLAIN = msgspec.structs.replace(NATIVE, kernels="torch")
NO_REDUCE = {"disable_custom_all_reduce": True}


@pytest.mark.parametrize(
    ("device", "options", "option"),
    [
        (PLAIN, {}, "--kernels"),
        (NATIVE, {**TP2, **NO_REDUCE}, "--disable-custom-all-reduce"),
        (NATIVE, {**TP2, "nnodes": 2}, "--nnodes"),
        (NATIVE, NO_REDUCE, ""),
        (NATIVE, TP2, ""),
        (NATIVE, DP4, ""),
        (PLAIN, RAY, ""),  # workers may have what isn't here
    ],
)
def test_what_needs_torch_says_so(device: DeviceConfig, options: dict[str, Any], option: str) -> None:
    here, without = (msgspec.structs.replace(LAPTOP, torch_installed=there) for there in (True, False))
    check_torch(device, resolved(here, **options), here)
    with pytest.raises(ConfigError) if option else contextlib.nullcontext() as refusal:
        check_torch(device, resolved(without, **options), without)
    if refusal is not None:
        assert option in str(refusal.value) and 'pip install "planaria[torch]"' in str(refusal.value)


@pytest.mark.row("P18")
def test_ranks_and_nodes() -> None:
    config = resolved(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=3)
    assert (config.world_size, config.local_world_size, ranks_here(config)) == (6, 2, 2)
    assert not config.disable_custom_all_reduce  # each tensor group is on one node
    assert resolved(tensor_parallel_size=2, nnodes=2).disable_custom_all_reduce  # and this one isn't
    assert not resolved(BOX, "cuda", **TP4).disable_custom_all_reduce  # each group finds out
    assert resolved(disable_custom_all_reduce=True).disable_custom_all_reduce
    outer = resolved(msgspec.structs.replace(LAPTOP, outer=RANK_1), **TP2, **EXTERNAL)
    assert outer.outer == RANK_1 and ranks_here(outer) == 2


def test_the_partition_and_the_environment_as_text() -> None:
    config = resolved(**RAY, pipeline_parallel_size=2, pp_layer_partition="10, 20", ray_runtime_env='{"env_vars": {}}')
    assert config.pp_layer_partition == (10, 20) and config.ray_runtime_env == {"env_vars": {}}


def test_more_ranks_than_cores_is_said() -> None:
    ((level, line),) = notes(LAPTOP, tensor_parallel_size=3)
    assert level == logging.WARNING and "3 ranks share 2 cores" in line
    assert not notes(LAPTOP, **TP2)
    ((level, line),) = notes(LAPTOP, dcp_kv_cache_interleave_size=4, **TP2)
    assert level == logging.WARNING and "old name of --cp-kv-cache-interleave-size" in line
    ((level, line),) = notes(LAPTOP, nnodes=2, **TP2)
    assert level == logging.DEBUG and "plain collective" in line


FLAGS: dict[str, tuple[list[str], Any]] = {
    # as users of vLLM type them
    "tensor_parallel_size": (["-tp", "2"], 2),
    "pipeline_parallel_size": (["-pp", "3"], 3),
    "decode_context_parallel_size": (["-dcp", "2"], 2),
    "prefill_context_parallel_size": (["-pcp", "2"], 2),
    "cp_kv_cache_interleave_size": (["--cp-kv-cache-interleave-size", "4"], 4),
    "dcp_kv_cache_interleave_size": (["--dcp-kv-cache-interleave-size", "4"], 4),
    "pp_layer_partition": (["--pp-layer-partition", "10,10,10"], "10,10,10"),
    "distributed_executor_backend": (["--distributed-executor-backend", "ray"], "ray"),
    "data_parallel_size": (["-dp", "4"], 4),
    "data_parallel_size_local": (["--data-parallel-size-local", "2"], 2),
    "data_parallel_rank": (["--data-parallel-rank", "1"], 1),
    "data_parallel_start_rank": (["--data-parallel-start-rank", "2"], 2),
    "data_parallel_backend": (["--data-parallel-backend", "ray"], "ray"),
    "data_parallel_external_lb": (["--data-parallel-external-lb"], True),
    "data_parallel_hybrid_lb": (["--data-parallel-hybrid-lb"], True),
    "data_parallel_address": (["--data-parallel-address", "10.0.0.2"], "10.0.0.2"),
    "data_parallel_rpc_port": (["--data-parallel-rpc-port", "4321"], 4321),
    "headless": (["--headless"], True),
    "disable_nccl_for_dp_synchronization": (["--disable-nccl-for-dp-synchronization"], True),
    "link_chunk_bytes": (["--link-chunk-bytes", "8192"], 8192),
    "ray_dp_pack_strategy": (["--ray-dp-pack-strategy", "fill"], "fill"),
    "api_server_count": (["--api-server-count", "2"], 2),
    "ray_link": (["--ray-link", "compiled-graph"], "compiled-graph"),
    "ray_runtime_env": (["--ray-runtime-env", "{}"], "{}"),
    "ray_workers_use_nsight": (["--ray-workers-use-nsight"], True),
    "placement_group": (["--placement-group", "mine"], "mine"),
    "placement_group_local_ranks": (["--placement-group-local-ranks", "1,0"], "1,0"),
    "nnodes": (["--nnodes", "3"], 3),
    "node_rank": (["--node-rank", "1"], 1),
    "master_addr": (["--master-addr", "10.0.0.1"], "10.0.0.1"),
    "master_port": (["--master-port", "1234"], 1234),
    "max_parallel_loading_workers": (["--max-parallel-loading-workers", "1"], 1),
    "disable_custom_all_reduce": (["--disable-custom-all-reduce"], True),
    "worker_cls": (["--worker-cls", "a.B"], "a.B"),
    "worker_extension_cls": (["--worker-extension-cls", "a.C"], "a.C"),
    "heartbeat_timeout": (["--heartbeat-timeout", "5"], 5.0),
}


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_every_option_has_its_flag(command: str) -> None:
    commands: Any = typer.main.get_command(app)
    typed = [word for words, _ in FLAGS.values() for word in words]
    given = commands.commands[command].make_context(command, ["model", *typed]).params
    plain = commands.commands[command].make_context(command, ["model"]).params
    defaults = EngineOptions(model="model")
    for name, (_, value) in FLAGS.items():
        assert given[name] == value != getattr(defaults, name) == plain[name], name


@pytest.mark.parametrize(
    ("options", "ahead", "device", "steps"),
    [
        ({}, None, "cpu", 1),
        ({}, True, "cpu", 2),
        ({}, None, "cuda", 2),
        (MP, None, "cpu", 2),
        (MP, False, "cpu", 1),
        (RAY, None, "cpu", 2),
        ({"pipeline_parallel_size": 2}, False, "cpu", 2),
        ({"pipeline_parallel_size": 3}, None, "cpu", 3),
        ({"pipeline_parallel_size": 3}, True, "cuda", 3),
    ],
)
@pytest.mark.row("P27", "X8")
def test_steps_in_flight(options: dict[str, Any], ahead: bool | None, device: str, steps: int) -> None:
    assert steps_in_flight(resolved(BOX, device, **options), ahead, device) == steps


def test_an_outer_launcher_serves_nobody() -> None:
    config = resolved(msgspec.structs.replace(LAPTOP, outer=RANK_1), **TP2, **EXTERNAL)
    with pytest.raises(ConfigError, match=r"serve is not.*planaria generate"):
        refuse_outer_launcher(config, "planaria serve")
    refuse_outer_launcher(resolved(**TP2), "planaria serve")


class Launcher:
    link, uses_ray = "queue", True


class Undeclared:
    link = "queue"


def test_a_custom_launcher_says_how_its_ranks_are_reached() -> None:
    facts = launcher_facts(f"{__name__}.Launcher")
    assert facts == LauncherFacts("queue", True)
    own = msgspec.structs.replace(LAPTOP, launcher=facts)
    config = resolved(own, distributed_executor_backend=f"{__name__}.Launcher", ray_workers_use_nsight=True, **TP4)
    assert config.distributed_executor_backend == f"{__name__}.Launcher" and config.ray_workers_use_nsight
    for path, rule in (("Undeclared", "must declare"), ("Nobody", "no attribute"), ("LAPTOP", "is not a class")):
        with pytest.raises(ConfigError, match=rule):
            launcher_facts(f"{__name__}.{path}")
    with pytest.raises(ConfigError, match="can't be imported"):
        launcher_facts("nowhere.at.all")


def test_a_module_that_is_not_there_is_refused_without_importing() -> None:
    check_module("--worker-cls", f"{__name__}.Anything")
    for path in ("nowhere.Worker", "tests.nowhere.Worker", "planaria.errors.deeper.Worker"):
        with pytest.raises(ConfigError, match=rf"^--worker-cls {path}: can't be imported"):
            check_module("--worker-cls", path)


@pytest.mark.row("P26")
def test_the_environment_of_an_outer_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert outer_launcher() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert outer_launcher() == OuterLauncher(
        rank=3, world_size=4, local_rank=1, local_world_size=2, master_addr="10.0.0.1", master_port=1234
    )
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(ConfigError, match=r"\$RANK 'three'"):
        outer_launcher()


@pytest.mark.row("P26", "P2")
def test_engines_of_an_outer_launcher() -> None:
    """Of a dense model: DP rank = RANK // (world / DP), and an engine that is one of its own."""
    for rank, replica, own in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (5, 2, 1)):
        outer = OuterLauncher(rank=rank, world_size=6, local_rank=rank, local_world_size=6)
        machine = msgspec.structs.replace(LAPTOP, outer=outer)
        config = resolved(machine, **TP2, **EXTERNAL, data_parallel_size=3)
        assert config.outer is not None and (config.data_parallel_size, config.data_parallel_index) == (1, replica)
        assert (config.outer.rank, config.outer.world_size, config.outer.local_rank) == (own, 2, rank)
        assert (config.outer.replica, config.outer.replicas, config.world_size) == (replica, 3, 2)


@pytest.mark.row("P22")
def test_the_environment_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spmd_data_parallel() is None
    monkeypatch.setenv("PLANARIA_DP_SIZE", "4")
    monkeypatch.setenv("PLANARIA_DP_RANK", "3")
    assert spmd_data_parallel() == SpmdDataParallel(size=4, rank=3, rank_local=3)
    monkeypatch.setenv("PLANARIA_DP_RANK_LOCAL", "1")
    assert spmd_data_parallel() == SpmdDataParallel(size=4, rank=3, rank_local=1)
    monkeypatch.setenv("PLANARIA_DP_SIZE", "0")
    with pytest.raises(ConfigError, match=r"\$PLANARIA_DP_SIZE '0'"):
        spmd_data_parallel()


# -- hashes


CONFIG = EngineConfig(
    model=MODEL,
    checkpoint={"name": "m", "path": "/here/m", "format": "gguf", "files": ["a"], "tensors": [["w", "f32"]],
                "tokenizer_dir": None, "chat_template": None},
    served_model_name="m",
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128),
    cache=CacheConfig(),
    device=DeviceConfig(device="cpu", dtype="float32", quantization="none", threads=1),
    parallel=ParallelConfig(),
)  # fmt: skip


def changed(name: str) -> EngineConfig:
    """CONFIG with another value in the field of this dotted name."""
    part, _, field = name.partition(".")
    whole = getattr(CONFIG, part)
    if not field:
        return msgspec.structs.replace(CONFIG, **{part: f"other {whole}"})
    if isinstance(whole, dict):
        return msgspec.structs.replace(CONFIG, **{part: {**whole, field: "other"}})
    return msgspec.structs.replace(CONFIG, **{part: msgspec.structs.replace(whole, **{field: "other"})})


@pytest.mark.parametrize("name", sorted(hash_fields(CONFIG)))
@pytest.mark.row("P24")
def test_a_field_that_shapes_the_computation_changes_the_hash(name: str) -> None:
    other = changed(name)
    assert compute_hash(other) != compute_hash(CONFIG)
    mine, theirs = hash_fields(CONFIG), hash_fields(other)
    assert {field for field in mine if mine[field] != theirs[field]} == {name}


def test_what_is_not_hashed_exists() -> None:
    parts = {
        "parallel": ParallelConfig, "device": DeviceConfig, "checkpoint": Checkpoint, "faults": FaultConfig,
        "cache": CacheConfig,
    }  # fmt: skip
    for name in NOT_HASHED - {"served_model_name"}:
        part, field = name.split(".")
        assert field in parts[part].__struct_fields__


@pytest.mark.parametrize("name", sorted(NOT_HASHED))
@pytest.mark.row("P24")
def test_a_field_that_does_not_leaves_it(name: str) -> None:
    assert compute_hash(changed(name)) == compute_hash(CONFIG)


@pytest.mark.row("P24")
def test_the_layout_in_force_is_joined() -> None:
    assert compute_hash(CONFIG, "tp=2 pp=1") == compute_hash(CONFIG, "tp=2 pp=1")
    assert compute_hash(CONFIG, "tp=2 pp=1") != compute_hash(CONFIG, "tp=1 pp=2")


def test_the_hash_is_the_same_in_another_process_and_order() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(CONFIG), type=EngineConfig)
    turned = msgspec.structs.replace(again, checkpoint=dict(reversed(again.checkpoint.items())))
    assert compute_hash(turned) == compute_hash(CONFIG)
    assert {"parallel.pp_layer_partition", "model.num_layers", "cache.block_size"} <= set(hash_fields(CONFIG))


@pytest.mark.row("P24")
def test_what_else_is_compared() -> None:
    mine = compared(CONFIG)
    assert mine["all-reduce"] == "fast" and mine["worker class"] == "auto" and mine["torch"] != "not installed"
    plain = msgspec.structs.replace(CONFIG, parallel=ParallelConfig(disable_custom_all_reduce=True))
    assert {key for key in mine if compared(plain)[key] != mine[key]} == {"all-reduce"}


def test_several_server_processes_are_for_a_server() -> None:
    with pytest.raises(ConfigError, match="--api-server-count 2: AsyncLLM is no server; leave it out"):
        refuse_several_engines(ParallelConfig(api_server_count=2), "AsyncLLM")
    refuse_several_engines(ParallelConfig(), "AsyncLLM")


def test_degrees_of_context_are_of_the_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes on with KV whose tokens lie elsewhere: what tells of it is hashed with them."""

    def named(**given: Any) -> str:
        return compute_hash(msgspec.structs.replace(CONFIG, parallel=resolved(**TP2, **given)), "tp=2")

    two = {"decode_context_parallel_size": 2}
    assert len({named(), named(**two), named(**two, cp_kv_cache_interleave_size=2)}) == 3
    assert named(**two, cp_kv_cache_interleave_size=2) == named(**two, dcp_kv_cache_interleave_size=2)
