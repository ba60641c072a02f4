"""`planaria plan`: where every rank would go, as arithmetic. Nothing is started, and no Ray cluster either."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from planaria.cli.look import write_json
from planaria.cli.options import engine_options
from planaria.config.experts import expert_map
from planaria.config.machine import Machine, accelerator_ids, look, served, usable_cores, usable_platform
from planaria.config.options import EngineOptions, ParallelConfig
from planaria.config.parallel import resolve_parallel
from planaria.config.sizes import AUTO, parse_bytes
from planaria.errors import CapacityError, ConfigError, PlanariaError, UserError
from planaria.models import model_config
from planaria.models.config import ModelConfig
from planaria.models.deal import deal, deal_tensor
from planaria.models.linears import linears
from planaria.models.memory import RankMemory, mib, rank_memory
from planaria.topology import Cluster, Device, DoesNotFit, Infeasible, Layout, Node, Packing, pack, place
from planaria.topology.layout import Coords
from planaria.topology.platforms import CPU, CUDA, PLATFORMS
from planaria.topology.table import CameUp, TableRow, differences, lines, remarks, rows, said

if TYPE_CHECKING:
    from planaria.checkpoint import Checkpoint
    from planaria.checkpoint.resolve import Hub

PACKED = {"q8_0": 34 / 32, "q4_1": 20 / 32}  # bytes of a weight
ANY = 1 << 30  # of what this machine has: the placement counts, with better words


class RankTooLarge(CapacityError):
    """A rank needs more memory than its device has."""


class DraftDemand(msgspec.Struct, frozen=True):
    """A model that drafts, on the last stage: on its first rank, whole, or dealt to all tensor ranks. parameter: bytes
    of a weight."""

    name: str
    model: ModelConfig
    parameter: float
    dealt: bool

    def at(self, coords: Coords, layout: Layout, **quantities: Any) -> RankMemory:
        """Of that rank. quantities: keywords of `rank_memory`, of the model that is served."""
        if coords.pp < layout.pp - 1 or coords.pcp or (coords.tp and not self.dealt):
            return RankMemory(0, 0, 0)
        shard = deal_tensor(self.model, layout.tp if self.dealt else 1)[coords.tp]
        own = rank_memory(self.model, shard, **{**quantities, "parameter": self.parameter})
        return own if quantities["kv"] is None else own._replace(kv=0)  # all KV is in what was asked for

    def __str__(self) -> str:
        return (
            f"{self.name}, which drafts, is counted on {'each' if self.dealt else 'the first'} rank of the last stage"
        )


class Demand(msgspec.Struct, frozen=True):
    """What each rank of a model needs, for any layout of it. quantities: keywords of `rank_memory`; sharers: engines
    of its node with the same weights, which are there once: each of them is dealt a part."""

    model: ModelConfig
    parallel: ParallelConfig
    quantities: dict[str, Any]
    sharers: int = 1
    draft: DraftDemand | None = None

    def needs(self, layout: Layout) -> Callable[[Coords], RankMemory]:
        """Raises ConfigError for a layout that the model can't be dealt to."""
        parallel = msgspec.structs.replace(
            self.parallel, tensor_parallel_size=layout.tp, prefill_context_parallel_size=layout.pcp
        )
        experts = expert_map(self.model, parallel, parallel.expert_parallel_size)
        context, partition = parallel.context(layout), parallel.pp_layer_partition
        slices = parallel.lanes * layout.pcp if parallel.slices_experts else 1
        groups = [  # of tensor ranks and stages, which have tokens of their own
            [
                rank_memory(self.model, shard, **self.quantities).shared_by(self.sharers)
                for shard in deal(self.model, layout.tp, layout.pp, partition, experts, group, context, slices)
            ]
            for group in range(parallel.lanes * layout.pcp)
        ]

        def need(at: Coords) -> RankMemory:
            found = groups[at.dp % parallel.lanes * layout.pcp + at.pcp][at.pp * layout.tp + at.tp]
            if self.draft is None:
                return found
            return RankMemory(*map(sum, zip(found, self.draft.at(at, layout, **self.quantities), strict=True)))

        return need

    def check_kv(self, layout: Layout) -> None:
        """Raises ConfigError where the KV memory that was asked for doesn't hold a request of the longest length."""
        if (given := self.quantities["kv"]) is not None:
            needs = msgspec.structs.replace(self, quantities={**self.quantities, "kv": None}).needs(layout)
            most = max(needs(layout.coords(rank)).kv for rank in range(layout.size))
            if most > given:
                rule = f"a request of --max-model-len {self.quantities['max_model_len']} needs {mib(most)} of a rank"
                raise ConfigError("--kv-cache-memory", mib(given), rule, "raise it, or lower --max-model-len")


