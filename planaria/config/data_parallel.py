"""The rules of data parallel options: how many engines, who starts them, who balances them. Pure.

What depends on the nodes there are (does it fit, and where) is `planaria.topology.packing`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from planaria.config.engine_nodes import engine_nodes
from planaria.config.options import EngineConfig, EngineOptions, ParallelConfig
from planaria.errors import ConfigError

_SIZE, _LOCAL = "--data-parallel-size", "--data-parallel-size-local"
_RANK, _START = "--data-parallel-rank", "--data-parallel-start-rank"
_EXTERNAL, _HYBRID = "--data-parallel-external-lb", "--data-parallel-hybrid-lb"
_BACKEND, _STRATEGY = "--data-parallel-backend", "--ray-dp-pack-strategy"
_ADDRESS, _PORT, _HEADLESS = "--data-parallel-address", "--data-parallel-rpc-port", "--headless"
_FOR_NODES = "is for a node whose engines have their server on another"
RPC_PORT = 29550  # where nodes meet that were given an address only


def may_slice(options: EngineOptions, *, programs: bool = False) -> bool:
    """Would data-parallel ranks have a slice of each expert, if the model has experts? Not where they have whole ones,
    or are engines of two kinds. programs: are these ranks the user's?"""
    several = options.data_parallel_size > 1 or programs
    return several and not (options.enable_expert_parallel or options.prefill_engines)


def data_parallel_fields(options: EngineOptions, lanes: bool) -> dict[str, Any]:
    """Fields of ParallelConfig, of options that `on_nodes` has seen. lanes: are these ranks lanes of one engine, whose
    ranks are dealt to the nodes? Raises ConfigError."""
    size, local, backend = options.data_parallel_size, options.data_parallel_size_local, options.data_parallel_backend
    external, hybrid = _outside(options)
    _balancing(options, external, hybrid)
    strategy = _strategy(options)
    nodes = None
    if size > 1 and options.nnodes > 1:
        _one_server(options, external, hybrid)
    if size > 1 and options.nnodes > 1 and lanes:
        _lanes_of_a_node(size, local, options.nnodes)
    elif size > 1 and options.nnodes > 1:
        nodes = engine_nodes(size, local, options.nnodes, options.node_rank)
        local = 0 if options.node_rank < nodes.first else nodes.local
    default = 1 if external or strategy == "span" else None if backend == "ray" else size
    _local(options, external, hybrid, strategy)
    return {
        "data_parallel_size_local": default if local is None else local,
        "data_parallel_rank": options.data_parallel_rank or 0,
        "data_parallel_start_rank": options.data_parallel_start_rank or 0 if hybrid else 0,
        "data_parallel_external_lb": external,
        "data_parallel_hybrid_lb": hybrid,
        "engine_nodes": nodes,
        "ray_dp_pack_strategy": strategy,
    }


def _outside(options: EngineOptions) -> tuple[bool, bool]:
    """External balancing, hybrid balancing."""
    external = options.data_parallel_external_lb or options.data_parallel_rank is not None
    hybrid = options.data_parallel_hybrid_lb or options.data_parallel_start_rank is not None
    return external, hybrid