class PlanCase(msgspec.Struct, frozen=True):
    """What is placed on what. source: of the cluster, for people. given: a placement that isn't ours to choose."""

    parallel: ParallelConfig
    cluster: Cluster
    source: str
    strategy: str | None = None  # None: no engine is placed by one
    given: Packing | None = None
    notes: tuple[str, ...] = ()
    demand: Demand | None = None  # of memory, where a model is named
    device: str = CUDA.name

    @property
    def layout(self) -> Layout:
        parallel = self.parallel
        return msgspec.structs.replace(parallel.layout, dp=len(parallel.replicas) * parallel.lanes)

    def rows(self, packing: Packing) -> list[TableRow]:
        return rows(packing, self.cluster, self.parallel.replicas.start)

    def answer(self, layout: Layout, strategy: str | None, local: int | None) -> Packing:
        """Raises ConfigError, Infeasible, RankTooLarge."""
        if self.given is not None:
            packing = self.given
        elif strategy is not None:
            packing = pack(self.cluster, layout, strategy, local)
        else:
            packing = Packing.of(place(self.cluster, layout, span=True))
        if self.demand is not None:
            self._fits(packing, self.demand)
        return packing

    def remarks(self, layout: Layout) -> tuple[str, ...]:
        """What to know beside the table."""
        if self.demand is None:
            return self.notes
        needs, up_to = self.demand.needs(layout), "up to " * (layout.size > 1)
        most = max((needs(layout.coords(rank)) for rank in range(layout.size)), key=lambda need: need.total)
        unknown = "" if any(self.memory().values()) else "; what the devices have isn't known"
        shared = f"; {self.demand.sharers} engines share weights" if self.demand.sharers > 1 else ""
        drafts = f"; {self.demand.draft}" if self.demand.draft is not None else ""
        return (f"memory: a rank needs {up_to}{most}{shared}{drafts}{unknown}", *self.notes)

    def memory(self) -> dict[tuple[str, int], int]:
        """Bytes of each device, by node and number; 0: unknown."""
        return {(node.id, device.id): device.memory for node in self.cluster.nodes for device in node.devices}

    def _fits(self, packing: Packing, demand: Demand) -> None:
        memory, needs = self.memory(), demand.needs(packing.layout)
        for slot in packing.slots():
            there = memory.get((slot.node, slot.device), 0)
            need = needs(slot.coords)
            if 0 < there < need.total:
                raise RankTooLarge(
                    f"rank {slot.rank} needs {need}, and device {slot.device} of {slot.node} has {mib(there)}: give "
                    "more ranks (-tp, -pp), a lower --max-model-len, or --quantization q8_0"
                )

    def larger(self) -> Packing | None:
        """The least tensor degree in powers of two whose ranks are small enough, if there is one."""
        if self.given is None and self.demand is not None:
            for degree in (2, 4, 8, 16):
                layout = msgspec.structs.replace(self.layout, tp=degree * self.layout.tp)
                with contextlib.suppress(ConfigError, CapacityError):
                    return self.answer(layout, self.strategy, self.parallel.data_parallel_size_local)
        return None


def run(model: str | None, engine: dict[str, Any], cluster: Path | None, as_json: bool) -> None:
    """Raises UserError; exits with 2 where there is no such placement."""
    gc.disable()  # many small values, all of which stay
    try:
        _run(model, engine, cluster, as_json)
    finally:
        gc.enable()