def on_nodes(options: EngineOptions, lanes: bool) -> EngineOptions:
    """The same said with --nnodes, --node-rank, --master-addr and --master-port where engines over nodes are asked for
    in vLLM's words: --data-parallel-address and --data-parallel-rpc-port for where nodes meet, fewer local engines
    than there are, and on nodes without a server --headless with --data-parallel-start-rank. lanes: see
    `data_parallel_fields`. Raises ConfigError."""
    _numbers(options)
    if lanes and behind_balancer(options):
        return _pods(options)
    _meeting_place(options)
    size, local, nnodes = options.data_parallel_size, options.data_parallel_size_local, options.nnodes
    address, port = options.data_parallel_address, options.data_parallel_rpc_port
    start = options.data_parallel_start_rank
    if options.headless:
        if options.data_parallel_backend == "ray" or size == 1 or options.data_parallel_rank is not None:
            raise ConfigError(_HEADLESS, True, _FOR_NODES, f"give {_SIZE}, {_LOCAL}, {_START} and {_ADDRESS}")
        if not local:
            raise ConfigError(_HEADLESS, True, f"how many engines this node has isn't said ({_LOCAL})", f"add {_LOCAL}")
        if address is None and nnodes == 1:
            raise ConfigError(_HEADLESS, True, "where the server is isn't said", f"add {_ADDRESS}")
        if start is None and not options.node_rank:
            raise ConfigError(_HEADLESS, True, "which engines this node has isn't said", f"add {_START}")
    elif size == 1 or options.data_parallel_backend == "ray" or any(_outside(options)):
        return options
    if (options.headless and start is not None) or (nnodes == 1 and local not in (None, size) and address is not None):
        options = _counted(options, start or 0)
    if (address, port) == (None, None):
        return options
    if options.nnodes == 1:
        option, value = (_ADDRESS, address) if address is not None else (_PORT, port)
        rule = f"is where nodes meet, and all {size} engines are on this one"
        raise ConfigError(option, value, rule, f"leave it out, or give {_LOCAL}")
    replaced = msgspec.structs.replace(
        options, data_parallel_address=None, data_parallel_rpc_port=None, master_addr=address or options.master_addr,
        master_port=port or (RPC_PORT if address is not None else options.master_port),
    )  # fmt: skip
    for option, before, now, default in (
        ("--master-addr", options.master_addr, replaced.master_addr, "127.0.0.1"),
        ("--master-port", options.master_port, replaced.master_port, 29501),
    ):
        if before not in (default, now):
            raise ConfigError(option, before, f"{_ADDRESS} and {_PORT} say the same, and say {now}", "give one of them")
    return replaced


def behind_balancer(options: EngineOptions) -> bool:
    """Is there a front end for each data-parallel rank, or for each node's?"""
    return not options.headless and any(_outside(options))


def _pods(options: EngineOptions) -> EngineOptions:
    """The same said with --nnodes and --node-rank: each pod has its lanes, and all meet at the first one's address."""
    external, hybrid = _outside(options)
    _balancing(options, external, hybrid)
    _local(options, external, hybrid, "strict")
    if options.nnodes > 1:
        _one_server(options, external, hybrid)
    if options.data_parallel_address is None:
        rule = "pods share the model's experts, and meet at the first one's address, which isn't said"
        fix = f"add {_ADDRESS}, or leave {_SIZE} out for servers with all experts each"
        raise ConfigError(_EXTERNAL if external else _HYBRID, True, rule, fix)
    size, start = options.data_parallel_size, options.data_parallel_rank or options.data_parallel_start_rank or 0
    local = 1 if external else options.data_parallel_size_local or size
    _even(size, local, start)
    return msgspec.structs.replace(
        options, nnodes=size // local, node_rank=start // local, master_addr=options.data_parallel_address,
        master_port=options.data_parallel_rpc_port or RPC_PORT, data_parallel_size_local=local,
        data_parallel_rank=None, data_parallel_start_rank=None, data_parallel_external_lb=False,
        data_parallel_hybrid_lb=False, data_parallel_address=None, data_parallel_rpc_port=None,
    )  # fmt: skip


def _even(size: int, local: int, start: int) -> None:
    """Raises ConfigError where nodes don't have as many each, or one begins elsewhere than at its share."""
    if size % local:
        raise ConfigError(_LOCAL, local, f"{_SIZE} is {size}, and every node has as many engines", "choose a divisor")
    if start % local:
        raise ConfigError(_START, start, f"every node has {local} engines", f"give a multiple of {local}")