def _run(model: str | None, engine: dict[str, Any], cluster_file: Path | None, as_json: bool) -> None:
    from planaria.config.resolve import check_sizes

    options = engine_options(model or "", engine)
    check_sizes(options)
    question = _from_file(options, cluster_file) if cluster_file is not None else _from_here(options)
    if model is not None:
        question = _of_model(options, question)
    try:
        packing = question.answer(question.layout, question.strategy, question.parallel.data_parallel_size_local)
    except (Infeasible, RankTooLarge, UserError) as e:
        print(f"planaria: {e}", file=sys.stderr)
        nearest = _nearest(question, e)
        if as_json:
            write_json(_refusal(question, e, nearest))
        elif nearest is not None:
            print(f"would fit: {_flags(nearest, question)}")
            _print(nearest, question)
        raise typer.Exit(2) from None
    if as_json:
        write_json(_as_json(packing, question))
    else:
        first = question.parallel.replicas.start
        print(said(question.source, packing, question.cluster, first, question.remarks(packing.layout)))


# -- what there is


def _from_file(options: EngineOptions, path: Path) -> PlanCase:
    """Ray places engines and ranks on nodes of which this one may be none."""
    from planaria.config.cluster_file import read_cluster

    asked = options.distributed_executor_backend
    if asked not in (None, "ray"):
        rule = f"is placed on by Ray, and the executor is {asked}"
        raise ConfigError("--cluster", path, rule, "leave --distributed-executor-backend out, or use ray")
    parallel = _parallel(_on_ray(options), Machine(cores=ANY, accelerators=ANY, ray_installed=True), CUDA.name)[0]
    cluster = read_cluster(path).headed_by(parallel.data_parallel_address)
    return PlanCase(parallel, cluster, str(path), _strategy(_on_ray(options)))


def _from_here(options: EngineOptions) -> PlanCase:
    """The Ray cluster that runs, unless ranks are to be started without Ray; else this machine."""
    machine = msgspec.structs.replace(look(options.distributed_executor_backend), accelerators=ANY)
    device = usable_platform().name if options.device == "auto" else served(options.device).name
    mine = options.distributed_executor_backend not in (None, "ray") or options.nnodes > 1
    if not mine and machine.ray_installed:
        question = _from_ray(options, machine, device)
        if question is not None:
            return question
    parallel, notes = _parallel(options, machine, device)
    return msgspec.structs.replace(without_ray(parallel, device), strategy=_strategy(options), notes=notes)


def without_ray(parallel: ParallelConfig, device: str) -> PlanCase:
    """On this machine, or on the nodes of the same command."""
    if not parallel.over_nodes:
        return PlanCase(parallel, _this_machine(parallel, device), "this machine", device=device)
    from planaria.executor.launcher.nodes import fleet_placement

    share = parallel.local_world_size * (parallel.engine_nodes.local if parallel.engine_nodes is not None else 1)
    nodes = [Node.of(str(number), share) for number in range(parallel.nnodes)]
    given = Packing.of(fleet_placement(parallel))
    return PlanCase(parallel, Cluster(tuple(nodes), "0"), f"{len(nodes)} nodes", given=given, device=device)


def _this_machine(parallel: ParallelConfig, device: str) -> Cluster:
    """One node. Without accelerators there is a slot for every rank."""
    from planaria.node import available_memory, node_name

    if not PLATFORMS[device].on_host:
        devices = [Device(id, device) for id in accelerator_ids()]
    else:
        ranks = parallel.world_size * len(parallel.replicas)
        share = available_memory() // ranks
        devices = [Device(id, CPU.name, share) for id in range(max(ranks, usable_cores()))]
    return Cluster((Node(node_name(), tuple(devices), ("127.0.0.1",)),), node_name())


def _from_ray(options: EngineOptions, machine: Machine, device: str) -> PlanCase | None:
    """None where no cluster runs."""
    from planaria.env import ray_settings
    from planaria.executor.ray.cluster import join
    from planaria.executor.ray.given import GivenGroups
    from planaria.executor.ray.groups import obtain

    settings = ray_settings()
    connection = join(settings.address)
    if connection is None:
        return None
    try:
        parallel, notes = _parallel(_on_ray(options), machine, device)
        resource = connection.resource(device)
        names = parallel.placement_groups
        layout = Layout(pp=parallel.pipeline_parallel_size, tp=parallel.tensor_parallel_size)
        now, given = msgspec.structs.replace(settings, wait=0.0), None
        strategy = _strategy(_on_ray(options))
        cluster = connection.snapshot(resource, ranks=0 if strategy is None else layout.size)
        cluster = cluster.headed_by(parallel.data_parallel_address)
        if len(names) > 1:
            several = msgspec.structs.replace(layout, dp=len(names))
            groups = GivenGroups(names, resource, now, parallel.placement_group_local_ranks)
            given = groups.pack(several, 0.0, head=cluster.head)
        elif names:
            layout = msgspec.structs.replace(layout, dp=parallel.lanes)
            given = Packing.of(obtain(connection, names[0], layout, resource, now, "").placement)
        source = connection.source(resource, names)
        return PlanCase(parallel, cluster, source, strategy, given, notes, device=device)
    finally:
        connection.close()


def _on_ray(options: EngineOptions) -> EngineOptions:
    """Lanes of one engine are not engines that Ray starts unless that is asked for, only its ranks are."""
    if (options.enable_expert_parallel and options.data_parallel_size > 1) or _slices(options):
        return msgspec.structs.replace(options, distributed_executor_backend="ray")
    return msgspec.structs.replace(options, data_parallel_backend="ray", distributed_executor_backend="ray")


def _strategy(options: EngineOptions) -> str | None:
    """One engine goes where `place` puts it, as in `serve`, unless a strategy was asked for."""
    if options.data_parallel_backend != "ray":
        return None
    return options.ray_dp_pack_strategy or ("strict" if options.data_parallel_size > 1 else None)


def _parallel(options: EngineOptions, machine: Machine, device: str) -> tuple[ParallelConfig, tuple[str, ...]]:
    parallel, notes = resolve_parallel(options, machine, device, slices=_slices(options))
    return parallel, _warnings(notes)


def _slices(options: EngineOptions) -> bool:
    from planaria.config.resolve import has_slices

    return has_slices(options)