def _counted(options: EngineOptions, start: int) -> EngineOptions:
    """Nodes as many as the engines need, and which of them this is. Where the first one has the server only, there is
    one more: so it is where it says so, and where the first engine's node has none."""
    size, nnodes = options.data_parallel_size, options.nnodes
    local = options.data_parallel_size_local or size
    _even(size, local, start)
    groups = size // local
    apart = not options.data_parallel_size_local or (options.headless and start == 0) or nnodes == groups + 1
    return msgspec.structs.replace(
        options, nnodes=nnodes if nnodes > 1 else groups + apart, data_parallel_start_rank=None, headless=False,
        node_rank=start // local + apart if options.headless else 0,
        data_parallel_size_local=0 if apart else local,
    )  # fmt: skip


def _meeting_place(options: EngineOptions) -> None:
    """--data-parallel-address and --data-parallel-rpc-port: are they what they can be, and do they mean something?"""
    address, port = options.data_parallel_address, options.data_parallel_rpc_port
    if address == "":
        raise ConfigError(_ADDRESS, "''", "is empty", "give the address of the node with the first engine")
    option, value = (_ADDRESS, address) if address is not None else (_PORT, port)
    if value is None:
        return
    if options.data_parallel_size == 1:
        raise ConfigError(option, value, f"there is one engine ({_SIZE} 1)", "leave it out")
    if any(_outside(options)) and not options.headless:
        raise ConfigError(option, value, "servers behind an outside balancer don't meet", "leave it out")
    if options.data_parallel_backend == "ray" and port is not None:
        raise ConfigError(_PORT, port, "engines on Ray are met where they come up", "leave it out")


def _one_server(options: EngineOptions, external: bool, hybrid: bool) -> None:
    """Engines over `nnodes` are balanced by the first one's server."""
    if external or hybrid:
        raise ConfigError(
            "--nnodes", options.nnodes, f"is for one server, and {_RANK if external else _START} for one on each node",
            "leave --nnodes out there",
        )  # fmt: skip
    if options.data_parallel_backend == "ray":
        rule = f"is for nodes without Ray, and {_BACKEND} is ray"
        raise ConfigError("--nnodes", options.nnodes, rule, "leave --nnodes out (Ray knows its nodes)")


def _lanes_of_a_node(size: int, local: int | None, nnodes: int) -> None:
    """Raises ConfigError where so many on each node are not those there are."""
    if local is not None and local * nnodes != size:
        rule = f"{_SIZE} {size} are lanes of one engine, which share its experts, dealt evenly to {nnodes} nodes"
        fix = "leave it out" if size % nnodes else f"leave it out, or give {size // nnodes}"
        raise ConfigError(_LOCAL, local, rule, fix)


def _numbers(options: EngineOptions) -> None:
    size, local = options.data_parallel_size, options.data_parallel_size_local
    if local is not None and not 0 <= local <= size:
        raise ConfigError(_LOCAL, local, f"must be 0 to {_SIZE} ({size})", "give the engines of one node")
    for option, rank in ((_RANK, options.data_parallel_rank), (_START, options.data_parallel_start_rank)):
        if rank is not None and not 0 <= rank < size:
            raise ConfigError(option, rank, f"must be 0 to {size - 1} with {_SIZE} {size}", "count engines from 0")


def _balancing(options: EngineOptions, external: bool, hybrid: bool) -> None:
    size = options.data_parallel_size
    if external and hybrid:
        rule = f"{_RANK} and {_EXTERNAL} are for a server per engine, {_START} and {_HYBRID} for one per node"
        raise ConfigError(_HYBRID, True, rule, "give those of one kind")
    if size == 1 and (external or hybrid):
        option = _EXTERNAL if external else _HYBRID
        raise ConfigError(option, True, f"there is one engine ({_SIZE} 1)", f"leave it out, or give {_SIZE}")
    if external and options.data_parallel_rank is None:
        raise ConfigError(_EXTERNAL, True, "which engine this server has isn't said", f"add {_RANK} 0 to {size - 1}")
    if (external or hybrid) and options.data_parallel_backend == "ray":
        raise ConfigError(
            _EXTERNAL if external else _HYBRID, True, "its engines are on its node, and Ray places them anywhere",
            f"use {_BACKEND} mp",
        )  # fmt: skip


def _strategy(options: EngineOptions) -> str:
    strategy = options.ray_dp_pack_strategy
    if strategy is None:
        return "strict"
    if options.data_parallel_backend != "ray":
        raise ConfigError(_STRATEGY, strategy, "is for engines on Ray", f"add {_BACKEND} ray")
    return strategy


def _local(options: EngineOptions, external: bool, hybrid: bool, strategy: str) -> None:
    """A given local size: its rules beside its range."""
    size, local, backend = options.data_parallel_size, options.data_parallel_size_local, options.data_parallel_backend
    if hybrid:
        first, here = options.data_parallel_start_rank or 0, size if local is None else local
        if here < 1 or first + here > size:
            raise ConfigError(
                _LOCAL, here, f"from {_START} {first} on there are {size - first} engines",
                f"give 1 to {size - first}, those of this node",
            )  # fmt: skip
        return
    if local is None:
        return
    if external and local != 1:
        raise ConfigError(_LOCAL, local, f"with {_RANK} a server has one engine", "leave it out")
    if strategy == "span" and local != 1:
        raise ConfigError(_LOCAL, local, f"with {_STRATEGY} span no engine is on one node", "leave it out")
    if backend == "ray" and strategy == "strict" and local == 0:
        raise ConfigError(_LOCAL, local, "strict puts so many on each node", f"use {_STRATEGY} fill, or give 1 or more")
    if backend == "mp" and not external and local < size and options.nnodes == 1:
        raise ConfigError(
            _LOCAL, local, f"nobody would start {size - local} of {size} engines",
            f"run the same on every node with --nnodes, or use {_BACKEND} ray, or a server on each node with {_HYBRID}",
        )  # fmt: skip


def engine_config(config: EngineConfig, index: int, size: int, accelerators: Sequence[int] = ()) -> EngineConfig:
    """Of one of so many engines. accelerators: of this node; an engine of another node has its own."""
    fleet = config.parallel
    parallel = msgspec.structs.replace(
        fleet, data_parallel_size=1, data_parallel_size_local=1, data_parallel_rank=0,
        data_parallel_start_rank=0, data_parallel_external_lb=False, data_parallel_hybrid_lb=False,
        data_parallel_index=index, data_parallel_address=None, engine_nodes=None,
    )  # fmt: skip
    parallel = as_api_process(parallel, -1)
    seat = index - fleet.replicas[0]
    if (nodes := fleet.engine_nodes) is not None:
        # its nodes come to a port that it binds, and says to who has them come
        parallel = msgspec.structs.replace(parallel, nnodes=nodes.per_engine, node_rank=0, master_port=0)
        seat = nodes.seat(index)
    parallel = msgspec.structs.replace(parallel, data_parallel_rank_local=seat)
    ranks = fleet.local_world_size
    own = tuple(accelerators[seat * ranks : (seat + 1) * ranks])
    device = msgspec.structs.replace(config.device, sharers=sharers(fleet, index, size), devices=own)
    return msgspec.structs.replace(config, parallel=parallel, device=device)


def as_api_process(parallel: ParallelConfig, rank: int) -> ParallelConfig:
    """As one of `api_server_count` API processes has it, counted from 0; -1: as an engine's has it. Raises
    ConfigError."""
    count = parallel.api_server_count
    if not -1 <= rank < count:
        rule = f"must be -1 (an engine's process) to {count - 1} with --api-server-count {count}"
        raise ConfigError("api_process_rank", rank, rule, "count API processes from 0")
    return msgspec.structs.replace(parallel, api_process_rank=rank)


def sharers(parallel: ParallelConfig, index: int, size: int) -> int:
    """Of `size` engines those that share this one's node."""
    return size if parallel.engine_nodes is None else parallel.engine_nodes.sharers(index, size)