def _warnings(notes: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(line for level, line in notes if level >= logging.WARNING)


def _of_model(options: EngineOptions, question: PlanCase) -> PlanCase:
    """With what `serve` would warn of, and what ranks need. Raises ConfigError where the model's heads, layers or
    experts can't be dealt, ModelError."""
    from planaria.checkpoint.foreign import model_of
    from planaria.checkpoint.resolve import Hub, shape_of
    from planaria.config.experts import expert_shapes, resolve_experts
    from planaria.config.resolve import LOGIT_ROWS, device_config, longest_text, step_tokens

    parallel, kind = question.parallel, question.device
    hub = Hub(options.revision, options.download_dir)
    checkpoint = shape_of(options.model, hub)
    model = model_of(checkpoint, options.model_impl)
    device = device_config(options, kind, model.dtype, packed=checkpoint.packed, ranks=1)
    element = 4 if device.dtype == "float32" else 2
    kept = _parameter(checkpoint, model, device.quantization == "keep", element)
    backend = parallel.distributed_executor_backend
    own = parallel.over_nodes or model.foreign is not None  # see hosts/weights.py; Transformers' code packs its own
    shared = device.platform.on_host and backend in ("uni", "mp") and not own
    demand = Demand(model, parallel, {
        "parameter": PACKED.get(device.quantization, kept), "element": element,
        "kv": None if options.kv_cache_memory is None else parse_bytes(options.kv_cache_memory, "--kv-cache-memory"),
        "max_model_len": longest_text(options, model, model.max_position),
        "step_tokens": step_tokens(options, kind),
        "logit_rows": options.max_num_seqs + LOGIT_ROWS,
    }, len(parallel.replicas) if shared else 1, _draft(options, model, parallel, device.dtype, hub))  # fmt: skip
    demand.needs(question.layout)  # what can't be dealt is refused first, as by `serve`
    if str(options.max_model_len) not in AUTO:
        demand.check_kv(question.layout)
    notes = _warnings(resolve_experts(parallel, options, options.device, expert_shapes(model, device.dtype), None)[1])
    return msgspec.structs.replace(
        question, demand=demand, notes=(*question.notes, *notes, *_uncounted(options, parallel, model, element))
    )


def _parameter(checkpoint: Checkpoint, model: ModelConfig, packed: bool, element: int) -> float:
    """Bytes of a weight as it is kept."""
    from planaria.loader.forms import forms

    if not (packed and checkpoint.tensors):
        return float(element)
    return sum(each.bytes for each in forms(checkpoint, "keep", element)) / model.num_parameters


def _draft(
    options: EngineOptions, served: ModelConfig, parallel: ParallelConfig, dtype: str, hub: Hub
) -> DraftDemand | None:  # fmt: skip
    """Raises ConfigError, ModelError."""
    from planaria.checkpoint.resolve import shape_of
    from planaria.config.speculative import check_drafting, check_sharing, speculative_config

    config = speculative_config(options.speculative_config)
    if config is None:
        return None
    check_sharing(config, parallel)
    if config.method != "draft_model":
        return None
    checkpoint = shape_of(config.model, hub._replace(revision=None))
    model = model_config(checkpoint.config, checkpoint.generation_config)
    check_drafting(config, model, served, parallel)
    packed = checkpoint.packed and dtype == "bfloat16"
    parameter = _parameter(checkpoint, model, packed, 4 if dtype == "float32" else 2)
    return DraftDemand(config.model, model, parameter, config.draft_tensor_parallel_size > 1)


def _uncounted(options: EngineOptions, parallel: ParallelConfig, model: ModelConfig, element: int) -> list[str]:
    """What takes memory and is not counted here. element: bytes of an adapter's value. Raises ConfigError."""
    from planaria.config.resolve import lora_config
    from planaria.config.speculative import speculative_config
    from planaria.config.transfer import CONNECTORS, FLAG, kv_transfer

    found, speculative = [], speculative_config(options.speculative_config)
    if speculative is not None and speculative.method == "eagle":
        found.append(f"not counted: {speculative.model}, the head that drafts (--speculative-config)")
    if options.kv_transfer_config is not None:
        config = kv_transfer(options.kv_transfer_config, parallel)
        if config.kv_connector in CONNECTORS[:2] and config.kv_role != "kv_consumer":  # copies in memory
            held = mib(config.kv_buffer_size)
            found.append(f"not counted: up to {held} of each rank with blocks for other servers ({FLAG})")
    if (lora := lora_config(options)) is not None:
        size = sum(map(sum, linears(model).values())) * lora.max_lora_rank * lora.max_loras * element
        found.append(f"not counted: up to {mib(size)} of a rank with adapters (--max-loras, --max-lora-rank)")
    if options.kv_offloading_size:
        found.append(f"not counted: {options.kv_offloading_size:g} GiB of the node (--kv-offloading-size)")
    return found


# -- beside `serve`


class Planned:
    """What `serve` is about to start without Ray: the same table, and a look at what came of it. A `planaria.server.
    fleet.Plan`."""

    def __init__(self, parallel: ParallelConfig, device: str) -> None:
        self.parallel, self.device = parallel, device
        self.numbered = not PLATFORMS[device].on_host  # devices of ranks mean something
        question, packing, self.table = self._answer(parallel)
        self.text = said(question.source, packing, question.cluster, parallel.replicas.start)

    def _answer(self, parallel: ParallelConfig) -> tuple[PlanCase, Packing, list[TableRow]]:
        question = without_ray(parallel, self.device)
        packing = question.answer(question.layout, None, None)
        return question, packing, question.rows(packing)

    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        """A line for each of an engine's ranks that came up elsewhere. places: by rank, as in EngineFacts."""
        if engine >= self.parallel.replicas.stop:  # the fleet has grown
            self.parallel = msgspec.structs.replace(
                self.parallel, data_parallel_size=engine + 1, data_parallel_size_local=engine + 1
            )
            self.table = self._answer(self.parallel)[2]
        own = [row for row in self.table if row.dp // self.parallel.lanes == engine]
        if len({row.node for row in self.table}) > 1:  # planned by number; the first rank says a node's name
            names: dict[str, str] = {}
            for row, at in zip(own, places, strict=False):
                names.setdefault(row.node, at.node)
            own = [row._replace(node=names.get(row.node, row.node)) for row in own]
        return differences(own, places, numbered=self.numbered)


# -- what is said


def _nearest(question: PlanCase, error: PlanariaError) -> Packing | None:
    if isinstance(error, RankTooLarge):
        return question.larger()
    if isinstance(error, DoesNotFit) and error.instead is not None:
        return question.answer(*error.instead)
    if isinstance(error, Infeasible) and error.nearest is not None:
        return question.answer(error.nearest, question.strategy, question.parallel.data_parallel_size_local)
    return None


def _flags(packing: Packing, question: PlanCase) -> str:
    """What to type for it."""
    layout = packing.layout
    degrees = (("-tp", layout.tp), ("-pcp", layout.pcp), ("-pp", layout.pp), ("-dp", layout.dp))
    words = [f"{flag} {degree}" for flag, degree in degrees if degree > 1 or flag == "-tp"]
    if packing.strategy and (layout.dp > 1 or question.strategy is not None):
        words.append(f"--ray-dp-pack-strategy {packing.strategy}")
        if packing.strategy != "span":
            words.append(f"--data-parallel-size-local {packing.local}")
    return " ".join(words)


def _print(packing: Packing, question: PlanCase) -> None:
    out = [*lines(question.rows(packing)), *remarks(packing, question.cluster), *question.remarks(packing.layout)]
    sys.stdout.write("\n".join(out) + "\n")


def _degrees(layout: Layout) -> dict[str, int]:
    pcp = {"pcp": layout.pcp} if layout.pcp > 1 else {}
    return {"dp": layout.dp, "pp": layout.pp, **pcp, "tp": layout.tp}


def _as_json(packing: Packing, question: PlanCase) -> dict[str, Any]:
    table = question.rows(packing)
    memory, demand = question.memory(), question.demand
    of = demand.needs(packing.layout) if demand is not None else None
    needs = {slot.rank: {"needs": of(slot.coords)._asdict()} for slot in packing.slots()} if of is not None else {}
    first = table[0].rank
    return {
        "feasible": True,
        "source": question.source,
        "layout": _degrees(packing.layout),
        "strategy": packing.strategy or None,
        "data_parallel_size_local": packing.local if packing.strategy else None,
        "head": question.cluster.head,
        "ranks": [
            {**row._asdict(), "memory": memory.get((row.node, row.device), 0), **needs.get(row.rank - first, {})}
            for row in table
        ],
        "engines": [
            {
                "dp": number,
                "local_rank": local_rank,
                "bundles": [{"node": each.node, "devices": int(each.devices)} for each in packing.bundles(number)],
            }
            for number, local_rank in enumerate(packing.local_ranks)
        ],  # fmt: skip
        "warnings": [*remarks(packing, question.cluster), *question.notes],
    }


def _refusal(question: PlanCase, error: PlanariaError, nearest: Packing | None) -> dict[str, Any]:
    return {
        "feasible": False,
        "source": question.source,
        "layout": _degrees(question.layout),
        "reason": error.why if isinstance(error, Infeasible) else str(error),
        "needed": error.needed if isinstance(error, Infeasible) else None,
        "found": error.found if isinstance(error, Infeasible) else None,
        "nearest": None if nearest is None else {
            "layout": _degrees(nearest.layout), "strategy": nearest.strategy or None,
            "options": _flags(nearest, question),
        },
    }  # fmt: skip
